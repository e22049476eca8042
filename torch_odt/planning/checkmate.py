"""checkmate: the fastest schedule within a budget, by an integer program, with a proof of how far it is from the best.

After Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020.

Objective: the fewest recomputed seconds under a byte budget. Like there, the program's order stands, and before each
of its steps everything may be recomputed once, in program order, from what was kept. Among such schedules the result
is optimal within the gap that is reported; it starts from what `auto` finds and is never slower. A graph of more than
`max_nodes` steps or storages is condensed first (see reduce.py), and then the gap is to the best schedule of the
condensed graph. The graph itself may have a faster one, which is looked for in a graph condensed half as much. Near
the smallest feasible budget a step may need the same thing twice, which this leaves to the other planners, and the
relaxation is weak there: expect gaps of a percent and more.
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
from torch_odt.planning.reduced_search import ReducedSearch
from torch_odt.planning.registry import planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Search
from torch_odt.planning.smallest import smallest_trials
from torch_odt.planning.solvers import SolverName, make_solver

_HEURISTIC_SECONDS = 1.5
_FINER = 2


@planner("checkmate")
def checkmate(graph: TrainingGraph, costs: Costs, budget_bytes: int, *, time_limit_seconds: float = 60.0) -> Schedule:
    """The best schedule that an integer program finds in a minute. Choose it where a plan is made once and used often.

    Raises:
        PlanError: pulp or its solver is not installed.
    """
    return optimize(graph, costs, budget_bytes, time_limit_seconds=time_limit_seconds).schedule


def optimize(
    graph: TrainingGraph,
    costs: Costs,
    budget_bytes: int,
    *,
    gradients: Gradients = "keep",
    max_nodes: int = 100,
    time_limit_seconds: float = 60.0,
    gap: float = 1e-4,
    threads: int = 2,
    solver: SolverName | None = None,
) -> Optimized:
    """The fastest schedule within a budget, and a proven bound.

    Args:
        graph, costs: the step and what its ops cost.
        budget_bytes: planned memory that must not be exceeded. When nothing is found that fits, the schedule that
            needs least returns.
        gradients: whether this step's gradients stay ("keep") or are added to existing ones ("accumulate").
        max_nodes: to how many stages and units the graph is condensed. More come nearer to the best schedule of the
            graph, fewer prove more about that of the condensed one.
        time_limit_seconds: for everything.
        gap: the share of a step's seconds at which to be content.
        threads: that the solver may use.
        solver: "highs", "cbc", or whichever is installed.

    Raises:
        PlanError: pulp or the solver is not installed.

    Example:
        >>> from torch_odt.capture.costs import Costs, OpCost
        >>> from torch_odt.capture.graph import Op, Output, TrainingGraph, Value
        >>> from torch_odt.planning.checkmate import optimize
        >>> value = Value(0, "loss", (), (), "float32", 4, "computed", 0, producer=0)
        >>> graph = TrainingGraph([Op(0, "aten.loss", (), {}, (), (), (0,))], [value], [], [Output(0, "loss", 0)], 1, 1)
        >>> costs = Costs({0: OpCost(1e-3, ((0, 4),), (0,))})
        >>> optimize(graph, costs, 64).gap
        0.0
    """
    deadline = time.perf_counter() + time_limit_seconds
    chosen_solver = make_solver(solver, threads)
    problem = problem_of(graph, costs, gradients)
    search = Search(problem, budget_bytes, time.perf_counter() + min(_HEURISTIC_SECONDS, time_limit_seconds / 4))
    explore(search)
    incumbent = Incumbent(problem, budget_bytes, search.best.built.runs)
    if not incumbent.fits:
        incumbent.offer(smallest_trials(problem)[0].built.runs)
    reduced = reduce(problem, max_nodes)
    is_cheapest = incumbent.fits and incumbent.counted.extra_cost <= 0
    if is_cheapest or time.perf_counter() >= deadline:
        return incumbent.optimized("checkmate", reduced, 0.0, 0.0)
    proving = ReducedSearch(reduced, Model, search, incumbent, chosen_solver, deadline, gap)
    # Schedules are looked for in a larger graph than can be searched to the end.
    finer = reduced if reduced.is_exact else reduce(problem, _FINER * max_nodes)
    finding = proving
    if not finer.has_same_choices_as(reduced):
        finding = ReducedSearch(finer, Model, search, incumbent, chosen_solver, deadline, gap)
    finding.find()
    proving.prove()
    solve_seconds = sum(run.solve_seconds for run in {finding, proving})
    return incumbent.optimized("checkmate", reduced, proving.bound_cost, solve_seconds)
