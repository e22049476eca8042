"""Between a reduced problem and the sequences of ops of the problem itself."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch_odt.planning.problem import Problem
from torch_odt.planning.reduce import Reduced

Kept = Sequence[Collection[int]]
"""For each stage, the units in memory at its start; one more for the end, which is empty."""


@dataclass(frozen=True)
class Solution:
    """What is kept into each stage, and what is read from the file in it if it is missing."""

    kept: Kept
    paged: Kept = ()


@dataclass(frozen=True)
class Returns:
    """What comes back at the start of a stage, in the order in which actions are numbered.

    Attributes:
        actions: that run.
        paged: units that are read from the file, each where its action would run.
    """

    actions: list[int]
    paged: list[int]


def returns_of(reduced: Reduced, kept: Kept, paged: Kept = ()) -> list[Returns] | None:
    """What comes back in each stage, given what is kept; None where something is gone for good.

    Args:
        reduced, kept: the smaller problem, and what stays in memory.
        paged: for each stage, the units that are read from the file if they are missing; others are made again.
    """
    found = []
    for stage in range(reduced.stages):
        resident = set(kept[stage])
        from_file = set(paged[stage]) if paged else set()
        wanted = [*reduced.used[stage], *(u for u in kept[stage + 1] if reduced.units[u].born < stage)]
        actions: set[int] = set()
        read: set[int] = set()
        stack = [u for u in wanted if u not in resident]
        while stack:
            unit = stack.pop()
            if unit in from_file:
                read.add(unit)
                continue
            action = reduced.units[unit].action
            if action < 0 or stage < reduced.actions[action].first:
                return None
            if action not in actions:
                actions.add(action)
                stack += [u for u in reduced.actions[action].reads if u not in resident]
        found.append(Returns(sorted(actions), sorted(u for u in read if reduced.units[u].action not in actions)))
    return found


def expand(reduced: Reduced, kept: Kept, paged: Kept = ()) -> list[int] | None:
    """The sequence of ops, with `BOUNDARY`, that keeps these units; None where something is gone for good.

    Page-ins stand in it, page-outs do not: where they belong follows from the rest.
    """
    returns = returns_of(reduced, kept, paged)
    if returns is None:
        return None
    problem = reduced.problem
    runs: list[int] = []
    for stage, back in enumerate(returns):
        read = [(reduced.units[u].action, (problem.paging[reduced.units[u].storage].back,)) for u in back.paged]
        made = [(number, reduced.actions[number].ops) for number in back.actions]
        for _, ops in sorted([*read, *made]):
            runs += ops
        runs += problem.steps[reduced.starts[stage] : reduced.starts[stage + 1]]
    return runs


def kept_by(reduced: Reduced, runs: Sequence[int]) -> list[set[int]]:
    """The units that a sequence of ops has in memory at the start of each stage."""
    when = _stage_begins(reduced, runs)
    episodes = _episodes(reduced.problem, runs)
    kept: list[set[int]] = [set() for _ in range(reduced.stages + 1)]
    for number, unit in enumerate(reduced.units):
        for made, last in episodes.get(unit.storage, ()):
            for stage in range(unit.born + 1, unit.last + 1):
                if made < when[stage] <= last:
                    kept[stage].add(number)
    return kept


def solution_of(reduced: Reduced, runs: Sequence[int]) -> Solution:
    """The solution that comes nearest to a sequence of ops; when it pages out follows from the rest."""
    writing = {step for steps in reduced.problem.paging.values() for step in (steps.out, steps.let_go)}
    others = [run for run in runs if run not in writing]
    return Solution(kept_by(reduced, others), paged_by(reduced, others))


def paged_by(reduced: Reduced, runs: Sequence[int]) -> list[set[int]]:
    """The units that a sequence of steps reads from the file in each stage."""
    when = _stage_begins(reduced, runs)
    number_of = {
        reduced.problem.paging[unit.storage].back: number
        for number, unit in enumerate(reduced.units)
        if unit.storage in reduced.problem.paging
    }
    paged: list[set[int]] = [set() for _ in range(reduced.stages)]
    for position, op in enumerate(runs):
        if op in number_of:
            paged[bisect_right(when, position) - 1].add(number_of[op])
    return paged


def _stage_begins(reduced: Reduced, runs: Sequence[int]) -> list[int]:
    """Where each stage starts: with the recomputation before its first step."""
    ends = {reduced.problem.steps[start - 1] for start in reduced.starts[1:-1]}
    begins = [0]
    first_runs: set[int] = set()
    for position, op in enumerate(runs):
        if op in ends and op not in first_runs:
            begins.append(position + 1)
        first_runs.add(op)
    return begins


def _episodes(problem: Problem, runs: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """For each storage, the runs that make it and, for each, the last run that reads it before the next."""
    found: dict[int, list[tuple[int, int]]] = {}
    for position, op in enumerate(runs):
        for storage in problem.reads[op]:
            made, _ = found[storage][-1]
            found[storage][-1] = (made, position)
        for storage in problem.results.get(op, ()):
            found.setdefault(storage, []).append((position, position))
    return found
