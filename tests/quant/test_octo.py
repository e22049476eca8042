"""Octo: int8 in both passes against float64, the paper's compensation, clipped ranges, and the way back."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.adapt.norms_behind import norms_behind
from torch_odt.quant.octo import octo_
from torch_odt.quant.octo_conv2d import CLIP_RATE, octo_conv2d

PLAIN: dict[str, Any] = {"compensation": "none", "clip": 1.0, "learn_clip": False}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _held(values: Tensor, step: Tensor, zero: float = 0, least: int = -127) -> Tensor:
    """What int8 holds of float32 values, in float64."""
    return ((values / step).round() + zero).clamp(least, 127).sub(zero).double() * step.double()


def _held_image(x: Tensor, share: float | Tensor) -> Tensor:
    low, high = x.min().clamp(max=0) * share, x.max().clamp(min=0) * share
    step = (high - low) / 255
    return _held(x, step, float((-128 - low / step).round().clamp(-128, 127)), -128)


def _held_weight(weight: Tensor, largest: Tensor) -> Tensor:
    return _held(weight, largest[:, None, None, None] / 127)


def _windows(stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1) -> tuple[Any, ...]:
    return [stride] * 2, [padding] * 2, [dilation] * 2, groups


@given(
    st.sampled_from([(1, 5, 4), (2, 3, 4), (6, 1, 1), (4, 1, 2)]),
    st.sampled_from([1, 3]),
    st.integers(1, 2),
    st.integers(0, 1),
    st.sampled_from([(1.0, 1.0, 1.0), (0.7, 0.8, 0.5)]),
    st.booleans(),
)
@settings(max_examples=25)
def test_values_and_gradients_are_those_of_what_int8_holds(
    channels: tuple[int, int, int],
    kernel: int,
    stride: int,
    padding: int,
    shares: tuple[float, float, float],
    by_channel: bool,
) -> None:
    """With rounding to the nearest everything is known: sums are exact, and compared with float64's."""
    groups, per_group, multiple = channels
    x = torch.randn(2, groups * per_group, 7, 7, requires_grad=True)
    weight = torch.randn(groups * multiple, per_group, kernel, kernel, requires_grad=True)
    windows = _windows(stride, padding, 1, groups)
    log_clip = torch.tensor(shares).log()
    how = (True, True, False, False, by_channel, "layer")
    output = octo_conv2d(x, weight, log_clip, torch.tensor(0), *windows, *how)[0]
    gradient = torch.randn_like(output)
    output.backward(gradient)
    with torch.no_grad():
        largest = weight.abs().flatten(1).amax(1)
        largest = largest if by_channel else largest.amax().expand(len(largest))
        expected = torch.conv2d(_held_image(x, 1), _held_weight(weight, largest), None, *windows)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
        steps = largest[:, None, None] / 127 * log_clip.exp()[1]
        scaled = gradient * steps
        held = _held(scaled, scaled.abs().max() * log_clip.exp()[2] / 127)
        image, kernels = _held_image(x, log_clip.exp()[0]), _held_weight(weight, largest * log_clip.exp()[1])
    image.requires_grad_()
    kernels.requires_grad_()
    torch.conv2d(image, kernels, None, *windows).backward(held / steps.double())
    for found, wanted in ((x.grad, image.grad), (weight.grad, kernels.grad)):
        assert found is not None and wanted is not None
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_a_linear_layer_is_a_convolution_of_one_pixel() -> None:
    linear, conv = nn.Linear(6, 4), nn.Conv2d(6, 4, 1)
    with torch.no_grad():
        conv.weight.copy_(linear.weight[:, :, None, None])
        conv.bias.copy_(linear.bias)
    models = nn.Sequential(linear), nn.Sequential(conv)
    for model in models:
        octo_(model, **PLAIN)
    rows = torch.randn(3, 5, 6, requires_grad=True)
    output = models[0](rows)
    pixels = models[1](rows.detach().reshape(15, 6, 1, 1)).reshape(3, 5, 4)
    assert torch.equal(output, pixels)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    pixels.backward(gradient)
    assert torch.equal(linear.weight.grad, conv.weight.grad[:, :, 0, 0])
    assert rows.grad is not None and rows.grad.shape == rows.shape


