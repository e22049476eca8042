"""What `auto` and `smallest` try: every family of schedules, with several scores, within one budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch_odt.planning.chen import segmentations
from torch_odt.planning.local_search import improve
from torch_odt.planning.min_cut import keep_sets
from torch_odt.planning.problem import BOUNDARY, Problem
from torch_odt.planning.rematerialize import Score
from torch_odt.planning.sage import states
from torch_odt.planning.scores import (
    bytes_per_second,
    furthest,
    own_bytes_per_second,
    stale_bytes_per_second,
    tensor_size_per_second,
)
from torch_odt.planning.search import Search, Trial

_SLACKS = (1.03, 1.07, 1.12)
# Transfers that run beside ops cost less than they take: how much less shows only in the whole schedule.
_TRANSFER_WEIGHTS = (0.5, 0.2, 0.05)
_IMPROVED_TRIALS = 4
_PUBLISHED: tuple[Score, ...] = (tensor_size_per_second, stale_bytes_per_second, bytes_per_second)
_OTHERS: tuple[Score, ...] = (own_bytes_per_second, furthest)


def explore(search: Search) -> Trial:
    """Try everything and improve the best until the search's deadline; returns the best."""
    if search.best.fits or search.budget_bytes < lower_bound_bytes(search.problem):
        return search.best
    trials = [search.best, *try_all(search, Families(search.problem))]
    for trial in _best_distinct(trials)[:_IMPROVED_TRIALS]:
        if not search.is_over:
            improve(search, trial)
    return search.best


class Families:
    """The keep-sets that do not depend on the budget, made once for all budgets."""

    def __init__(self, problem: Problem) -> None:
        self.priced = list(keep_sets(problem))
        self.borders = list(segmentations(problem))

    def together(self) -> Iterator[frozenset[int]]:
        """What lies between segments, together with what a price keeps."""
        for border in self.borders:
            for kept in self.priced[::2]:
                yield border | kept


def try_all(search: Search, families: Families) -> Iterator[Trial]:
    """Try eviction on demand with every score and all keep-sets, until the deadline of the search.

    What the planners of papers do comes first, whatever the time: no budget that one of them meets is to be refused.
    """
    yield from map(search.try_evicting, _PUBLISHED)
    yield search.try_keeping(states(search.problem), bytes_per_second)
    for attempt in _attempts(search, families):
        if search.is_over:
            return
        yield attempt()


def _attempts(search: Search, families: Families) -> Iterator[Callable[[], Trial]]:
    """One of each family comes before the variants of any: time may end the search early."""
    if search.problem.transfers is not None and search.problem.transfers.overlaps:
        for weight in _TRANSFER_WEIGHTS:
            yield lambda weight=weight: search.try_evicting(transfer_weight=weight)  # type: ignore[misc]
    for kept in (*families.priced, *families.borders):
        yield lambda kept=kept: search.try_keeping(kept)  # type: ignore[misc]
    for slack in _SLACKS:
        yield lambda slack=slack: search.try_evicting(slack=slack)  # type: ignore[misc]
    for score in _OTHERS:
        yield lambda score=score: search.try_evicting(score)  # type: ignore[misc]
    for kept in families.together():
        yield lambda kept=kept: search.try_keeping(kept)  # type: ignore[misc]


def _best_distinct(trials: list[Trial]) -> list[Trial]:
    found: dict[tuple[int, float], Trial] = {}
    for trial in sorted(trials, key=Trial.order):
        found.setdefault((trial.peak_bytes, trial.seconds), trial)
    return list(found.values())


def lower_bound_bytes(problem: Problem) -> int:
    """Bytes that no schedule can go below: what has left the step by then, and an op with its inputs."""
    bound = left = 0
    for op in problem.steps:
        if op == BOUNDARY:
            continue
        inputs = sum(problem.nbytes[s] for s in problem.reads[op] if not problem.is_sticky[s])
        bound = max(bound, left + inputs + problem.transient_bytes[op])
        left += sum(problem.nbytes[s] for s in problem.results[op] if problem.is_sticky[s])
    return bound + problem.apart_bytes
