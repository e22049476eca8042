"""From a fractional solution of the relaxation to schedules."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from torch_odt.planning.expand import expand
from torch_odt.planning.milp import Model, Values
from torch_odt.planning.optimized import Incumbent
from torch_odt.planning.reduce import Reduced
from torch_odt.planning.relaxation import relax
from torch_odt.planning.search import Search
from torch_odt.planning.solvers import Solver

_THRESHOLDS = tuple(step / 10 for step in range(1, 10))
_DRAWS = 60
_SHARES = (0.97, 0.94, 0.91, 0.88, 0.84, 0.8)
_REPAIRED = 12
_ALMOST_NOTHING = 1e-6


def round_repeatedly(
    reduced: Reduced,
    make_model: Callable[[Reduced, int], Model],
    values: Values,
    solver: Solver,
    search: Search,
    incumbent: Incumbent,
    end: float,
) -> float:
    """Round relaxations, with the budget and with smaller ones, and offer what comes of them.

    Low thresholds go over the budget of the relaxation, high ones recompute more than it takes: in between, with a
    somewhat smaller budget, lie the roundings that are good.

    Args:
        reduced, search, incumbent: what is planned.
        make_model: makes the program for a budget.
        values: of the relaxation with the budget itself.
        end: `time.perf_counter()` when to begin no other relaxation.

    Returns:
        The seconds spent in the solver.
    """
    _offer_rounded(reduced, values, search, incumbent)
    solve_seconds = 0.0
    for share in _SHARES:
        remaining = end - time.perf_counter()
        if remaining <= 0:
            break
        model = make_model(reduced, int(share * (incumbent.budget_bytes - reduced.problem.apart_bytes)))
        relaxed = relax(model, solver, remaining)
        solve_seconds += relaxed.solve_seconds
        if relaxed.values is None:
            break
        _offer_rounded(reduced, relaxed.values, search, incumbent)
    return solve_seconds


def _offer_rounded(reduced: Reduced, values: Values, search: Search, incumbent: Incumbent) -> None:
    """Offer the roundings of a relaxation, as they are and repaired by evicting on demand."""
    cheapest: dict[frozenset[int], float] = {}
    paged = [values.paged_rather(reduced)] * reduced.stages
    for kept in _rounded(reduced, values):
        runs = expand(reduced, kept, paged)
        if runs is not None:
            cost = incumbent.offer(runs).extra_cost
            crossing = frozenset(reduced.units[u].storage for u in kept[reduced.crossing])
            cheapest[crossing] = min(cost, cheapest.get(crossing, cost))
    for crossing in sorted(cheapest, key=cheapest.__getitem__)[:_REPAIRED]:
        incumbent.offer(search.try_keeping(crossing).built.runs)


def _rounded(reduced: Reduced, values: Values) -> Iterator[list[set[int]]]:
    """What to keep into each stage: all above a threshold, for nine of them and for random ones.

    A random threshold is drawn for each unit and not for each of its stages: what is kept is then kept for long.
    """
    for threshold in _THRESHOLDS:
        yield _kept(reduced, values, [threshold] * len(reduced.units))
    generator = random.Random(0)
    for _ in range(_DRAWS):
        yield _kept(reduced, values, [generator.uniform(0.02, 0.98) for _ in reduced.units])


def _kept(reduced: Reduced, values: Values, thresholds: list[float]) -> list[set[int]]:
    kept: list[set[int]] = [set() for _ in range(reduced.stages + 1)]
    for (stage, number), value in values.kept.items():
        can_come_back = reduced.units[number].action >= 0 or reduced.units[number].storage in reduced.problem.paging
        if value > (thresholds[number] if can_come_back else _ALMOST_NOTHING):
            kept[stage].add(number)
    return kept
