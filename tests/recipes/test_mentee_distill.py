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
    small = {"image-size": 8, "labelled": 20, "unlabelled": 28, "held-out": 30, "mentor-samples": 96}
    small |= {"test-samples": 40, "width": 8, "mentee-width": 8, "mentor-steps": 3, "steps": 4, "batch": 16}
    small |= {"trials": 2, "seeds": 1}
    arguments = [f"--{name}={value}" for name, value in small.items()]
    arguments += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    with torch.random.fork_rng(devices=[]):
        code = mentee_distill.main(arguments)
    rows = json.loads((tmp_path / "mentee_distill.json").read_text())["rows"]
    assert list(rows) == ["mentor", "labels", "logits of these", "logits of all", "... and hints", "(labels of all)"]
    # Two copies of each sample, of ten classes; the last stage of the mentor has 32 channels.
    assert rows["logits of these"]["disk_bytes"] == 2 * 20 * 10 * 2
    assert rows["logits of all"]["disk_bytes"] == 2 * 48 * 10 * 2
    assert rows["... and hints"]["disk_bytes"] == 2 * 48 * (10 + 32) * 2
    printed = capsys.readouterr().out
    assert code == (1 if "missed:" in printed else 0)
    assert ("target met" in printed) != ("missed:" in printed)


def test_the_mentor_is_trained_and_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = SmallResNet.forward
    monkeypatch.setattr(SmallResNet, "forward", lambda self, x: calls.append(len(x)) or plain(self, x))
    options = mentee_distill._options(["--quick", "--cache", str(tmp_path), "--image-size", "8"])
    # oneDNN's AVX2 kernel for weights of pointwise convolutions with strides writes out of bounds below 8 channels.
    options.width, options.mentor_steps, options.batch = 8, 2, 8
    samples = mentee_distill.Samples(torch.randn(20, 3, 8, 8), torch.arange(20) % 3)
    with torch.random.fork_rng(devices=[]):
        mentor = mentee_distill._mentor(options, samples, 3)
        again = mentee_distill._mentor(options, samples, 3)
    assert calls == [16, 16]
    assert all(torch.equal(a, b) for a, b in zip(mentor.parameters(), again.parameters(), strict=True))


def test_nothing_that_is_learnt_from_is_held_out_or_tested() -> None:
    options = mentee_distill._options(["--labelled=5", "--unlabelled=7", "--held-out=6", "--batch=4", "--copies=3"])
    options.mentor_samples = 20
    train: Any = [(torch.full((3, 8, 8), float(index)), index) for index in range(60)]
    parts = mentee_distill._parts(options, train, train[:3])
    sets = [set(samples.labels.tolist()) for samples in (parts.mentor, parts.device, parts.held_out)]
    assert [len(each) for each in sets] == [20, 12, 6]
    assert len(set.union(*sets)) == 38
    assert parts.labelled == 15 and len(parts.device) == 36
    # Constant images stay what they are when they are shifted: each copy still is of its label.
    assert torch.equal(parts.device.images[:, 0, 0, 0].long(), parts.device.labels)
    assert torch.equal(parts.known.labels[:15], parts.device.labels[:15])
    assert bool((parts.known.labels[15:] == mentee_distill.UNLABELLED).all())
    assert not set(parts.device.labels[:15].tolist()) & set(parts.device.labels[15:].tolist())
    with pytest.raises(SystemExit, match="2 are left for the mentor"):
        mentee_distill._parts(options, train[:20], train[:3])


def test_settings_cover_the_rates_and_are_drawn_the_same_again() -> None:
    settings = mentee_distill._settings(8)
    low, high = mentee_distill.RATES
    rates = [setting.rate for setting in settings]
    assert rates == sorted(rates) and low <= rates[0] < 2 * low and high / 2 < rates[-1] <= high
    assert settings == mentee_distill._settings(8)


def test_shifted_copies_move_by_two_pixels_at_most() -> None:
    images = torch.zeros(40, 1, 9, 9)
    images[:, :, 4, 4] = 1
    moved = mentee_distill._shifted(images, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    places = moved[:, 0].nonzero()[:, 1:] - 4
    assert len(places) == 40 and bool((places.abs() <= 2).all()) and bool((places.abs() == 2).any())


@pytest.mark.parametrize("network", [SmallResNet(7, width=4), SmallConvNet(7, width=4)])
def test_networks_take_images_of_any_size(network: nn.Module) -> None:
    for size in (8, 28):
        assert network(torch.randn(2, 3, size, size)).shape == (2, 7)


def test_what_is_missed_is_named() -> None:
    taken = TrainingBytes(100, 90, 10)
    rows = {
        "mentor": mentee_distill.Row([0.9], TrainingBytes(300, 200, 100)),
        "labels": mentee_distill.Row([0.8, 0.7], taken),
        "logits of all": mentee_distill.Row([0.7, 0.7], taken),
    }
    missed = mentee_distill._missed(rows)
    assert missed == [
        "logits of all samples reach 70.0%, labels alone 75.0%",
        "the mentor's training takes 3.0 times the mentee's bytes, not 4",
    ]


def _counted(make_training: Callable[..., Training], *arguments: Any) -> TrainingBytes:
    """In the place of a process that trains and is measured, which takes long: what would train in it."""
    trained = make_training(*arguments).optimizer.param_groups[0]["params"]
    return TrainingBytes(100, None, sum(parameter.numel() for parameter in trained))
