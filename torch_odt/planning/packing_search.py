"""A better order for `packing`: local search among the large blocks, which decide how high the stack becomes.

Blocks that stand out above the target, or neighbours of theirs, are moved forward in the order; what does not let more
stand out is kept, so that the search may wander over a plateau. A trial places again only what comes after the
move, and ends as soon as more stands out than before. Effort is counted in placements, and random numbers come from a
seed: the same blocks always get the same order.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_UNPLACED = -1
# Of the moves: those of a neighbour in time instead of the block that stands out, and those to anywhere before it
# instead of just before one of its neighbours.
_NEIGHBOUR_SHARE = 0.3
_ANYWHERE_SHARE = 0.9
_MOVES = (1, 1, 2)


class OrderSearch:
    """Looks for an order in which best fit keeps blocks below a target.

    Args:
        start, end, nbytes: the blocks, in the order to begin with: each lives in [start, end) and takes nbytes.
        target_bytes: the height that is wanted.
        seed: another one takes another way.

    Attributes:
        order: the best one so far.
        placements: how many were made.
    """

    def __init__(self, start: Ints, end: Ints, nbytes: Ints, target_bytes: int, seed: int) -> None:
        together = (start[:, None] < end[None, :]) & (end[:, None] > start[None, :])
        np.fill_diagonal(together, False)
        self._neighbours: list[list[int]] = [np.flatnonzero(row).tolist() for row in together]
        self._nbytes: list[int] = nbytes.tolist()
        self._target_bytes = target_bytes
        self._random = random.Random(seed)
        self.order = list(range(len(nbytes)))
        self.placements = 0
        self._offsets, self._excess = self._place(self.order, 0, [_UNPLACED] * len(nbytes), None)

    @property
    def is_done(self) -> bool:
        """Whether the target is reached."""
        return self._excess == 0

    def run(self, effort: int) -> None:
        """Search until the target is reached or so many placements were made."""
        limit = self.placements + effort
        while self._excess and self.placements < limit:
            order, first = self._moved()
            offsets, excess = self._place(order, first, self._offsets, self._excess)
            if excess <= self._excess:
                self.order, self._offsets, self._excess = order, offsets, excess

    def _moved(self) -> tuple[list[int], int]:
        """The order with a few blocks moved forward, and the first position that has changed."""
        choose = self._random
        tops = [offset + size for offset, size in zip(self._offsets, self._nbytes, strict=True)]
        blamed = [block for block, top in enumerate(tops) if top > self._target_bytes]
        order, first = self.order[:], len(self.order)
        for _ in range(choose.choice(_MOVES)):
            block = choose.choice(blamed)
            neighbours = self._neighbours[block]
            if neighbours and choose.random() < _NEIGHBOUR_SHARE:
                block = choose.choice(neighbours)
                neighbours = self._neighbours[block]
            position = order.index(block)
            if neighbours and choose.random() >= _ANYWHERE_SHARE:
                to = order.index(choose.choice(neighbours))
            else:
                to = choose.randrange(position + 1)
            order.pop(position)
            order.insert(to, block)
            first = min(first, position, to)
        return order, first

    def _place(self, order: list[int], first: int, known: list[int], most_excess: int | None) -> tuple[list[int], int]:
        """Best fit of what stands in `order` from `first` on; gives up when more than `most_excess` stands out."""
        sizes, target = self._nbytes, self._target_bytes
        offsets = [_UNPLACED] * len(known)
        excess = 0
        for block in order[:first]:
            offsets[block] = known[block]
            excess += max(0, known[block] + sizes[block] - target)
        for count, block in enumerate(order[first:]):
            if most_excess is not None and excess > most_excess:
                self.placements += count
                return offsets, excess
            size = sizes[block]
            placed = (other for other in self._neighbours[block] if offsets[other] != _UNPLACED)
            smallest_gap, offset, top = None, _UNPLACED, 0
            for low, high in sorted((offsets[other], offsets[other] + sizes[other]) for other in placed):
                gap = low - top
                if gap >= size and (smallest_gap is None or gap < smallest_gap):
                    smallest_gap, offset = gap, top
                if high > top:
                    top = high
            offsets[block] = top if smallest_gap is None else offset
            excess += max(0, offsets[block] + size - target)
        self.placements += len(order) - first
        return offsets, excess
