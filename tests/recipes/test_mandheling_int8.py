"""The recipe from end to end on a few digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recipes import mandheling_int8


@pytest.mark.slow
def test_integers_are_compared_with_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setenv("TORCH_ODT_CACHE", str(tmp_path / "cache"))
    arguments = ["--quick", "--width=8", "--train=320", "--epochs=2", "--bits", "3", "4", "--out", str(tmp_path)]
    arguments.append("--watts=10")
    threads = torch.get_num_threads()
    try:
        ended = mandheling_int8.main(arguments)
    finally:
        torch.set_num_threads(threads)
    report = json.loads((tmp_path / "mandheling_int8.json").read_text())
    assert ended == bool(report["missed"])
    assert len(report["rows"]["integers"]) == 1 and report["rows"]["float32"][0]["checked_share"] is None
    assert 0 < report["rows"]["integers"][0]["checked_share"] <= 1
    assert 0 < report["stated_accuracy"] < 1
    assert all(each is None or each["energy_joules"]["model, modelled"] > 0 for each in report["reached"]["integers"])
    assert len(report["step_seconds"]) == 6 and all(seconds > 0 for seconds in report["step_seconds"].values())


def test_what_is_missed_is_said() -> None:
    outcome = mandheling_int8.Outcome
    good = {"float32": [outcome(0.9, None, None, [])], "integers": [outcome(0.885, 0.1, 0.0, [])]}
    assert mandheling_int8._missed(good) == []
    bad = {"float32": [outcome(0.9, None, None, [])], "integers": [outcome(0.87, 0.3, 0.0, [])]}
    below, checked = mandheling_int8._missed(bad)
    assert "3.0 points below float32" in below and "30.0%" in checked
