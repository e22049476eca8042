"""A plan as a picture: memory over one pass through the schedule, and beneath it what is recomputed and paged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_odt.runtime.budget import format_bytes

if TYPE_CHECKING:
    from torch_odt.planning.plan import Plan
    from torch_odt.planning.timeline import Timeline

_MIB = 2**20
_FIXED, _KEPT, _RECOMPUTED, _WORKSPACE = "#d9dce1", "#3b76af", "#e08a3c", "#8fb8de"
_RETURNED, _MOVING = "#2f9e83", "#9a68b8"
_TEXT, _FAINT, _LIMIT = "#333940", "#8a929b", "#b5322b"


def draw_plan(plan: Plan, timeline: Timeline, path: Path) -> None:
    """Draw live bytes by kind, the budget and the boundary between forward and backward; see `Plan.plot`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('drawing a plan needs matplotlib: pip install "torch_odt[plot]"') from error
    # A figure of its own: the user's pyplot state and backend are not touched.
    lanes = _lanes(timeline)
    figure = Figure(figsize=(9, 4.6 + 0.25 * len(lanes)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    heights = [18, len(lanes)] if lanes else [1]
    axes, *beneath = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False).flat
    _draw_memory(axes, plan, timeline)
    _draw_limits(axes, plan, timeline)
    for each in beneath:
        _draw_lanes(each, lanes)
    _label([axes, *beneath], plan)
    figure.savefig(path)


def _draw_memory(axes: Any, plan: Plan, timeline: Timeline) -> None:
    # The last op's values hold until the pass ends.
    seconds = [*timeline.start_seconds, timeline.seconds]

    def mib(sizes: list[int]) -> list[float]:
        return [size / _MIB for size in (*sizes, sizes[-1])]

    # Without an arena its size is that of the largest moment.
    fixed = max(0, plan.peak_bytes - (plan.arena_bytes or max(timeline.total_bytes)))
    bands = [
        ("gradients, optimizer and others", _FIXED, [fixed] * len(timeline.start_seconds)),
        ("kept", _KEPT, timeline.kept_bytes),
        ("recomputed", _RECOMPUTED, timeline.recomputed_bytes),
        ("back from the file", _RETURNED, timeline.returned_bytes),
        ("on its way to or from the file", _MOVING, timeline.moving_bytes),
        ("workspace of the operator", _WORKSPACE, timeline.workspace_bytes),
    ]
    bands = [band for band in bands if any(band[2])]
    names, colors, sizes = zip(*bands, strict=True)
    axes.stackplot(seconds, *map(mib, sizes), labels=names, colors=colors, step="post", linewidth=0)
    axes.set_xlim(0, timeline.seconds)
    highest = plan.peak_bytes
    if plan.budget is not None:
        highest = max(highest, min(plan.budget.growth_bytes, 2 * plan.peak_bytes))
    axes.set_ylim(0, highest / _MIB * 1.16)


def _draw_limits(axes: Any, plan: Plan, timeline: Timeline) -> None:
    budget_bytes = plan.budget.growth_bytes if plan.budget is not None else 0
    shows_budget = 0 < budget_bytes <= 2 * plan.peak_bytes
    # The two labels keep out of each other's way: the upper level has its label above, the lower one below.
    is_below = shows_budget and plan.peak_bytes <= budget_bytes
    _level(axes, plan.peak_bytes, f"predicted peak {format_bytes(plan.peak_bytes)}", _TEXT, ":", is_below=is_below)
    if shows_budget:
        _level(axes, budget_bytes, f"budget {format_bytes(budget_bytes)}", _LIMIT, "-", is_below=not is_below)
    if 0 < timeline.boundary_seconds < timeline.seconds:
        axes.axvline(timeline.boundary_seconds, color=_FAINT, linewidth=0.8)
        top = axes.get_ylim()[1]
        for text, side in (("forward ", "right"), (" backward", "left")):
            axes.text(timeline.boundary_seconds, top * 0.985, text, ha=side, va="top", color=_FAINT, fontsize=8)


def _lanes(timeline: Timeline) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """Names, colours and (start, duration) of what happens beside keeping; nothing of which there is none."""
    spans = zip(timeline.start_seconds, timeline.end_seconds, timeline.recomputes, strict=True)
    lanes = [("recomputed", _RECOMPUTED, [(start, end - start) for start, end, again in spans if again])]
    for name, color, direction in (("page-outs", _MOVING, "out"), ("page-ins", _RETURNED, "in")):
        moves = [move for move in timeline.transfers if move.direction == direction]
        lanes.append((name, color, [(move.start_seconds, move.end_seconds - move.start_seconds) for move in moves]))
    return [lane for lane in lanes if lane[2]]


def _draw_lanes(axes: Any, lanes: Sequence[tuple[str, str, list[tuple[float, float]]]]) -> None:
    for row, (_, color, spans) in enumerate(lanes):
        axes.broken_barh(spans, (row + 0.15, 0.7), facecolors=color, edgecolors=color, linewidth=0.3)
    axes.set_ylim(len(lanes), 0)
    axes.set_yticks([row + 0.5 for row in range(len(lanes))], [name for name, _, _ in lanes])


def _level(axes: Any, nbytes: int, text: str, color: str, style: str, *, is_below: bool) -> None:
    axes.axhline(nbytes / _MIB, color=color, linewidth=1.1, linestyle=style)
    axes.annotate(
        text,
        (1, nbytes / _MIB),
        xycoords=("axes fraction", "data"),
        xytext=(-4, -4 if is_below else 4),
        textcoords="offset points",
        ha="right",
        va="top" if is_below else "bottom",
        color=color,
        fontsize=8,
        bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
    )


def _label(stacked: Sequence[Any], plan: Plan) -> None:
    axes = stacked[0]
    title = f"{plan.planner}: {format_bytes(plan.peak_bytes)}"
    if plan.recomputed:
        title += f", {plan.slowdown:.2f} times the operator time of keeping everything"
    axes.set_title(title, loc="left", color=_TEXT, fontsize=11)
    axes.set_ylabel("MiB above the level before", color=_TEXT)
    passes = f", one of {plan.passes} micro-batches" if plan.passes > 1 else ""
    stacked[-1].set_xlabel(f"predicted seconds{passes}", color=_TEXT)
    for each in stacked:
        each.tick_params(colors=_TEXT, labelsize=8)
        for side in ("top", "right"):
            each.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            each.spines[side].set_color(_FAINT)
    handles = axes.get_legend_handles_labels()
    axes.get_figure().legend(*handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
