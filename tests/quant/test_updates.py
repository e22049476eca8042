"""An optimizer's step in parts leaves what a step over all layers at once leaves."""

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

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.05}),
}


class OwnSGD(torch.optim.SGD):
    """Of another class: what its step does is not known."""


def stepped(kind: type[torch.optim.Optimizer], options: dict[str, Any], steps: int = 3) -> tuple[nn.Module, Any]:
    model = trained_a_little("residual")
    odt.quant.convert_(model, calibration(), qas=True)
    layers = list(int8_layers(model).values())
    groups = [
        {"params": layers[0].parameters(), "lr": 0.01},
        {"params": [p for layer in layers[1:] for p in layer.parameters()]},
    ]
    optimizer = kind(groups, **options)  # type: ignore[arg-type]
    odt.quant.train_int8_(model, optimizer)
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
