"""How text looks in a terminal, and what the gauge sees."""

from __future__ import annotations

import time

import pytest
import torch

from torch_odt.commands.gauge import MemoryGauge
from torch_odt.commands.progress import Progress
from torch_odt.commands.table import bytes_text, render, seconds_text


def test_columns_line_up() -> None:
    assert render([["a", "1"], ["bcd", "22"]], ["", "n"], indent="") == "      n\na     1\nbcd  22"


def test_empty_table() -> None:
    assert render([]) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.0000012, "1.2 µs"), (0.0123, "12.3 ms"), (1.234, "1.23 s"), (75.0, "75 s"), (4000.0, "4000 s")],
)
def test_seconds(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


def test_unknown_bytes_are_no_zero() -> None:
    assert bytes_text(None) == "–"


def test_gauge_sees_what_comes_and_goes() -> None:
    with MemoryGauge() as gauge:
        block = torch.ones(16 << 20)
        time.sleep(0.1)
        del block
    assert gauge.peak_bytes - gauge.base_bytes > 50 << 20
    assert gauge.family_peak_bytes >= gauge.peak_bytes


def test_progress_outside_a_terminal_ends_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("epoch 1", 3) as progress:
        for loss in (3, 2, 1):
            progress.advance(f"loss {loss}")
    assert capsys.readouterr().err.splitlines()[-1] == "epoch 1 3/3, loss 1"


def test_progress_counts_what_was_done_before(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("epoch 2", 5, done=4) as progress:
        progress.advance("loss 1")
    with Progress("epoch 3", 5, done=5):
        pass
    assert capsys.readouterr().err == "epoch 2 5/5, loss 1\n"


def test_quiet_progress_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("epoch 1", 1, quiet=True) as progress:
        progress.advance("loss 1")
        progress.say("a plan")
    printed = capsys.readouterr()
    assert printed.out + printed.err == ""
