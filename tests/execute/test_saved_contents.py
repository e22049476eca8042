"""Contents of tensors and containers, put back into the same objects."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Any

import torch
from torch import nn

from torch_odt.execute.saved_contents import SavedContents, SavedModules


def test_everything_in_containers_comes_back() -> None:
    tensor, number = torch.arange(3.0), 1
    inner: list[Any] = [tensor, number]
    root = {
        "list": inner,
        "again": inner,
        "deque": deque([1, 2], maxlen=2),
        "set": {1, 2},
        "state": defaultdict(dict, {"key": {"step": torch.ones(())}}),
        "tuple": (inner, {"deep": [1]}),
        "count": Counter("ab"),
    }
    root["self"] = root
    saved = SavedContents(root, lambda _: True)
    expected = list(root)
    tensor.mul_(5)
    inner[0] = torch.zeros(1)
    inner.append(2)
    root["deque"].append(3)
    root["set"].clear()
    root["state"]["other"]["step"] = 3
    root["state"]["key"]["step"].add_(1)
    root["tuple"][1]["deep"].clear()
    root["count"].update("a")
    del root["again"]
    saved.restore()
    assert list(root) == expected and root["again"] is inner and root["tuple"][0] is inner
    assert inner[0] is tensor and inner[1:] == [1] and tensor.tolist() == [0, 1, 2]
    assert root["deque"] == deque([1, 2]) and root["set"] == {1, 2} and root["tuple"][1] == {"deep": [1]}
    assert list(root["state"]) == ["key"] and root["state"]["key"]["step"] == 1
    assert root["count"] == Counter("ab")


def test_only_what_is_asked_for_is_copied() -> None:
    kept, other = torch.zeros(2), torch.zeros(2)
    saved = SavedContents([kept, other], lambda tensor: tensor is kept)
    kept.add_(1)
    other.add_(1)
    saved.restore()
    assert kept.sum() == 0 and other.sum() == 2


def test_an_expanded_tensor_takes_as_little_memory_as_before() -> None:
    tensor, other, base = torch.zeros(1).expand(2, 3), torch.ones(2, 1).expand(2, 3), torch.zeros(1)
    view = base.expand(4)
    saved = SavedContents([tensor, other, view], lambda _: True)
    tensor.data = torch.ones(2, 3)
    other.data = torch.zeros(2, 3)
    base.fill_(3)
    saved.restore()
    assert torch.equal(tensor, torch.zeros(2, 3)) and torch.equal(other, torch.ones(2, 3))
    # Where it lies where it lay, it still does.
    assert base.item() == 0 and view.data_ptr() == base.data_ptr()
    assert tensor.untyped_storage().nbytes() == 4 and other.untyped_storage().nbytes() == 8


def test_buffers_and_attributes_of_modules_come_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    layer = model[0]
    layer.history = [1]
    layer.table = torch.zeros(2)
    mean = layer.running_mean
    for changed in (None, [mean]):
        saved = SavedModules(model, changed)
        mean.add_(1)
        layer.running_mean = torch.ones(2)
        layer.extra = 3
        if changed is None:
            layer.history.append(2)
            layer.table.add_(1)
        saved.restore()
        assert layer.running_mean is mean and mean.sum() == 0 and not hasattr(layer, "extra")
        assert layer.history == [1] and layer.table.sum() == 0
