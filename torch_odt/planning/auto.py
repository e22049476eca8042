"""auto: the fastest schedule that fits, from several planners and a local search.

No single rule is best everywhere: eviction on demand (melon) is hard to beat on chains, the minimum cut on densely
connected networks, segments where memory is scarcest. So all of them are tried, each is allowed to evict on demand
where it does not fit by itself, and the best ones are improved by keeping and exchanging storages while time allows.
Every trial is counted exactly; nothing is proved optimal (the planners that solve integer programs do that, for small
graphs).
"""

from __future__ import annotations

import time

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.explore import explore
from torch_odt.planning.problem import Gradients, problem_of
from torch_odt.planning.registry import planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Footprint, Search
from torch_odt.planning.smallest import smallest

_ATTEMPTS = 5


@planner("auto")
def auto(
    graph: TrainingGraph,
    costs: Costs,
    budget_bytes: int,
    *,
    footprint: Footprint | None = None,
    time_limit_seconds: float = 1.5,
    gradients: Gradients = "keep",
) -> Schedule:
    """The fastest schedule found within a budget. Choose it unless there is a reason for another one.

    Args:
        graph: the step.
        costs: of its ops.
        budget_bytes: planned memory that must not be exceeded. When nothing fits, the schedule that needs least
            returns.
        footprint: what a schedule really takes, when that is more than its live bytes: an arena with gaps, and what
            leaves the step on top of it.
        time_limit_seconds: when to stop looking for something faster.
        gradients: whether this step's gradients stay ("keep") or are added to existing ones ("accumulate").
    """
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
        needed = best.peak_bytes if footprint is None else footprint(schedule)
        if least is None or needed < least[0]:
            least = (needed, schedule)
        if needed <= budget_bytes:
            return schedule
        live_budget = best.peak_bytes - max(needed - budget_bytes, best.peak_bytes // 500)
    schedule, needed = smallest(graph, costs, footprint=footprint, gradients=gradients)
    return schedule if least is None or needed < least[0] else least[1]
