"""The frontier: for each number of bytes what a step of each planner takes, in seconds and, where known, joules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from torch_odt.pages import svg
from torch_odt.planning.frontier import non_dominated
from torch_odt.planning.plan import Plan
from torch_odt.planning.plan_text import format_joules, format_seconds
from torch_odt.runtime.budget import format_bytes

_COLORS = 8
_ROOM = 0.06


@dataclass(frozen=True)
class _Measure:
    """What a step takes."""

    name: str
    symbol: str
    of: Callable[[Plan], float | None]
    text: Callable[[float], str]


_SECONDS = _Measure("seconds", "s", lambda plan: plan.step_seconds, format_seconds)
_JOULES = _Measure("joules", "J", lambda plan: plan.step_joules, format_joules)


def frontier_chart(plan: Plan, frontiers: Mapping[str, Sequence[Plan]]) -> str:
    """A line for each planner; a dot for each of its plans; a ring around the plan of the page."""
    everyone = [plan, *(each for plans in frontiers.values() for each in plans)]
    measures = [_SECONDS, *([_JOULES] if all(each.step_joules is not None for each in everyone) else [])]
    switch = "".join(
        f'<label><input type="radio" name="measure" value="{measure.name}"{" checked" if i == 0 else ""}>'
        f"{measure.name}</label>"
        for i, measure in enumerate(measures)
    )
    legend = "".join(
        f'<li><label><input type="checkbox" checked data-planner="{i}"><i class="swatch {_style(i)}"></i>'
        f"{escape(name)}</label></li>"
        for i, name in enumerate(frontiers)
    )
    plots = "".join(_plot(plan, frontiers, measure, hidden=i > 0) for i, measure in enumerate(measures))
    return f"""
<figure id="frontier" class="chart">
{f'<div class="switch" role="radiogroup" aria-label="what a step takes">{switch}</div>' if len(measures) > 1 else ""}
{plots}
<figcaption><p class="now" data-of="point">{escape(_text(plan, "This plan"))}</p>
<ul class="legend">{legend}<li><i class="ring"></i>this plan</li></ul></figcaption>
</figure>"""


def _plot(plan: Plan, frontiers: Mapping[str, Sequence[Plan]], measure: _Measure, *, hidden: bool) -> str:
    """Steps, because a budget between two plans has to do with the smaller one."""
    lines = {name: _best(plans, measure) for name, plans in frontiers.items()}
    points = [(plan.peak_bytes, _value(plan, measure)), *(point[:2] for line in lines.values() for point in line)]
    budget_bytes = plan.budget.growth_bytes if plan.budget is not None else 0
    nbytes, cost = _around([x for x, _ in points]), _around([y for _, y in points])
    byte_ticks, cost_ticks = nbytes.byte_ticks(4), cost.decimal_ticks(5, measure.symbol)
    shapes = [svg.level(cost, tick, "grid") for tick, _ in cost_ticks]
    dots = []
    for i, (name, line) in enumerate(lines.items()):
        edges = [x for x, _, _ in reversed(line)]
        path = svg.steps(nbytes, cost, [*edges, nbytes.high], [y for _, y, _ in reversed(line)])
        shapes.append(f'<g data-planner="{i}">{svg.line(path, _style(i))}</g>')
        dots += [_dot(nbytes, cost, x, y, f"dot {_style(i)}", i, _text(each, name)) for x, y, each in line]
    texts = [svg.label(text, "tick", bottom=cost.percent(value)) for value, text in cost_ticks]
    if nbytes.low <= budget_bytes <= nbytes.high:
        shapes.append(svg.upright(nbytes, budget_bytes, "budget"))
        texts.append(svg.label("budget", "half before budget", left=nbytes.percent(budget_bytes)))
    ring = _dot(nbytes, cost, plan.peak_bytes, _value(plan, measure), "ring", None, _text(plan, "This plan"))
    times = "".join(svg.label(text, "tick", left=nbytes.percent(value)) for value, text in byte_ticks)
    drawing = svg.drawing(shapes, f"{measure.name} of a step over its peak bytes, for {', '.join(frontiers)}")
    return f"""<div class="stack" data-measure="{measure.name}"{" hidden" if hidden else ""}>
<div class="plot">{drawing}{"".join(texts)}{"".join(dots)}{ring}</div><div class="times">{times}</div></div>"""


def _style(planner: int) -> str:
    """A colour; dashed where all of them are taken."""
    return f"line{planner % _COLORS}" + (" dashed" if planner >= _COLORS else "")


def _best(plans: Sequence[Plan], measure: _Measure) -> list[tuple[int, float, Plan]]:
    points = [(plan.peak_bytes, _value(plan, measure), plan) for plan in plans]
    return non_dominated(points, lambda point: point[:2])


def _value(plan: Plan, measure: _Measure) -> float:
    return measure.of(plan) or 0.0


def _around(values: Sequence[float]) -> svg.Axis:
    """All of the values with some room on both sides, though not below zero."""
    low, high = min(values), max(values)
    room = _ROOM * (high - low) or 0.5 * high or 1.0
    return svg.Axis(max(0.0, low - room), high + room)


def _dot(nbytes: svg.Axis, cost: svg.Axis, x: float, y: float, style: str, planner: int | None, text: str) -> str:
    owner = "" if planner is None else f' data-planner="{planner}"'
    place = f"left:{nbytes.percent(x)};bottom:{cost.percent(y)}"
    return f'<i class="{style}" style="{place}" data-text="{escape(text)}" title="{escape(text)}"{owner}></i>'


def _text(plan: Plan, name: str) -> str:
    parts = [format_bytes(plan.peak_bytes), f"{format_seconds(plan.step_seconds)} a step"]
    if plan.step_joules is not None:
        parts.append(format_joules(plan.step_joules))
    parts.append("whole batch" if plan.micro_batch is None else f"micro-batches of {plan.micro_batch}")
    if plan.recomputed_ops:
        parts.append(f"{plan.recomputed_ops} calls recomputed")
    if plan.timeline is not None and plan.timeline.transfers:
        parts.append(f"{format_bytes(plan.passes * plan.timeline.moved_bytes('out'))} paged out")
    return f"{name}: {', '.join(parts)}"
