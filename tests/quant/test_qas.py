"""QAS is gradient descent of the real numbers, and int8 weights follow their optimizer on average."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_models import calibration, images, labels, relative_error, trained_a_little
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.quant.activation import by_channel, weight_of
from torch_odt.quant.modules import Int8Layer
from torch_odt.quant.qas import int8_layers


def converted(name: str = "residual", **options: Any) -> nn.Module:
    model = trained_a_little(name)
    odt.quant.convert_(model, calibration(), **options)
    return model


def backward(model: nn.Module, seed: int = 0) -> None:
    F.cross_entropy(model(images(8, seed)), labels(8, seed)).backward()


def test_without_qas_gradients_are_those_of_counts() -> None:
    scaled, plain = converted(), converted(qas=False)
    grids: dict[str, Tensor] = {}
    for name, layer in int8_layers(scaled).items():
        layer.register_forward_pre_hook(lambda _, inputs, name=name: grids.update({name: inputs[0].grid}))
    for model in (scaled, plain):
        backward(model)
    for name, ours in int8_layers(scaled).items():
        s_w, theirs = ours.weight_scale, plain.get_submodule(name)
        torch.testing.assert_close(ours.weight_slot.grad, theirs.weight_slot.grad / s_w.view(-1, 1, 1, 1) ** 2)
        assert ours.bias is not None
        torch.testing.assert_close(ours.bias.grad, theirs.bias.grad / (s_w * grids[name][0]) ** 2)
    scaled.zero_grad()
    odt.quant.scale_gradients_(scaled, enabled=False)
    backward(scaled)
    assert torch.equal(scaled.stem.weight_slot.grad, plain.stem.weight_slot.grad)


OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, weight_decay=1e-2),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=0.05, weight_decay=1e-2),
    "of others": lambda parameters, lr: Averaging(parameters, {"lr": lr}),
}


class Averaging(torch.optim.Optimizer):
    """None of torch's, so that its step may be of all weights together; it hands a tensor out that it keeps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                self.state[parameter]["kept"] = parameter - group["lr"] * parameter.grad
                self.state[parameter]["as it was"] = self.state[parameter]["kept"].clone()
                parameter.data = self.state[parameter]["kept"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clips", [False, True])
def test_optimizers_do_what_they_do_to_float32(name: str, clips: bool) -> None:
    """The gradients are the int8 graph's own; weights are off by the rounding of their last update."""
    model = converted(headroom=3.0)
    layers = int8_layers(model).values()
    real = [nn.Parameter(tensor) for layer in layers for tensor in (layer.float_weight(), layer.float_bias())]
    slots = [slot for layer in layers for slot in (layer.weight_slot, layer.bias)]
    rate = 20.0 if clips else 1.5
    ours, theirs = OPTIMIZERS[name](slots, rate), OPTIMIZERS[name](real, rate)
    odt.quant.train_int8_(model, ours)
    errors: list[float] = []
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        before = [layer.float_weight() for layer in layers]
        for slot, tensor in zip(slots, real, strict=True):
            assert slot.grad is not None
            tensor.grad = weight_of(slot.grad).clone()
        if clips:
            norms = [float(nn.utils.clip_grad_norm_(each, 0.05)) for each in (slots, real)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0.1
        ours.step()
        theirs.step()
        for layer, was, weight, bias in zip(layers, before, real[::2], real[1::2], strict=True):
            s_w = by_channel(layer.weight_scale, weight)
            wanted, found = ((after - was) / s_w for after in (weight.detach(), layer.float_weight()))
            assert (found - wanted).abs().max() < 1.001 and wanted.abs().max() > 2
            errors.append(relative_error(found, wanted))
            torch.testing.assert_close(layer.bias.detach(), bias.detach())
            weight.data = layer.float_weight()
    assert max(errors) < 0.45
    assert all(torch.equal(of["kept"], of["as it was"]) for of in ours.state.values() if "kept" in of)


def test_gradients_are_as_large_as_those_of_float32() -> None:
    model = converted(masters="fp32")
    backward(model)
    norm = nn.utils.get_total_norm(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    odt.quant.dequantize_(model).zero_grad()
    backward(model)
    real = nn.utils.get_total_norm(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    assert float(norm) == pytest.approx(float(real), rel=0.1)


def updated(layer: Int8Layer, change: Tensor) -> None:
    """As an optimizer whose update is `change` steps."""
    layer.unpack_()
    layer.weight_slot.data += change * by_channel(layer.weight_scale, change)
    layer.pack_()


@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_weights_that_no_optimizer_changes_are_the_same_integers(name: str) -> None:
    for layer in int8_layers(converted(name, headroom=0.3)).values():
        before = layer.weight.clone()
        for _ in range(20):
            layer.unpack_()
            layer.pack_()
        assert torch.equal(layer.weight, before)


def test_small_updates_are_not_lost() -> None:
    layer = converted("mlp")[1]
    before = layer.weight.float()
    inner = before.abs() < 100
    for _ in range(50):
        updated(layer, torch.full_like(before, 0.02))
    moved = (layer.weight.float() - before)[inner]
    # Fifty times a fiftieth: one step on average, of 4,000 weights and more.
    assert inner.sum() > 4000 and abs(float(moved.mean()) - 1) < 0.06
    assert set(moved.unique().tolist()) >= {0.0, 1.0, 2.0}
    assert layer.weight_slot.untyped_storage().nbytes() == 4 and layer.rounding[1] == 50


def test_whole_updates_are_exact_and_what_is_beyond_is_counted() -> None:
    layer = converted("mlp")[1]
    before = layer.weight.clone()
    updated(layer, torch.full_like(before, 2.0, dtype=torch.float32))
    assert torch.equal(layer.weight.int(), (before.int() + 2).clamp(-127, 127))
    wanted = int((before.int() + 2 > 127).sum())
    assert int(layer.saturated) == wanted > 0


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_any_optimizer_changes_int8_weights_in_place(kind: type[torch.optim.Optimizer]) -> None:
    model = converted("mlp", headroom=0.2)
    optimizer = kind(model.parameters(), lr=0.05)  # type: ignore[call-arg]
    training = odt.quant.train_int8_(model, optimizer)
    layer, before = model[1], model[1].weight.clone()
    trained(model, optimizer, range(3))
    assert layer.weight.dtype == torch.int8 and not torch.equal(layer.weight, before)
    assert layer.weight.data_ptr() and layer.weight_slot.untyped_storage().nbytes() == 4
    assert set(training.layers) == {"1", "5"}
    training.stop()
    with pytest.raises(RuntimeError, match="single memory location"):
        trained(model, optimizer, range(1))


def last_loss(model: nn.Module, in_place: bool) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if in_place:
        odt.quant.train_int8_(model, optimizer)
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images(16, 0)), labels(16, 0))
        loss.backward()
        optimizer.step()
    return loss.item()


def test_training_follows_float32_with_qas_and_trails_without() -> None:
    real = last_loss(odt.quant.dequantize_(converted(masters="fp32")), in_place=False)
    assert abs(last_loss(converted(), in_place=True) - real) < 0.03
    assert abs(last_loss(converted(masters="fp32"), in_place=False) - real) < 0.03
    assert last_loss(converted(qas=False), in_place=True) > real + 0.06


def test_a_run_that_is_resumed_goes_on_bit_for_bit() -> None:
    model = converted("residual")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    odt.quant.train_int8_(model, optimizer)
    trained(model, optimizer, range(2))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    trained(model, optimizer, range(2, 4))
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    other = converted("residual")
    resumed = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    odt.quant.train_int8_(other, resumed)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    trained(other, resumed, range(2, 4))
    ours, theirs = other.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_has_no_gradient_stays() -> None:
    model = converted("residual")
    model.stem.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    odt.quant.train_int8_(model, optimizer)
    before = copy.deepcopy(model.stem.state_dict())
    trained(model, optimizer, range(2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.stem.state_dict().items())
    assert model.pointwise.rounding[1] == 2


def test_bad_input_is_named() -> None:
    model = trained_a_little("mlp")
    with pytest.raises(ValueError, match="has no int8 layers"):
        odt.quant.scale_gradients_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="has no int8 layers"):
        odt.quant.train_int8_(model, optimizer)
    odt.quant.convert_(model, calibration())
    with pytest.raises(ValueError, match="holds no int8 weight of this model"):
        odt.quant.train_int8_(model, optimizer)
    with pytest.raises(ValueError, match="LBFGS evaluates the model inside of its step"):
        odt.quant.train_int8_(model, torch.optim.LBFGS(model.parameters()))
    masters = converted("mlp", masters="fp32")
    with pytest.raises(ValueError, match="have masters in float32"):
        odt.quant.train_int8_(masters, torch.optim.SGD(masters.parameters(), lr=0.1))


def test_an_update_that_is_not_finite_is_named() -> None:
    layer = converted("mlp")[1]
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match="not finite"):
        updated(layer, torch.full((16, 432), float("nan")))
    assert torch.equal(layer.weight, before) and int(layer.rounding[1]) == 0
