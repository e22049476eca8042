"""checkmate-lp: the integer program's relaxation, rounded in two phases.

After the approximation in Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
MLSys 2020.

Objective: few recomputed seconds under a byte budget, for graphs that are too large for the integer program. The
relaxation says to what part each storage is kept into each stage. What is above a threshold is kept, and what then has
to be recomputed follows. Rounding goes over the budget, so relaxations for somewhat smaller ones are rounded, too. The
relaxation with the budget itself gives a proven bound.
Within a few percent of the best for moderate budgets; near the smallest feasible one roundings that fit are rare, and
the result is what eviction on demand makes of them. Where that does not fit either, or time does not suffice for a
relaxation, it is what `auto` looks at first.
"""

from __future__ import annotations

import time

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.explore import explore
from torch_odt.planning.milp import Model
from torch_odt.planning.optimized import Incumbent, Optimized
from torch_odt.planning.problem import Gradients, problem_of
from torch_odt.planning.reduce import reduce
from torch_odt.planning.registry import planner
from torch_odt.planning.relaxation import relax
from torch_odt.planning.rounding import round_repeatedly
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Search
from torch_odt.planning.smallest import smallest_trials
from torch_odt.planning.solvers import SolverName, make_solver

_HEURISTIC_SECONDS = 1.5


@planner("checkmate-lp")
def checkmate_lp(
    graph: TrainingGraph, costs: Costs, budget_bytes: int, *, time_limit_seconds: float = 60.0
) -> Schedule:
    """The best rounding of a relaxation. Choose it for graphs of many hundred operators, with time to plan.

    Raises:
        PlanError: pulp or its solver is not installed.
    """
    return round_relaxation(graph, costs, budget_bytes, time_limit_seconds=time_limit_seconds).schedule


def round_relaxation(
    graph: TrainingGraph,
    costs: Costs,
    budget_bytes: int,
    *,
    gradients: Gradients = "keep",
    max_nodes: int = 200,
    time_limit_seconds: float = 60.0,
    threads: int = 2,
    solver: SolverName | None = None,
) -> Optimized:
    """The fastest rounding within a budget, and the bound of the relaxation.

    Args:
        graph, costs, budget_bytes, gradients, threads, solver: as for `checkmate.optimize`.
        max_nodes: to how many stages and units the graph is condensed.
        time_limit_seconds: when to begin no other relaxation.

    Raises:
        PlanError: pulp or the solver is not installed.
    """
    deadline = time.perf_counter() + time_limit_seconds
    chosen_solver = make_solver(solver, threads)
    problem = problem_of(graph, costs, gradients)
    search = Search(problem, budget_bytes)
    incumbent = Incumbent(problem, budget_bytes, search.best.built.runs)
    reduced = reduce(problem, max_nodes)
    bound = solve_seconds = 0.0
    if not incumbent.fits:
        model = Model(reduced, budget_bytes - problem.apart_bytes)
        relaxed = relax(model, chosen_solver, deadline - time.perf_counter())
        bound = relaxed.bound_cost
        solve_seconds = relaxed.solve_seconds
        if relaxed.values is not None:
            solve_seconds += round_repeatedly(
                reduced, Model, relaxed.values, chosen_solver, search, incumbent, deadline
            )
    if not incumbent.fits:
        # No rounding fits, or there was no time for one.
        heuristics = Search(problem, budget_bytes, time.perf_counter() + _HEURISTIC_SECONDS)
        explore(heuristics)
        incumbent.offer(heuristics.best.built.runs)
    if not incumbent.fits:
        incumbent.offer(smallest_trials(problem)[0].built.runs)
    return incumbent.optimized("checkmate-lp", reduced, bound, solve_seconds)
