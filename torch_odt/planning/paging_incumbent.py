"""What schedules that page are compared by: seconds or joules within a deadline, as a clock counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_odt.planning.lowering import lower, runs_of
from torch_odt.planning.objective import Goal
from torch_odt.planning.optimized import Counted, Incumbent, Optimized
from torch_odt.planning.problem import Problem
from torch_odt.planning.reduce import Reduced
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import peak_bytes
from torch_odt.planning.spread_transfers import clock_after, file_peak_bytes, spread_transfers, with_page_outs

_NEVER = 1 << 62
_ROUNDING = 1e-9


@dataclass(frozen=True)
class PricedGoal(Goal):
    """A goal, and what it costs to compute.

    Attributes:
        watts: of ops.
    """

    watts: float = 0.0

    def program_cost(self, problem: Problem) -> float:
        """What the program itself costs."""
        return problem.program_seconds * (self.watts if self.objective == "joules" else 1.0)


class PagingIncumbent(Incumbent):
    """The best sequence of steps so far, by a goal; `problem` counts seconds."""

    def __init__(self, problem: Problem, budget_bytes: int, runs: Sequence[int], goal: PricedGoal) -> None:
        self.goal = goal
        super().__init__(problem, budget_bytes, runs)

    @property
    def program_cost(self) -> float:
        return self.goal.program_cost(self.problem)

    def anew(self) -> PagingIncumbent:
        return PagingIncumbent(self.problem, self.budget_bytes, self.problem.steps, self.goal)

    def count(self, runs: Sequence[int]) -> Counted:
        problem, goal = self.problem, self.goal
        runs = self._with_transfers(runs)
        if problem.transfers is not None and file_peak_bytes(problem, runs) > problem.transfers.limit_bytes:
            return Counted(_NEVER, 0.0)
        clock = clock_after(problem, runs)
        joules = clock.op_seconds * goal.watts + clock.transfer_joules
        cost = joules if goal.objective == "joules" else clock.seconds
        late_seconds = max(0.0, clock.seconds - goal.deadline_seconds * (1 + _ROUNDING))
        return Counted(peak_bytes(problem, runs) + problem.apart_bytes, cost - self.program_cost, late_seconds)

    def schedule(self, planner: str) -> Schedule:
        """The best sequence as a schedule."""
        return lower(self.problem, self._with_transfers(self.runs), planner)

    def optimized(self, planner: str, reduced: Reduced, bound_cost: float, solve_seconds: float) -> Optimized:
        bound = self.program_cost + bound_cost
        schedule = self.schedule(planner)
        is_joules = self.goal.objective == "joules"
        return Optimized(
            schedule=schedule,
            fits=self.fits,
            seconds=clock_after(self.problem, runs_of(self.problem, schedule)).seconds,
            bound_seconds=0.0 if is_joules else bound,
            solve_seconds=solve_seconds,
            stages=reduced.stages,
            units=len(reduced.units),
            is_exact=reduced.is_exact,
            joules=self.program_cost + self.counted.extra_cost if is_joules else 0.0,
            bound_joules=bound if is_joules else 0.0,
        )

    def _with_transfers(self, runs: Sequence[int]) -> list[int]:
        """The steps as they will run; a sequence that has page-outs keeps those."""
        problem = self.problem
        if problem.transfers is None:
            return list(runs)
        if any(run in self._writing for run in runs):
            moved = _without_idle_page_outs(problem, runs)
        else:
            limit = self.budget_bytes - problem.apart_bytes
            moved = with_page_outs(problem, runs, limit)
            if problem.transfers.overlaps:
                moved = spread_transfers(problem, moved, limit)
        # A schedule waits for a page-out where its memory is let go, which a sequence need not say.
        return runs_of(problem, lower(problem, moved))

    @property
    def _writing(self) -> set[int]:
        return {steps.out for steps in self.problem.paging.values()}


def _without_idle_page_outs(problem: Problem, runs: Sequence[int]) -> list[int]:
    """The same steps, but nothing is written that does not come back: what computed it again has taken its place."""
    outs = {steps.out: storage for storage, steps in problem.paging.items()}
    let_gos = {steps.let_go: storage for storage, steps in problem.paging.items()}
    backs = {steps.back: storage for storage, steps in problem.paging.items()}
    kept: list[int] = []
    awaited: set[int] = set()
    for run in reversed(runs):
        storage = outs.get(run, let_gos.get(run))
        if storage is not None and storage not in awaited:
            continue
        if run in outs:
            awaited.discard(outs[run])
        elif run in backs:
            awaited.add(backs[run])
        kept.append(run)
    return kept[::-1]
