"""The live bytes of a sequence of steps, without making a schedule of it."""

from __future__ import annotations

from collections.abc import Collection

from torch_odt.planning.problem import BOUNDARY, Problem


def peak_bytes(problem: Problem, runs: Collection[int]) -> int:
    """The peak of a sequence of steps when everything is freed right after its last use."""
    return max(profile(problem, runs), default=0)


def profile(problem: Problem, runs: Collection[int]) -> list[int]:
    """For each run, the most bytes that are live while it runs."""
    reads, results, nbytes, sticky = problem.reads, problem.results, problem.nbytes, problem.is_sticky
    last_touch: dict[int, int] = {}
    ends: list[list[int]] = [[] for _ in runs]
    for position, op in enumerate(runs):
        for storage in reads[op]:
            last_touch[storage] = position
        for storage in results.get(op, ()):
            if storage in last_touch and not sticky[storage]:
                ends[last_touch[storage]].append(storage)
            last_touch[storage] = position
    for storage, position in last_touch.items():
        if not sticky[storage]:
            ends[position].append(storage)
    live = 0
    peaks: list[int] = []
    left: set[int] = set()
    for position, op in enumerate(runs):
        if op == BOUNDARY:
            peaks.append(live)
        else:
            peaks.append(live + problem.transient_bytes[op])
            for storage in results[op]:
                if storage not in left:
                    live += nbytes[storage]
                    if sticky[storage]:
                        left.add(storage)
        for storage in ends[position]:
            live -= nbytes[storage]
    return peaks
