"""What `auto` does with more time than a first step has: every planner is tried, each held to what its schedules take.

Planners that take no time limit come first, for they are fast. What is left is shared by a longer search and by the
planners that stop when they are told to (integer programs, where their solver is installed). Nothing that is found
takes the place of something better, so more planners and more time never make a plan worse.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError, ScheduleError
from torch_odt.planning.calibrate import within
from torch_odt.planning.problem import Gradients
from torch_odt.planning.registry import Planner, built_in_names, get_planner, is_for_paging, limited, takes_time_limit
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Footprint
from torch_odt.planning.simulate import simulate

_NOT_TRIED = ("auto", "keep-all", "poet-paging", "poet-remat")
# With less, an integer program is hardly written down.
_LEAST_SHARE_SECONDS = 2.0
# The planner aims lower when its schedule takes more than it counts.
_SHARE_OF_AN_AIM = 0.6


@dataclass
class Best:
    """The best schedule for a budget so far.

    Attributes:
        schedule: what it is.
        taken_bytes, seconds: of it.
    """

    graph: TrainingGraph
    costs: Costs
    budget_bytes: int
    taken_by: Footprint
    gradients: Gradients
    schedule: Schedule

    def __post_init__(self) -> None:
        self.taken_bytes, self.seconds = self._count(self.schedule)

    @property
    def is_fastest(self) -> bool:
        """Nothing is computed again and nothing waited for: there is nothing to save."""
        found = simulate(self.graph, self.costs, self.schedule, gradients=self.gradients)
        return self.taken_bytes <= self.budget_bytes and not found.recompute_seconds and not found.written_bytes

    def offer(self, schedule: Schedule) -> None:
        """Take a schedule if it is better: one that fits and is faster; failing that, one that takes less."""
        taken_bytes, seconds = self._count(schedule)
        if self._order(taken_bytes, seconds) < self._order(self.taken_bytes, self.seconds):
            self.schedule, self.taken_bytes, self.seconds = schedule, taken_bytes, seconds

    def _count(self, schedule: Schedule) -> tuple[int, float]:
        simulation = simulate(self.graph, self.costs, schedule, gradients=self.gradients)
        return self.taken_by(schedule), simulation.seconds

    def _order(self, taken_bytes: int, seconds: float) -> tuple[bool, float, float]:
        if taken_bytes <= self.budget_bytes:
            return False, seconds, taken_bytes
        return True, taken_bytes, seconds


def improve_until(deadline: float, best: Best, search: Callable[[float], Schedule]) -> Schedule:
    """Try every planner until a deadline; returns the best schedule.

    Args:
        deadline: `time.perf_counter()` when to stop; what does not look at the time is still waited for.
        best: where to begin.
        search: looks for a schedule for so many seconds.
    """
    # Without anything to page to, others do as those do that page.
    in_vain = [] if best.costs.transfers is not None else [n for n in built_in_names() if is_for_paging(n)]
    left_out = (*_NOT_TRIED, *in_vain)
    names = [name for name in built_in_names() if name not in left_out]
    timed = [name for name in names if takes_time_limit(get_planner(name))]
    _try(best, deadline, [name for name in names if name not in timed])
    if (deadline - time.perf_counter()) / (1 + len(timed)) < _LEAST_SHARE_SECONDS:
        timed = []
    left_seconds = deadline - time.perf_counter()
    if left_seconds > 0 and not best.is_fastest:
        best.offer(search(left_seconds / (1 + len(timed))))
    for position, name in enumerate(timed):
        now = time.perf_counter()
        _try(best, now + (deadline - now) / (len(timed) - position), [name])
    return replace(best.schedule, planner="auto")


def _try(best: Best, deadline: float, names: Iterable[str]) -> None:
    for name in names:
        if time.perf_counter() >= deadline or best.is_fastest:
            return
        planner: Planner = limited(get_planner(name), deadline, _SHARE_OF_AN_AIM)
        try:
            schedule = within(planner, best.graph, best.costs, best.budget_bytes, best.taken_by)
        except ScheduleError:
            raise
        except PlanError:
            # Its solver is not installed.
            continue
        best.offer(schedule)
