"""Whole models in NITI's arithmetic: what is converted, that they learn, and that every door trains the same bits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from niti_cases import Means, Residual, batches, bytes_of, mantissas, small_net
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.quant import NitiSGD, PackedWeights, niti_, niti_cross_entropy
from torch_odt.quant.niti_functions import niti_dequantize, niti_quantize, niti_relu
from torch_odt.quant.niti_layers import NitiConv2d, NitiLayer
from torch_odt.quant.niti_numbers import as_carrier, as_int8


@pytest.fixture(autouse=True)
def _seeded() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def with_norms() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6),
        nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(6 * 36, 4),
    )  # fmt: skip


def train(model: nn.Module, optimizer: NitiSGD, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = niti_cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("make", [small_net, Residual, Means, with_norms])
def test_it_computes_what_float32_does_but_for_rounding(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    plain = copy.deepcopy(model)
    training = niti_(model)
    assert isinstance(model, type(plain)) and not training.in_float32
    x, _ = batches(1)[0]
    expected = plain(x)
    assert float((model(x) - expected).detach().norm() / expected.detach().norm()) < 0.1


@pytest.mark.parametrize("make", [small_net, Residual, with_norms])
def test_it_learns(make: Callable[[], nn.Module]) -> None:
    model = make()
    training = niti_(model, gradient_bits=4)
    losses = train(model, NitiSGD(model, lr=0.05), batches(40, size=16))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    weights = [layer.weight for layer in training.layers().values()]
    assert all(weight.element_size() == 1 for weight in weights)


def test_without_norms_everything_is_in_integers() -> None:
    model = Residual()
    training = niti_(model)
    assert training.converted == ("stem", "first", "second", "beside", "head") and not training.between
    head = model.head
    assert isinstance(head, NitiLayer) and head.to_float, "the logits are the sums themselves"
    assert model.stem.relu  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "layers"), [("resnet18", 21), ("mobilenet_v2", 53)])
@pytest.mark.parametrize("batch_norm", ["float32", "fold"])
def test_networks_of_torchvision(name: str, layers: int, batch_norm: Any) -> None:
    models = pytest.importorskip("torchvision").models
    model = models.mobilenet_v2(width_mult=0.35, num_classes=4) if name == "mobilenet_v2" else models.resnet18()
    training = niti_(model, batch_norm=batch_norm, gradient_bits=2)
    assert len(training.converted) == layers and not training.in_float32
    norms = [each for each in training.between if "BatchNorm" in each]
    assert not norms if batch_norm == "fold" else True
    before = {each: layer.weight.detach().view(torch.int8).clone() for each, layer in training.layers().items()}
    (loss,) = train(model, NitiSGD(model, lr=0.01), [(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3]))])
    assert loss == loss
    moved = [not torch.equal(layer.weight.view(torch.int8), before[each]) for each, layer in training.layers().items()]
    assert sum(moved) > 0.8 * layers


def test_norms_stay_float32_or_are_folded() -> None:
    kept = niti_(with_norms())
    assert len(kept.converted) == 3
    assert {name.split(" ")[0] for name in kept.between} <= {"1", "4", "7"}
    model = with_norms()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.running_mean)
    model.eval()
    plain, (x, _) = copy.deepcopy(model), batches(1)[0]
    folded = niti_(model, batch_norm="fold")
    assert [name for name in folded.between] == ["_7 (7)"] or "Dropout" in folded.between[0]
    expected = plain(x).detach()
    assert float((model(x) - expected).detach().norm() / expected.norm()) < 0.1
    integers = model(x).detach()
    folded.dequantize_()
    assert type(model[0]) is nn.Conv2d and type(model[1]) is nn.BatchNorm2d
    assert float((model(x).detach() - integers).norm() / integers.norm()) < 0.1


# That an operator looks at a scale changes nothing of what it allocates: filterwarnings = error.
def test_a_loop_and_a_step_train_the_same_bits() -> None:
    data = batches(12)
    for make in (small_net, Residual):
        base = make()
        loop, ours = copy.deepcopy(base), copy.deepcopy(base)
        niti_(loop), niti_(ours)
        expected = train(loop, NitiSGD(loop), data)
        step = odt.TrainStep(ours, niti_cross_entropy, NitiSGD(ours), budget=odt.Budget("1GiB", of="training"))
        found = [float(step(x, y)) for x, y in data]
        assert found == expected
        assert bytes_of(ours) == bytes_of(loop)


def test_updates_in_the_backward_pass_change_no_bit_and_keep_no_gradient() -> None:
    data = batches(12)
    loop, ours, planned = (small_net() for _ in range(3))
    for model in (ours, planned):
        model.load_state_dict(loop.state_dict())
    for model in (loop, ours, planned):
        niti_(model)
    expected = train(loop, NitiSGD(loop), data)
    optimizer = NitiSGD(ours, in_backward=True)
    assert train(ours, optimizer, data) == expected
    assert bytes_of(ours) == bytes_of(loop)
    optimizer.zero_grad()
    niti_cross_entropy(ours(data[0][0]), data[0][1]).backward()
    layers = [module for module in ours.modules() if isinstance(module, NitiLayer)]
    assert all(layer.weight.grad is None and layer.bias.grad is None for layer in layers)  # type: ignore[union-attr]
    assert all(layer.gradient_rescaling.grad is not None for layer in layers)
    optimizer = NitiSGD(planned, in_backward=True)
    step = odt.TrainStep(planned, niti_cross_entropy, optimizer, budget=odt.Budget("1GiB", of="training"))
    assert [float(step(x, y)) for x, y in data] == expected
    assert bytes_of(planned) == bytes_of(loop)


# What is kept packed is packed anew inside of a step, and stays.
KEPT = pytest.mark.filterwarnings("ignore:allocations departed from the plan")


@pytest.mark.parametrize("packs", [False, pytest.param(True, marks=KEPT)])
def test_a_step_takes_gradients_off_inside_of_its_schedule(packs: bool) -> None:
    data, models = batches(6), [small_net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        niti_(model, packs=PackedWeights() if packs else None)
    loop, ours = models
    optimizer = NitiSGD(ours)
    step = odt.TrainStep(ours, niti_cross_entropy, optimizer, budget=odt.Budget("1GiB", of="training"))
    assert [float(step(x, y)) for x, y in data] == train(loop, NitiSGD(loop), data)
    assert bytes_of(ours) == bytes_of(loop)
    layers = [module for module in ours.modules() if isinstance(module, NitiLayer)]
    assert all(layer.weight.grad is None and layer.gradient_rescaling.grad is not None for layer in layers)
    found = f"{len(layers)} parameters are updated as soon as their gradients are complete"
    fused = "" if packs else f", {len(layers)} of them by the operators that compute these"
    assert any(note.startswith(f"{found}{fused}; these are gone then") for note in step.plan.notes)
    # A hook sees what is stored for it, and the plan is another one.
    seen: list[Tensor] = []
    layers[0].weight.register_hook(lambda gradient: seen.append(as_int8(gradient).clone()))
    assert float(step(*data[0])) == train(loop, NitiSGD(loop), data[:1])[0]
    assert bytes_of(ours) == bytes_of(loop) and len(seen) == 1 and bool(seen[0].any())


def test_sums_of_numbers_that_are_far_apart_keep_to_the_plan() -> None:
    loop, ours = Residual(), Residual()
    for parameter in loop.first.parameters():
        parameter.data.mul_(2.0**-24)
    ours.load_state_dict(loop.state_dict())
    for model in (loop, ours):
        niti_(model)
    step = odt.TrainStep(ours, niti_cross_entropy, NitiSGD(ours), budget=odt.Budget("1GiB", of="training"))
    # Where allocations depart from the plan there is a warning, which fails the test.
    assert [float(step(x, y)) for x, y in batches(3)] == train(loop, NitiSGD(loop), batches(3))
    assert bytes_of(ours) == bytes_of(loop)


def test_a_weight_in_another_order_is_updated_without_its_operator() -> None:
    data, models = batches(3), [small_net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        niti_(model)
        model.to(memory_format=torch.contiguous_format)
    loop, ours = models
    step = odt.TrainStep(ours, niti_cross_entropy, NitiSGD(ours), budget=odt.Budget("1GiB", of="training"))
    assert [float(step(x, y)) for x, y in data] == train(loop, NitiSGD(loop), data)
    assert bytes_of(ours) == bytes_of(loop)


def test_an_optimizer_with_a_step_of_its_own_sees_all_gradients() -> None:
    class Frozen(NitiSGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                as_int8(parameter.grad).zero_()
            return super().step(closure)

    model = small_net()
    niti_(model)
    before = [layer.weight.view(torch.int8).clone() for layer in model.modules() if isinstance(layer, NitiLayer)]
    step = odt.TrainStep(model, niti_cross_entropy, Frozen(model), budget=odt.Budget("1GiB", of="training"))
    step(*batches(1)[0])
    after = [layer.weight.view(torch.int8) for layer in model.modules() if isinstance(layer, NitiLayer)]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("in_backward", [False, True])
def test_wrap_leaves_integers_to_the_optimizer(in_backward: bool) -> None:
    data, models = batches(3), [small_net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        niti_(model)
    loop, ours = models
    expected = train(loop, NitiSGD(loop), data)
    optimizer = NitiSGD(ours, in_backward=in_backward)
    wrapped = odt.wrap(ours, budget=odt.Budget("1GiB", of="training"), optimizer=optimizer)
    assert train(wrapped, optimizer, data) == expected
    assert bytes_of(ours) == bytes_of(loop)


class Broadcast(nn.Module):
    """A sum of an image and a tensor of one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 6, 3, padding=1), nn.Linear(6 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        found: Tensor = self.head(torch.flatten(x + F.adaptive_avg_pool2d(x, 1), 1))
        return found


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("trained", ["weights", "scales"])
def test_a_second_backward_pass_before_a_step_is_refused(packs: bool, trained: str) -> None:
    model = small_net()
    niti_(model, packs=PackedWeights() if packs else None)
    optimizer = NitiSGD(model)
    if trained == "scales":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("gradient_rescaling") or name == "0.bias")
    x, y = batches(1)[0]
    niti_cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="cannot be added up: call optimizer"):
        niti_cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    niti_cross_entropy(model(x), y).backward()
    # Nothing is added up here.
    assert torch.autograd.grad(niti_cross_entropy(model(x), y), [model[-1].gradient_rescaling])[0] is not None


