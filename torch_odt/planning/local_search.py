"""Local search over keep-sets: keep more where it still fits, exchange what is kept for what is better worth it."""

from __future__ import annotations

from collections.abc import Iterable

from torch_odt.planning.keep_set import forward_storages
from torch_odt.planning.problem import Problem
from torch_odt.planning.search import Search, Trial

_EXCHANGES = 24


def improve(search: Search, start: Trial) -> Trial:
    """Improve a trial until nothing helps or the time is over; returns the best one found on the way."""
    current = _add_while_it_helps(search, start)
    while not search.is_over:
        better = _exchange(search, current)
        if better is None:
            return current
        current = _add_while_it_helps(search, better)
    return current


def _add_while_it_helps(search: Search, current: Trial) -> Trial:
    """Keep more storages, the most seconds per byte first; in groups, which are halved when they fail."""
    candidates = worth_keeping(search.problem, current.kept)
    size = max(1, len(candidates) // 2)
    position = 0
    while position < len(candidates) and not search.is_over:
        group = candidates[position : position + size]
        trial = search.try_keeping(current.kept.union(group))
        if trial.is_better_than(current):
            current = trial
            position += len(group)
            size *= 2
        elif len(group) > 1:
            size = len(group) // 2
        else:
            position += 1
    return current


def _exchange(search: Search, current: Trial) -> Trial | None:
    """Give up one kept storage for the best of what its bytes could hold instead; None if no exchange helps."""
    problem = search.problem
    for given_up in _cheap_to_give_up(problem, current.kept)[:_EXCHANGES]:
        if search.is_over:
            return None
        kept = current.kept - {given_up}
        wanted = [s for s in worth_keeping(problem, kept) if s != given_up]
        room = problem.nbytes[given_up]
        chosen = set()
        for storage in wanted:
            if problem.nbytes[storage] <= room:
                chosen.add(storage)
                room -= problem.nbytes[storage]
        for replacement in (kept | chosen, kept | set(wanted[:1]), kept):
            trial = search.try_keeping(replacement)
            if trial.is_better_than(current):
                return trial
    return None


def worth_keeping(problem: Problem, kept: frozenset[int]) -> list[int]:
    """The storages that a keep-set recomputes, those first whose keeping saves the most seconds per byte."""
    readers = recomputation_readers(problem, kept)
    saved = {s: _saved_seconds(problem, s, readers) for s in readers if problem.nbytes[s]}
    return sorted(saved, key=lambda s: (-saved[s] / problem.nbytes[s], s))


def recomputation_readers(problem: Problem, kept: Iterable[int]) -> dict[int, int]:
    """For each storage that is recomputed, how many need it: recomputed ones, and the backward pass as one."""
    dropped = set(forward_storages(problem)).difference(kept)
    readers: dict[int, int] = {}
    stack = [s for s in dropped if problem.uses[s] and problem.uses[s][-1] > problem.boundary]
    while stack:
        storage = stack.pop()
        first_time = storage not in readers
        readers[storage] = readers.get(storage, 0) + 1
        if first_time:
            stack += [s for s in problem.reads[problem.rerun[storage]] if s in dropped]
    return readers


def _saved_seconds(problem: Problem, storage: int, readers: dict[int, int]) -> float:
    """What need not run any more when one more storage is kept: its op, and what only serves that."""
    seconds = 0.0
    remaining: dict[int, int] = {}
    stack = [storage]
    while stack:
        current = stack.pop()
        op = problem.rerun[current]
        seconds += problem.seconds[op]
        for source in problem.reads[op]:
            if source in readers:
                remaining[source] = remaining.get(source, readers[source]) - 1
                if remaining[source] == 0:
                    stack.append(source)
    return seconds


def _cheap_to_give_up(problem: Problem, kept: frozenset[int]) -> list[int]:
    """Kept storages that the backward pass needs, those first that cost the fewest seconds per byte to recompute."""
    droppable = set(forward_storages(problem))
    cost: dict[int, float] = {}
    for storage in kept & droppable:
        if problem.nbytes[storage] and problem.uses[storage] and problem.uses[storage][-1] > problem.boundary:
            cost[storage] = _closure_seconds(problem, storage, kept, droppable) / problem.nbytes[storage]
    return sorted(cost, key=lambda s: (cost[s], s))


def _closure_seconds(problem: Problem, storage: int, kept: frozenset[int], droppable: set[int]) -> float:
    ops: set[int] = set()
    stack = [storage]
    while stack:
        op = problem.rerun[stack.pop()]
        if op not in ops:
            ops.add(op)
            stack += [s for s in problem.reads[op] if s in droppable and s not in kept]
    return sum(problem.seconds[op] for op in ops)
