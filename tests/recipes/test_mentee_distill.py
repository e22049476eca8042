"""The recipe from end to end on a few digits: the mentor answers once, and all three ways are trained and compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recipes import mentee_distill
from recipes.common.process_bytes import Training, TrainingBytes
from recipes.common.small_resnet import SmallConvNet, SmallResNet


@pytest.mark.slow
def test_three_ways_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(mentee_distill, "training_bytes", _counted)
    small = {"image-size": 8, "samples": 48, "mentor-samples": 96, "test-samples": 40, "width": 4, "mentee-width": 4}
    small |= {"mentor-steps": 3, "steps": 4, "batch": 16, "seeds": 1}
    arguments = [f"--{name}={value}" for name, value in small.items()]
    arguments += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    with torch.random.fork_rng(devices=[]):
        code = mentee_distill.main(arguments)
    rows = json.loads((tmp_path / "mentee_distill.json").read_text())["rows"]
    assert list(rows) == ["mentor", "labels", "stored logits", "... and hints"]
    assert rows["stored logits"]["disk_bytes"] == 48 * 10 * 2
    assert rows["... and hints"]["disk_bytes"] == 48 * (10 + 16 * 2 * 2) * 2
    printed = capsys.readouterr().out
    assert code == (1 if "missed:" in printed else 0)
    assert ("target met" in printed) != ("missed:" in printed)


def test_the_mentor_is_trained_and_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = SmallResNet.forward
    monkeypatch.setattr(SmallResNet, "forward", lambda self, x: calls.append(len(x)) or plain(self, x))
    options = mentee_distill._options(["--quick", "--cache", str(tmp_path), "--image-size", "8"])
    options.width, options.mentor_steps, options.mentor_samples, options.batch = 4, 2, 20, 8
    data: Any = [(torch.randn(3, 8, 8), index % 3) for index in range(400)]
    with torch.random.fork_rng(devices=[]):
        mentor = mentee_distill._mentor(options, data, 3)
        again = mentee_distill._mentor(options, data, 3)
    assert calls == [8, 8]
    assert all(torch.equal(a, b) for a, b in zip(mentor.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("network", [SmallResNet(7, width=4), SmallConvNet(7, width=4)])
def test_networks_take_images_of_any_size(network: nn.Module) -> None:
    for size in (8, 28):
        assert network(torch.randn(2, 3, size, size)).shape == (2, 7)


def test_what_is_missed_is_named() -> None:
    taken = TrainingBytes(100, 90, 10)
    rows = {
        "mentor": mentee_distill.Row([0.9], TrainingBytes(300, 200, 100)),
        "labels": mentee_distill.Row([0.8, 0.7], taken),
        "stored logits": mentee_distill.Row([0.7, 0.7], taken),
    }
    missed = mentee_distill._missed(rows)
    assert missed == [
        "stored logits reach 70.0%, labels alone 75.0%",
        "the mentor's training takes 3.0 times the mentee's bytes, not 4",
    ]


def _counted(make_training: Callable[..., Training], *arguments: Any) -> TrainingBytes:
    """In the place of a process that trains and is measured, which takes long: what would train in it."""
    trained = make_training(*arguments).optimizer.param_groups[0]["params"]
    return TrainingBytes(100, None, sum(parameter.numel() for parameter in trained))
