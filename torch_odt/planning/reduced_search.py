"""Looking for better schedules of a condensed graph by its integer program, and proving how good they are.

What `checkmate` and `poet` share: the relaxation and its roundings, neighbourhoods of the best schedule so far, and the
program itself for as long as there is time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torch_odt.planning.expand import Solution, expand, solution_of
from torch_odt.planning.milp import Model, Values
from torch_odt.planning.optimized import Counted, Incumbent
from torch_odt.planning.reduce import Reduced
from torch_odt.planning.relaxation import relax
from torch_odt.planning.rounding import round_repeatedly
from torch_odt.planning.search import Search
from torch_odt.planning.solvers import Outcome, Solver

_RELAXATION_SHARE = 0.3
_ROUNDING_SHARE = 0.25
_FINDING_SHARE = 0.5
_NEIGHBOURHOOD_SECONDS = 6.0
_NEIGHBOURHOOD_GAP = 1e-4
_MOST_FAILURES = 8
_LEAST_WIDTH = 24
_LEAST_SECONDS = 0.2

MakeModel = Callable[[Reduced, int], Model]
"""(reduced, budget_bytes) -> its program."""


class ReducedSearch:
    """The program of one condensed graph; the rows that a solution violates are added between solutions.

    Attributes:
        bound_cost: of what comes on top of the program, proved so far.
        solve_seconds: spent in the solver.
    """

    def __init__(
        self,
        reduced: Reduced,
        make_model: MakeModel,
        search: Search,
        incumbent: Incumbent,
        solver: Solver,
        deadline: float,
        gap: float,
    ) -> None:
        self.reduced = reduced
        self.search = search
        self.incumbent = incumbent
        self.solver = solver
        self.deadline = deadline
        self.gap = gap
        self.make_model = make_model
        self.model = make_model(reduced, incumbent.budget_bytes - reduced.problem.apart_bytes)
        self.bound_cost = 0.0
        self.solve_seconds = 0.0
        self._condensed = incumbent.anew()

    def find(self) -> None:
        """Look for better schedules, in half of the time that is left."""
        end = time.perf_counter() + _FINDING_SHARE * (self.deadline - time.perf_counter())
        values = self._relax()
        if values is None or self._is_over():
            return
        middle = time.perf_counter() + _ROUNDING_SHARE * (end - time.perf_counter())
        self.solve_seconds += round_repeatedly(
            self.reduced, self.make_model, values, self.solver, self.search, self.incumbent, middle
        )
        self._improve(end)

    def prove(self) -> None:
        """Solve the integer program as far as time allows."""
        if self._relax() is None:
            return
        while not self._is_over():
            outcome = self._solve(self.deadline, self.gap / 2)
            if outcome.bound == float("inf"):
                self._note_that_nothing_fits()
            else:
                self.bound_cost = max(self.bound_cost, self.model.cost(outcome.bound))
            if not outcome.has_solution or not self._take():
                return

    def _relax(self) -> Values | None:
        relaxed = relax(self.model, self.solver, _RELAXATION_SHARE * (self.deadline - time.perf_counter()))
        self.bound_cost = max(self.bound_cost, relaxed.bound_cost)
        self.solve_seconds += relaxed.solve_seconds
        if relaxed.is_infeasible:
            self._note_that_nothing_fits()
        return relaxed.values

    def _note_that_nothing_fits(self) -> None:
        """Of the choices that the condensed graph has left, so that none is better than what fits without it."""
        if self.incumbent.fits and not self.reduced.is_exact:
            self.bound_cost = max(self.bound_cost, self.incumbent.counted.extra_cost)

    def _improve(self, end: float) -> None:
        """Choose anew for some units while the others stay as they are, as long as that helps."""
        failures = 0
        for units in neighbourhoods(len(self.reduced.units)):
            clock = time.perf_counter()
            if failures == _MOST_FAILURES or clock >= end or self._is_over():
                return
            before = self.incumbent.counted
            with self.model.only(units, self._start()):
                outcome = self._solve(min(end, clock + _NEIGHBOURHOOD_SECONDS), _NEIGHBOURHOOD_GAP)
            if outcome.has_solution:
                self._take()
            failures = 0 if self._is_much_better_than(before) else failures + 1

    def _solve(self, end: float, gap: float) -> Outcome:
        clock = time.perf_counter()
        outcome = self.solver.solve(self.model.program, self.model.start(self._start()), end - clock, gap)
        self.solve_seconds += time.perf_counter() - clock
        return outcome

    def _is_much_better_than(self, before: Counted) -> bool:
        now = self.incumbent.counted
        return now.extra_cost < before.extra_cost * (1 - _NEIGHBOURHOOD_GAP) or now.late_seconds < before.late_seconds

    def _start(self) -> Solution:
        """The best known solution of the condensed graph; not every schedule is one."""
        self._offer(solution_of(self.reduced, self.incumbent.runs))
        return solution_of(self.reduced, self._condensed.runs)

    def _take(self) -> int:
        """Offer what the solver found; returns how many rows it violated and are added."""
        values = self.model.values()
        self._offer(values.solution(self.reduced))
        return self.model.add_violated(values)

    def _offer(self, solution: Solution) -> None:
        runs = expand(self.reduced, solution.kept, solution.paged)
        if runs is not None:
            self.incumbent.offer(runs)
            self._condensed.offer(runs)

    def _is_over(self) -> bool:
        extra = self.incumbent.counted.extra_cost
        whole = self.incumbent.program_cost + extra
        is_near = self.incumbent.fits and extra - self.bound_cost <= self.gap * whole
        return is_near or self.deadline - time.perf_counter() <= _LEAST_SECONDS


def neighbourhoods(units: int) -> Iterator[range]:
    """Overlapping windows of units, from the last to the first and over again; for a few units, all of them once."""
    width = max(_LEAST_WIDTH, units // 3)
    if units <= width:
        yield range(units)
        return
    starts = [*range(0, units - width, width // 2), units - width]
    while True:
        for start in reversed(starts):
            yield range(start, start + width)
