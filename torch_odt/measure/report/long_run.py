"""A long run: temperature, frequency, step time and the process's memory over its seconds."""

from __future__ import annotations

from collections.abc import Sequence

from torch_odt.measure.record import Cell, Record, Trace
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.lines import Line, Side, lines
from torch_odt.measure.report.selection import cell_name, refusals, why_absent
from torch_odt.measure.report.units import BYTES, CELSIUS, COUNT, HERTZ, SECONDS, Unit

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
    """What heat does to a run (Cai et al., Figure 7)."""
    cells = [cell for cell in record.cells if cell.experiment == "long run"]
    panels, rows, missing = [], [], refusals(cells)
    labels: dict[str, str] = {}
    for cell in cells:
        for quantity in dict.fromkeys([*_QUANTITIES, *(trace.quantity for trace in cell.traces)]):
            traces = [trace for trace in cell.traces if trace.quantity == quantity and trace.values]
            title, unit = _QUANTITIES.get(quantity, (f"{quantity} in {traces[0].unit}" if traces else quantity, COUNT))
            if not traces:
                if cell.outcome == "ok" and quantity in ("temperature", "frequency"):
                    missing.append(f"{cell_name(cell)}: no {quantity} was read{_why(cell, record, quantity)}")
                continue
            for trace in traces:
                labels.setdefault(trace.label, f"line{len(labels) % _COLORS}")
            panels.append(Panel(f"{cell_name(cell)}: {quantity}", _chart(traces, title, unit, labels)))
            rows += [row for trace in traces for row in _rows(cell_name(cell), trace, unit)]
    return Figure(
        "long-run",
        "A long run: temperature, frequency and the time of a step over its seconds",
        "Where heat lowers the frequency, a step takes longer.",
        panels,
        list(labels.items()),
        ("run", "quantity", "of", "at", "reading"),
        rows,
        missing or (() if panels else ("No long run was recorded.",)),
    )


def _chart(traces: Sequence[Trace], title: str, unit: Unit, labels: dict[str, str]) -> str:
    drawn = []
    for trace in traces:
        kept = _spread(len(trace.values), _MOST_DRAWN)
        xs, ys = [trace.at_seconds[i] for i in kept], [trace.values[i] for i in kept]
        drawn.append(Line(trace.label, labels[trace.label], xs, ys, has_dots=False))
    x = Side("seconds since the run began", SECONDS, includes_zero=True)
    return lines(drawn, x=x, y=Side(title, unit), description=f"{title} over the run")


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


def _why(cell: Cell, record: Record, quantity: str) -> str:
    """What the meters say instead."""
    source = {"temperature": "thermal", "frequency": "cpufreq"}[quantity]
    readings = cell.quantities.get(source, {}).values()
    said = [str(each["absent"]) for each in readings if not isinstance(each, int | float)]
    reason = said[0] if said else why_absent(record.machine, source)
    return f" ({reason})" if reason else ""
