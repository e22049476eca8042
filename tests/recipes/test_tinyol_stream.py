"""The recipe from end to end on a few digits: its figures are its table's, and what it misses is its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recipes import tinyol_stream
from recipes.tinyol_stream import Phase, PhaseResult, Reading, Samples


def test_a_stream_is_learnt_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    small = {"samples": 2400, "image-size": 16, "pretrain-steps": 60, "offline-epochs": 5, "anomaly-samples": 400}
    arguments = [f"--{name}={value}" for name, value in small.items()]
    arguments += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    with torch.random.fork_rng(devices=[]):
        code = tinyol_stream.main(arguments)
    found = json.loads((tmp_path / "tinyol_stream.json").read_text())
    assert code == (1 if found["missed"] else 0)
    phases = list(found["phases"].values())
    assert [phase["samples"] for phase in phases] == [240, 720, 720, 720]
    assert all(phase["unlearnt"] < phase["end"] for phase in phases[1:])
    assert phases[0]["unlearnt"] is None
    assert [reading["samples"] for reading in found["readings"]] == list(range(120, 2401, 120))
    live = [reading["live_bytes"] for reading in found["readings"]]
    if None not in live:
        assert max(live) - min(live) <= tinyol_stream.ALLOWED_LIVE_BYTES
    assert found["online"]["new"] > 0.5 < found["offline"]["new"]
    assert set(found["auc"]) == {f"class {label}" for label in range(6, 10)}
    printed = capsys.readouterr().out
    assert "online_head in place of 'classifier' of SmallCNN" in printed
    assert ("targets met" in printed) == (code == 0)


def test_each_target_can_be_missed() -> None:
    nothing = Samples(torch.zeros(1, 1, 2, 2), torch.zeros(1))
    phases = [Phase("all classes", nothing, 1, abs), Phase("drift", nothing, 1, abs, is_drift=True)]
    good = {name: PhaseResult(0.5, 0.9, None, 0, None, 1) for name in ("all classes", "drift")}
    flat = [Reading(1, 0, 0), Reading(2, 1 << 20, 16 << 10)]
    learnt, offline = {"new": 0.8}, {"new": 0.82}
    assert tinyol_stream._missed(phases, good, flat, learnt, offline) == []
    worse = good | {"drift": PhaseResult(0.5, 0.86, 0.1, 1, 1, 1)}
    growing = [*flat, Reading(3, 2 << 20, 1 << 20)]
    missed = tinyol_stream._missed(phases, worse, growing, learnt, {"new": 0.84})
    assert len(missed) == 4
    assert missed[2] == "drift: 86.0%, where it was 90.0% before"


def test_a_phase_goes_through_its_samples_again() -> None:
    samples = Samples(torch.arange(3.0).reshape(3, 1, 1, 1), torch.arange(3))
    phase = Phase("", samples, 7, lambda image: image + 1)
    assert [label for _, label in phase] == [0, 1, 2, 0, 1, 2, 0]
    assert [float(image) for image, _ in phase.from_place(5)] == [3.0, 1.0]
