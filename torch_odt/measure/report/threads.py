"""Speed over threads, and under governors of frequency."""

from __future__ import annotations

from torch_odt.measure.record import Cell, Record
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.lines import Line, Side, lines
from torch_odt.measure.report.selection import grouped, model_of, ratio, refusals, steps_of, threads_text
from torch_odt.measure.report.units import COUNT, JOULES, SECONDS, TIMES
from torch_odt.measure.report.ways import Way, stroke_legend, strokes_of, way_of

_COLORS = 8


def threads(record: Record) -> Figure:
    """How much faster more threads train (Cai et al., Figure 1 and Table 3).

    A chart for each network and governor; a line for each batch, dashed for torch_odt's budgets, dotted for
    ExecuTorch.
    """
    cells = [cell for cell in steps_of(record) if cell.mode == "training" and cell.median_seconds]
    batches = sorted({cell.batch_size for cell in cells})
    colors = {batch: f"line{i % _COLORS}" for i, batch in enumerate(batches)}
    strokes = strokes_of(map(way_of, cells))
    panels, rows, shown, used = [], [], set(), set()
    for (model, governor), each in grouped(cells, lambda cell: (model_of(cell), cell.governor)).items():
        drawn = []
        for (batch, way), same in sorted(grouped(each, _line_of).items(), key=lambda item: item[0][0]):
            points = sorted(same, key=lambda cell: cell.threads)
            rows += [_row(cell, points[0]) for cell in points]
            if len(points) > 1:
                style = f"{colors[batch]} {strokes[way]}".strip()
                xs, ys = [cell.threads for cell in points], [_speed(cell, points[0]) for cell in points]
                used.add(way)
                drawn.append(Line(f"batch {batch}, {way.name}", style, xs, ys))
        shown |= {line.style for line in drawn}
        if drawn:
            panels.append(Panel(f"{model}, governor {governor}" if governor else model, _chart(drawn, model)))
    legend = [(f"batch {batch}", color) for batch, color in colors.items() if any(color in style for style in shown)]
    legend += stroke_legend({way: stroke for way, stroke in strokes.items() if way in used})
    refused = refusals(cell for cell in steps_of(record) if cell.governor and cell.mode == "training")
    return Figure(
        "threads",
        "Speed of training over threads: small batches against large ones",
        "Above 1, more threads are faster.",
        panels,
        legend,
        ("network", "batch", "series", "governor", "threads", "seconds of a step", "speed", "joules of a step"),
        rows if panels else (),
        [*refused, *(() if panels else ("No network was trained with several numbers of threads.",))],
        is_dense=True,
    )


def _line_of(cell: Cell) -> tuple[int, Way]:
    return cell.batch_size, way_of(cell)


def _chart(drawn: list[Line], model: str) -> str:
    places = sorted({int(x) for line in drawn for x in line.xs})
    x = Side("threads", COUNT, is_log=True, places=places)
    y = Side(f"times the speed of {threads_text(places[0])}", TIMES, includes_zero=True)
    return lines(drawn, x=x, y=y, description=f"speed over threads, for {model}")


def _speed(cell: Cell, first: Cell) -> float:
    """How many times faster it is than with the fewest threads."""
    return ratio(first.median_seconds, cell.median_seconds) or 0.0


def _row(cell: Cell, first: Cell) -> tuple[str, ...]:
    joules = cell.joules_per_step()
    return (
        model_of(cell),
        str(cell.batch_size),
        way_of(cell).name,
        cell.governor or "as it was",
        str(cell.threads),
        SECONDS.text(cell.median_seconds or 0.0),
        f"{_speed(cell, first):.3g}× {threads_text(first.threads)}",
        JOULES.text(joules[0]) if joules is not None else "absent",
    )
