"""Keep-sets: schedules that are described by what stays in memory from the forward to the backward pass.

Given the set of kept storages, everything else follows: what the backward pass needs and is not kept is recomputed
from what is, once, at its first use, and stays until its last.
"""

from __future__ import annotations

from collections.abc import Collection

from torch_odt.planning.problem import Problem


def forward_storages(problem: Problem) -> list[int]:
    """Storages of the forward pass that can be given up, in program order."""
    found = []
    for op in problem.steps[: problem.boundary]:
        found += [s for s in problem.results[op] if problem.rerun[s] >= 0 and not problem.is_sticky[s]]
    return found


def complement(problem: Problem, kept: Collection[int]) -> frozenset[int]:
    """What a keep-set drops."""
    return frozenset(forward_storages(problem)).difference(kept)


def uses_with_recomputation(problem: Problem, dropped: Collection[int]) -> list[list[int]]:
    """For each storage, when it is read in the program or for recomputing something else.

    A dropped storage is recomputed at its first use behind the boundary, so its op's inputs are used then, too.
    """
    boundary = problem.boundary
    uses = problem.uses
    first = [next((p for p in positions if p > boundary), -1) if positions else -1 for positions in uses]
    extended = list(uses)
    extra: dict[int, list[int]] = {}
    for storage in sorted(dropped, key=lambda s: problem.rank[problem.rerun[s]], reverse=True):
        when = first[storage]
        if when < 0:
            continue
        for source in problem.reads[problem.rerun[storage]]:
            extra.setdefault(source, []).append(when)
            if first[source] < 0 or when < first[source]:
                first[source] = when
    for source, positions in extra.items():
        extended[source] = sorted({*uses[source], *positions})
    return extended
