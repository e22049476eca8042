"""A plan as a page: one HTML file that holds its shapes, style and script, and asks no network for anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

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

# A browser that obeys it loads nothing, even if a text found its way around the escaping.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


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
    heading = escape(title or f"Plan by {plan.planner}")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="generator" content="torch_odt">
<title>{heading}</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<main>
<header><h1>{heading}</h1><p>{escape(_subtitle(plan))}</p></header>
{tables.facts(plan)}
{"".join(_sections(plan, frontiers or {}))}
</main>
{_script(plan)}
</body>
</html>
"""


def _subtitle(plan: Plan) -> str:
    if not plan.captured:
        return "without a graph: the step runs plainly, with checkpoints"
    by = f"planned by {plan.planner}"
    return f"{by} for {plan.budget.text}" if plan.budget is not None else f"{by} without a budget"


def _sections(plan: Plan, frontiers: Mapping[str, Sequence[Plan]]) -> Iterator[str]:
    if plan.timeline is not None and plan.timeline.start_seconds:
        passes = f", of each of {plan.passes} micro-batches" if plan.passes > 1 else ""
        yield _section(f"Memory over the step{passes}", timeline_chart(plan, plan.timeline), _TIMELINE_HINT)
    else:
        yield _section("Memory over the step", '<p class="absent">The step was not captured: nothing to draw.</p>')
    if frontiers:
        table = f"<details><summary>As a table</summary>{tables.frontiers(frontiers)}</details>"
        yield _section("What other budgets would cost", frontier_chart(plan, frontiers) + table, _FRONTIER_HINT)
    else:
        yield _section("What other budgets would cost", f'<p class="absent">{NOT_COMPUTED}</p>')
    yield _section("What the peak is made of", tables.footprint(plan))
    if plan.recomputed:
        yield _section("Recomputed in a step", tables.recomputed(plan))
    if plan.notes:
        yield _section("Rewrites and notes", tables.notes(plan))


def _section(title: str, content: str, hint: str = "") -> str:
    text = f'<p class="hint">{hint}</p>' if hint else ""
    return f"<section><h2>{title}</h2>{text}\n{content}\n</section>\n"


def _script(plan: Plan) -> str:
    if plan.timeline is None or not plan.timeline.start_seconds:
        data = "null"
    else:
        # Nothing in it may end the element that it stands in.
        data = json.dumps(timeline_data(plan, plan.timeline), separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{data}</script>\n<script>\n{_asset("page.js")}</script>'


def _asset(name: str) -> str:
    return (resources.files("torch_odt.planning.page") / name).read_text(encoding="utf-8")
