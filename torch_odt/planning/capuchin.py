"""capuchin: swap what lies idle for long enough, then swap or recompute whatever costs less.

Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020.

Objective: little time lost to swapping, decided from one observed run. Between its last use in the forward and its
first in the backward pass a storage lies idle; what is left of that after writing and reading it back is its free
time. Storages are swapped by free time, the longest first, as long as there is any; then each further one costs time,
and it is swapped or recomputed, whichever costs less for its bytes. Near the best where transfers are fast and run
beside ops. It looks at each storage by itself: transfers that wait for each other, and recomputations that need one
another, cost more than it thinks, and energy is none of its concerns. Without anything to page to, it only recomputes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.keep_set import forward_storages, uses_with_recomputation
from torch_odt.planning.live_profile import peak_bytes
from torch_odt.planning.problem import BOUNDARY, Problem, problem_of
from torch_odt.planning.registry import planner
from torch_odt.planning.rematerialize import Built, build
from torch_odt.planning.schedule import Schedule

_NO_TIME = 1e-12
# Of all choices, so many different shares are tried where the budget is out of reach.
_PARTS = 8


@planner("capuchin")
def capuchin(graph: TrainingGraph, costs: Costs, budget_bytes: int) -> Schedule:
    """Swap by free time, then whatever costs less. Choose it as a baseline for paging."""
    problem = problem_of(graph, costs)
    choices = list(_choices(problem))
    best = build(problem)
    least = peak_bytes(problem, best.runs)
    excess = least - budget_bytes
    for count, choice in enumerate(choices, 1):
        if excess <= 0:
            break
        excess -= problem.nbytes[choice.storage]
        if excess <= 0:
            # What has been chosen may not have been there when memory was scarcest.
            built = _build(problem, choices[:count], budget_bytes)
            peak = peak_bytes(problem, built.runs)
            if peak < least:
                best, least = built, peak
            excess = peak - budget_bytes
    if excess > 0:
        # Recomputation needs memory, too: to give up everything is not always what takes least.
        shares = [choices[: len(choices) * part // _PARTS] for part in range(1, _PARTS + 1)]
        tried = [best, *(_build(problem, share, budget_bytes) for share in shares)]
        best = min(tried, key=lambda built: peak_bytes(problem, built.runs))
    return best.schedule(problem, "capuchin")


@dataclass(frozen=True)
class _Choice:
    storage: int
    is_swapped: bool


def _choices(problem: Problem) -> Iterator[_Choice]:
    """What to give up, in this order, and how."""
    crossing = [s for s in forward_storages(problem) if problem.nbytes[s] and _first_use_behind(problem, s) is not None]
    pageable = [s for s in problem.paging if problem.nbytes[s] and _first_use_behind(problem, s) is not None]
    free = _free_seconds(problem, pageable)
    hidden = sorted((s for s in pageable if free[s] >= 0), key=lambda s: (-free[s], s))
    yield from (_Choice(storage, is_swapped=True) for storage in hidden)
    left = set(crossing).union(pageable).difference(hidden)
    costs = {s: min(_ways(problem, s, free), key=lambda way: way[0]) for s in left}
    for storage in sorted(left, key=lambda s: (costs[s][0] / problem.nbytes[s], s)):
        yield _Choice(storage, is_swapped=costs[storage][1])


def _ways(problem: Problem, storage: int, free: dict[int, float]) -> Iterator[tuple[float, bool]]:
    """The seconds that each way of giving up a storage costs, and whether that way is a swap."""
    if problem.rerun[storage] >= 0:
        yield problem.seconds[problem.rerun[storage]] + _NO_TIME, False
    if storage in free:
        yield -free[storage], True


def _free_seconds(problem: Problem, storages: list[int]) -> dict[int, float]:
    """How long each storage lies idle beyond its transfers; below 0, what a swap costs."""
    clock, starts = 0.0, []
    for op in problem.steps:
        starts.append(clock)
        clock += 0.0 if op == BOUNDARY else problem.seconds[op]
    overlaps = problem.transfers is not None and problem.transfers.overlaps
    found = {}
    for storage in storages:
        first = _first_use_behind(problem, storage)
        assert first is not None
        last = max((p for p in problem.uses[storage] if p < first), default=problem.born[storage])
        idle = starts[first] - (starts[last] + problem.seconds[problem.steps[last]] if last >= 0 else 0.0)
        steps = problem.paging[storage]
        transfers = problem.seconds[steps.out] + problem.seconds[steps.back]
        found[storage] = (idle if overlaps else 0.0) - transfers
    return found


def _first_use_behind(problem: Problem, storage: int) -> int | None:
    """The position of a storage's first use in the backward pass, if it comes from the forward pass."""
    if problem.born[storage] > problem.boundary:
        return None
    return next((p for p in problem.uses[storage] if p > problem.boundary), None)


def _build(problem: Problem, choices: Sequence[_Choice], budget_bytes: int) -> Built:
    """The schedule of choices: swaps are free of charge for the builder, so that it does what was chosen."""
    swapped = {choice.storage for choice in choices if choice.is_swapped}
    recomputed = {choice.storage for choice in choices if not choice.is_swapped}
    paging = {storage: problem.paging[storage] for storage in swapped}
    free_of_charge = {step: 0.0 for steps in paging.values() for step in (steps.out, steps.back)}
    chosen = replace(problem, paging=paging, seconds={**problem.seconds, **free_of_charge})
    built = build(chosen, dropped=swapped | recomputed, uses=uses_with_recomputation(problem, recomputed))
    return replace(built, budget_bytes=budget_bytes)
