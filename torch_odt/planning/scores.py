"""How gladly a storage is given up when the next op does not fit: the score that each planner evicts by.

A score may only fall while storages are evicted: the builder asks for it again just before it acts on it.
"""

from __future__ import annotations

from torch_odt.planning.rematerialize import Walk

_NO_TIME = 1e-9


def tensor_size_per_second(walk: Walk, storage: int) -> float:
    """Melon's TPS: bytes x freed lifetime / seconds to recompute it with all of its missing ancestors."""
    freed = walk.next_use(storage) - walk.position
    return walk.problem.nbytes[storage] * freed / (walk.missing_seconds(storage) + _NO_TIME)


def bytes_per_second(walk: Walk, storage: int) -> float:
    """SAGE's: bytes / seconds to recompute it with all of its missing ancestors."""
    return walk.problem.nbytes[storage] / (walk.missing_seconds(storage) + _NO_TIME)


def stale_bytes_per_second(walk: Walk, storage: int) -> float:
    """DTR's 1 / h: bytes x staleness / seconds of the evicted neighbourhood."""
    stale_seconds = walk.idle_seconds(storage) + _NO_TIME
    return walk.problem.nbytes[storage] * stale_seconds / (walk.neighbourhood_seconds(storage) + _NO_TIME)


def own_bytes_per_second(walk: Walk, storage: int) -> float:
    """As melon's, but for the op alone: on long chains the ancestors come back together anyway."""
    freed = walk.next_use(storage) - walk.position
    return walk.problem.nbytes[storage] * freed / (walk.own_seconds(storage) + _NO_TIME)


def furthest(walk: Walk, storage: int) -> float:
    """Belady's rule, weighted by bytes: what is not needed for longest."""
    return float(walk.problem.nbytes[storage] * (walk.next_use(storage) - walk.position))
