"""What is written for TensorBoard, without TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard_writer import Written

from torch_odt.integrations.tensorboard import TensorBoardLog
from torch_odt.runtime import Controller


def test_decisions_and_steps() -> None:
    writer = Written()
    log = TensorBoardLog(writer)
    controller = Controller(300 << 20, on_decision=log.decision)
    controller.begin(level_bytes=0)
    (decision,) = controller.decisions
    assert writer.scalars["odt/budget_bytes", 0] == decision.budget_bytes
    assert writer.scalars["odt/available_bytes", 0] == decision.available_bytes > 0
    assert writer.texts == [("odt/decision", "begin: training begins", 0)]
    log.step(7, loss=0.5, step_seconds=0.25, process_bytes=1 << 20)
    assert writer.scalars["odt/loss", 7] == 0.5
    assert writer.scalars["odt/step_seconds", 7] == 0.25
    assert writer.scalars["odt/held_bytes", 7] == 1 << 20
    log.close()
    assert writer.is_closed


def test_a_folder_without_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install .torch_odt\[tensorboard\]"):
        TensorBoardLog(tmp_path)
