"""Lines over a number: dots that are joined, on axes that may be logarithmic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product

from torch_odt.measure.report.units import Unit
from torch_odt.pages import svg

_ROOM = 0.06
# A label at the very edge would stand out of the chart.
_LAST_LABEL = 0.95
_MOST_UPWARDS, _MOST_ACROSS = 5, 4
# What a mark takes of a chart, about, and how far it stands from its point.
_MARK_WIDTH, _MARK_HEIGHT, _MARK_GAP = 0.2, 0.1, 0.02
# A little more than a mark's height, which sums of floats may miss.
_NEXT_MARK, _LOWEST_MARK = 1.001 * _MARK_HEIGHT, 0.06


@dataclass(frozen=True)
class Line:
    """Points from left to right.

    Attributes:
        name: for what is said of a dot.
        style: the class that colours it.
        has_dots: whether each point is marked.
        marks: what stands beside each point, where there is room.
    """

    name: str
    style: str
    xs: Sequence[float]
    ys: Sequence[float]
    has_dots: bool = True
    marks: Sequence[str] = ()


@dataclass(frozen=True)
class Side:
    """An axis.

    Attributes:
        title: unit included.
        is_log: whether equal ratios are equally far apart; every number is positive then.
        places: where its labels stand; by default at round numbers.
        includes_zero: whether it starts at 0.
    """

    title: str
    unit: Unit
    is_log: bool = False
    places: Sequence[float] = ()
    includes_zero: bool = False


def lines(drawn: Sequence[Line], *, x: Side, y: Side, description: str) -> str:
    """A chart as HTML; empty without a point."""
    points = [point for line in drawn for point in zip(line.xs, line.ys, strict=True)]
    if not points:
        return ""
    across, upwards = _axis(x, [point[0] for point in points]), _axis(y, [point[1] for point in points])
    y_ticks = _ticks(y, upwards, _MOST_UPWARDS)
    shapes = [svg.level(upwards, tick, "grid") for tick, _ in y_ticks]
    texts = [svg.label(text, "tick", bottom=upwards.percent(tick)) for tick, text in y_ticks]
    for line in drawn:
        if len(line.xs) > 1:
            shapes.append(svg.line(svg.polyline(across, upwards, line.xs, line.ys), line.style))
        if line.has_dots or len(line.xs) == 1:
            texts += [_dot(line, x, y, across, upwards, point) for point in zip(line.xs, line.ys, strict=True)]
    texts += _marks(drawn, across, upwards)
    x_ticks = [tick for tick in _ticks(x, across, _MOST_ACROSS) if x.places or across.share(tick[0]) < _LAST_LABEL]
    labels = "".join(svg.label(text, "tick", left=across.percent(tick)) for tick, text in x_ticks)
    return f"""<div class="stack">
<div class="axis" data-axis="y">{svg.label(y.title, "title")}</div>
<div class="plot">{svg.drawing(shapes, description)}{"".join(texts)}</div><div class="times">{labels}</div>
<div class="axis" data-axis="x">{svg.label(x.title, "title")}</div></div>"""


def _axis(side: Side, values: Sequence[float]) -> svg.Axis:
    """All of the values, with some room on both sides."""
    low, high = min(values), max(values)
    if side.is_log:
        room = max((high / low) ** _ROOM, 1.1)
        return svg.LogAxis(low / room, high * room)
    room = _ROOM * (high - low) or 0.1 * abs(high) or 1.0
    lowest = 0.0 if side.includes_zero else low - room
    return svg.Axis(max(0.0, lowest) if low >= 0 else lowest, high + room)


def _ticks(side: Side, axis: svg.Axis, most: int) -> list[tuple[float, str]]:
    if side.places:
        return [(place, side.unit.text(place)) for place in side.places]
    if isinstance(axis, svg.LogAxis):
        return [(tick, side.unit.text(tick)) for tick in axis.power_ticks(most)]
    return side.unit.ticks(axis, most)


def _dot(line: Line, x: Side, y: Side, across: svg.Axis, upwards: svg.Axis, point: tuple[float, float]) -> str:
    text = escape(f"{line.name}: {y.unit.text(point[1])} at {x.unit.text(point[0])}")
    place = f"left:{across.percent(point[0])};bottom:{upwards.percent(point[1])}"
    return f'<i class="dot {line.style}" style="{place}" title="{text}"></i>'


def _marks(drawn: Sequence[Line], across: svg.Axis, upwards: svg.Axis) -> Iterator[str]:
    """On the left of its point, or on the right where another mark or the axis is in the way; else above or below.

    From the lowest point upwards, so that marks of points that lie on each other are mostly in the points' order.
    """
    points = [
        (upwards.share(y), across.share(x), text)
        for line in drawn
        for x, y, text in zip(line.xs, line.ys, line.marks, strict=False)
        if text
    ]
    taken: list[tuple[float, float]] = []
    for height, point, text in sorted(points, key=lambda each: each[0]):
        sides = [("before", point - _MARK_GAP - _MARK_WIDTH), ("behind", point + _MARK_GAP)]
        inside = [(style, left) for style, left in sides if 0 <= left <= 1 - _MARK_WIDTH]
        for bottom, (style, left) in product(_heights(height, [bottom for _, bottom in taken]), inside):
            if all(abs(left - a) >= _MARK_WIDTH or abs(bottom - b) >= _MARK_HEIGHT for a, b in taken):
                taken.append((left, bottom))
                yield svg.label(text, f"mark {style}", left=f"{100 * point:.2f}%", bottom=f"{100 * bottom:.2f}%")
                break


def _heights(height: float, taken: Sequence[float]) -> list[float]:
    """Where a mark may stand: at its point's height, else right above or below another mark, the nearest first."""
    places = [bottom + step for bottom in set(taken) for step in (_NEXT_MARK, -_NEXT_MARK)]
    inside = [place for place in places if _LOWEST_MARK <= place <= 1 - _LOWEST_MARK]
    return [height, *sorted(inside, key=lambda place: (abs(place - height), place))]
