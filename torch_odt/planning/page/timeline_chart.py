"""Memory over the step: what is resident by where it comes from, and beneath it what is recomputed and paged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from torch_odt.pages import svg
from torch_odt.planning.plan import Plan
from torch_odt.planning.plan_text import format_seconds
from torch_odt.planning.timeline import WAIT, Timeline
from torch_odt.runtime.budget import format_bytes

_MOST_FIXED = 3
_HEADROOM = 1.14


@dataclass(frozen=True)
class Band:
    """A part of memory, from the bottom of the chart upwards.

    Attributes:
        name: for the legend.
        style: the class that colours it.
        sizes: one for each entry of the timeline.
    """

    name: str
    style: str
    sizes: Sequence[int]


def bands_of(plan: Plan, timeline: Timeline) -> list[Band]:
    """What lies in memory, without what there is nothing of beside what is kept."""
    count = len(timeline.start_seconds)
    kept = Band("kept", "kept", timeline.kept_bytes)
    parts = [
        Band("recomputed", "recomputed", timeline.recomputed_bytes),
        Band("back from the file", "returned", timeline.returned_bytes),
        Band("on its way to or from the file", "moving", timeline.moving_bytes),
        Band("workspace of the operator", "workspace", timeline.workspace_bytes),
    ]
    fixed = [Band(name, f"fixed{i}", [nbytes] * count) for i, (name, nbytes) in enumerate(_fixed(plan, timeline))]
    return [*fixed, kept, *(part for part in parts if any(part.sizes))]


def timeline_chart(plan: Plan, timeline: Timeline) -> str:
    """The chart, its lanes and its legend, which shows the bytes of the moment under the pointer."""
    bands = bands_of(plan, timeline)
    seconds = svg.Axis(0.0, timeline.seconds)
    totals = [sum(sizes) for sizes in zip(*(band.sizes for band in bands), strict=True)]
    moment = totals.index(max(totals))
    return f"""
<figure id="timeline" class="chart">
<div class="stack" tabindex="0" role="slider" aria-label="moment of the step" aria-valuemin="0"
 aria-valuemax="{len(totals) - 1}" aria-valuenow="{moment}" aria-valuetext="{escape(timeline.names[moment])}">
<div class="plot">{_memory(plan, timeline, bands, seconds)}</div>
{"".join(_lanes(timeline, seconds))}
<div class="cursor" style="left:{seconds.percent(timeline.start_seconds[moment])}"></div>
<div class="times">{_labels(seconds.decimal_ticks(5, "s"), seconds, "left")}</div>
</div>
<figcaption>{_readout(timeline, bands, totals, moment)}</figcaption>
</figure>"""


def timeline_data(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """What the page's script needs to tell about any moment."""
    names = list(dict.fromkeys(timeline.names))
    places = {name: place for place, name in enumerate(names)}
    return {
        "names": names,
        "name": [places[name] for name in timeline.names],
        "start": timeline.start_seconds,
        "seconds": timeline.seconds,
        "recomputes": [int(again) for again in timeline.recomputes],
        "continues": [int(same) for same in timeline.continues],
        "bands": [list(band.sizes) for band in bands_of(plan, timeline)],
        "file": timeline.file_bytes if any(timeline.file_bytes) else [],
        "transfers": [list(transfer) for transfer in timeline.transfers],
    }


def _fixed(plan: Plan, timeline: Timeline) -> list[tuple[str, int]]:
    """What is reserved beside what the timeline tells, for the whole step, the largest parts by name."""
    lines = sorted((line for line in plan.lines if line.nbytes > 0), key=lambda line: -line.nbytes)
    arena = next((line for line in lines if line.nbytes == plan.arena_bytes), None)
    if arena is None:
        return [("gradients, optimizer and others", max(0, plan.peak_bytes - max(timeline.total_bytes)))]
    lines.remove(arena)
    named = [(line.label, line.nbytes) for line in lines]
    if len(named) <= _MOST_FIXED:
        return named
    return [*named[: _MOST_FIXED - 1], ("others", sum(nbytes for _, nbytes in named[_MOST_FIXED - 1 :]))]


