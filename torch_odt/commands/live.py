"""What `torch-odt train` tells of its steps while they are made: on a line, and to TensorBoard."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch_odt as odt
from torch_odt.commands.errors import as_user_errors
from torch_odt.commands.gauge import MemoryGauge
from torch_odt.commands.table import format_bytes, seconds_text
from torch_odt.commands.training import Record
from torch_odt.integrations.tensorboard import TensorBoardLog
from torch_odt.runtime.pause import read_celsius


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that belong to it."""
    parser.add_argument(
        "--tensorboard", type=Path, metavar="FOLDER", help="write loss, seconds, memory and decisions there"
    )


@contextmanager
def tensorboard(arguments: argparse.Namespace) -> Iterator[TensorBoardLog | None]:
    """A log for the run, which is closed with it; None where none is asked for.

    Raises:
        UserError: TensorBoard is not installed, or the folder cannot be written.
    """
    if arguments.tensorboard is None:
        yield None
        return
    with as_user_errors(ImportError, OSError):
        log = TensorBoardLog(arguments.tensorboard)
    try:
        yield log
    finally:
        log.close()


def live_text(step: odt.TrainStep, gauge: MemoryGauge, record: Record, *, limit_bytes: int, above_bytes: int) -> str:
    """Budget, plan, memory, seconds and temperature, as they are now.

    Args:
        limit_bytes: the budget, where it does not change.
        above_bytes: the level that memory and budget are counted from.
    """
    if step.controller is not None:
        limit_bytes = step.controller.current.total_bytes - above_bytes
    words = [
        f"memory {format_bytes(max(0, gauge.now_bytes - above_bytes))} of {format_bytes(limit_bytes)}",
        f"plan {format_bytes(step.plan.peak_bytes)}",
        f"{seconds_text(record.seconds[-1])} a step",
    ]
    celsius = read_celsius()
    return ", ".join(words if celsius is None else [*words, f"{celsius:.0f} °C"])
