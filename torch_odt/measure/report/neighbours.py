"""Training beside another program: in the foreground, in the background, and not at all."""

from __future__ import annotations

from torch_odt.measure.record import Cell, Record
from torch_odt.measure.report.bars import Bar, Group, bars
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.selection import grouped, model_of, ratio, refusals
from torch_odt.measure.report.units import times_text, unit_of
from torch_odt.measure.report.ways import way_of

_COLORS = 8
_STEP = "step_seconds"
_ALONE = "none"
# That are sent, whatever happens; what the percentiles are of.
_COUNT = "requests"
_NAMES = {
    "requests_per_second": "requests the other program answers",
    "p50_seconds": "half of its requests are answered within",
    "p99_seconds": "99 % of its requests are answered within",
    "processor_operations_per_second": "arithmetic of the other program",
    "memory_bytes_per_second": "memory that the other program copies",
    _STEP: "a step of the training",
}


def neighbours(record: Record) -> Figure:
    """What training does to another program, and that to the training (Chen et al., Figures 16 and 17, Table 6)."""
    cells = [cell for cell in record.cells if cell.experiment == "neighbour"]
    measured = [cell for cell in cells if cell.outcome == "ok"]
    conditions = list(dict.fromkeys(map(_condition, measured)))
    colors = {condition: f"line{i % _COLORS}" for i, condition in enumerate(conditions)}
    panels, rows = [], []
    for (model, batch), each in grouped(measured, lambda cell: (model_of(cell), cell.batch_size)).items():
        beside = f"{model}, batch {batch}"
        readings = {condition: _readings(same[0]) for condition, same in grouped(each, _condition).items()}
        for name in dict.fromkeys(name for found in readings.values() for name in found if name != _COUNT):
            made = [
                Bar(
                    [(found[name], colors[condition])],
                    unit_of(name).text(found[name]) + _against(readings, name, condition),
                )
                for condition, found in readings.items()
                if name in found
            ]
            title = f"{_title(name)} in {unit_of(name).name}"
            chart = bars([Group("", made)], unit_of(name), title=title, rows_title="training beside it")
            if chart:
                panels.append(Panel(f"{_title(name)}, beside {beside}", chart))
            rows += [
                (beside, _title(name), condition, unit_of(name).text(found[name]))
                for condition, found in readings.items()
                if name in found
            ]
    return Figure(
        "neighbours",
        "Foreground against background: training beside another program",
        "The other program alone, and beside a training in the foreground and in the background.",
        panels,
        [(f"training: {condition}", color) for condition, color in colors.items()] if panels else (),
        ("training", "what", "how", "reading"),
        rows,
        refusals(cells) or (() if panels else ("Training beside another program was not measured.",)),
        is_dense=True,
    )


def _condition(cell: Cell) -> str:
    """How it was trained; the program that runs alone knows no engine."""
    how = ", ".join(map(str, cell.factors.values())) or "as it is"
    return how if how == _ALONE else f"{how}, {way_of(cell).name}"


def _readings(cell: Cell) -> dict[str, float]:
    found: dict[str, float] = {name: value for name, value in cell.results.items()}
    if cell.median_seconds is not None:
        found[_STEP] = cell.median_seconds
    return found


def _against(readings: dict[str, dict[str, float]], name: str, condition: str) -> str:
    """How many times what it is in the first condition that has it."""
    first = next(each for each, found in readings.items() if name in found)
    times = ratio(readings[condition][name], readings[first][name])
    return "" if condition == first or times is None else f" · {times_text(times)}"


def _title(name: str) -> str:
    return _NAMES.get(name, name.replace("_", " "))
