"""The frontier: what a training step takes in bytes and in seconds, as measured and as the plans predicted it."""

from __future__ import annotations

from collections.abc import Sequence

from torch_odt.measure.record import Cell, Record
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.lines import Line, Side, lines
from torch_odt.measure.report.selection import grouped, model_of, threads_hint, usual_steps
from torch_odt.measure.report.units import BYTES, SECONDS
from torch_odt.measure.report.ways import way_of

_STYLES = {"torch": "line0", "torch_odt": "line1", "executorch": "line4"}
_NAMES = {"torch": "plain PyTorch", "torch_odt": "torch_odt, measured", "executorch": "ExecuTorch"}
_PREDICTED, _PREDICTED_DOT = "line2 dashed", "line2"


def frontier(record: Record) -> Figure:
    """For each network the largest batch that torch_odt trained: a dot for each budget, named by it, and the others."""
    cells = usual_steps(record, _is_measured)
    panels, rows = [], []
    shown: set[str] = set()
    is_joined = False
    for (model, optimizer), each in grouped(cells, lambda cell: (model_of(cell), way_of(cell).optimizer)).items():
        largest = max((cell.batch_size for cell in each if cell.engine == "torch_odt"), default=None)
        if largest is None:
            continue
        by_engine = grouped([cell for cell in each if cell.batch_size == largest], lambda cell: cell.engine)
        ours = sorted(by_engine["torch_odt"], key=lambda cell: cell.training_bytes or 0)
        by_engine["torch_odt"] = ours
        drawn = [_line(engine, same) for engine, same in by_engine.items()]
        drawn.append(Line("predicted", _PREDICTED, *_predicted(ours)))
        is_joined = is_joined or len(drawn[-1].xs) > 1
        x = Side("peak bytes above the level before", BYTES, includes_zero=True)
        y = Side("seconds of a training step", SECONDS, includes_zero=True)
        name = ", ".join(part for part in (model, f"batch {largest}", optimizer) if part)
        chart = lines(drawn, x=x, y=y, description=f"seconds over bytes of a training step of {name}")
        panels.append(Panel(name, chart))
        shown |= by_engine.keys()
        rows += [_row(name, cell) for same in by_engine.values() for cell in same]
    legend = [(_NAMES[engine], style) for engine, style in _STYLES.items() if engine in shown]
    return Figure(
        "frontier",
        "The frontier: bytes against seconds of a training step, measured and predicted",
        "Further to the left is less memory, further down is faster; a dot of torch_odt for each budget."
        + threads_hint(record, cells),
        panels,
        [*legend, ("torch_odt, predicted", _PREDICTED if is_joined else _PREDICTED_DOT)] if panels else (),
        ("step", "series", "bytes", "seconds", "predicted bytes", "predicted seconds"),
        rows,
        () if panels else ("torch_odt trained nothing in this record.",),
        is_dense=True,
    )


def _is_measured(cell: Cell) -> bool:
    has_numbers = bool(cell.median_seconds) and cell.training_bytes is not None
    # What the process holds says nothing of what another device does.
    return cell.mode == "training" and has_numbers and cell.device == "cpu"


def _line(engine: str, cells: Sequence[Cell]) -> Line:
    xs, ys = [cell.training_bytes or 0 for cell in cells], [cell.median_seconds or 0.0 for cell in cells]
    return Line(_NAMES[engine], _STYLES[engine], xs, ys, marks=[cell.budget for cell in cells])


def _predicted(cells: Sequence[Cell]) -> tuple[list[float], list[float]]:
    plans = sorted((plan for cell in cells if (plan := cell.prediction)), key=lambda plan: plan.peak_bytes)
    return [plan.peak_bytes for plan in plans], [plan.step_seconds for plan in plans]


def _row(name: str, cell: Cell) -> tuple[str, ...]:
    measured = BYTES.text(cell.training_bytes or 0), SECONDS.text(cell.median_seconds or 0.0)
    plan = cell.prediction
    expected = (BYTES.text(plan.peak_bytes), SECONDS.text(plan.step_seconds)) if plan else ("", "")
    return name, way_of(cell).name, *measured, *expected
