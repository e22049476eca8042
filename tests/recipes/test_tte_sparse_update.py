"""The recipe from end to end on a few digits: its scheme fits, and a second run measures nothing again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes import tte_sparse_update
from torch_odt.adapt import FineTuning, Scheme


@pytest.mark.slow
def test_a_scheme_is_found_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    runs = []
    monkeypatch.setattr(FineTuning, "__call__", _counted(FineTuning.__call__, runs))
    small = {"samples": 60, "image-size": 32, "pretrain-epochs": 1, "epochs": 1, "layers": 2, "ratios": 1, "ranked": 3}
    arguments = [f"--{name}={value}" for name, value in (small | {"seeds": 1}).items()]
    arguments += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    ended = tte_sparse_update.main(arguments)
    report = json.loads((tmp_path / "tte_sparse_update.json").read_text())
    rows = report["rows"]
    assert rows["found scheme"]["bytes"] <= report["budget_bytes"] == rows["last 6 layers"]["bytes"]
    assert str(Scheme.load(tmp_path / "tte_scheme.json")) == rows["found scheme"]["scheme"]
    assert ended == (rows["found scheme"]["mean"] < rows["last 6 layers"]["mean"])
    first = len(runs)
    assert tte_sparse_update.main(arguments) == ended
    assert len(runs) - first == 3 + 3


def _counted(call, runs):  # type: ignore[no-untyped-def]
    def counted(self, model, adaptation):  # type: ignore[no-untyped-def]
        runs.append(adaptation.method)
        return call(self, model, adaptation)

    return counted
