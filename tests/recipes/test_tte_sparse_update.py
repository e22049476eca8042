"""The recipe from end to end on a few digits: its scheme fits, and a second run measures nothing again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from recipes import tte_sparse_update
from torch_odt.adapt import FineTuning, Scheme


@pytest.mark.slow
@pytest.mark.filterwarnings("default:no part of the model gained anything")  # as an epoch of 48 samples may well do
def test_a_scheme_is_found_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    runs = []
    monkeypatch.setattr(FineTuning, "__call__", _counted(FineTuning.__call__, runs))
    small = {"pretrain": 60, "pretrain-epochs": 1, "train": 48, "held-out": 12, "epochs": 1, "layers": 2, "ratios": 1}
    arguments = [f"--{name}={value}" for name, value in (small | {"ranked": 3, "seeds": 1, "last": 6}).items()]
    arguments += ["--rates", "0.02", "0.05", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    ended = tte_sparse_update.main(arguments)
    report = json.loads((tmp_path / "tte_sparse_update_mcunet_digits.json").read_text())
    rows = report["rows"]
    found, last = rows["found, in the bytes of 6"], rows["last 6 layers"]
    assert rows["classifier"]["bytes"] <= found["bytes"] <= last["bytes"] <= rows["everything"]["bytes"]
    assert str(Scheme.load(tmp_path / "tte_scheme_mcunet_digits_6.json")) == found["what"]
    assert ended == bool(report["missed"])
    assert any("found, in" in text for text in report["missed"]) == (found["mean"] < last["mean"])
    first = len(runs)
    assert tte_sparse_update.main(arguments) == ended
    assert len(runs) - first == len(rows) * (2 + 1) + 3, "contributions are remembered"
    tte_sparse_update.main([*arguments, "--last", "--less", "8", "--device-size", "128"])
    rows = json.loads((tmp_path / "tte_sparse_update_mcunet_digits_less_8.json").read_text())["rows"]
    assert rows["found, in 1/8 of everything"]["bytes"] <= rows["everything"]["bytes"] / 8
    assert "last 3 layers" in rows, "as many as fit into that"


def test_a_training_that_diverges_is_told_and_counts_as_nothing_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    task = tte_sparse_update.Task(model, 2, tte_sparse_update.Shuffled((x, y), 8), [(x, y)], [(x, y)], epochs=3)
    adapt = task.updating(Scheme(1, {"0": 1.0}))
    assert task.accuracy(adapt, task.fine_tuning(1e30), 0) == 0 < task.accuracy(adapt, task.fine_tuning(0.01), 0)
    assert "sparse_update at a rate of 1e+30: a loss of epoch" in capsys.readouterr().err


def _counted(call, runs):  # type: ignore[no-untyped-def]
    def counted(self, model, adaptation):  # type: ignore[no-untyped-def]
        runs.append(adaptation.method)
        return call(self, model, adaptation)

    return counted
