"""auto: the fastest schedule that fits, from several planners and a local search.

No single rule is best everywhere: eviction on demand (melon, dtr, sage) is hard to beat on chains, the minimum cut on
densely connected networks, segments where memory is scarcest. So all of them are tried, each is allowed to evict on
demand where it does not fit by itself, and the best ones are improved by keeping and exchanging storages while time
allows. No budget is refused that one of them meets. Every trial is counted exactly; nothing is proved optimal (the
planners that solve integer programs do that, for small graphs). Given more than a moment, it tries those as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.explore import explore, lower_bound_bytes
from torch_odt.planning.problem import Gradients, problem_of
from torch_odt.planning.registry import get_planner, planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Footprint, Search
from torch_odt.planning.simulate import simulate
from torch_odt.planning.smallest import smallest
from torch_odt.planning.thorough import Best, improve_until

QUICK_SECONDS = 1.5
"""What a first step can wait for."""

_ATTEMPTS = 5
_OTHERS = ("chen", "dtr", "sage", "melon", "min-cut")


@planner("auto")
def auto(
    graph: TrainingGraph,
    costs: Costs,
    budget_bytes: int,
    *,
    footprint: Footprint | None = None,
    time_limit_seconds: float = QUICK_SECONDS,
    start: Schedule | None = None,
    gradients: Gradients = "keep",
    fewest: Callable[[], Schedule] | None = None,
) -> Schedule:
    """The fastest schedule found within a budget. Choose it unless there is a reason for another one.

    Args:
        graph: the step.
        costs: of its ops.
        budget_bytes: planned memory that must not be exceeded. When nothing fits, the schedule that needs least
            returns.
        footprint: what a schedule really takes, when that is more than its live bytes: an arena with gaps, and what
            leaves the step on top of it.
        time_limit_seconds: when to stop looking for something faster. More never gives a worse schedule than the
            default does: what is found in that time is where every other planner begins (see thorough.py).
        start: a schedule to begin with in its place.
        gradients: whether this step's gradients stay ("keep") or are added to existing ones ("accumulate").
        fewest: makes, or remembers, the schedule that needs least; it is looked for where this is None.
    """
    deadline = time.perf_counter() + time_limit_seconds

    def search(limit_seconds: float) -> Schedule:
        return _search(graph, costs, budget_bytes, footprint, limit_seconds, gradients, fewest)

    if start is None:
        start = search(min(time_limit_seconds, QUICK_SECONDS))
        if time_limit_seconds <= QUICK_SECONDS:
            return start
    taken_by = _taken_by(graph, costs, footprint, gradients)
    return improve_until(deadline, Best(graph, costs, budget_bytes, taken_by, gradients, start), search)


def _search(
    graph: TrainingGraph,
    costs: Costs,
    budget_bytes: int,
    footprint: Footprint | None,
    time_limit_seconds: float,
    gradients: Gradients,
    fewest: Callable[[], Schedule] | None,
) -> Schedule:
    """The fastest schedule that is found in so many seconds."""
    deadline = time.perf_counter() + time_limit_seconds
    problem = problem_of(graph, costs, gradients, apart=footprint is not None)
    live_budget = budget_bytes
    least: tuple[int, Schedule] | None = None
    for _ in range(_ATTEMPTS):
        now = time.perf_counter()
        # With a footprint, time is left for searching again with a budget that allows for the gaps.
        share = 1.0 if footprint is None else 0.5
        search = Search(problem, live_budget, now + share * max(0.0, deadline - now))
        best = explore(search)
        if not best.fits:
            break
        schedule = search.schedule("auto")
        now = time.perf_counter()
        needed = best.peak_bytes if footprint is None else footprint(schedule)
        # Looking for addresses is not looking for something faster.
        deadline += time.perf_counter() - now
        if least is None or needed < least[0]:
            least = (needed, schedule)
        if needed <= budget_bytes:
            return schedule
        live_budget = best.peak_bytes - max(needed - budget_bytes, best.peak_bytes // 500)
    taken_by = _taken_by(graph, costs, footprint, gradients)
    if fewest is None:
        schedule, needed = smallest(graph, costs, footprint=footprint, gradients=gradients)
    else:
        schedule = fewest()
        needed = taken_by(schedule)
    if least is not None and least[0] <= needed:
        needed, schedule = least
    if needed > budget_bytes >= lower_bound_bytes(problem):
        for name in _OTHERS:
            other = replace(get_planner(name)(graph, costs, budget_bytes), planner="auto")
            if taken_by(other) <= budget_bytes:
                return other
    return schedule


def _taken_by(graph: TrainingGraph, costs: Costs, footprint: Footprint | None, gradients: Gradients) -> Footprint:
    def live_peak(schedule: Schedule) -> int:
        return simulate(graph, costs, schedule, gradients=gradients).peak_bytes

    return footprint or live_peak
