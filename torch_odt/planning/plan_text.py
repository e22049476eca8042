"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch_odt.runtime.budget import format_bytes

if TYPE_CHECKING:
    from torch_odt.planning.plan import Plan

_BAR_CELLS = 20
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MOST_RECOMPUTED = 6


def plan_text(plan: Plan) -> str:
    """Title, facts, the footprint line by line, what is recomputed, and the notes."""
    blocks = ["\n".join(_facts(plan)), "\n".join(_footprint(plan))]
    if plan.recomputed:
        blocks.append("\n".join(_recomputed(plan)))
    if plan.notes:
        blocks.append("\n".join(["Notes", *(f"  - {note}" for note in plan.notes)]))
    return "\n\n".join(blocks)


def _facts(plan: Plan) -> Iterator[str]:
    yield f"Plan by {plan.planner!r}" if plan.captured else "Plan without a graph"
    if plan.budget is not None:
        budget = plan.budget
        held = f"; {format_bytes(budget.level_bytes)} held before" if budget.of == "process" else ""
        yield f"  budget         {budget.text}{held}"
    if plan.device:
        yield f"  device         {plan.device}"
    if plan.objective != "seconds" or plan.deadline_seconds is not None:
        deadline = "" if plan.deadline_seconds is None else f", in {plan.deadline_seconds:.3g} s at most"
        yield f"  objective      fewest {plan.objective}{deadline}"
    yield f"  batch          {_batch(plan)}"
    yield f"  peak           {_peak(plan)}"
    if plan.captured:
        yield f"  step           {_step(plan)}"
    if plan.step_joules is not None:
        yield f"  energy         {format_joules(plan.step_joules)} a step"
    if plan.smallest_feasible_bytes is not None:
        yield f"  smallest       {format_bytes(plan.smallest_feasible_bytes)} would still be feasible"


def _batch(plan: Plan) -> str:
    whole = "whole" if plan.batch is None else f"{plan.batch} samples"
    if plan.passes == 1:
        return f"{whole}, at once"
    return f"{whole}, in {plan.passes} micro-batches of {plan.micro_batch}"


def _peak(plan: Plan) -> str:
    text = format_bytes(plan.peak_bytes)
    if plan.budget is None:
        return f"{text} above the level before"
    room = plan.budget.growth_bytes
    if room <= 0:
        return f"{text}, of which the budget leaves nothing"
    return f"{text} of {format_bytes(room)}, {plan.peak_bytes / room:.0%}"


def _step(plan: Plan) -> str:
    text = f"{format_seconds(plan.step_seconds)} in operators"
    if not plan.recomputed:
        return f"{text}, nothing is computed twice"
    calls = "1 call" if plan.recomputed_ops == 1 else f"{plan.recomputed_ops} calls"
    everything_kept = format_seconds(plan.eager_seconds)
    return f"{text}, {plan.slowdown:.2f} times the {everything_kept} of keeping everything; {calls} recomputed"


def _footprint(plan: Plan) -> Iterator[str]:
    peak = plan.peak_bytes
    lines = [line for line in plan.lines if line.nbytes != 0]
    names = [line.label for line in lines] + ["together"]
    sizes = [format_bytes(line.nbytes) for line in lines] + [format_bytes(peak)]
    name_width, size_width = max(map(len, names)), max(map(len, sizes))
    yield "Footprint above the level before"
    for line, size in zip(lines, sizes, strict=False):
        share = line.nbytes / peak if peak else 0.0
        text = f"  {line.label:<{name_width}}  {size:>{size_width}}  {share:>4.0%}  {_bar(share)}"
        yield f"{text}  {line.note}".rstrip()
    yield f"  {'together':<{name_width}}  {sizes[-1]:>{size_width}}"


def _recomputed(plan: Plan) -> Iterator[str]:
    shown: Sequence[tuple[str, int, float]] = [
        (entry.target.removesuffix(".default"), entry.calls, entry.seconds)
        for entry in plan.recomputed[:_MOST_RECOMPUTED]
    ]
    rest = plan.recomputed[_MOST_RECOMPUTED:]
    if rest:
        others = (f"{len(rest)} others", sum(entry.calls for entry in rest), sum(entry.seconds for entry in rest))
        shown = [*shown, others]
    width = max(len(name) for name, _, _ in shown)
    yield "Recomputed"
    for name, calls, seconds in shown:
        yield f"  {name:<{width}}  {calls:>5} x  {format_seconds(seconds):>8}"


def _bar(share: float) -> str:
    """A bar of a fixed width, in eighths of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * _BAR_CELLS * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if part else "")).ljust(_BAR_CELLS)


def format_seconds(seconds: float) -> str:
    """Seconds for people, in the unit that suits."""
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"


def format_joules(joules: float) -> str:
    """Joules for people, in the unit that suits."""
    return f"{joules:.2f} J" if joules >= 0.9995 else f"{joules * 1e3:.3g} mJ"
