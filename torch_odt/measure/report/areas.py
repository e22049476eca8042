"""What a total is made of over time: bands on top of each other, with lines laid over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch_odt.measure.report.units import BYTES, SECONDS
from torch_odt.pages import svg

_HEADROOM = 1.14


@dataclass(frozen=True)
class Band:
    """A part of memory, from the bottom upwards; a number for each moment."""

    name: str
    style: str
    sizes: Sequence[float]


@dataclass(frozen=True)
class Overlay:
    """A total from elsewhere, over moments of its own.

    Attributes:
        style: the class that colours it.
        start_seconds: when each value begins; the last one ends with the chart.
        sizes: one for each start.
    """

    style: str
    start_seconds: Sequence[float]
    sizes: Sequence[float]


def areas(
    start_seconds: Sequence[float],
    end_seconds: float,
    bands: Sequence[Band],
    *,
    overlays: Sequence[Overlay] = (),
    until_seconds: float,
    at_most: float,
    description: str,
) -> str:
    """A chart as HTML; empty without a moment.

    Args:
        start_seconds: when each size of the bands begins to hold.
        end_seconds: when the last one ends.
        bands: from the bottom upwards.
        overlays: lines over them.
        until_seconds: how far the axis of time goes: charts that are compared have one scale.
        at_most: the highest number that the other axis has room for.
        description: for those who do not see it.
    """
    if not start_seconds or end_seconds <= 0:
        return ""
    tops = list(accumulate((band.sizes for band in bands), _added))
    seconds = svg.Axis(0.0, until_seconds)
    memory = svg.Axis(0.0, _HEADROOM * max(at_most, 1))
    ticks = memory.byte_ticks(4)
    shapes = [svg.level(memory, tick, "grid") for tick, _ in ticks]
    texts = [svg.label(text, "tick", bottom=memory.percent(tick)) for tick, text in ticks]
    edges = [*start_seconds, end_seconds]
    # From the top downwards, each over the ones before: no seams between neighbours.
    for band, top in reversed(list(zip(bands, tops, strict=True))):
        shapes.append(svg.area(seconds, memory, edges, top, f"block {band.style}"))
    for overlay in overlays:
        path = svg.steps(seconds, memory, [*overlay.start_seconds, end_seconds], overlay.sizes)
        shapes.append(svg.line(path, overlay.style))
    labels = "".join(svg.label(text, "tick", left=seconds.percent(tick)) for tick, text in SECONDS.ticks(seconds, 4))
    return f"""<div class="stack">
<div class="axis" data-axis="y">{svg.label(f"memory in {BYTES.name}", "title")}</div>
<div class="plot">{svg.drawing(shapes, description)}{"".join(texts)}</div><div class="times">{labels}</div>
<div class="axis" data-axis="x">{svg.label("seconds since the step began", "title")}</div></div>"""


def _added(below: Sequence[float], sizes: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(below, sizes, strict=True)]
