"""Offsets for blocks of known lifetimes: the packing behind `pool`.

Every block is a rectangle, its lifetime wide and its bytes high; no two may overlap; the stack is to be as low as
possible. That is NP-hard, so several orders are tried, each placed by best fit, and the lowest stack is kept:

- Melon (MobiSys 2022, section 3.4): longer lifetime first. Activations pile up at the bottom, first produced and last
  released, temporaries above them.
- by size, by size times lifetime, and by how crowded memory is while the block lives.
- where none of these is good enough: whatever order a local search finds (see `packing_search`).

Near-optimal (within 3 % of the lower bound) on training steps; a lower bound that is reached ends the search.
Everything is deterministic: effort is limited by a count of placements, not by time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_odt.planning.packing_search import OrderSearch

Ints = NDArray[np.int64]

_TOLERANCE = 0.002
# A search costs time: what is this far above the lower bound needs none.
_ACCEPTED = 0.025
_SEARCHES = 4
_MOST_PLACEMENTS = 60_000
# First an order of the few blocks that decide, without a gap if there is one; then the others are fitted in. Each is
# searched for among blocks of at least this share of the lower bound, to come this close to it.
_LEVELS = ((0.02, _TOLERANCE), (0.002, _ACCEPTED))
_MOST_SEARCHED = 1500


@dataclass(frozen=True)
class Blocks:
    """Blocks to place: block `i` lives in [start[i], end[i]) and takes nbytes[i]."""

    start: Ints
    end: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.nbytes)

    def select(self, indices: Ints) -> Blocks:
        return Blocks(self.start[indices], self.end[indices], self.nbytes[indices])


def as_blocks(rows: Sequence[tuple[int, int, int]]) -> Blocks:
    """Blocks from rows of (start, end, nbytes)."""
    return Blocks(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


def live_bytes(blocks: Blocks) -> tuple[Ints, Ints]:
    """When the bytes in memory change, and how many there are from then on."""
    times = np.concatenate([blocks.start, blocks.end])
    deltas = np.concatenate([blocks.nbytes, -blocks.nbytes])
    moments, index = np.unique(times, return_inverse=True)
    change = np.zeros(len(moments), dtype=np.int64)
    np.add.at(change, index, deltas)
    return moments, np.cumsum(change)


def live_peak(blocks: Blocks) -> int:
    """The most bytes that live at once: no packing is lower."""
    return int(live_bytes(blocks)[1].max(initial=0))


def place_all(blocks: Blocks, *, effort: int = 150_000) -> tuple[Ints, int]:
    """Offsets for all blocks, and the height of the stack.

    Args:
        blocks: what to place.
        effort: how many placements the search may make after the fixed orders have been tried.
    """
    if len(blocks) == 0:
        return np.zeros(0, dtype=np.int64), 0
    good_enough = int(live_peak(blocks) * (1 + _TOLERANCE))
    best: tuple[Ints, int] | None = None
    for order in _orders(blocks):
        found = best_fit(blocks, order, limit=best[1] if best else None)
        if found is not None:
            best = found
            if found[1] <= good_enough:
                return found
    assert best is not None
    return _search(blocks, best, effort)


def stack_in_order(blocks: Blocks) -> tuple[Ints, int]:
    """Offsets by first fit in order of time, as an allocator without foresight gives them; fast."""
    order = np.lexsort((blocks.end, blocks.start))
    starts, ends, sizes = blocks.start.tolist(), blocks.end.tolist(), blocks.nbytes.tolist()
    offsets = np.zeros(len(blocks), dtype=np.int64)
    living: list[tuple[int, int, int]] = []  # (offset, top, end), sorted
    height = 0
    for block in order.tolist():
        living = [entry for entry in living if entry[2] > starts[block]]
        offset = 0
        for low, high, _ in living:
            if low - offset >= sizes[block]:
                break
            offset = high
        insort(living, (offset, offset + sizes[block], ends[block]))
        offsets[block] = offset
        height = max(height, offset + sizes[block])
    return offsets, height


def best_fit(blocks: Blocks, order: Ints, *, limit: int | None = None) -> tuple[Ints, int] | None:
    """Place blocks in the given order, each into the smallest gap that takes it, else on top of what it meets.

    Returns:
        The offsets and the height; None as soon as the height reaches `limit`.
    """
    count = len(order)
    offsets = np.zeros(len(blocks), dtype=np.int64)
    # What is placed, sorted by offset.
    low, high, start, end = (np.empty(count, dtype=np.int64) for _ in range(4))
    height = 0
    starts, ends, sizes = blocks.start.tolist(), blocks.end.tolist(), blocks.nbytes.tolist()
    for placed, block in enumerate(order.tolist()):
        size, begins, finishes = sizes[block], starts[block], ends[block]
        met = ((start[:placed] < finishes) & (end[:placed] > begins)).nonzero()[0]
        offset = _lowest_waste(low[met], high[met], size) if len(met) else 0
        if offset + size > height:
            height = offset + size
            if limit is not None and height >= limit:
                return None
        at = int(low[:placed].searchsorted(offset))
        for column, entry in ((low, offset), (high, offset + size), (start, begins), (end, finishes)):
            column[at + 1 : placed + 1] = column[at:placed]
            column[at] = entry
        offsets[block] = offset
    return offsets, height


def _lowest_waste(low: Ints, high: Ints, size: int) -> int:
    """The bottom of the smallest gap of at least `size` between the intervals, or the top of them all."""
    tops = np.maximum.accumulate(high)
    gaps = low.copy()
    gaps[1:] -= tops[:-1]
    fitting = (gaps >= size).nonzero()[0]
    if len(fitting) == 0:
        return int(tops[-1])
    gap = int(fitting[gaps[fitting].argmin()])
    return int(tops[gap - 1]) if gap else 0


def _orders(blocks: Blocks) -> list[Ints]:
    lifetime, size, start, end = blocks.end - blocks.start, blocks.nbytes, blocks.start, blocks.end
    crowd = _crowd(blocks)
    keys = [
        (end, start, -size, -lifetime),  # Melon
        (start, -lifetime, -size),
        (end, -lifetime, start, -size),
        (start, -size * lifetime),
        (start, -size, -crowd),
        (-size, start, -crowd),
    ]
    return [np.lexsort(key) for key in keys]


def _crowd(blocks: Blocks) -> Ints:
    """For each block, the most bytes in memory at any moment of its life."""
    moments, live = live_bytes(blocks)
    first, last = np.searchsorted(moments, blocks.start), np.searchsorted(moments, blocks.end)
    # reduceat wants pairs; the slices between one block's end and the next one's start are thrown away.
    pairs = np.stack([first, np.maximum(last, first + 1)], axis=1).ravel()
    padded = np.append(live, 0)
    return np.maximum.reduceat(padded, pairs)[::2]


def _search(blocks: Blocks, best: tuple[Ints, int], effort: int) -> tuple[Ints, int]:
    """The best of what is known and of the orders that local searches find."""
    lowest = live_peak(blocks)
    by_size = np.lexsort((blocks.start, -blocks.nbytes))
    begin = _begin(blocks, by_size[: _count_of(blocks, _LEVELS[0][0] * lowest)])
    for seed in range(_SEARCHES):
        if best[1] <= (1 + _ACCEPTED) * lowest or effort <= 0:
            break
        order = begin
        for share, tolerance in _LEVELS:
            count = _count_of(blocks, share * lowest)
            order = np.concatenate([order, by_size[len(order) : count]])
            part = blocks.select(order)
            search = OrderSearch(part.start, part.end, part.nbytes, int((1 + tolerance) * lowest), seed)
            search.run(min(effort, _MOST_PLACEMENTS))
            effort -= search.placements
            order = order[search.order]
            if not search.is_done:
                break
        best = best_fit(blocks, np.concatenate([order, by_size[len(order) :]]), limit=best[1]) or best
    return best


def _count_of(blocks: Blocks, least_bytes: float) -> int:
    """How many blocks of at least this size are searched among."""
    return min(int((blocks.nbytes >= least_bytes).sum()), _MOST_SEARCHED)


def _begin(blocks: Blocks, large: Ints) -> Ints:
    """The fixed order that stacks the large blocks lowest."""
    chosen = np.sort(large)
    part = blocks.select(chosen)
    return chosen[min(_orders(part), key=lambda order: _height(part, order))]


def _height(blocks: Blocks, order: Ints) -> int:
    placed = best_fit(blocks, order)
    assert placed is not None
    return placed[1]
