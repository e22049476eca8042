"""QAS is gradient descent of the real numbers, and int8 weights follow their optimizer on average."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_models import calibration, images, labels, trained_a_little
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.quant.modules import Int8Layer
from torch_odt.quant.qas import int8_layers


def converted(name: str = "residual", **options: Any) -> nn.Module:
    model = trained_a_little(name)
    odt.quant.convert_(model, calibration(), **options)
    return model


def backward(model: nn.Module, seed: int = 0) -> None:
    F.cross_entropy(model(images(8, seed)), labels(8, seed)).backward()


def test_the_hook_scales_and_takes_it_back() -> None:
    scaled, plain = converted(), converted()
    odt.quant.scale_gradients_(scaled)
    for model in (scaled, plain):
        backward(model)
    for ours, theirs in zip(int8_layers(scaled).values(), int8_layers(plain).values(), strict=True):
        s_w = ours.weight_scale
        assert ours.weight_slot.grad is not None and theirs.weight_slot.grad is not None
        torch.testing.assert_close(ours.weight_slot.grad * s_w.view(-1, 1, 1, 1) ** 2, theirs.weight_slot.grad)
        assert ours.bias is not None and theirs.bias is not None
        assert ours.bias.grad is not None and theirs.bias.grad is not None
        torch.testing.assert_close(ours.bias.grad * (s_w * ours.input_step) ** 2, theirs.bias.grad)
    scaled.zero_grad()
    odt.quant.scale_gradients_(scaled, enabled=False)
    backward(scaled)
    assert torch.equal(scaled.stem.weight_slot.grad, plain.stem.weight_slot.grad)


def test_with_qas_a_step_is_that_of_float32() -> None:
    """Momentum and weight decay included; the gradients are the int8 graph's own."""
    model = converted(masters="fp32", qas=True)
    layer = model.pointwise
    assert isinstance(layer, Int8Layer)
    weight, bias = nn.Parameter(layer.float_weight()), nn.Parameter(layer.float_bias())
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
    ours, theirs = torch.optim.SGD(layer.parameters(), **options), torch.optim.SGD([weight, bias], **options)
    for step in range(3):
        model.zero_grad()
        backward(model, step)
        s_w = layer.weight_scale
        weight.grad = layer.master.grad * s_w.view(-1, 1, 1, 1)
        bias.grad = layer.bias.grad * (s_w * layer.input_step)
        ours.step()
        theirs.step()
        torch.testing.assert_close(layer.float_weight(), weight.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(layer.float_bias(), bias.detach(), rtol=1e-4, atol=1e-6)


def updated(layer: Int8Layer, change: Tensor) -> None:
    """As an optimizer whose update is `change` steps."""
    layer.unpack_()
    layer.weight_slot.data += change
    layer.pack_()


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
    model = converted("mlp", qas=True, headroom=0.2)
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
    assert abs(last_loss(converted(qas=True), in_place=True) - real) < 0.03
    assert abs(last_loss(converted(qas=True, masters="fp32"), in_place=False) - real) < 0.03
    assert last_loss(converted(), in_place=True) > real + 0.06


def test_a_run_that_is_resumed_goes_on_bit_for_bit() -> None:
    model = converted("residual", qas=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    odt.quant.train_int8_(model, optimizer)
    trained(model, optimizer, range(2))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    trained(model, optimizer, range(2, 4))
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    other = converted("residual", qas=True)
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
    masters = converted("mlp", masters="fp32")
    with pytest.raises(ValueError, match="have masters in float32"):
        odt.quant.train_int8_(masters, torch.optim.SGD(masters.parameters(), lr=0.1))


def test_an_update_that_is_not_finite_is_named() -> None:
    layer = converted("mlp")[1]
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match="not finite"):
        updated(layer, torch.full((16, 432), float("nan")))
    assert torch.equal(layer.weight, before) and int(layer.rounding[1]) == 0
