"""All cells as a table, so that no number of the record is left out."""

from __future__ import annotations

from collections.abc import Callable

from torch_odt.measure.record import Cell, Record
from torch_odt.measure.report.figure import Figure
from torch_odt.measure.report.selection import cell_name, results_text
from torch_odt.measure.report.units import BYTES, JOULES, SECONDS


def all_cells(record: Record) -> Figure:
    """One row for each cell."""
    return Figure(
        "all-cells",
        "Every cell of the record",
        header=(
            "cell", "outcome", "seconds of a step", "first step", "bytes above the level before",
            "bytes of the device's memory", "joules of a step",
            "parameters", "results and notes",
        ),
        rows=[_row(cell) for cell in record.cells],
        missing=() if record.cells else ("The record has no cell.",),
    )  # fmt: skip


def _row(cell: Cell) -> tuple[str, ...]:
    joules = cell.joules_per_step()
    return (
        cell_name(cell),
        cell.outcome,
        _text(SECONDS.text, cell.median_seconds),
        _text(SECONDS.text, cell.first_seconds),
        _text(BYTES.text, cell.training_bytes),
        _text(BYTES.text, cell.device_bytes),
        "" if joules is None else f"{JOULES.text(joules[0])} ({joules[1]})",
        f"{cell.parameters:,}" if cell.parameters else "",
        "; ".join([text for text in (cell.reason, *results_text(cell), *cell.notes) if text]),
    )


def _text(text: Callable[[float], str], value: float | None) -> str:
    return "" if value is None else text(value)
