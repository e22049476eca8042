"""The frontier: for each number of bytes the fastest schedule, found once for a ladder of budgets.

A budget that changes while a model trains, or that is still to be chosen, asks for many plans of one step. They are
made together here: from everything kept down to the fewest bytes, evenly, each by every planner that is asked for.
What takes no fewer bytes than another and is no faster is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.auto import auto
from torch_odt.planning.by_name import schedule_by_name
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.objective import FASTEST, Goal, schedule_for
from torch_odt.planning.problem import Gradients
from torch_odt.planning.registry import get_planner, limited
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Footprint
from torch_odt.planning.simulate import simulate

T = TypeVar("T")

# A deadline of the step is met by planning again and again, at other prices of a second.
_SHARE_OF_A_PRICE = 0.5


@dataclass(frozen=True)
class Point:
    """A schedule of the frontier.

    Attributes:
        peak_bytes: what it takes.
        seconds: of all its ops, recomputation included.
        joules: the same, as far as the costs know what they draw.
        planner: the name of the planner that made it.
        schedule: what runs.
    """

    peak_bytes: int
    seconds: float
    joules: float
    planner: str
    schedule: Schedule


def frontier(
    graph: TrainingGraph,
    costs: Costs,
    *,
    planners: Sequence[str] = ("auto",),
    rungs: int = 8,
    time_limit_seconds: float = 12.0,
    footprint: Footprint | None = None,
    gradients: Gradients = "keep",
    goal: Goal = FASTEST,
) -> list[Point]:
    """The schedules that are not worse than another in bytes and in seconds, the largest and fastest first.

    Choose it where the budget is not known yet or will change: every later budget is then a look-up.

    Args:
        graph: the step.
        costs: of its ops.
        planners: names of planners. "auto" alone is hardly ever worse than together with others.
        rungs: how many budgets are planned for between everything kept and the fewest bytes.
        time_limit_seconds: shared by the rungs; once it is over, those that are left are not planned for. What takes
            most and what takes fewest bytes is there in any case. A planner that stops when it is told to is told.
        footprint: what a schedule really takes, when that is more than its live bytes.
        gradients: whether this step's gradients stay ("keep") or are added to existing ones ("accumulate").
        goal: joules may take the place of seconds. What misses its deadline is left out.

    Returns:
        The points in order of falling bytes and rising seconds; at least one unless there is a deadline.

    Raises:
        PlanError: there is no planner of one of the names, or its solver is not installed.
    """
    for name in planners:
        get_planner(name)

    def taken_by(schedule: Schedule) -> int:
        if footprint is not None:
            return footprint(schedule)
        return simulate(graph, costs, schedule, gradients=gradients).peak_bytes

    def plan(name: str, budget_bytes: int, limit_seconds: float) -> Point:
        stop_at = time.perf_counter() + limit_seconds
        if name != "auto":
            return point(schedule_by_name(name, graph, costs, budget_bytes, taken_by, goal=goal, stop_at=stop_at))
        share = 1.0 if math.isinf(goal.deadline_seconds) else _SHARE_OF_A_PRICE
        planner = limited(partial(auto, footprint=footprint, gradients=gradients), stop_at, share)
        wanted: dict[str, Any] = {"objective": goal.objective, "deadline_seconds": goal.deadline_seconds}
        return point(schedule_for(planner, graph, costs, budget_bytes, **wanted))

    def point(schedule: Schedule) -> Point:
        found = simulate(graph, costs, schedule, gradients=gradients)
        return Point(taken_by(schedule), found.seconds, found.joules, schedule.planner, schedule)

    deadline = time.perf_counter() + time_limit_seconds
    highest = point(keep_all(graph, costs))
    found = [highest, *(plan(name, 1, 0.0) for name in planners)]
    budgets = ladder(min(each.peak_bytes for each in found), highest.peak_bytes, rungs)
    asked = [(budget_bytes, name) for budget_bytes in budgets for name in planners]
    for position, (budget_bytes, name) in enumerate(asked):
        left_seconds = deadline - time.perf_counter()
        if left_seconds > 0:
            found.append(plan(name, budget_bytes, left_seconds / (len(asked) - position)))
    in_time = [each for each in found if each.seconds <= goal.deadline_seconds]
    return non_dominated(in_time, lambda each: (each.peak_bytes, goal.cost(each.seconds, each.joules)))


def ladder(lowest_bytes: int, highest_bytes: int, rungs: int) -> list[int]:
    """So many budgets at equal distances between two others, the largest first."""
    step = (highest_bytes - lowest_bytes) / (rungs + 1)
    return sorted({int(highest_bytes - step * rung) for rung in range(1, rungs + 1)}, reverse=True)


def non_dominated(found: Iterable[T], cost: Callable[[T], tuple[int, float]]) -> list[T]:
    """What nothing else beats in both bytes and seconds, in order of falling bytes and rising seconds."""
    best: list[T] = []
    for each in sorted(found, key=cost):
        if not best or cost(each)[1] < cost(best[-1])[1]:
            best.append(each)
    return best[::-1]
