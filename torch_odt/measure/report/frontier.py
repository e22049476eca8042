"""The frontier: what a training step takes in bytes and in seconds, as measured and as the plans predicted it."""

from __future__ import annotations

from collections.abc import Sequence

from torch_odt.measure.record import Cell, Record
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.lines import Line, Side, lines
from torch_odt.measure.report.selection import grouped, model_of, usual_steps, way_of
from torch_odt.measure.report.units import BYTES, SECONDS

_PLAIN, _MEASURED, _PREDICTED = "line0", "line1", "line2 dashed"


def frontier(record: Record) -> Figure:
    """For each network the largest batch that torch_odt trained: a dot for each budget, and plain PyTorch."""
    cells = usual_steps(record, _is_measured)
    panels, rows = [], []
    for model, each in grouped(cells, model_of).items():
        largest = max((cell.batch_size for cell in each if cell.engine == "torch_odt"), default=None)
        same = [cell for cell in each if cell.batch_size == largest]
        if largest is None:
            continue
        plain = [cell for cell in same if cell.engine == "torch"]
        ours = sorted((cell for cell in same if cell.engine == "torch_odt"), key=lambda cell: cell.training_bytes or 0)
        drawn = [
            Line("plain PyTorch", _PLAIN, *_points(plain)),
            Line("torch_odt", _MEASURED, *_points(ours)),
            Line("predicted", _PREDICTED, *_predicted(ours)),
        ]
        x = Side("peak bytes above the level before", BYTES, includes_zero=True)
        y = Side("seconds of a training step", SECONDS, includes_zero=True)
        name = f"{model}, batch {largest}"
        chart = lines(drawn, x=x, y=y, description=f"seconds over bytes of a training step of {name}")
        panels.append(Panel(name, chart))
        rows += [_row(name, cell) for cell in (*plain, *ours)]
    return Figure(
        "frontier",
        "The frontier: bytes against seconds of a training step, measured and predicted",
        "Further to the left is less memory, further down is faster; a dot of torch_odt for each budget.",
        panels,
        [("plain PyTorch", _PLAIN), ("torch_odt, measured", _MEASURED), ("torch_odt, predicted", _PREDICTED)]
        if panels
        else (),
        ("step", "series", "bytes", "seconds", "predicted bytes", "predicted seconds"),
        rows,
        () if panels else ("torch_odt trained nothing in this record.",),
        is_dense=True,
    )


def _is_measured(cell: Cell) -> bool:
    return cell.mode == "training" and bool(cell.median_seconds) and cell.training_bytes is not None


def _points(cells: Sequence[Cell]) -> tuple[list[float], list[float]]:
    return [cell.training_bytes or 0 for cell in cells], [cell.median_seconds or 0.0 for cell in cells]


def _predicted(cells: Sequence[Cell]) -> tuple[list[float], list[float]]:
    plans = sorted((plan for cell in cells if (plan := cell.prediction)), key=lambda plan: plan.peak_bytes)
    return [plan.peak_bytes for plan in plans], [plan.step_seconds for plan in plans]


def _row(name: str, cell: Cell) -> tuple[str, ...]:
    measured = BYTES.text(cell.training_bytes or 0), SECONDS.text(cell.median_seconds or 0.0)
    plan = cell.prediction
    expected = (BYTES.text(plan.peak_bytes), SECONDS.text(plan.step_seconds)) if plan else ("", "")
    return name, way_of(cell).name, *measured, *expected
