"""A plan as a page: one HTML file that holds its shapes, style and script, and asks no network for anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch_odt.pages.document import asset, document, section
from torch_odt.planning.page import tables
from torch_odt.planning.page.frontier_chart import frontier_chart
from torch_odt.planning.page.timeline_chart import timeline_chart, timeline_data
from torch_odt.planning.plan import Plan

_TIMELINE_HINT = (
    "Bytes above the level before the step, over predicted time. Point at a moment, or move with the arrow keys. "
    "What is reserved for gradients, optimizer and other parts is drawn as if it were in use throughout."
)
_FRONTIER_HINT = (
    "What a step of each planner is predicted to take within a number of bytes; point at a dot to see its plan."
)
NOT_COMPUTED = "The frontiers of planners were not computed for this page."

_PACKAGE = "torch_odt.planning.page"


def write_page(
    path: str | Path, plan: Plan, *, frontiers: Mapping[str, Sequence[Plan]] | None = None, title: str = ""
) -> None:
    """Write a plan to an HTML file, which is replaced; see `page`.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(page(plan, frontiers=frontiers, title=title), encoding="utf-8")


def page(plan: Plan, *, frontiers: Mapping[str, Sequence[Plan]] | None = None, title: str = "") -> str:
    """A plan as the text of an HTML page: memory over the step, the frontiers of planners, and the plan's numbers.

    Choose it over `print` and images to look at single moments: the page tells the operator and the bytes under the
    pointer. It needs no network, and no script for anything but that.

    Args:
        plan: what to show.
        frontiers: for each planner its plans, as `torch_odt.execute.frontier.frontiers` finds them; None or empty where
            they were not computed, which the page then says.
        title: what is trained; any text.

    Example:
        >>> import torch, torch_odt as odt
        >>> model = torch.nn.Linear(4, 2)
        >>> batch = (torch.ones(3, 4), torch.tensor([0, 1, 1]))
        >>> plan = odt.plan(model, torch.nn.functional.cross_entropy, batch, budget="8GiB", cache=False)
        >>> page(plan, title="a linear model")[:15]
        '<!DOCTYPE html>'
    """
    return document(
        title or f"Plan by {plan.planner}",
        tables.facts(plan) + "\n" + "".join(_sections(plan, frontiers or {})),
        subtitle=_subtitle(plan),
        style=asset(_PACKAGE, "page.css"),
        script=_script(plan),
    )


def _subtitle(plan: Plan) -> str:
    if not plan.captured:
        return "without a graph: the step runs plainly, with checkpoints"
    by = f"planned by {plan.planner}"
    return f"{by} for {plan.budget.text}" if plan.budget is not None else f"{by} without a budget"


def _sections(plan: Plan, frontiers: Mapping[str, Sequence[Plan]]) -> Iterator[str]:
    if plan.timeline is not None and plan.timeline.start_seconds:
        passes = f", of each of {plan.passes} micro-batches" if plan.passes > 1 else ""
        yield section(f"Memory over the step{passes}", timeline_chart(plan, plan.timeline), _TIMELINE_HINT)
    else:
        yield section("Memory over the step", '<p class="absent">The step was not captured: nothing to draw.</p>')
    if frontiers:
        table = f"<details><summary>As a table</summary>{tables.frontiers(frontiers)}</details>"
        yield section("What other budgets would cost", frontier_chart(plan, frontiers) + table, _FRONTIER_HINT)
    else:
        yield section("What other budgets would cost", f'<p class="absent">{NOT_COMPUTED}</p>')
    yield section("What the peak is made of", tables.footprint(plan))
    if plan.recomputed:
        yield section("Recomputed in a step", tables.recomputed(plan))
    if plan.notes:
        yield section("Rewrites and notes", tables.notes(plan))


def _script(plan: Plan) -> str:
    if plan.timeline is None or not plan.timeline.start_seconds:
        data = "null"
    else:
        # Nothing in it may end the element that it stands in.
        data = json.dumps(timeline_data(plan, plan.timeline), separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{data}</script>\n<script>\n{asset(_PACKAGE, "page.js")}</script>'
