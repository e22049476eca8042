"""chen: square root of n checkpoints.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv:1604.06174).

Objective: little memory for at most one more forward pass. The forward pass is cut into segments of equal bytes; what
crosses a cut is kept, a segment is recomputed as a whole when its backward pass begins. Optimal, for about sqrt(n)
segments, on a chain of equal layers. It looks neither at what an op costs nor at where the peak really is, so that on
networks with cheap and dear ops it recomputes convolutions where a normalisation would have done.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.keep_set import forward_storages
from torch_odt.planning.problem import Problem, problem_of
from torch_odt.planning.registry import planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Search

_SHARES_OF_ROOT = (0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0)
# A cut may move by this share of a segment to where little crosses it.
_WINDOW = 0.35


@planner("chen")
def chen(graph: TrainingGraph, costs: Costs, budget_bytes: int) -> Schedule:
    """Keep what lies between segments. Choose it as a baseline, or for chains of equal layers."""
    search = Search(problem_of(graph, costs), budget_bytes)
    for kept in segmentations(search.problem):
        search.try_keeping(kept, evict=False)
    return search.schedule("chen")


def segmentations(problem: Problem) -> Iterator[frozenset[int]]:
    """Keep-sets for several numbers of segments around the square root of the number of storages."""
    if problem.boundary == 0:
        return
    root = isqrt(max(1, sum(problem.nbytes[s] > 0 for s in forward_storages(problem))))
    for count in sorted({max(2, round(share * root)) for share in _SHARES_OF_ROOT}):
        yield segment_borders(problem, count)


def segment_borders(problem: Problem, count: int) -> frozenset[int]:
    """What crosses the borders of `count` segments of about equal bytes, each moved to where the least crosses."""
    crossing = _crossing_bytes(problem)
    produced = _produced_bytes(problem)
    total, length = produced[-1], len(crossing)
    kept: set[int] = set()
    for border in range(1, count):
        low, high = total * (border - _WINDOW) / count, total * (border + _WINDOW) / count
        window = [p for p in range(length - 1) if low <= produced[p] <= high]
        if not window:
            window = [min(range(length), key=lambda p: abs(produced[p] - total * border / count))]
        middle = min(window, key=lambda p: (crossing[p], p))
        kept.update(_crossing(problem, middle))
    return frozenset(kept)


def _crossing(problem: Problem, position: int) -> Iterator[int]:
    """Storages computed up to a step of the forward pass and read behind it in the forward pass."""
    for op in problem.steps[: position + 1]:
        for storage in problem.results[op]:
            if any(position < use < problem.boundary for use in problem.uses[storage]):
                yield storage


def _crossing_bytes(problem: Problem) -> list[int]:
    change = [0] * (problem.boundary + 1)
    for op in problem.steps[: problem.boundary]:
        for storage in problem.results[op]:
            last = max((use for use in problem.uses[storage] if use < problem.boundary), default=-1)
            if last > problem.born[storage]:
                change[problem.born[storage]] += problem.nbytes[storage]
                change[last] -= problem.nbytes[storage]
    return _running_sum(change[: problem.boundary])


def _produced_bytes(problem: Problem) -> list[int]:
    steps = problem.steps[: problem.boundary]
    return _running_sum([sum(problem.nbytes[s] for s in problem.results[op]) for op in steps])


def _running_sum(numbers: list[int]) -> list[int]:
    total, sums = 0, []
    for number in numbers:
        total += number
        sums.append(total)
    return sums
