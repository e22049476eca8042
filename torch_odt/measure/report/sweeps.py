"""Networks of one kind of layer, over their width and their depth (Chen et al., Figures 6, 8 and 10)."""

from __future__ import annotations

from collections.abc import Sequence

from torch_odt.measure.record import Cell, Record
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.lines import Line, Side, lines
from torch_odt.measure.report.selection import grouped, refusals
from torch_odt.measure.report.units import BYTES, COUNT, SECONDS
from torch_odt.measure.report.ways import series_of, stroke_legend, strokes_of, way_of

_COLORS = 8
_HEADER = ("layers", "width", "depth", "series", "seconds of a step", "bytes above the level before", "parameters")
_NONE = "No networks of one kind of layer were measured."


def sweep_of_width(record: Record) -> Figure:
    """Seconds over the width; a line for each depth."""
    return _sweep(record, over="width", line_for="depth")


def sweep_of_depth(record: Record) -> Figure:
    """Seconds over the depth; a line for each width."""
    return _sweep(record, over="depth", line_for="width")


def layer_kinds(record: Record) -> Figure:
    """Kinds of layers against each other at the smallest depth, over the width."""
    cells = [cell for cell in _swept(record) if cell.median_seconds]
    strokes = strokes_of(map(way_of, cells))
    lowest = min((_number(cell, "depth") for cell in cells), default=0.0)
    kinds = list(dict.fromkeys(_kind(cell) for cell in cells))
    colors = {kind: f"line{i % _COLORS}" for i, kind in enumerate(kinds)}
    panels, rows = [], []
    for mode in ("training", "inference"):
        same = [cell for cell in cells if cell.mode == mode and _number(cell, "depth") == lowest]
        drawn = [
            _line(each, "width", f"{kind}, {way.name}", f"{colors[kind]} {strokes[way]}".strip())
            for (kind, way), each in grouped(same, lambda cell: (_kind(cell), way_of(cell))).items()
        ]
        if drawn:
            panels.append(Panel(f"{mode}, depth {lowest:g}", _chart(drawn, "width", mode)))
        rows += [_row(cell) for cell in same]
    return Figure(
        "layer-kinds",
        "Kinds of layers against each other: fully connected, convolution, depthwise separable",
        "Both axes are logarithmic.",
        panels,
        [*colors.items(), *stroke_legend(strokes)] if panels else (),
        _HEADER,
        rows,
        () if panels else (_NONE,),
    )


def _sweep(record: Record, *, over: str, line_for: str) -> Figure:
    swept = _swept(record)
    cells = [cell for cell in swept if cell.median_seconds]
    sizes = sorted({_number(cell, line_for) for cell in cells})
    colors = {size: f"line{i % _COLORS}" for i, size in enumerate(sizes)}
    strokes = strokes_of(map(way_of, cells))
    panels, rows = [], []
    for (kind, mode), each in grouped(cells, lambda cell: (_kind(cell), cell.mode)).items():
        drawn = [
            _line(same, over, f"{line_for} {size:g}, {way.name}", f"{colors[size]} {strokes[way]}".strip())
            for (size, way), same in sorted(
                grouped(each, lambda cell: (_number(cell, line_for), way_of(cell))).items(),
                key=lambda item: item[0][0],
            )
        ]
        # Separable convolutions have one depth.
        if len({x for line in drawn for x in line.xs}) > 1:
            panels.append(Panel(f"{kind}, {mode}", _chart(drawn, over, mode)))
        rows += [_row(cell) for cell in each]
    return Figure(
        f"sweep-{over}",
        f"{over.capitalize()} against {line_for}: time of a step over the {over} of a network",
        "Both axes are logarithmic. Where lines are steep, "
        f"{over} costs much; where they lie far apart, {line_for} does.",
        panels,
        [(f"{line_for} {size:g}", color) for size, color in colors.items()] + stroke_legend(strokes),
        _HEADER,
        rows,
        refusals(swept) or (() if panels else (_NONE,)),
        is_dense=True,
    )


def _swept(record: Record) -> list[Cell]:
    return [cell for cell in record.cells if all(_is_size(cell.factors.get(name)) for name in ("width", "depth"))]


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def _kind(cell: Cell) -> str:
    return str(cell.factors.get("layer", cell.model))


def _number(cell: Cell, name: str) -> float:
    return float(cell.factors[name])


def _line(cells: Sequence[Cell], over: str, name: str, style: str) -> Line:
    points = sorted({_number(cell, over): cell.median_seconds or 0.0 for cell in cells}.items())
    return Line(name, style, [x for x, _ in points], [y for _, y in points])


def _chart(drawn: Sequence[Line], over: str, mode: str) -> str:
    places = sorted({x for line in drawn for x in line.xs})
    x = Side(f"{over} (number of {'neurons or channels' if over == 'width' else 'layers'})", COUNT, True, places)
    y = Side(f"seconds of a step of {mode}", SECONDS, is_log=True)
    return lines(drawn, x=x, y=y, description=f"seconds of {mode} over {over}")


def _row(cell: Cell) -> tuple[str, ...]:
    size = "" if cell.training_bytes is None else BYTES.text(cell.training_bytes)
    seconds = SECONDS.text(cell.median_seconds or 0.0)
    width, depth = (f"{_number(cell, name):g}" for name in ("width", "depth"))
    return _kind(cell), width, depth, series_of(cell).name, seconds, size, f"{cell.parameters:,}"
