"""What a plan says in numbers and words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from torch_odt.pages import document
from torch_odt.planning.plan import Plan
from torch_odt.planning.plan_text import format_joules, format_seconds
from torch_odt.runtime.budget import format_bytes

_MOST_RECOMPUTED = 12


def facts(plan: Plan) -> str:
    """The few numbers to look at first."""
    return document.facts(list(_facts(plan)))


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "predicted peak", format_bytes(plan.peak_bytes)
    if plan.budget is not None and plan.budget.growth_bytes > 0:
        yield "of the budget", f"{plan.peak_bytes / plan.budget.growth_bytes:.0%}"
    if plan.captured:
        yield "a step", format_seconds(plan.step_seconds)
    if plan.eager_seconds > 0:
        yield "against keeping everything", f"{plan.slowdown:.2f} times"
    if plan.step_joules is not None:
        yield "energy of a step", format_joules(plan.step_joules)
    if plan.captured:
        yield "recomputed", _recomputed(plan)
    if plan.timeline is not None:
        written, read = (plan.passes * plan.timeline.moved_bytes(direction) for direction in ("out", "in"))
        yield "paged", f"{format_bytes(written)} out, {format_bytes(read)} in" if written else "nothing"
        if written:
            yield "waits for the file", format_seconds(plan.passes * plan.timeline.wait_seconds)
    yield "batch", "whole" if plan.micro_batch is None else f"{plan.passes} micro-batches of {plan.micro_batch}"
    if plan.smallest_feasible_bytes is not None:
        yield "smallest feasible budget", format_bytes(plan.smallest_feasible_bytes)
    if plan.planning_seconds is not None:
        yield "planning took", format_seconds(plan.planning_seconds)


def _recomputed(plan: Plan) -> str:
    if not plan.recomputed:
        return "nothing"
    share = sum(entry.seconds for entry in plan.recomputed) / plan.step_seconds if plan.step_seconds > 0 else 0.0
    return f"{share:.1%} of the time, {plan.recomputed_ops} calls"


def footprint(plan: Plan) -> str:
    """What the peak is made of, with a bar for each part."""
    rows = "".join(
        f"<tr><td>{escape(line.label)}<small>{escape(line.note)}</small></td><td>{format_bytes(line.nbytes)}</td>"
        f'<td class="bar"><i style="width:{100 * line.nbytes / plan.peak_bytes:.1f}%"></i></td></tr>'
        for line in plan.lines
        if line.nbytes > 0
    )
    total = format_bytes(plan.peak_bytes)
    return f"<table><tbody>{rows}<tr><th>together</th><th>{total}</th><td></td></tr></tbody></table>"


def recomputed(plan: Plan) -> str:
    """What runs more than once, the most expensive first."""
    rows = [
        (entry.target.removesuffix(".default"), str(entry.calls), format_seconds(entry.seconds))
        for entry in plan.recomputed[:_MOST_RECOMPUTED]
    ]
    rest = plan.recomputed[_MOST_RECOMPUTED:]
    if rest:
        seconds = format_seconds(sum(entry.seconds for entry in rest))
        rows.append((f"{len(rest)} others", str(sum(entry.calls for entry in rest)), seconds))
    return document.table(("operator", "calls", "together"), rows)


def frontiers(plans: Mapping[str, Sequence[Plan]]) -> str:
    """The chart's dots as numbers."""
    knows_joules = all(plan.step_joules is not None for found in plans.values() for plan in found)
    header = ("planner", "peak", "a step", *(("energy",) if knows_joules else ()), "micro-batch", "recomputed")
    rows = []
    for name, found in plans.items():
        for plan in found:
            energy = (format_joules(plan.step_joules or 0.0),) if knows_joules else ()
            size = "whole" if plan.micro_batch is None else str(plan.micro_batch)
            cells = (format_bytes(plan.peak_bytes), format_seconds(plan.step_seconds), *energy, size)
            rows.append((name, *cells, str(plan.recomputed_ops)))
    return document.table(header, rows)


def notes(plan: Plan) -> str:
    """Which rewrites are on, and what was not possible and why."""
    return "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in plan.notes) + "</ul>"
