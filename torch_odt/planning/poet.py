"""poet: the fewest joules, or seconds, within a budget and a deadline, by rematerialization and paging together.

After Patil, Jain, Dutta, Stoica, Gonzalez, "POET: Training Neural Networks on Tiny Devices with Integrated
Rematerialization and Paging", ICML 2022.

Objective: the joules of ops and transfers (or the seconds of a step) under a byte budget and a deadline. As in
checkmate.py, the program's order stands, and before each of its steps everything may come back once: computed again or
read from a file. Where transfers do not run beside ops, the result is optimal among such schedules within the gap that
is reported; where they do, the bound counts only that transfers follow one another, and the clock what they take. What
the paper leaves out counts here: transfers take time, what is read has its place in memory from the start, branches and
their joins are in the graph, and the file has a size. Parameters and the optimizer's state are outside of a budget,
gradients within it. It starts from what the other planners find and is never worse. Larger graphs are condensed
first, and then the gap is to the best schedule of the condensed graph. Near the smallest feasible budget, and where
the file is nearly full, the bound is weak.

"poet-paging" only pages and "poet-remat" only recomputes: what the paper compares with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning.capuchin import capuchin
from torch_odt.planning.explore import explore
from torch_odt.planning.lowering import runs_of
from torch_odt.planning.objective import Objective, priced
from torch_odt.planning.optimized import Optimized
from torch_odt.planning.paging_incumbent import PagingIncumbent, PricedGoal
from torch_odt.planning.paging_model import PagingModel
from torch_odt.planning.persistent import cheapest
from torch_odt.planning.problem import Gradients, Problem, problem_of
from torch_odt.planning.reduce import Reduced, reduce
from torch_odt.planning.reduced_search import ReducedSearch
from torch_odt.planning.registry import planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Search, Trial
from torch_odt.planning.smallest import smallest_trials
from torch_odt.planning.solvers import SolverName, make_solver

Means = Literal["both", "paging", "rematerialization"]

_NAMES: dict[Means, str] = {"both": "poet", "paging": "poet-paging", "rematerialization": "poet-remat"}
# Whose schedules are tried besides those that `explore` tries.
_OTHERS: dict[Means, tuple[str, ...]] = {
    "both": ("capuchin", "pofo"),
    "paging": (),
    "rematerialization": ("rotor",),
}
_HEURISTIC_SECONDS = 1.5
_HEURISTIC_SHARE = 1 / 3
_PRICES = 12
_HASTY_SHARE = 0.03
_FINER = 2


@planner("poet")
def poet(
    graph: TrainingGraph,
    costs: Costs,
    budget_bytes: int,
    *,
    objective: Objective = "seconds",
    deadline_seconds: float = math.inf,
    time_limit_seconds: float = 60.0,
) -> Schedule:
    """Recompute and page, whatever is cheaper, by an integer program. Choose it where energy or a deadline counts.

    Raises:
        PlanError: pulp or its solver is not installed; or joules are asked for, and the costs do not know the watts.
    """
    return optimize(
        graph,
        costs,
        budget_bytes,
        objective=objective,
        deadline_seconds=deadline_seconds,
        time_limit_seconds=time_limit_seconds,
    ).schedule


@planner("poet-paging")
def poet_paging(
    graph: TrainingGraph,
    costs: Costs,
    budget_bytes: int,
    *,
    objective: Objective = "seconds",
    deadline_seconds: float = math.inf,
    time_limit_seconds: float = 60.0,
) -> Schedule:
    """As `poet`, without rematerialization. Choose it as a baseline, or where nothing may run twice."""
    return optimize(
        graph,
        costs,
        budget_bytes,
        objective=objective,
        deadline_seconds=deadline_seconds,
        means="paging",
        time_limit_seconds=time_limit_seconds,
    ).schedule


@planner("poet-remat")
def poet_remat(
    graph: TrainingGraph,
    costs: Costs,
    budget_bytes: int,
    *,
    objective: Objective = "seconds",
    deadline_seconds: float = math.inf,
    time_limit_seconds: float = 60.0,
) -> Schedule:
    """As `poet`, without paging. Choose it as a baseline, or where the storage wears."""
    return optimize(
        graph,
        costs,
        budget_bytes,
        objective=objective,
        deadline_seconds=deadline_seconds,
        means="rematerialization",
        time_limit_seconds=time_limit_seconds,
    ).schedule


def optimize(
    graph: TrainingGraph,
    costs: Costs,
    budget_bytes: int,
    *,
    objective: Objective = "seconds",
    deadline_seconds: float = math.inf,
    means: Means = "both",
    gradients: Gradients = "keep",
    max_nodes: int = 100,
    time_limit_seconds: float = 60.0,
    gap: float = 1e-4,
    threads: int = 2,
    solver: SolverName | None = None,
) -> Optimized:
    """The schedule of the fewest joules or seconds within a budget and a deadline, and a proven bound.

    Args:
        graph: the step.
        costs: of its ops, and of transfers; without those, nothing is paged.
        budget_bytes: planned memory that must not be exceeded. When nothing is found that fits, the schedule that
            needs least returns.
        objective: what to spend least of.
        deadline_seconds: what a step may take, transfers included. When nothing is found that is in time, the fastest
            schedule returns.
        means: "both", "paging" or "rematerialization".
        gradients, max_nodes, time_limit_seconds, threads, solver: as for `checkmate.optimize`.
        gap: the share of a step's joules or seconds at which to be content.

    Raises:
        PlanError: pulp or the solver is not installed; or joules are asked for, and the costs do not know the watts.

    Example:
        >>> from torch_odt.capture.costs import Costs, OpCost
        >>> from torch_odt.capture.graph import Op, Output, TrainingGraph, Value
        >>> from torch_odt.planning.poet import optimize
        >>> value = Value(0, "loss", (), (), "float32", 4, "computed", 0, producer=0)
        >>> graph = TrainingGraph([Op(0, "aten.loss", (), {}, (), (), (0,))], [value], [], [Output(0, "loss", 0)], 1, 1)
        >>> costs = Costs({0: OpCost(2.0, ((0, 4),), (0,))}, watts=3.0)
        >>> optimize(graph, costs, 64, objective="joules").joules
        6.0
    """
    if objective == "joules" and costs.watts <= 0:
        raise PlanError("joules need the watts of the processor: plan for a device, or give Costs.watts")
    end = time.perf_counter() + time_limit_seconds
    chosen_solver = make_solver(solver, threads)
    goal = PricedGoal(objective, deadline_seconds, costs.watts)
    usable = replace(costs, transfers=None) if means == "rematerialization" else costs
    start = _WarmStart(graph, usable, budget_bytes, goal, means, gradients, _HEURISTIC_SHARE * time_limit_seconds)
    incumbent = start.incumbent
    reduced = reduce(start.problem, max_nodes)
    is_cheapest = incumbent.fits and incumbent.counted.extra_cost <= 0
    if is_cheapest or time.perf_counter() >= end:
        return incumbent.optimized(_NAMES[means], reduced, 0.0, 0.0)
    make_model = partial(_make_model, goal=goal)
    proving = ReducedSearch(reduced, make_model, start.search, incumbent, chosen_solver, end, gap)
    finer = reduced if reduced.is_exact else reduce(start.problem, _FINER * max_nodes)
    finding = proving
    if not finer.has_same_choices_as(reduced):
        finding = ReducedSearch(finer, make_model, start.search, incumbent, chosen_solver, end, gap)
    finding.find()
    proving.prove()
    solve_seconds = sum(run.solve_seconds for run in {finding, proving})
    return incumbent.optimized(_NAMES[means], reduced, proving.bound_cost, solve_seconds)


def _make_model(reduced: Reduced, budget_bytes: int, goal: PricedGoal) -> PagingModel:
    return PagingModel(reduced, budget_bytes, goal)


class _WarmStart:
    """The best that heuristics find.

    A heuristic is given joules as if they were seconds; for a deadline, a second costs joules as well, the more the
    later its schedules are.

    Nothing is begun after its time is over but what costs least without paging, and what takes fewest bytes where
    nothing fits.

    Attributes:
        problem: what may be done, in seconds.
        incumbent: the best schedule.
        search: the heuristics at the last price, for repairing other schedules.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        costs: Costs,
        budget_bytes: int,
        goal: PricedGoal,
        means: Means,
        gradients: Gradients,
        time_limit_seconds: float,
    ) -> None:
        self.graph = graph
        self.costs = costs
        self.budget_bytes = budget_bytes
        self.goal = goal
        self.means = means
        self.gradients = gradients
        self.problem = self._allowed(problem_of(graph, costs, gradients))
        self.incumbent = PagingIncumbent(self.problem, budget_bytes, self.problem.steps, goal)
        self._end = time.perf_counter() + time_limit_seconds
        self._trial_seconds = min(_HEURISTIC_SECONDS, time_limit_seconds)
        if goal.objective == "joules":
            # Schedules that are hasty as well are not always dearer.
            self._try(priced(costs, _HASTY_SHARE * costs.watts))
        self.search = self._try(costs if goal.objective == "seconds" else priced(costs, 0.0))
        if goal.deadline_seconds < math.inf and goal.objective == "joules":
            self._trial_seconds = min(_HEURISTIC_SECONDS, time_limit_seconds / _PRICES)
            self._meet_deadline()
        if not self.incumbent.fits:
            self.incumbent.offer(smallest_trials(self.problem)[0].built.runs)

    def _meet_deadline(self) -> None:
        late = self.incumbent.count(self.search.best.built.runs).late_seconds > 0
        if not late:
            return
        self._try(self.costs)
        low, high = math.log(0.01 * self.costs.watts), math.log(1000 * self.costs.watts)
        for _ in range(_PRICES):
            if self._is_over:
                return
            middle = (low + high) / 2
            self.search = self._try(priced(self.costs, math.exp(middle)))
            if self.incumbent.count(self.search.best.built.runs).late_seconds > 0:
                low = middle
            else:
                high = middle

    def _try(self, costs: Costs) -> Search:
        problem = self._allowed(problem_of(self.graph, costs, self.gradients))
        # What is second by a price may be the first that is in time.
        end = min(self._end, time.perf_counter() + self._trial_seconds)
        search = Search(problem, self.budget_bytes, end, report=self._offer)
        explore(search)
        for runs in self._of_others(costs):
            self.incumbent.offer(runs)
        return search

    def _offer(self, trial: Trial) -> None:
        if trial.fits or not self.incumbent.fits:
            self.incumbent.offer(trial.built.runs)

    def _of_others(self, costs: Costs) -> Iterator[Sequence[int]]:
        for name in _OTHERS[self.means]:
            if self._is_over:
                return
            if name == "capuchin":
                schedule = capuchin(self.graph, costs, self.budget_bytes)
            else:
                problem = problem_of(self.graph, costs)
                schedule = cheapest(problem, self.budget_bytes, name, pages=name == "pofo", stop_at=self._end)
            yield runs_of(self.problem, schedule)

    @property
    def _is_over(self) -> bool:
        return time.perf_counter() >= self._end

    def _allowed(self, problem: Problem) -> Problem:
        """The problem of what may be done: where there is only paging, nothing can be computed again."""
        return replace(problem, rerun=[-1] * len(problem.rerun)) if self.means == "paging" else problem
