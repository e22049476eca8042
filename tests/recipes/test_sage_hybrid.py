"""The recipe on a network of a moment: its figures are those of its table, and steps keep what was planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recipes import sage_hybrid
from torch_odt._extensions import memory_module


@pytest.mark.slow
@pytest.mark.skipif(memory_module is None, reason="torch_odt._memory, which counts bytes, is not built")
def test_both_halves_together_take_the_fewest_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_ODT_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "sage.json"
    options = ["--model", "resnet18", "--batch-size", "2", "--image-size", "64", "--threads", "1"]
    with torch.random.fork_rng(devices=[]):
        code = sage_hybrid.main([*options, "--execute", "--out", str(out)])
    found = json.loads(out.read_text())
    rows, minima, executed = found["rows"], found["minima"], found["executed"]
    assert [row["micro_batch"] for row in rows] == [2, 1]
    assert all(row["least_bytes"] <= row["kept_bytes"] for row in rows)
    assert minima["hybrid_bytes"] < minima["recomputation_bytes"] == rows[0]["least_bytes"]
    most = max(minima["hybrid_bytes"], executed["activation_bytes"])
    is_met = most <= 0.5 * minima["accumulation_bytes"] and most <= 0.24 * minima["recomputation_bytes"]
    assert code == (0 if is_met else 1)
    # Beside the plan there are scalars.
    assert 0 < executed["activation_bytes"] <= minima["hybrid_bytes"] + (1 << 20)
    assert "recomputation alone: " in capsys.readouterr().out
