"""Plans with everything that can be drawn, from graphs made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphs import MB, normalised

from torch_odt.capture.costs import TransferCosts
from torch_odt.planning.plan import Plan, PlanLine, eager_seconds, recomputed_in
from torch_odt.planning.pool import pack
from torch_odt.planning.registry import get_planner
from torch_odt.planning.simulate import simulate
from torch_odt.planning.timeline import timeline_of
from torch_odt.runtime.budget import ResolvedBudget

# So that some results are worth a transfer and others are recomputed.
TRANSFERS = TransferCosts(
    write_latency_seconds=0.1,
    write_bytes_per_second=4 * MB,
    read_latency_seconds=0.1,
    read_bytes_per_second=4 * MB,
    limit_bytes=1 << 40,
)
BUDGET = ResolvedBudget(400 * MB, 300 * MB, 100 * MB, "training", "100 MiB for training")


def make_plan(planner: str = "melon", share: float = 0.4, **options: Any) -> Plan:
    """A planner's plan within a share of what keeping everything takes; by default it recomputes and pages."""
    graph, costs = normalised(6)
    costs = replace(costs, transfers=TRANSFERS)
    most = simulate(graph, costs, get_planner("keep-all")(graph, costs, 1)).peak_bytes
    schedule = get_planner(planner)(graph, costs, int(share * most))
    layout = pack(graph, costs, schedule)
    lines = (
        PlanLine("activations and temporaries", layout.address_peak_bytes, "one arena, mapped once"),
        PlanLine("gradients", layout.outside_peak_bytes),
        PlanLine("optimizer state", 3 * MB, "made by its first step"),
        PlanLine("capture and planning", 2 * MB),
        PlanLine("reserve", MB),
    )
    settings: dict[str, Any] = {
        "planner": planner,
        "lines": lines,
        "step_seconds": simulate(graph, costs, schedule).seconds,
        "eager_seconds": eager_seconds(graph, costs),
        "batch": 8,
        "budget": BUDGET,
        "recomputed": recomputed_in(graph, costs, schedule),
        "notes": ("a note", "another one"),
        "smallest_feasible_bytes": 7 * MB,
        "planning_seconds": 0.25,
        "schedule": schedule,
        "layout": layout,
        "timeline": timeline_of(graph, costs, schedule),
    }
    return Plan(**(settings | options))


def make_frontiers(**options: Any) -> dict[str, list[Plan]]:
    """Plans of two planners for several budgets."""
    shares = (1.0, 0.6, 0.4)
    return {name: [make_plan(name, share, budget=None, **options) for share in shares] for name in ("melon", "dtr")}
