"""An optimizer's step in parts, or in the backward pass, leaves what a step over all layers at once leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_models import calibration, images, labels, trained_a_little
from torch import nn

import torch_odt as odt
from torch_odt.quant import updates
from torch_odt.quant.qas import int8_layers

# Of gradient descent: powers of two, with which what is fused is exact as well.
PLAIN: dict[str, Any] = {"lr": 2.0**-5, "weight_decay": 2.0**-7}
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.05}),
}


class OwnSGD(torch.optim.SGD):
    """Of another class: what its step does is not known."""


def stepped(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], steps: int = 3, in_backward: bool = False
) -> tuple[nn.Module, Any]:
    model = trained_a_little("residual")
    odt.quant.convert_(model, calibration())
    layers = list(int8_layers(model).values())
    groups = [
        {"params": layers[0].parameters(), "lr": 2.0**-6},
        {"params": [p for layer in layers[1:] for p in layer.parameters()]},
    ]
    optimizer = kind(groups, **options)  # type: ignore[arg-type]
    odt.quant.train_int8_(model, optimizer, in_backward=in_backward)
    for step in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images(8, step)), labels(8, step)).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("weights", [1, 1 << 9, 1 << 30])
def test_parts_change_no_bit(name: str, weights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, options = KINDS[name]
    monkeypatch.setattr(updates, "PART_WEIGHTS", weights)
    ours, optimizer = stepped(kind, options)
    monkeypatch.setattr(updates, "PARTWISE", ())
    theirs, reference = stepped(kind, options)
    for one, other in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
    assert len(optimizer.param_groups) == 2 and len(optimizer.state) == len(reference.state)
    assert all(layer.weight_slot.grad is not None for layer in int8_layers(ours).values())


def test_an_optimizer_of_another_class_steps_as_a_whole() -> None:
    ours, _ = stepped(OwnSGD, KINDS["sgd"][1])
    theirs, _ = stepped(*KINDS["sgd"])
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_parts_hold_so_many_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained_a_little("residual")
    odt.quant.convert_(model, calibration())
    layers = list(int8_layers(model).values())
    monkeypatch.setattr(updates, "PART_WEIGHTS", layers[0].weight.numel() + layers[1].weight.numel())
    parts = list(updates._parts_of(layers))
    assert [layer for part in parts for layer in part] == layers and parts[0] == layers[:2]
    assert all(len(p) == 1 or sum(layer.weight.numel() for layer in p) <= updates.PART_WEIGHTS for p in parts)


def test_groups_come_back_where_a_step_fails() -> None:
    model, optimizer = stepped(*KINDS["sgd"], steps=0)
    F.cross_entropy(model(images(8, 0)), labels(8, 0)).backward()
    layer = next(iter(int8_layers(model).values()))
    assert layer.weight_slot.grad is not None
    layer.weight_slot.grad.fill_(float("nan"))
    groups = optimizer.param_groups
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    assert optimizer.param_groups is groups
    assert all(each.weight_slot.untyped_storage().nbytes() == 4 for each in int8_layers(model).values())


def test_gradient_descent_in_one_pass_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, optimizer = stepped(torch.optim.SGD, PLAIN)
    monkeypatch.setattr(updates.Int8Updates, "_descent_of", lambda *_: None)
    theirs, reference = stepped(torch.optim.SGD, PLAIN)
    assert_same(ours, theirs)
    assert not optimizer.state and not reference.state
    assert all(layer.weight_slot.grad is not None for layer in int8_layers(ours).values())


@pytest.mark.parametrize("name", [*KINDS, "plain"])
def test_updates_in_the_backward_pass_change_no_bit(name: str) -> None:
    kind, options = (torch.optim.SGD, PLAIN) if name == "plain" else KINDS[name]
    ours, optimizer = stepped(kind, options, in_backward=True)
    theirs, reference = stepped(kind, options)
    assert_same(ours, theirs)
    assert len(optimizer.state) == len(reference.state)


def test_in_the_backward_pass_gradients_of_one_layer_are_held() -> None:
    model, optimizer = stepped(torch.optim.SGD, PLAIN, steps=0, in_backward=True)
    layers = int8_layers(model)
    held: list[int] = []
    for layer in layers.values():
        layer.weight_slot.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(each.weight_slot.grad is not None for each in layers.values()))
        )
    before = {name: layer.weight.clone() for name, layer in layers.items()}
    F.cross_entropy(model(images(8, 0)), labels(8, 0)).backward()
    assert held == [0] * len(layers)
    assert all(int(layer.rounding[1]) == 1 for layer in layers.values())
    assert any(not torch.equal(before[name], layer.weight) for name, layer in layers.items())
    changed = {name: layer.weight.clone() for name, layer in layers.items()}
    biases = {name: layer.bias.detach().clone() for name, layer in layers.items() if layer.bias is not None}
    optimizer.step()
    assert all(torch.equal(changed[name], layer.weight) for name, layer in layers.items())
    assert all(not torch.equal(bias, layers[name].bias) for name, bias in biases.items())  # type: ignore[arg-type]


def test_rates_are_those_of_the_moment() -> None:
    model, optimizer = stepped(torch.optim.SGD, PLAIN, steps=1, in_backward=True)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["lr"] = group["weight_decay"] = 0.0
    # Gives the optimizer other groups.
    optimizer.load_state_dict(state)
    before = {name: layer.weight.clone() for name, layer in int8_layers(model).items()}
    F.cross_entropy(model(images(8, 1)), labels(8, 1)).backward()
    assert all(torch.equal(before[name], layer.weight) for name, layer in int8_layers(model).items())
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    F.cross_entropy(model(images(8, 1)), labels(8, 1)).backward()
    assert not all(torch.equal(before[name], layer.weight) for name, layer in int8_layers(model).items())


def test_groups_may_be_exchanged() -> None:
    model, optimizer = stepped(torch.optim.SGD, PLAIN, steps=1)
    layer = int8_layers(model)[next(iter(int8_layers(model)))]
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.0, "weight_decay": 0.0}
    before = layer.weight.clone()
    F.cross_entropy(model(images(8, 5)), labels(8, 5)).backward()
    optimizer.step()
    assert torch.equal(layer.weight, before)


def test_fused_descent_unscales_by_itself() -> None:
    models = []
    for fused in (False, True):
        model, optimizer = stepped(torch.optim.SGD, {**PLAIN, "fused": fused}, steps=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scaler.scale(F.cross_entropy(model(images(8, 5)), labels(8, 5))).backward()
        scaler.step(optimizer)
        models.append(model)
    for one, other in zip(int8_layers(models[0]).values(), int8_layers(models[1]).values(), strict=True):
        assert int((one.weight.int() - other.weight.int()).abs().max()) <= 1


def test_layers_that_do_not_train_and_stopped_updates_stay_out() -> None:
    model = trained_a_little("residual")
    odt.quant.convert_(model, calibration())
    layers = list(int8_layers(model).values())
    layers[0].weight_slot.requires_grad_(False)
    training = odt.quant.train_int8_(model, torch.optim.SGD(model.parameters(), **PLAIN), in_backward=True)
    F.cross_entropy(model(images(8, 0)), labels(8, 0)).backward()
    assert [int(layer.rounding[1]) for layer in layers] == [0, *[1] * (len(layers) - 1)]
    training.stop()
    F.cross_entropy(model(images(8, 0)), labels(8, 0)).backward()
    assert layers[1].weight_slot.grad is not None and int(layers[1].rounding[1]) == 1


@pytest.mark.parametrize("in_backward", [True, False])
def test_another_optimizer_takes_over_from_one_that_updates_in_the_backward_pass(in_backward: bool) -> None:
    model = trained_a_little("residual")
    odt.quant.convert_(model, calibration())
    layers = list(int8_layers(model).values())
    odt.quant.train_int8_(model, torch.optim.SGD(model.parameters(), **PLAIN), in_backward=True)
    optimizer = torch.optim.SGD(model.parameters(), **PLAIN)
    odt.quant.train_int8_(model, optimizer, in_backward=in_backward)
    F.cross_entropy(model(images(8, 0)), labels(8, 0)).backward()
    assert [int(layer.rounding[1]) for layer in layers] == [int(in_backward)] * len(layers)
    optimizer.step()
    assert [int(layer.rounding[1]) for layer in layers] == [1] * len(layers)


def test_other_optimizers_cannot_update_in_the_backward_pass() -> None:
    with pytest.raises(ValueError, match="OwnSGD cannot update in the backward pass; those that can: SGD, Adam"):
        stepped(OwnSGD, PLAIN, steps=0, in_backward=True)


def test_a_captured_step_updates_the_same_weights() -> None:
    ours, optimizer = stepped(torch.optim.SGD, PLAIN, steps=0, in_backward=True)
    theirs, _ = stepped(torch.optim.SGD, PLAIN, steps=2)
    step = odt.TrainStep(ours, F.cross_entropy, optimizer, budget=odt.Budget("1GiB", of="training"))
    for number in range(2):
        step(images(8, number), labels(8, number))
    assert_same(ours, theirs)


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
