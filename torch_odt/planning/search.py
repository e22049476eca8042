"""Trying out schedules: build, count, remember the best one that fits.

`Search` is what `auto`, `smallest`, `chen` and `min-cut` share. It counts bytes on the sequence of steps alone, which
takes a fraction of the time of the simulator and gives the same peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from torch_odt.planning.keep_set import complement, uses_with_recomputation
from torch_odt.planning.live_profile import peak_bytes
from torch_odt.planning.problem import Problem
from torch_odt.planning.rematerialize import Built, Score, build
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.scores import tensor_size_per_second
from torch_odt.planning.spread_transfers import seconds_with_transfers, spread_transfers, with_cheaper_transfers

_MAX_RECOMPUTATION = 6.0

Footprint = Callable[[Schedule], int]
"""The bytes that count against a budget, when they are more than the live peak (an arena with gaps)."""


@dataclass(frozen=True)
class Trial:
    """A schedule that was tried.

    Attributes:
        built: its steps.
        seconds: that it takes longer than the program: for recomputation, and waiting for transfers.
        peak_bytes: the most planned memory that it holds.
        fits: whether that is within the budget.
        kept: the keep-set it was built from; without one, what it had in memory between forward and backward pass.
    """

    built: Built
    seconds: float
    peak_bytes: int
    fits: bool
    kept: frozenset[int]

    def order(self) -> tuple[bool, float, float]:
        """Fitting comes first; then less time among those that fit, fewer bytes among those that do not."""
        if self.fits:
            return (False, self.seconds, self.peak_bytes)
        return (True, self.peak_bytes, self.seconds)

    def is_better_than(self, other: Trial) -> bool:
        return self.order() < other.order()


@dataclass
class Work:
    """How much may still be tried, in steps built. Unlike seconds, it is the same on a busy machine."""

    steps_left: float = float("inf")


@dataclass
class Search:
    """A search for the fastest schedule within a budget.

    Attributes:
        problem: what to schedule.
        budget_bytes: what the peak must not exceed.
        deadline: `time.perf_counter()` when to stop looking for something better.
        work: what several searches may try together.
        report: called with every trial.
        best: the best trial so far; keep-all to begin with.
        trials: how many were tried.
    """

    problem: Problem
    budget_bytes: int
    deadline: float = float("inf")
    work: Work = field(default_factory=Work)
    report: Callable[[Trial], None] = lambda trial: None
    best: Trial = field(init=False)
    trials: int = 0

    def __post_init__(self) -> None:
        self.best = self._trial(build(self.problem), None)

    @property
    def is_over(self) -> bool:
        return self.work.steps_left <= 0 or time.perf_counter() > self.deadline

    def try_keeping(self, kept: Collection[int], score: Score = tensor_size_per_second, *, evict: bool = True) -> Trial:
        """Keep a set of storages, recompute the rest at its first use, and (unless told not to) evict on demand."""
        kept = frozenset(kept)
        dropped = complement(self.problem, kept)
        uses = uses_with_recomputation(self.problem, dropped)
        return self._try(score, self.budget_bytes if evict else None, dropped, uses, kept)

    def try_evicting(
        self, score: Score = tensor_size_per_second, slack: float = 1.0, transfer_weight: float = 1.0
    ) -> Trial:
        """Evict on demand alone.

        Args:
            score: what goes first.
            slack: lets the builder, which counts late frees, go over the budget.
            transfer_weight: takes transfers for cheaper than they are, because ops hide most of them.
        """
        return self._try(score, int(self.budget_bytes * slack), (), None, None, transfer_weight)

    def _try(
        self,
        score: Score,
        budget_bytes: int | None,
        dropped: Collection[int],
        uses: list[list[int]] | None,
        kept: frozenset[int] | None,
        transfer_weight: float = 1.0,
    ) -> Trial:
        built = build(
            self.problem if transfer_weight == 1.0 else with_cheaper_transfers(self.problem, transfer_weight),
            budget_bytes=None if budget_bytes is None else budget_bytes - self.problem.apart_bytes,
            score=score,
            dropped=dropped,
            uses=uses,
            max_recompute_seconds=_MAX_RECOMPUTATION * self.problem.program_seconds,
        )
        trial = self._trial(built, kept)
        if trial.is_better_than(self.best):
            self.best = trial
        return trial

    def _trial(self, built: Built, kept: frozenset[int] | None) -> Trial:
        self.trials += 1
        self.work.steps_left -= len(built.runs)
        if self.problem.paging:
            # What fits is decided as it will run.
            limit = self.budget_bytes - self.problem.apart_bytes
            built = replace(built, runs=spread_transfers(self.problem, built.runs, limit), budget_bytes=0.0)
        peak = peak_bytes(self.problem, built.runs) + self.problem.apart_bytes
        seconds = built.recompute_seconds
        if self.problem.paging:
            seconds = seconds_with_transfers(self.problem, built.runs) - self.problem.program_seconds
        trial = Trial(built, seconds, peak, peak <= self.budget_bytes, built.crossing if kept is None else kept)
        self.report(trial)
        return trial

    def schedule(self, planner: str) -> Schedule:
        return self.best.built.schedule(self.problem, planner)
