"""Transfers beside ops: page-outs begin as soon as they can, page-ins as early as they need and memory allows.

A builder pages out when memory is needed and in when a storage is, so that ops would wait for every transfer. The same
steps in another order hide them: nobody changes a storage, so it can be written right after its last use before the
page-out, and read while it does not push the peak above the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_odt.capture.costs import TransferCosts
from torch_odt.planning.live_profile import profile
from torch_odt.planning.problem import BOUNDARY, Problem
from torch_odt.planning.transfer_clock import TransferClock

# A transfer may have to wait for the one before.
_AHEAD = 2.0


def spread_transfers(problem: Problem, runs: Sequence[int], budget_bytes: float) -> list[int]:
    """The same steps with transfers moved ahead.

    Args:
        problem: with paging.
        runs: steps, each page-out right before its storage leaves memory.
        budget_bytes: what page-ins that come early must not exceed, without what is counted apart; they never raise
            the peak above both this and what it is already.
    """
    outs = {steps.out: storage for storage, steps in problem.paging.items()}
    backs = {steps.back: storage for storage, steps in problem.paging.items()}
    if not any(run in outs for run in runs):
        return list(runs)
    ahead = _page_outs_ahead(problem, runs, outs)
    if problem.transfers is not None and file_peak_bytes(problem, ahead) > problem.transfers.limit_bytes:
        ahead = list(runs)
    return _page_ins_ahead(problem, ahead, backs, budget_bytes)


def with_page_outs(problem: Problem, runs: Sequence[int], budget_bytes: float) -> list[int]:
    """A sequence of steps that has page-ins alone, with the page-outs that they need.

    Each comes right after the last step that touches its storage before the first page-in, or later, as memory allows,
    where the file would hold too much otherwise. Where transfers run beside ops, the storage stays in memory until
    that hides the transfer, or until memory is needed.

    Args:
        problem, budget_bytes: as for `spread_transfers`.
        runs: steps without page-outs.
    """
    idle = _idle_before_page_ins(problem, runs)
    costs = problem.transfers
    if costs is None or not idle:
        return list(runs)
    soon = [(start, problem.paging[storage].out) for storage, (start, _) in idle.items()]
    at_once = _inserted(runs, soon)
    is_full = file_peak_bytes(problem, at_once) > costs.limit_bytes
    if not is_full and not costs.overlaps:
        return at_once
    ends = _stays(problem, runs, idle, budget_bytes, float("inf") if is_full else _AHEAD)
    if is_full:
        return _inserted(runs, [(end, problem.paging[storage].out) for storage, end in ends.items()])
    return _inserted(runs, soon + [(end, problem.paging[s].let_go) for s, end in ends.items() if end > idle[s][0]])


def with_cheaper_transfers(problem: Problem, weight: float) -> Problem:
    """The same problem, in which a transfer takes `weight` times its seconds."""
    pages = {step for steps in problem.paging.values() for step in (steps.out, steps.back)}
    seconds = {step: weight * s if step in pages else s for step, s in problem.seconds.items()}
    return replace(problem, seconds=seconds)


def seconds_with_transfers(problem: Problem, runs: Sequence[int]) -> float:
    """What a sequence of steps takes when its transfers run beside ops."""
    return clock_after(problem, runs).seconds


def clock_after(problem: Problem, runs: Sequence[int]) -> TransferClock:
    """The clock at the end of a sequence of steps."""
    clock = TransferClock(problem.transfers)
    outs = {steps.out: storage for storage, steps in problem.paging.items()}
    backs = {steps.back: storage for storage, steps in problem.paging.items()}
    lets_go = {steps.let_go: storage for storage, steps in problem.paging.items()}
    for run in runs:
        if run in outs:
            clock.page_out(outs[run], problem.nbytes[outs[run]])
        elif run in backs:
            clock.page_in(backs[run], problem.nbytes[backs[run]])
        elif run in lets_go:
            clock.wait_for(lets_go[run])
        elif run != BOUNDARY:
            clock.run(problem.seconds[run], problem.reads[run])
    return clock


def _idle_before_page_ins(problem: Problem, runs: Sequence[int]) -> dict[int, tuple[int, int]]:
    """For each storage that is paged in: from behind its last touch before that until there, by position."""
    backs = {steps.back: storage for storage, steps in problem.paging.items()}
    last_touch: dict[int, int] = {}
    idle: dict[int, tuple[int, int]] = {}
    for position, run in enumerate(runs):
        if run in backs and backs[run] not in idle:
            idle[backs[run]] = (last_touch[backs[run]] + 1, position)
        for storage in (*problem.reads[run], *problem.results.get(run, ())):
            last_touch[storage] = position
    return idle


def _stays(
    problem: Problem, runs: Sequence[int], idle: dict[int, tuple[int, int]], budget_bytes: float, times: float
) -> dict[int, int]:
    """Until where each storage stays in memory: until ops have taken so many times its transfer, if memory allows."""
    live = profile(problem, runs)
    limit = max(budget_bytes, max(live))
    ends = {}
    for storage, (start, stop) in sorted(idle.items(), key=lambda item: item[1]):
        position, to_hide = start, times * problem.seconds[problem.paging[storage].out]
        while position < stop and to_hide > 0 and live[position] + problem.nbytes[storage] <= limit:
            live[position] += problem.nbytes[storage]
            to_hide -= 0.0 if runs[position] == BOUNDARY else problem.seconds[runs[position]]
            position += 1
        ends[storage] = position
    return ends


def _inserted(runs: Sequence[int], steps: Sequence[tuple[int, int]]) -> list[int]:
    """The runs with further steps, each before the run of a position."""
    before: dict[int, list[int]] = {}
    for position, step in steps:
        before.setdefault(position, []).append(step)
    found: list[int] = []
    for position, run in enumerate(runs):
        found += before.get(position, ())
        found.append(run)
    return found


def _page_outs_ahead(problem: Problem, runs: Sequence[int], outs: dict[int, int]) -> list[int]:
    """Each page-out comes right after the last step that touches its storage; where it was, the storage is let go."""
    last_touch: dict[int, int] = {}
    following: dict[int, list[int]] = {}
    for position, run in enumerate(runs):
        if run in outs:
            following.setdefault(last_touch[outs[run]], []).append(run)
        for storage in (*problem.reads[run], *problem.results.get(run, ())):
            last_touch[storage] = position
    found: list[int] = []
    for position, run in enumerate(runs):
        found.append(problem.paging[outs[run]].let_go if run in outs else run)
        found += following.get(position, ())
    return found


def file_peak_bytes(problem: Problem, runs: Sequence[int]) -> int:
    """The most that the file holds during a sequence of steps."""
    outs = {steps.out: storage for storage, steps in problem.paging.items()}
    backs = {steps.back: storage for storage, steps in problem.paging.items()}
    last_back = {backs[run]: position for position, run in enumerate(runs) if run in backs}
    held = peak = 0
    for position, run in enumerate(runs):
        if run in outs:
            held += TransferCosts.file_bytes(problem.nbytes[outs[run]])
            peak = max(peak, held)
        elif run in backs and last_back[backs[run]] == position:
            held -= TransferCosts.file_bytes(problem.nbytes[backs[run]])
    return peak


def _page_ins_ahead(problem: Problem, runs: list[int], backs: dict[int, int], budget_bytes: float) -> list[int]:
    """Each page-in comes so early that ops hide it, if its storage fits into memory for so long."""
    live = profile(problem, runs)
    limit = max(budget_bytes, max(live))
    last_touch: dict[int, int] = {}
    ahead: dict[int, list[int]] = {}
    earliest = 0
    for position, run in enumerate(runs):
        if run in backs:
            storage = backs[run]
            nbytes = problem.nbytes[storage]
            # One transfer follows the other.
            earliest = max(earliest, last_touch[storage] + 1)
            start, to_hide = position, _AHEAD * problem.seconds[run]
            while start > earliest and to_hide > 0 and live[start - 1] + nbytes <= limit:
                if runs[start - 1] == BOUNDARY:
                    # Between the two passes others compute, and for longer than is known here.
                    break
                start -= 1
                live[start] += nbytes
                to_hide -= problem.seconds[runs[start]]
            ahead.setdefault(start, []).append(run)
            earliest = start
        for storage in (*problem.reads[run], *problem.results.get(run, ())):
            last_touch[storage] = position
    found: list[int] = []
    for position, run in enumerate(runs):
        found += ahead.get(position, ())
        if run not in backs:
            found.append(run)
    return found
