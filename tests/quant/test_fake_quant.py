"""Fake quantization: values and gradients are those of torch's own operators and of the papers' formulae."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.ops import int8_conv2d_scaled
from torch_odt.quant.fake_quant import fake_quantize_
from torch_odt.quant.observed_ranges import NONE_SEEN, learned_steps, observed_range, steps_of_range, weight_steps

LAYERS = {
    "linear": (nn.Linear(6, 4), (5, 6)),
    "linear of sequences": (nn.Linear(6, 4, bias=False), (2, 3, 6)),
    "1-d": (nn.Conv1d(4, 6, 3, padding=1, groups=2), (2, 4, 9)),
    "2-d": (nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 7, 7)),
    "circular": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 7, 7)),
    "depthwise": (nn.Conv2d(6, 6, 3, stride=2, groups=6), (2, 6, 8, 8)),
    "3-d": (nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _alone(layer: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    model = nn.Sequential(copy.deepcopy(layer))
    fake_quantize_(model, **options)
    return model, model[0]


def _held(values: Tensor, step: Tensor, zero: Tensor, low: int = -128, axis: int | None = None) -> Tensor:
    """What int8 holds of values, in float64 and without torch's operators."""
    shape = [-1 if dim == axis else 1 for dim in range(values.dim())]
    step, zero = (each.double().reshape(shape) if axis is not None else each.double() for each in (step, zero))
    return ((values.double() / step).round() + zero).clamp(low, 127).sub(zero).mul(step)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_computes_with_what_int8_holds(kind: str) -> None:
    layer, shape = LAYERS[kind]
    x = torch.randn(shape)
    model, quantized = _alone(layer)
    output = model(x)
    plain = copy.deepcopy(layer).double()
    low, high = float(x.min()), float(x.max())
    step = (x.max() - x.min()) / 255
    rounded = _held(x, step, (-128 - low / step).round())
    with torch.no_grad():
        steps = layer.weight.abs().flatten(1).amax(1) / 127
        plain.weight.copy_(_held(layer.weight, steps, torch.zeros(1), -127, axis=0))
    torch.testing.assert_close(output.double(), plain(rounded), rtol=1e-5, atol=1e-5)
    span = torch.tensor([low, high])
    assert torch.equal(quantized.input_range, span)
    expected = torch.fake_quantize_per_tensor_affine(x, *steps_of_range(span), -128, 127)
    assert torch.equal(quantized.operands(x)[0], expected)


def test_the_gradient_goes_straight_through_and_stops_where_values_are_clipped() -> None:
    model, layer = _alone(nn.Linear(4, 3))
    layer.input_range.copy_(torch.tensor([-1.0, 1.0]))
    model.eval()
    x = torch.tensor([[0.3, -0.7, 2.0, -3.0]], requires_grad=True)
    gradient = torch.randn(1, 3)
    model(x).backward(gradient)
    weight = torch.fake_quantize_per_channel_affine(
        layer.weight, weight_steps(layer.weight.detach(), ""), torch.zeros(3, dtype=torch.int32), 0, -127, 127
    )
    torch.testing.assert_close(x.grad, gradient @ weight * torch.tensor([1.0, 1.0, 0.0, 0.0]))
    rounded = _held(x.detach(), *steps_of_range(layer.input_range)).float()
    torch.testing.assert_close(layer.weight.grad, gradient.T @ rounded)
    torch.testing.assert_close(layer.bias.grad, gradient[0])


def test_observed_ranges_are_moving_averages_with_0_within() -> None:
    model, layer = _alone(nn.Linear(4, 3), averaging=0.25)
    batches = [torch.rand(8, 4) + 1, torch.randn(8, 4), torch.zeros(8, 4)]
    expected = torch.tensor([0.0, float(batches[0].max())])
    for number, x in enumerate(batches):
        model(x)
        if number:
            expected = 0.75 * expected + 0.25 * torch.stack([x.min().clamp(max=0), x.max().clamp(min=0)])
        torch.testing.assert_close(layer.input_range, expected)
    model.eval()(torch.randn(8, 4) * 100)
    torch.testing.assert_close(layer.input_range, expected)


def test_an_input_of_zeros_is_exact() -> None:
    model, layer = _alone(nn.Linear(4, 3))
    assert torch.equal(model(torch.zeros(2, 4)), layer.bias.expand(2, 3))