@pytest.mark.parametrize(("option", "value"), [("accumulation_steps", 2), ("clip_grad_norm", 1.0)])
def test_a_step_that_adds_up_gradients_is_refused(option: str, value: Any) -> None:
    model = small_net()
    niti_(model)
    options: Any = {"budget": odt.Budget("1GiB", of="training"), option: value}
    step = odt.TrainStep(model, niti_cross_entropy, NitiSGD(model), **options)
    with pytest.raises(ValueError, match=r"0\.weight, 0\.bias, 3\.weight and others have eight bits"):
        step(*batches(1)[0])


def test_a_sum_that_repeats_a_tensor_trains() -> None:
    model = Broadcast()
    x, _ = batches(1)[0]
    expected = model(x).detach()
    niti_(model)
    assert float((model(x).detach() - expected).norm() / expected.norm()) < 0.1
    losses = train(model, NitiSGD(model), batches(40))
    assert losses[-1] < losses[0] / 2


def test_two_optimizers_in_the_backward_pass_are_as_one() -> None:
    data, models = batches(3), [small_net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        niti_(model)
    NitiSGD(models[1], in_backward=True)
    losses = [train(model, NitiSGD(model, in_backward=True), data) for model in models]
    assert losses[0] == losses[1] and bytes_of(models[0]) == bytes_of(models[1])


def test_a_relu6_is_a_bound_of_the_layer_before_it() -> None:
    model = small_net()
    plain = copy.deepcopy(model)
    niti_(model)
    assert [(layer.relu, layer.ceiling) for layer in model.modules() if isinstance(layer, NitiLayer)] == [
        (True, None), (False, None), (True, 6.0), (False, None),
    ]  # fmt: skip
    # As a function of its own behind the layer, it does the same.
    images, _ = batches(1)[0]
    inside = 40 * plain[:2](images).detach()
    layer = NitiConv2d(plain[4], rounding="nearest")
    other = copy.deepcopy(layer)
    layer.relu, layer.ceiling = True, 6.0
    fused, apart = niti_quantize(inside), niti_quantize(inside)
    for x in (fused, apart):
        x.mantissas.requires_grad_(), x.exponent.requires_grad_()
    bounded, free = layer(fused), niti_relu(other(apart), 6.0)
    assert torch.equal(as_int8(bounded.mantissas), as_int8(free.mantissas)) and bounded.exponent == free.exponent
    assert float(niti_dequantize(free).detach().max()) == 6.0
    gradient = [as_carrier(mantissas(*free.mantissas.shape, seed=5)), torch.tensor([-3.0])]
    for found in (bounded, free):
        torch.autograd.backward([found.mantissas, found.exponent], gradient)
    assert torch.equal(as_int8(layer.weight.grad), as_int8(other.weight.grad))
    assert torch.equal(as_int8(fused.mantissas.grad), as_int8(apart.mantissas.grad))


def test_the_state_goes_on_where_it_was() -> None:
    data = batches(20)
    model = Residual()
    start = copy.deepcopy(model)
    niti_(model)
    optimizer = NitiSGD(model)
    train(model, optimizer, data[:9])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    rest = train(model, optimizer, data[9:])
    file.seek(0)
    saved = torch.load(file)
    again = niti_(start).model
    again.load_state_dict(saved["model"])
    resumed = NitiSGD(again)
    resumed.load_state_dict(saved["optimizer"])
    assert train(again, resumed, data[9:]) == rest
    assert bytes_of(again) == bytes_of(model)


def test_the_way_back_keeps_what_was_trained() -> None:
    model = small_net()
    keys = list(model.state_dict())
    training = niti_(model)
    train(model, NitiSGD(model), batches(5))
    weight = model[0].float_weight()  # type: ignore[operator]
    assert training.dequantize_() is model and training.dequantize_() is model
    assert list(model.state_dict()) == keys and type(model) is nn.Sequential
    assert torch.equal(model[0].weight, weight)


def test_scales_are_looked_at_less_and_less_often() -> None:
    model = small_net()
    training = niti_(model, gradient_bits=2)
    train(model, NitiSGD(model), batches(60))
    seldom = training.checked_share()
    assert 0 < seldom < 0.4
    always = niti_(small_net(), longest_period=1)
    train(always.model, NitiSGD(always.model), batches(4))
    assert always.checked_share() == 1 and always.clipped_share() == 0
    assert "looked at in 100.0%" in str(always)


def test_a_batch_that_is_split_and_packed_weights_change_nothing() -> None:
    base, data = Residual(), batches(8)
    found = []
    for options in ({}, {"split": 600}, {"packs": PackedWeights(limit_bytes=1 << 20)}, {"split": "cache"}):
        model = copy.deepcopy(base)
        niti_(model, **options)
        found.append((train(model, NitiSGD(model), data), bytes_of(model)))
    assert all(each == found[0] for each in found[1:])


def test_saturation_is_counted_and_told() -> None:
    model = small_net()
    training = niti_(model)
    quiet, (x, y) = batches(6), batches(1)[0]
    optimizer = NitiSGD(model)
    train(model, optimizer, [(0.01 * images, labels) for images, labels in quiet])
    training.set_gradient_bits(-8)
    train(model, optimizer, [(x, y)] + [(100 * x, y)] * 2)
    clipped = {name: each.clipped_batches for name, each in training.rescalings().items() if each.clipped_batches}
    assert clipped and training.clipped_share() > 0
    name = max(clipped, key=lambda each: clipped[each])
    assert f"clipped     {name}" in str(training) or len(clipped) > 3


def test_what_cannot_be_converted_is_named() -> None:
    class Awkward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine = nn.Conv2d(1, 4, 3)
            self.circular = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
            self.twice = nn.Conv2d(4, 4, 1)
            self.transposed = nn.ConvTranspose2d(4, 4, 2)
            self.zeros = nn.Conv2d(4, 4, 1, bias=False)
            nn.init.zeros_(self.zeros.weight)
            self.unused = nn.Linear(2, 2)
            self.wanted = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.twice(self.twice(self.circular(self.fine(x))))
            found: Tensor = self.wanted(self.zeros(self.transposed(x)))
            return found

    training = niti_(Awkward(), keep_float32=["wanted"])
    assert training.converted == ("fine",)
    for name, reason in {
        "circular": "padding_mode", "twice": "called 2 times", "transposed": "ConvTranspose2d", "zeros": "all zeros",
        "unused": "none does", "wanted": "asked for",
    }.items():  # fmt: skip
        assert reason in training.in_float32[name]
        assert name in str(training)
    assert training.model(torch.randn(2, 1, 6, 6)).isfinite().all()


def test_a_forward_pass_that_cannot_be_traced_converts_layer_by_layer() -> None:
    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.conv(x))
            found: Tensor = self.head(x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3)))
            return found

    model = Conditional()
    training = niti_(model)
    assert training.converted == ("conv", "head") and "torch.fx cannot trace Conditional" in training.between[0]
    losses = train(model, NitiSGD(model), batches(30, size=16))
    assert sum(losses[-5:]) < sum(losses[:5])