def _memory(plan: Plan, timeline: Timeline, bands: Sequence[Band], seconds: svg.Axis) -> str:
    budget_bytes = plan.budget.growth_bytes if plan.budget is not None else 0
    shows_budget = 0 < budget_bytes <= 2 * plan.peak_bytes
    highest = max(plan.peak_bytes, budget_bytes if shows_budget else 0)
    memory = svg.Axis(0.0, _HEADROOM * highest)
    ticks = memory.byte_ticks(4)
    edges = [*timeline.start_seconds, timeline.seconds]
    shapes = [svg.level(memory, tick, "grid") for tick, _ in ticks]
    tops = np.cumsum([band.sizes for band in bands], axis=0)
    # From the top downwards, each over the ones before: no seams between neighbours.
    for band, top in reversed(list(zip(bands, tops.tolist(), strict=True))):
        shapes.append(svg.area(seconds, memory, edges, top, band.style))
    shapes.append(svg.level(memory, plan.peak_bytes, "peak"))
    texts = [_labels(ticks, memory, "bottom")]
    # The two labels keep out of each other's way: the upper level has its label above, the lower one below.
    is_below = shows_budget and plan.peak_bytes <= budget_bytes
    texts.append(_level_label(memory, plan.peak_bytes, f"predicted peak {format_bytes(plan.peak_bytes)}", is_below))
    if shows_budget:
        shapes.append(svg.level(memory, budget_bytes, "budget"))
        texts.append(_level_label(memory, budget_bytes, f"budget {format_bytes(budget_bytes)}", not is_below))
    if 0 < timeline.boundary_seconds < timeline.seconds:
        shapes.append(svg.upright(seconds, timeline.boundary_seconds, "boundary"))
        place = seconds.percent(timeline.boundary_seconds)
        texts += [svg.label("forward", "half before", left=place), svg.label("backward", "half", left=place)]
    description = f"bytes in memory over the step, at most {format_bytes(plan.peak_bytes)}"
    return svg.drawing(shapes, description) + "".join(texts)


def _level_label(memory: svg.Axis, nbytes: int, text: str, is_below: bool) -> str:
    return svg.label(text, "level below" if is_below else "level", bottom=memory.percent(nbytes))


def _labels(ticks: Iterable[tuple[float, str]], axis: svg.Axis, side: str) -> str:
    return "".join(svg.label(text, "tick", **{side: axis.percent(value)}) for value, text in ticks)


def _lanes(timeline: Timeline, seconds: svg.Axis) -> Iterator[str]:
    """What is recomputed, moved and waited for, and what lies in the file; nothing where there is none of it."""
    spans = list(zip(timeline.start_seconds, timeline.end_seconds, strict=True))
    again = [span for span, is_again in zip(spans, timeline.recomputes, strict=True) if is_again]
    waits = [span for span, name in zip(spans, timeline.names, strict=True) if name == WAIT]
    out, back = ([t for t in timeline.transfers if t.direction == direction] for direction in ("out", "in"))
    lanes = (
        ("recomputed", "recomputed", again, timeline.recompute_seconds, 0),
        ("page-outs", "moving", [(t.start_seconds, t.end_seconds) for t in out], None, timeline.moved_bytes("out")),
        ("page-ins", "returned", [(t.start_seconds, t.end_seconds) for t in back], None, timeline.moved_bytes("in")),
        ("waiting", "wait", waits, timeline.wait_seconds, 0),
    )
    for name, style, intervals, took, nbytes in lanes:
        if intervals:
            shape = svg.spans(seconds, intervals, style)
            total = format_bytes(nbytes) if took is None else format_seconds(took)
            yield _lane(name, "lane", svg.drawing([shape], f"{name}: {len(intervals)} times, {total}"))
    most = max(timeline.file_bytes)
    if most:
        edges = [*timeline.start_seconds, timeline.seconds]
        shape = svg.area(seconds, svg.Axis(0.0, most), edges, timeline.file_bytes, "file")
        note = svg.label(f"at most {format_bytes(most)}", "most")
        yield _lane("in the file", "lane high", svg.drawing([shape], "bytes in the file") + note)


def _lane(name: str, style: str, content: str) -> str:
    return f'<div class="{style}"><span class="tick">{name}</span>{content}</div>'


def _readout(timeline: Timeline, bands: Sequence[Band], totals: Sequence[int], moment: int) -> str:
    """The legend with the bytes of one moment: at first that of the peak."""
    start, end = _span_of_call(timeline, moment)
    parts = "".join(
        f'<li><i class="swatch {band.style}"></i>{escape(band.name)} <b>{format_bytes(band.sizes[moment])}</b></li>'
        for band in reversed(bands)
    )
    file = ""
    if any(timeline.file_bytes):
        size = format_bytes(timeline.file_bytes[moment])
        file = f'<li><i class="swatch file"></i>in the file <b data-of="file">{size}</b></li>'
    moves = '<p class="now" data-of="transfers"></p>' if timeline.transfers else ""
    again = ", computed again" if timeline.recomputes[moment] else ""
    return f"""
<p class="now" aria-live="off"><strong data-of="name">{escape(timeline.names[moment])}</strong>
<span data-of="when">at {format_seconds(start)}, for {format_seconds(end - start)}{again}</span></p>
<ul class="legend"><li>together <b data-of="total">{format_bytes(totals[moment])}</b></li>{parts}{file}</ul>{moves}"""


def _span_of_call(timeline: Timeline, moment: int) -> tuple[float, float]:
    """When the op of a moment starts and ends."""
    first = last = moment
    while timeline.continues[first]:
        first -= 1
    while last + 1 < len(timeline.continues) and timeline.continues[last + 1]:
        last += 1
    return timeline.start_seconds[first], timeline.end_seconds[last]
