"""The recipe from end to end on a few digits; what is missed is named; and what trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from recipes import tte_int8_qas
from recipes.tte_int8_qas import Row


@pytest.mark.slow
def test_ways_to_train_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    small = {"source-samples": 64, "samples": 64, "test": 32, "pretrain-epochs": 1, "epochs": 1, "seeds": 1}
    arguments = [f"--{name}={value}" for name, value in small.items()] + ["--rates", "0.01", "0.03"]
    arguments += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    code = tte_int8_qas.main(arguments)
    report = json.loads((tmp_path / "tte_int8_qas_mcunet_digits.json").read_text())
    assert list(report["rows"]) == list(tte_int8_qas.WAYS)
    assert all(len(row["held_out"]) == 2 and len(row["test"]) == 1 for row in report["rows"].values())
    assert code == (1 if report["missed"] else 0)
    assert ("missed:" in capsys.readouterr().out) == bool(report["missed"])


def test_what_is_missed_is_named() -> None:
    def rows(real: float, plain: float, scaled: float) -> dict[str, Row]:
        names = ("float32", "int8", "int8, QAS")
        return {name: Row({}, 0.01, [value]) for name, value in zip(names, (real, plain, scaled), strict=True)}

    assert tte_int8_qas._missed(rows(0.9, 0.85, 0.892)) == []
    assert tte_int8_qas._missed(rows(0.9, 0.88, 0.88)) == [
        "int8 with QAS is 2.0 points below float32, and 1 was asked for",
        "int8 without QAS trails float32 by 2.0 points only: the task says nothing",
    ]


def test_the_last_layers_train_and_the_classifier() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    tte_int8_qas._train_last(model, ("0", "1", "2", "3"), 2)
    assert [layer.weight.requires_grad for layer in model] == [False, False, True, True, True]


def test_rates_rise_and_fall() -> None:
    shares = torch.tensor([tte_int8_qas._share(step, 50) for step in range(50)])
    assert shares.argmax() in (4, 5) and shares[0] == pytest.approx(0.2) and 0 < shares[-1] < 0.01