def test_learned_steps_have_the_gradients_of_the_paper() -> None:
    """Esser et al., equation 3, and as for the zero: clipped values move with it, by a step the other way."""
    sample = torch.randn(8, 5)
    _, layer = _alone(nn.Linear(5, 3), ranges="learned", sample=sample)
    x = (torch.randn(8, 5) * 3).requires_grad_()
    gradient = torch.randn(8, 3)
    of_input, of_weight = torch.zeros(8, 5), torch.zeros(3, 5)
    quantized, weight, _ = layer.operands(x)
    quantized.register_hook(of_input.copy_)
    weight.register_hook(of_weight.copy_)
    F.linear(quantized, weight, layer.bias).backward(gradient)
    # Of the steps' gradients, what gradient descent moves them by; they are at 1 of their units.
    step, zero = layer.input_unit, layer.input_zero.detach()
    scaled, origin = x.detach() / step, zero.round()
    q = scaled.round() + origin
    inside = (q >= -128) & (q <= 127)
    assert 0 < int(inside.sum()) < inside.numel()
    slope = torch.where(inside, scaled.round() - scaled, q.clamp(-128, 127) - origin)
    factor = 1 / math.sqrt(5 * 127)
    torch.testing.assert_close(layer.input_step.grad * step, (of_input * slope).sum().reshape(1) * factor)
    torch.testing.assert_close(
        layer.input_zero.grad, torch.where(inside, torch.zeros(()), -step * of_input).sum().reshape(1) * factor
    )
    torch.testing.assert_close(x.grad, of_input * inside)
    steps = layer.weight_unit[:, None]
    scaled = layer.weight.detach() / steps
    slope = torch.where(scaled.round().abs() <= 127, scaled.round() - scaled, scaled.round().clamp(-127, 127))
    torch.testing.assert_close(layer.weight_step.grad * layer.weight_unit, (of_weight * slope).sum(1) * factor)


def test_learned_steps_learn() -> None:
    """A step that is far too large shrinks, and the error with it."""
    model, layer = _alone(nn.Linear(16, 16), ranges="learned", sample=torch.randn(64, 16))
    plain = nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight.copy_(plain.weight)
        layer.bias.copy_(plain.bias)
        layer.input_step.mul_(8)
        layer.input_zero.zero_()
    optimizer = torch.optim.Adam([layer.input_step], lr=0.2)
    losses = []
    for _ in range(60):
        x = torch.randn(64, 16)
        loss = F.mse_loss(model(x), plain(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0] and 0 < float(layer.input_step.detach()) < 4


def _network() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8, affine=False), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 16, 4),
    )  # fmt: skip
    for _ in range(4):
        model(torch.randn(8, 3, 6, 6))
    return model


def test_a_folded_batch_norm_is_part_of_weight_and_bias() -> None:
    model = _network()
    plain = copy.deepcopy(model).eval()
    sample = torch.randn(8, 3, 6, 6)
    adaptation = fake_quantize_(model, batch_norm="fold", sample=sample)
    assert [type(each) for each in (model[1], model[4])] == [nn.Identity, nn.Identity]
    for conv, norm in ((0, 1), (3, 4)):
        fused = torch.nn.utils.fuse_conv_bn_eval(plain[conv], plain[norm])
        weight, bias = model[conv]._folded()
        torch.testing.assert_close(weight, fused.weight)
        torch.testing.assert_close(bias, fused.bias)
    wanted = plain(sample)
    assert float(((model.eval()(sample) - wanted).norm() / wanted.norm()).detach()) < 0.03
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(adaptation.parameters(), lr=0.1)
    F.cross_entropy(model.train()(sample), torch.arange(8) % 4).backward()
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {"0.weight", "0.norm.weight", "0.norm.bias", "3.weight", "3.bias"} <= moved
    assert not any("running" in name or "tracked" in name for name in moved)
    trained = model.eval()(sample)
    adaptation.unload()
    assert [type(each) for each in model] == [type(each) for each in plain]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert float((model(sample) - trained).detach().norm() / trained.detach().norm()) < 0.03


