"""Speed over threads, and under governors of frequency."""

from __future__ import annotations

from torch_odt.measure.record import Cell, Record
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.lines import Line, Side, lines
from torch_odt.measure.report.selection import grouped, model_of, refusals, series_of, steps_of, threads_text
from torch_odt.measure.report.units import COUNT, JOULES, SECONDS, TIMES

_COLORS = 8


def threads(record: Record) -> Figure:
    """How much faster more threads train (paper 001, Figure 1 and Table 3).

    A chart for each network and governor; a line for each batch, dashed for torch_odt.
    """
    cells = [cell for cell in steps_of(record) if cell.mode == "training" and cell.median_seconds]
    batches = sorted({cell.batch_size for cell in cells})
    colors = {batch: f"line{i % _COLORS}" for i, batch in enumerate(batches)}
    panels, rows, drawn_batches, has_dashes = [], [], set(), False
    for (model, governor), each in grouped(cells, lambda cell: (model_of(cell), cell.governor)).items():
        drawn = []
        by_line = grouped(each, lambda cell: (cell.batch_size, series_of(cell)))
        for (batch, series), same in sorted(by_line.items(), key=lambda item: item[0][0]):
            found = {cell.threads: cell for cell in reversed(same)}
            points = sorted((number, cell.median_seconds or 0.0) for number, cell in found.items())
            speeds = [points[0][1] / seconds for _, seconds in points]
            dashed = " dashed" if series.way.engine != "torch" else ""
            rows += [
                _row(found[number], speed, points[0][0]) for (number, _), speed in zip(points, speeds, strict=True)
            ]
            if len(points) > 1:
                name = f"batch {batch}, {series.way.name}"
                drawn.append(Line(name, colors[batch] + dashed, [number for number, _ in points], speeds))
                drawn_batches.add(batch)
                has_dashes |= bool(dashed)
        if drawn:
            places = sorted({int(x) for line in drawn for x in line.xs})
            x = Side("threads", COUNT, is_log=True, places=places)
            y = Side(f"times the speed of {threads_text(places[0])}", TIMES, includes_zero=True)
            title = f"{model}, governor {governor}" if governor else model
            panels.append(Panel(title, lines(drawn, x=x, y=y, description=f"speed over threads, for {title}")))
    legend = [(f"batch {batch}", color) for batch, color in colors.items() if batch in drawn_batches]
    refused = refusals(cell for cell in steps_of(record) if cell.governor and cell.mode == "training")
    return Figure(
        "threads",
        "Speed of training over threads: small batches against large ones",
        "Above 1, more threads are faster.",
        panels,
        [*legend, *([("torch_odt", "dashed")] if has_dashes else [])] if panels else (),
        (
            "network",
            "batch",
            "series",
            "governor",
            "threads",
            "seconds of a step",
            "speed",
            "joules",
        ),
        rows,
        [*refused, *(() if panels else ("No network was trained with several numbers of threads.",))],
        is_dense=True,
    )


def _row(cell: Cell, speed: float, fewest: int) -> tuple[str, ...]:
    joules = cell.joules_per_step()
    return (
        model_of(cell),
        str(cell.batch_size),
        series_of(cell).name,
        cell.governor or "as it was",
        str(cell.threads),
        SECONDS.text(cell.median_seconds or 0.0),
        f"{speed:.3g} ({fewest} = 1)",
        JOULES.text(joules[0]) if joules is not None else "absent",
    )