def test_wrong_options_are_refused() -> None:
    for options, text in (
        ({"gradient_bits": 8}, "from -8 to 7"),
        ({"batch_norm": "integers"}, "float32, fold"),
        ({"start": "zeros"}, "model, xavier"),
        ({"rounding": "stochastic"}, "nearest, pseudo_stochastic"),
        ({"longest_period": 0}, "1 or more"),
        ({"split": "l2"}, "'cache'"),
        ({"split": 0}, "None does not split"),
        ({"keep_float32": ["99"]}, "which the model does not have"),
    ):
        with pytest.raises(ValueError, match=text):
            niti_(small_net(), **options)
    with pytest.raises(ValueError, match="no layer that can be converted"):
        niti_(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="convert it by odt"):
        NitiSGD(small_net())
    training = niti_(small_net())
    with pytest.raises(ValueError, match="1 is not in NITI's arithmetic"):
        training.set_gradient_bits(2, ["1"])
    with pytest.raises(ValueError, match="logits of shape"):
        niti_cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long))


def test_a_batch_with_nan_is_refused_and_changes_nothing() -> None:
    model = small_net()
    niti_(model)
    before = bytes_of(model)
    with pytest.raises(RuntimeError, match="not finite"):
        model(torch.full((2, 1, 8, 8), float("nan")))
    assert bytes_of(model) == before