def test_it_agrees_with_the_int8_kernels() -> None:
    model, layer = _alone(nn.Conv2d(4, 6, 3, padding=1))
    x = torch.randn(2, 4, 7, 7)
    output = model(x)
    step, zero = steps_of_range(layer.input_range)
    steps = weight_steps(layer.weight.detach(), "")
    image = (x / step).round().add(zero).clamp(-128, 127).to(torch.int8)
    kernel = (layer.weight / steps[:, None, None, None]).round().to(torch.int8)
    found = int8_conv2d_scaled(image, kernel, step * steps, input_zero_point=int(zero), padding=1)
    torch.testing.assert_close(output, found + layer.bias[:, None, None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranges", ["observed", "learned"])
def test_a_train_step_is_a_plain_loop_bit_for_bit(ranges: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    fake_quantize_(model, ranges=ranges, sample=torch.randn(4, 3, 6, 6) if ranges == "learned" else None)
    plain = copy.deepcopy(model)
    step = odt.TrainStep(
        model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), budget=odt.Budget("1GiB", of="training")
    )
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        x, y = torch.randn(4, 3, 6, 6), torch.arange(4)
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        assert torch.equal(step(x, y), loss.detach())
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_captured_step_names_what_has_diverged() -> None:
    model, layer = _alone(nn.Linear(4, 3), ranges="learned", sample=torch.randn(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    step = odt.TrainStep(model, F.mse_loss, optimizer, budget=odt.Budget("1GiB", of="training"))
    x, y = torch.randn(4, 4), torch.randn(4, 3)
    step(x, y)
    with torch.no_grad():
        layer.input_step.fill_(-1)
    with pytest.raises(RuntimeError, match="0: learning has brought a range to zero"):
        step(x, y)


@pytest.mark.parametrize("ranges", ["observed", "learned"])
def test_state_comes_back_bit_for_bit(ranges: Any) -> None:
    sample = torch.randn(8, 3, 6, 6)
    models = [_network(), _network()]
    for model in models:
        fake_quantize_(model, ranges=ranges, batch_norm="fold", sample=sample)
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(8, 3, 6, 6)
    outputs = [model.eval()(x) for model in models]
    assert torch.equal(*outputs)
    assert all(map(torch.equal, models[0].state_dict().values(), models[1].state_dict().values()))


def test_what_stays_in_float32_is_named() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle, self.up = nn.Linear(4, 4), nn.Linear(4, 4), nn.ConvTranspose1d(1, 1, 1)
            self.words, self.watched = nn.Embedding(3, 4), nn.Linear(4, 4)
            self.watched.register_forward_hook(lambda *_: None)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Two()
    adaptation = fake_quantize_(model, sample=torch.randn(2, 4), skip=["words"])
    notes = "\n".join(adaptation.notes)
    for text in (
        "up: float32, because ConvTranspose1d is none of",
        "words: float32, as asked",
        "watched: float32, bec",
    ):
        assert text in notes
    assert "idle: float32, because the sample does not run" in notes
    assert type(model.idle) is nn.Linear and type(model.used) is not nn.Linear


def test_batch_norms_that_cannot_be_folded_are_named() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4))
    adaptation = fake_quantize_(model, batch_norm="fold")
    assert "are kept: 0, 3" in adaptation.notes[0]

    class Branching(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    adaptation = fake_quantize_(Branching(nn.Linear(4, 4), nn.BatchNorm1d(4)), batch_norm="fold")
    assert "BatchNorms are kept: torch.fx cannot follow Branching" in adaptation.notes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranges": "guessed"}, "observed or learned"),
        ({"ranges": "learned"}, "needs a sample"),
        ({"batch_norm": "drop"}, "keep or fold"),
        ({"averaging": 0.0}, "share of a batch"),
        ({"skip": ["9"]}, "skip names 9"),
        ({"skip": ["0"]}, "nothing of Sequential can be quantized: 0: float32, as asked for"),
        ({"ranges": "learned", "sample": torch.zeros(2, 4)}, "0: its input is 0 throughout"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=message):
        fake_quantize_(model, **options)
    assert type(model[0]) is nn.Linear


def test_useless_numbers_are_named() -> None:
    model, layer = _alone(nn.Linear(4, 3))
    with pytest.raises(RuntimeError, match="0 has seen no batch"):
        model.eval()(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="0: its input holds numbers that are not finite"):
        model.train()(torch.full((2, 4), float("nan")))
    with pytest.raises(RuntimeError, match="not finite"):
        fake_quantize_(nn.Sequential(nn.Linear(4, 3)), sample=torch.full((2, 4), float("inf")))
    model(torch.ones(2, 4))
    with torch.no_grad():
        layer.weight[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="0: its weight holds"):
        model(torch.ones(2, 4))


def test_a_second_time_is_refused() -> None:
    model, _ = _alone(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="fake-quantized already"):
        fake_quantize_(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the check itself
def test_the_operators_are_registered_as_torch_wants_them() -> None:
    torch.library.opcheck(observed_range, (torch.randn(3, 4), torch.tensor(NONE_SEEN), 0.1, "layer"))
    torch.library.opcheck(weight_steps, (torch.randn(3, 4), "layer"))
    torch.library.opcheck(learned_steps, (torch.ones(3, requires_grad=True), torch.ones(3), "layer"))
