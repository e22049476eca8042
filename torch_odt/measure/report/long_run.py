"""A long run: temperature, frequency, step time and the process's memory over its seconds."""

from __future__ import annotations

from collections.abc import Iterator

from torch_odt.measure.record import Cell, Record, Trace
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.lines import Line, Side, lines
from torch_odt.measure.report.selection import grouped, model_of, refusals, threads_text, why_absent
from torch_odt.measure.report.units import BYTES, CELSIUS, COUNT, HERTZ, SECONDS, Unit
from torch_odt.measure.report.ways import Way, stroke_legend, strokes_of, way_of

# In the order in which they stand, each with how its axis is called.
_QUANTITIES = {
    "temperature": ("temperature in degrees Celsius", CELSIUS),
    "frequency": ("frequency in gigahertz", HERTZ),
    "step": ("seconds of a step", SECONDS),
    "memory": ("memory in bytes", BYTES),
}
_COLORS = 8
_MOST_DRAWN, _MOST_LISTED = 600, 40


def long_run(record: Record) -> Figure:
    """What heat does to a run (Cai et al., Figure 7): a chart for each quantity, with a line for each way of a step."""
    cells = [cell for cell in record.cells if cell.experiment == "long run"]
    measured = [cell for cell in cells if cell.outcome == "ok"]
    strokes = strokes_of(way_of(cell) for cell in measured)
    panels, rows, missing = [], [], refusals(cells)
    missing += [text for cell in measured for text in _not_read(cell, record)]
    labels: dict[str, str] = {}
    for name, same in grouped(measured, _name).items():
        traced = [(cell, trace) for cell in same for trace in cell.traces if trace.values]
        for quantity in dict.fromkeys([*_QUANTITIES, *(trace.quantity for _, trace in traced)]):
            traces = [(way_of(cell), trace) for cell, trace in traced if trace.quantity == quantity]
            if not traces:
                continue
            for _, trace in traces:
                labels.setdefault(trace.label, f"line{len(labels) % _COLORS}")
            title, unit = _QUANTITIES.get(quantity, (f"{quantity} in {traces[0][1].unit}", COUNT))
            drawn = [_line(way, trace, f"{labels[trace.label]} {strokes[way]}".strip()) for way, trace in traces]
            x = Side("seconds since the run began", SECONDS, includes_zero=True)
            panels.append(
                Panel(
                    f"{name}: {quantity}", lines(drawn, x=x, y=Side(title, unit), description=f"{title} over the run")
                )
            )
            rows += [row for way, trace in traces for row in _rows(f"{name}, {way.name}", trace, unit)]
    return Figure(
        "long-run",
        "A long run: temperature, frequency and the time of a step over its seconds",
        "Where heat lowers the frequency, a step takes longer.",
        panels,
        [*labels.items(), *stroke_legend(strokes)] if panels else (),
        ("run", "quantity", "of", "at", "reading"),
        rows,
        missing or (() if panels else ("No long run was recorded.",)),
    )


def _name(cell: Cell) -> str:
    """What runs have in common that are drawn together."""
    governor = [f"governor {cell.governor}"] if cell.governor else []
    return ", ".join([model_of(cell), f"batch {cell.batch_size}", threads_text(cell.threads), *governor])


def _line(way: Way, trace: Trace, style: str) -> Line:
    kept = _spread(len(trace.values), _MOST_DRAWN)
    xs, ys = [trace.at_seconds[i] for i in kept], [trace.values[i] for i in kept]
    return Line(f"{trace.label}, {way.name}", style, xs, ys, has_dots=False)


def _rows(name: str, trace: Trace, unit: Unit) -> list[tuple[str, ...]]:
    return [
        (name, trace.quantity, trace.label, SECONDS.text(trace.at_seconds[i]), unit.text(trace.values[i]))
        for i in _spread(len(trace.values), _MOST_LISTED)
    ]


def _spread(count: int, most: int) -> list[int]:
    """So many places at most, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _not_read(cell: Cell, record: Record) -> Iterator[str]:
    """What its meters say in the place of temperatures and frequencies."""
    known = {trace.quantity for trace in cell.traces if trace.values}
    for quantity, source in (("temperature", "thermal"), ("frequency", "cpufreq")):
        if quantity in known:
            continue
        readings = cell.quantities.get(source, {}).values()
        said = [str(each["absent"]) for each in readings if not isinstance(each, int | float)]
        reason = said[0] if said else why_absent(record.machine, source)
        yield f"No {quantity} was read" + (f": {reason}." if reason else ".")