def test_one_image_without_a_batch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"))
    octo_(model)
    x = torch.randn(3, 6, 6)
    assert torch.equal(model(x), model(x[None])[0])


def test_a_rounded_gradient_is_right_on_average() -> None:
    x, weight = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3, requires_grad=True)
    gradient = torch.randn(2, 4, 3, 3)

    def of(seed: int, is_stochastic: bool = True) -> Tensor:
        arguments = (torch.zeros(3), torch.tensor(seed), *_windows(), True, False, False, is_stochastic, True, "layer")
        return torch.autograd.grad(octo_conv2d(x, weight, *arguments)[0], weight, gradient)[0]

    assert torch.equal(of(1), of(1)) and not torch.equal(of(1), of(2))
    exact = torch.autograd.grad(torch.conv2d(_held_image(x, 1), weight.double()), weight, gradient.double())[0]
    mean = torch.stack([of(seed) for seed in range(60)]).mean(0)
    assert float((mean - exact).norm()) < 0.25 * float((of(1) - exact).norm())


def _clip_gradient(values: Tensor, rounded: Tensor, within: Tensor) -> float:
    """As `octo_conv2d` says, in float64."""
    error = rounded - values.double()
    gain = torch.where(within, error * error, error * rounded).sum() / error.square().sum()
    assert -1 < float(gain) < 1, "the limit would be tested"
    return CLIP_RATE * float(gain)


def test_shares_have_the_gradient_of_their_rounding_error() -> None:
    """Clipped by so little that it costs about what it gains."""
    x, weight = torch.randn(4, 3, 9, 9), torch.randn(5, 3, 3, 3, requires_grad=True)
    gradient = torch.randn(4, 5, 7, 7)
    log_clip = torch.tensor([0.998, 0.9999, 0.997]).log().requires_grad_()
    output = octo_conv2d(x, weight, log_clip, torch.tensor(0), *_windows(), True, True, True, True, True, "layer")[0]
    output.backward(gradient)
    assert log_clip.grad is not None
    with torch.no_grad():
        of_input, of_weight, of_gradient = log_clip.exp()
        within = (x >= x.min() * of_input) & (x <= x.max() * of_input)
        expected = [_clip_gradient(x, _held_image(x, of_input), within)]
        steps = weight.abs().flatten(1).amax(1)[:, None, None, None] / 127 * of_weight
        expected.append(_clip_gradient(weight, _held(weight, steps), weight.abs() <= 127 * steps))
        scaled = gradient * steps[:, 0]
        bound = scaled.abs().max() * of_gradient
        expected.append(_clip_gradient(scaled, _held(scaled, bound / 127), scaled.abs() <= bound))
    torch.testing.assert_close(log_clip.grad, torch.tensor(expected), rtol=1e-2, atol=1e-4)


def test_shares_find_the_range_with_the_least_error() -> None:
    """Of n numbers from -1 to 1 and two of 1.5 beyond, for bounds of r: n (2r / 255)^2 / 12 + 2 (1.5 - r)^2."""
    x = torch.rand(1, 4, 128, 128) * 2 - 1
    x[0, 0, 0, :2] = torch.tensor([1.5, -1.5])
    model = nn.Sequential(nn.Conv2d(4, 1, 1))
    octo_(model, compensation="none")
    layer: Any = model[0]
    optimizer = torch.optim.SGD([layer.log_clip], lr=5.0)
    for _ in range(40):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    best = 1.5 * 12 / (x.numel() * 2 / 255**2 + 12)
    assert float(layer.log_clip.detach()[0].exp()) == pytest.approx(best / 1.5, abs=0.02)


def test_nothing_is_clipped_or_learned_where_that_is_not_asked_for() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    octo = octo_(model, **PLAIN)
    assert octo.trained == ("0.weight", "0.bias")
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    assert model[0].log_clip.grad is None


