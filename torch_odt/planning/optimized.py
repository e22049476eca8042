"""What planners that prove something return, and how they keep count of the best schedule so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_odt.planning.lowering import lower
from torch_odt.planning.problem import BOUNDARY, Problem
from torch_odt.planning.reduce import Reduced
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import peak_bytes


@dataclass(frozen=True)
class Optimized:
    """A schedule and how good it is.

    Attributes:
        schedule: the best that was found.
        fits: whether it stays within the budget, and the deadline if there is one.
        seconds: of a step with it.
        bound_seconds: what no schedule of the condensed graph can go below, as far as was proved; 0 where it is joules
            that are minimised.
        solve_seconds: spent in the solver.
        stages, units: the size of the condensed graph.
        is_exact: the graph was small enough not to be condensed.
        joules: of a step with it, where it is they that are minimised; 0 otherwise.
        bound_joules: what no schedule of the condensed graph can go below then.
    """

    schedule: Schedule
    fits: bool
    seconds: float
    bound_seconds: float
    solve_seconds: float
    stages: int
    units: int
    is_exact: bool
    joules: float = 0.0
    bound_joules: float = 0.0

    @property
    def gap(self) -> float:
        """What share of the schedule's seconds or joules the best one may save; 1 where it does not fit."""
        if not self.fits:
            return 1.0
        bound, reached = (self.bound_joules, self.joules) if self.bound_joules else (self.bound_seconds, self.seconds)
        return max(0.0, 1.0 - bound / reached) if reached else 0.0


class Counted(NamedTuple):
    """What a sequence of ops takes.

    Attributes:
        peak_bytes: of it.
        extra_cost: what it costs above the program itself: seconds, or whatever else is minimised.
        late_seconds: after a deadline.
    """

    peak_bytes: int
    extra_cost: float
    late_seconds: float = 0.0


class Incumbent:
    """The best sequence of ops so far, counted op by op.

    Attributes:
        runs: the sequence.
        counted: what it takes.
    """

    def __init__(self, problem: Problem, budget_bytes: int, runs: Sequence[int]) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.runs = runs
        self.counted = self.count(runs)

    @property
    def fits(self) -> bool:
        return self.counted.peak_bytes <= self.budget_bytes and self.counted.late_seconds <= 0

    @property
    def program_cost(self) -> float:
        return self.problem.program_seconds

    def anew(self) -> Incumbent:
        """One like this that knows only the program itself."""
        return Incumbent(self.problem, self.budget_bytes, self.problem.steps)

    def offer(self, runs: Sequence[int]) -> Counted:
        """Take a sequence if it is better: if it fits and costs less; failing that, if it is nearer to fitting."""
        counted = self.count(runs)
        if self._order(counted) < self._order(self.counted):
            self.runs = runs
            self.counted = counted
        return counted

    def count(self, runs: Sequence[int]) -> Counted:
        """What a sequence of ops takes."""
        problem = self.problem
        seconds = sum(problem.seconds[op] for op in runs if op != BOUNDARY)
        return Counted(peak_bytes(problem, runs) + problem.apart_bytes, seconds - problem.program_seconds)

    def _order(self, counted: Counted) -> tuple[int, float, float]:
        if counted.peak_bytes > self.budget_bytes:
            return (2, counted.peak_bytes, counted.extra_cost)
        if counted.late_seconds > 0:
            return (1, counted.late_seconds, counted.extra_cost)
        return (0, counted.extra_cost, counted.peak_bytes)

    def optimized(self, planner: str, reduced: Reduced, bound_seconds: float, solve_seconds: float) -> Optimized:
        """The result; `bound_seconds` are of recomputation alone."""
        return Optimized(
            schedule=lower(self.problem, self.runs, planner),
            fits=self.fits,
            seconds=self.problem.program_seconds + self.counted.extra_cost,
            bound_seconds=self.problem.program_seconds + bound_seconds,
            solve_seconds=solve_seconds,
            stages=reduced.stages,
            units=len(reduced.units),
            is_exact=reduced.is_exact,
        )
