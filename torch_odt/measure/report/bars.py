"""Bars that lie: groups of them below each other, each with its number at its end; of one part, or of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_odt.measure.report.units import Unit
from torch_odt.pages import svg

# Numbers stand to the right of their bars, and those of the longest bar have to fit, too.
_HEADROOM = 1.7
_ROW_REM = 1.1
_THICKNESS = 0.72
_MOST_TICKS = 4
_LAST_LABEL = 0.92


@dataclass(frozen=True)
class Bar:
    """A bar, or what stands in its place.

    Attributes:
        parts: lengths with the class that colours each, from left to right; none where there is no bar.
        text: at its end, or why there is none.
        is_refused: whether the text says that it could not be measured, such as for want of memory.
    """

    parts: Sequence[tuple[float, str]]
    text: str
    is_refused: bool = False

    @property
    def length(self) -> float:
        return sum(value for value, _ in self.parts)


@dataclass(frozen=True)
class Group:
    """Bars that are compared, and what they have in common."""

    label: str
    bars: Sequence[Bar]


def bars(groups: Sequence[Group], unit: Unit, *, title: str, rows_title: str) -> str:
    """A chart as HTML; empty without a bar.

    Args:
        groups: from top to bottom.
        unit: of the lengths.
        title: of the axis along the bars, unit included.
        rows_title: of the axis across them: what the groups differ in.
    """
    drawn = [bar.length for group in groups for bar in group.bars if bar.parts]
    if not drawn:
        return ""
    longest = max(drawn) or 1.0
    # A label above each group, and half a row between them.
    heights = [len(group.bars) + (1.4 if group.label else 0.4) for group in groups]
    along, across = svg.Axis(0.0, longest * _HEADROOM), svg.Axis(0.0, sum(heights))
    ticks = unit.ticks(along, _MOST_TICKS)
    shapes = [svg.line(svg.polyline(along, across, (tick, tick), (0, across.high)), "grid") for tick, _ in ticks]
    texts: list[str] = []
    top = across.high
    for group, height in zip(groups, heights, strict=True):
        if group.label:
            texts.append(svg.label(group.label, "group", bottom=across.percent(top - 1.2)))
        lowest = top - height + 0.2
        for i, bar in enumerate(reversed(group.bars)):
            shapes += _shapes(along, across, bar, lowest + i)
            texts.append(_text(along, across, bar, lowest + i))
        top -= height
    description = f"{title}, for each {rows_title}: {_spoken(groups)}"
    # One at the very edge would stand out of the chart.
    inside = [(tick, text) for tick, text in ticks if along.share(tick) < _LAST_LABEL]
    labels = "".join(svg.label(text, "tick", left=along.percent(tick)) for tick, text in inside)
    height_rem = across.high * _ROW_REM
    return f"""<div class="stack wide">
<div class="axis" data-axis="y">{svg.label(rows_title, "title")}</div>
<div class="plot" style="height:{height_rem:.2f}rem">{svg.drawing(shapes, description)}{"".join(texts)}</div>
<div class="times">{labels}</div>
<div class="axis" data-axis="x">{svg.label(title, "title")}</div></div>"""


def _shapes(along: svg.Axis, across: svg.Axis, bar: Bar, bottom: float) -> Iterator[str]:
    left, middle = 0.0, bottom + 0.5
    for value, style in bar.parts:
        edges = (middle - _THICKNESS / 2, middle + _THICKNESS / 2)
        yield f'<path class="block {style}" d="{svg.block(along, across, (left, left + value), edges)}"/>'
        left += value


def _text(along: svg.Axis, across: svg.Axis, bar: Bar, bottom: float) -> str:
    style = "value refused" if bar.is_refused else "value"
    return svg.label(bar.text, style, left=along.percent(bar.length), bottom=across.percent(bottom + 0.5))


def _spoken(groups: Sequence[Group]) -> str:
    return "; ".join(f"{group.label} {', '.join(bar.text for bar in group.bars)}".strip() for group in groups)
