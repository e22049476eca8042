"""The recipe on a network of a moment: it stays within plain PyTorch's bytes, with more samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recipes import melon_batch
from torch_odt._extensions import memory_module

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        layers = []
        for index in range(6):
            layers += [nn.Conv2d(16 if index else 3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def make(num_classes=10):
    return Net(num_classes)
"""


@pytest.mark.slow
@pytest.mark.skipif(memory_module is None, reason="torch_odt._memory, which counts bytes, is not built")
def test_a_larger_batch_in_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setenv("TORCH_ODT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(NET)
    out = tmp_path / "melon.json"
    options = ["--model", f"{tmp_path / 'net.py'}:make", "--image-size", "32", "--plain-batch", "96", "--threads", "1"]
    with torch.random.fork_rng(devices=[]):
        code = melon_batch.main([*options, "--steps", "1", "--epochs", "1", "--seeds", "1", "--out", str(out)])
    found = json.loads(out.read_text())
    plain, equal, largest, unlimited, checkpointed = found["steps"]
    assert plain["batch_size"] == equal["batch_size"] == 96 < largest["batch_size"]
    assert max(equal["peak_bytes"], largest["peak_bytes"]) <= plain["peak_bytes"]
    assert checkpointed["peak_bytes"] < unlimited["peak_bytes"]
    assert plain["peak_bytes"] < checkpointed["peak_bytes"]
    assert code == (0 if largest["batch_size"] >= 4.3 * 96 else 1)
    assert [each["batch_size"] for each in found["learnt"]] == [96, largest["batch_size"]]
    assert all(0 <= accuracy <= 1 for each in found["learnt"] for accuracy in each["accuracies"])
