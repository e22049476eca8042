"""The recipe from end to end on a few made-up images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from recipes import minilearn_retrain
from recipes.minilearn_retrain import Inference, Row, Samples, SmallCNN, Task


@pytest.mark.slow
def test_a_small_network_stands_beside_the_deployed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilearn_retrain, "TASKS", {"bars": _bars})
    monkeypatch.setattr(minilearn_retrain, "TIMED_PAIRS", 1)
    small = {"samples": 24, "epochs": 2, "head-epochs": 1, "seeds": 1}
    arguments = [f"--{name}={value}" for name, value in small.items()] + ["--tasks", "bars", "--criteria", "l1"]
    arguments += ["--data-dir", str(tmp_path), "--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    ended = minilearn_retrain.main(arguments)
    report = json.loads((tmp_path / "minilearn_retrain.json").read_text())
    found = report["tasks"]["bars"]
    (row,) = found["rows"]
    assert row["feature_bytes"] == pytest.approx(16 * 4 * 4, rel=0.05) and row["taken"] <= 24
    assert row["stored_bytes"] < row["inputs_bytes"]
    assert found["pruned"] == ["conv3.0", "conv4.0", "fc1"]
    full, pruned = found["inference"]["float32"]
    assert pruned["weight_bytes"] < full["weight_bytes"] / 2
    assert ended == bool(report["missed"])


def row(samples: int, accuracy: float) -> Row:
    return Row("l1", samples, samples, (1, 2), 0.8, 0.9, accuracy, accuracy, 10.0, 5, 9)


def test_what_is_missed_is_named() -> None:
    rows = [
        Row("l1", count, count, (1, 2), 0.8, 0.9, small, small, 10.0, 5, 9)
        for count, small in ((100, 0.5), (600, 0.79))
    ]
    inferences = (Inference(1.0, 100, 100), Inference(0.6, 60, 45))
    assert minilearn_retrain._missed(0.6, rows, inferences) == [
        "the task says nothing: the deployed network reaches 60.0%, not 70%",
        "by l1, MiniLearn reaches 79.0%, the deployed network 80.0%",
        "inference takes 40% less time, not 48%",
        "inference takes 48% less bytes, not 50%",
    ]
    met = Inference(0.5, 40, 40)
    assert (
        minilearn_retrain._missed(0.9, [Row("l1", 9, 9, (1,), 0.8, 0.9, 0.8, 0.8, 1.0, 1, 2)], (inferences[0], met))
        == []
    )


def test_answers_are_counted_as_the_model_counts_its_classes() -> None:
    scores = torch.eye(4)[[0, 1, 2, 3]]
    test = (scores, torch.tensor([0, 1, 2, 2]))
    assert minilearn_retrain._accuracy(nn.Identity(), test, [0, 1, 2, 3]) == 0.75
    # Of the last sample, no class that may be named has a score: the first one is taken.
    assert minilearn_retrain._accuracy(nn.Identity(), test, [2, 0, 1]) == 1.0
    relabelled = (scores, torch.tensor([7, 5, 6, 4]))
    assert minilearn_retrain._accuracy(nn.Identity(), relabelled, [7, 5, 6, 4], names_all=False) == 1.0


def _bars(options: object) -> Task:
    pretrain, user, test = (_drawn(count, seed) for seed, count in enumerate((128, 120, 60)))
    return Task(lambda: SmallCNN(10, 16, 16), "conv2.3", pretrain, user, test, 256, 1)


def _drawn(count: int, seed: int) -> Samples:
    """A bright row says which class it is."""
    labels = torch.arange(count) % 10
    images = torch.randn(count, 1, 16, 16, generator=torch.Generator().manual_seed(seed)) / 4
    images[torch.arange(count), 0, labels] += 2
    return images, labels
