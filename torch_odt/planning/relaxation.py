"""The relaxation of the integer program, with the rows that its solutions violate added until there are none."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch_odt.planning.milp import Model, Values
from torch_odt.planning.solvers import Solver

_ROUNDS = 12
_LEAST_SECONDS = 0.2


@dataclass(frozen=True)
class Relaxed:
    """What was reached.

    Attributes:
        values: the last solution; None where there is none, or time did not suffice for one.
        bound_cost: what no schedule can go below, above what the program itself costs.
        is_infeasible: no schedule fits.
        solve_seconds: spent in the solver.
    """

    values: Values | None
    bound_cost: float
    is_infeasible: bool
    solve_seconds: float


def relax(model: Model, solver: Solver, time_limit_seconds: float) -> Relaxed:
    """Solve the relaxation and add rows, as long as there is time."""
    end = time.perf_counter() + time_limit_seconds
    values = None
    bound = solve_seconds = 0.0
    for _ in range(_ROUNDS):
        clock = time.perf_counter()
        if end - clock <= _LEAST_SECONDS:
            break
        outcome = solver.relax(model.program, end - clock)
        solve_seconds += time.perf_counter() - clock
        if not outcome.has_solution:
            is_infeasible = outcome.bound == float("inf")
            return Relaxed(None if is_infeasible else values, bound, is_infeasible, solve_seconds)
        values = model.values()
        bound = max(bound, model.cost(outcome.bound))
        if not model.add_violated(values):
            break
    return Relaxed(values, bound, False, solve_seconds)