@pytest.mark.parametrize("compensation", ["channel", "position"])
def test_compensation_has_the_gradients_of_the_paper(compensation: Any) -> None:
    """d_mu = alpha dz, d_alpha = mu dz, d_delta = dz, summed over what shares them."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    octo_(model, compensation=compensation, sample=torch.randn(1, 3, 6, 6))
    layer = model[0]
    with torch.no_grad():
        layer.alpha.uniform_(0.5, 2)
    assert layer.mu.shape == ((4,) if compensation == "channel" else (4, 4, 4))
    gradient = torch.randn(2, 4, 4, 4)
    model(torch.randn(2, 3, 6, 6)).backward(gradient)
    of_output = gradient.sum((0, 2, 3) if compensation == "channel" else 0)
    torch.testing.assert_close(layer.delta.grad, of_output)
    torch.testing.assert_close(layer.mu.grad, layer.alpha.detach() * of_output)
    torch.testing.assert_close(layer.alpha.grad, layer.mu.detach() * of_output)


@pytest.mark.parametrize("compensation", ["channel", "position"])
def test_compensation_removes_a_known_bias(compensation: Any) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False))
    plain = copy.deepcopy(model)
    octo = octo_(model, compensation=compensation, sample=torch.randn(1, 2, 5, 5))
    known = torch.randn(model[0].delta.shape)
    shift = known[:, None, None] if known.dim() == 1 else known
    optimizer = torch.optim.SGD([model[0].alpha, model[0].mu, model[0].delta], lr=1.0)
    for _ in range(150):
        x = torch.randn(4, 2, 5, 5)
        loss = F.mse_loss(model(x), plain(x).detach() + shift)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(model[0].compensation().detach(), known, rtol=0.02, atol=0.02)
    if compensation == "position":
        with pytest.raises(ValueError, match="0 has a compensation for each position"):
            octo.merge()
        return
    x = torch.randn(4, 2, 5, 5)
    wanted = model.eval()(x).detach()
    assert type(octo.merge()[0]) is nn.Conv2d
    assert float((model(x) - wanted).detach().abs().max()) < 0.05


def test_no_compensation_in_front_of_a_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU())
    octo = octo_(model)
    assert model[0].mu is None and model[3].mu is not None
    assert "1 layers are in front of BatchNorms" in octo.notes[0]


def test_weight_decay_is_the_penalty_of_the_paper() -> None:
    models = [nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 3))]
    octos = [octo_(model) for model in models]
    with torch.no_grad():
        models[0][0].mu.normal_()
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(octos[0].parameter_groups(compensation_decay=0.3), lr=0.1)]
    optimizers.append(torch.optim.SGD(octos[1].parameters(), lr=0.1))
    for _ in range(3):
        x, y = torch.randn(5, 4), torch.randn(5, 3)
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss = F.mse_loss(model(x), y)
            if number:
                loss = loss + 0.15 * (model[0].mu.square().sum() + model[0].delta.square().sum())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for ours, theirs in zip(*(model.state_dict().values() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_bytes_are_kept_for_the_backward_pass() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False))
    octo_(model, compensation="none")
    x = torch.randn(4, 8, 10, 10, requires_grad=True)
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(x)
    assert sum(tensor.nbytes for tensor in kept) < x.numel() + model[0].weight.numel() + 100
    with torch.no_grad():
        before = int(model[0].steps_made)
        model(x)
    assert int(model[0].steps_made) == before == 1


def test_frozen_layers_and_weights_of_0() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1))
    with torch.no_grad():
        model[1].weight.zero_()
        model[0].weight[1] = 0
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    octo_(model)
    model(torch.randn(2, 3, 4, 4)).sum().backward()
    assert model[0].weight.grad is None and bool(model[1].weight.grad.isfinite().all())
    assert model(torch.zeros(0, 3, 4, 4)).shape == (0, 2, 4, 4)


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4)
    )


def test_a_train_step_is_a_plain_loop_bit_for_bit() -> None:
    model = _network()
    octo_(model)
    plain = copy.deepcopy(model)
    budget = odt.Budget("1GiB", of="training")
    step = odt.TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), budget=budget)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        x, y = torch.randn(4, 3, 6, 6), torch.arange(4)
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        assert torch.equal(step(x, y), loss.detach())
    assert int(model[0].steps_made) == 3
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    with pytest.raises(RuntimeError, match="0: its input holds numbers that are not finite"):
        step(torch.full((4, 3, 6, 6), float("nan")), torch.arange(4))


def _trained(model: nn.Module, batches: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(4)).backward()
        optimizer.step()


def test_what_was_saved_goes_on_bit_for_bit() -> None:
    models = [_network(), _network()]
    for model in models:
        octo_(model)
    batches = [torch.randn(4, 3, 6, 6) for _ in range(4)]
    _trained(models[0], batches[:2])
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        _trained(model, batches[2:])
    assert all(map(torch.equal, models[0].state_dict().values(), models[1].state_dict().values()))


def test_unloading_gives_the_plain_layers_back() -> None:
    model = _network()
    names = list(model.state_dict())
    octo = octo_(model)
    _trained(model, [torch.randn(4, 3, 6, 6)])
    weights = {name: value.clone() for name, value in model.state_dict().items() if name in names}
    assert octo.unload() is model
    assert [type(each) for each in model] == [type(each) for each in _network()]
    assert list(model.state_dict()) == names
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_it_learns_as_float32_does() -> None:
    losses: list[list[float]] = []
    for in_int8 in (False, True):
        torch.manual_seed(4)
        model = _network()
        if in_int8:
            octo_(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        draw = torch.Generator().manual_seed(0)
        losses.append([])
        for _ in range(60):
            x, y = torch.rand(16, 3, 6, 6, generator=draw), torch.arange(16) % 2
            x[:, 0] += 0.3 * y[:, None, None]
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert all(sum(each[-15:]) < 0.4 * sum(each[:15]) for each in losses), losses


def test_batch_norms_are_found_by_the_flow_of_data() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv, self.shared, self.second = (
                nn.BatchNorm2d(3),
                nn.Conv2d(3, 3, 1),
                nn.Conv2d(3, 3, 1),
                None,
            )
            self.last = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x))
            z = self.shared(y)
            return self.last(z) + z

    assert norms_behind(Block()) == {"conv": "norm"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compensation": "all"}, "choose channel"),
        ({"compensation": "position"}, "needs a sample"),
        ({"clip": 0.0}, "share of a range"),
        ({"gradient_rounding": "up"}, "stochastic or nearest"),
        ({"weight_ranges": "layer"}, "channel or tensor"),
        ({"skip": ["0"]}, "can be quantized: 0: float32, as asked for"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        octo_(nn.Sequential(nn.Linear(4, 3)), **options)


def test_what_stays_in_float32_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"))
    notes = "\n".join(octo_(model).notes)
    assert "1: float32, because Conv1d is neither" in notes and "2: float32, because it is padded with" in notes
    with pytest.raises(ValueError, match="in int8 already"):
        octo_(nn.Sequential(model[0]))


def test_useless_numbers_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    octo_(model)
    with pytest.raises(RuntimeError, match=r"0: its input is torch.float64"):
        model(torch.ones(2, 4).double())
    output = model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="0: the gradient of its output is not finite"):
        output.backward(torch.full((2, 3), math.inf))
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="0: its weight holds"):
        model(torch.ones(2, 4))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the check itself
def test_the_operator_is_registered_as_torch_wants_it() -> None:
    x, weight = torch.randn(2, 6, 5, 5, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    log_clip = torch.full((3,), -0.1, requires_grad=True)
    arguments = (x, weight, log_clip, torch.tensor(7), *_windows(2, 1, 1, 2), True, True, True, True, True, "layer")
    torch.library.opcheck(octo_conv2d, arguments)