def test_weights_drawn_as_in_niti() -> None:
    model = small_net()
    niti_(model, start="xavier")
    layer = model[4]
    assert isinstance(layer, NitiLayer) and layer.float_bias() is not None
    assert not layer.float_bias().any()  # type: ignore[union-attr]
    bound = (6 / (8 + 16)) ** 0.5
    assert 0.8 * bound < float(layer.float_weight().abs().max()) <= 1.01 * bound


@pytest.mark.parametrize("make", [small_net, Residual])
def test_operators_are_registered_as_torch_wants_them(make: Callable[[], nn.Module]) -> None:
    """Traced, the step is the same graph of operators with the same shapes and bits."""
    model = make()
    niti_(model)
    data = batches(3)
    wrapped = copy.deepcopy(model)
    expected = train(model, NitiSGD(model), data)
    compiled = torch.compile(wrapped, backend="aot_eager", fullgraph=True)
    optimizer = NitiSGD(wrapped)
    assert train(compiled, optimizer, data) == expected  # type: ignore[arg-type]
    assert bytes_of(wrapped) == bytes_of(model)


def test_other_optimizers_are_refused() -> None:
    model = niti_(small_net()).model
    with pytest.raises(ValueError, match="holds integers of 8 bits, which SGD cannot change: use NitiSGD"):
        odt.TrainStep(model, niti_cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), budget="2GiB")
    with pytest.raises(TypeError, match="takes the model, not its parameters"):
        NitiSGD(model.parameters())  # type: ignore[arg-type]
