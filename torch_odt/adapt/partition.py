"""Where to cut a chain: the fewest blocks that fit, or the most even ones of a given number.

A block is a run of units, written as the pair (first unit, unit after the last). Its bytes are expensive to find out,
and a part of a block is taken to need no more than the whole; a cheap guess says where to look first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

Block = tuple[int, int]
BytesOf = Callable[[int, int], int]


class UnitTooLarge(Exception):
    """No cut fits: some unit alone takes more.

    Attributes:
        smallest_bytes: what the largest unit takes.
    """

    def __init__(self, smallest_bytes: int) -> None:
        super().__init__(smallest_bytes)
        self.smallest_bytes = smallest_bytes


def fewest_blocks(units: int, bytes_of: BytesOf, guess: Sequence[int], limit_bytes: int) -> list[Block]:
    """Blocks of at most so many bytes, each as long as it may be, which makes them fewest.

    Args:
        units: how many units the chain has.
        bytes_of: of a block.
        guess: of each unit, in proportion to its bytes.

    Raises:
        UnitTooLarge: a unit alone takes more.

    Example:
        >>> fewest_blocks(4, lambda first, end: 10 * (end - first), [1, 1, 1, 1], 25)
        [(0, 2), (2, 4)]
    """
    blocks: list[Block] = []
    scale = None
    while not blocks or blocks[-1][1] < units:
        first = blocks[-1][1] if blocks else 0
        # `fits` does and `fails` does not, as far as is known.
        fits, fails = first, units + 1
        while fails - fits > 1:
            end = units if scale is None else _guess_end(first, guess, limit_bytes / scale)
            end = min(max(end, fits + 1), fails - 1)
            taken = bytes_of(first, end)
            scale = taken / max(1, sum(guess[first:end]))
            if taken <= limit_bytes:
                fits = end
            else:
                fails = end
        if fits == first:
            raise UnitTooLarge(max(bytes_of(unit, unit + 1) for unit in range(units)))
        blocks.append((first, fits))
    return blocks


def even_blocks(units: int, bytes_of: BytesOf, guess: Sequence[int], count: int) -> list[Block]:
    """So many blocks, of which the largest is as small as moving one cut at a time makes it.

    Example:
        >>> sizes = [30, 10, 10, 10]
        >>> even_blocks(4, lambda first, end: sum(sizes[first:end]), [1, 1, 1, 1], 2)
        [(0, 1), (1, 4)]
    """
    ends = _even_ends(guess, count)
    best = _largest(ends, bytes_of)
    while True:
        moved = [other for other in _one_cut_moved(ends, bytes_of) if _largest(other, bytes_of) < best]
        if not moved:
            return _blocks(ends)
        ends = min(moved, key=lambda other: _largest(other, bytes_of))
        best = _largest(ends, bytes_of)


def _guess_end(first: int, guess: Sequence[int], limit: float) -> int:
    end, total = first, 0
    while end < len(guess) and total + guess[end] <= limit:
        total += guess[end]
        end += 1
    return end


def _even_ends(guess: Sequence[int], count: int) -> list[int]:
    """The ends of blocks whose largest guess is least, by dynamic programming."""
    units = len(guess)
    sums = [sum(guess[:end]) for end in range(units + 1)]
    best: list[tuple[float, list[int]]] = [(float(sums[end]), [end]) for end in range(units + 1)]
    for blocks in range(2, count + 1):
        best = [
            min(
                (max(best[cut][0], sums[end] - sums[cut]), [*best[cut][1], end])
                for cut in range(blocks - 1, max(end, blocks))
            )
            for end in range(units + 1)
        ]
    return best[units][1]


def _one_cut_moved(ends: list[int], bytes_of: BytesOf) -> list[list[int]]:
    """The largest block shortened by one unit, at either side."""
    blocks = _blocks(ends)
    index = max(range(len(blocks)), key=lambda each: bytes_of(*blocks[each]))
    moved = []
    for cut, by in ((index - 1, 1), (index, -1)):
        if 0 <= cut < len(ends) - 1:
            other = list(ends)
            other[cut] += by
            if all(first < end for first, end in _blocks(other)):
                moved.append(other)
    return moved


def _largest(ends: list[int], bytes_of: BytesOf) -> int:
    return max(bytes_of(*block) for block in _blocks(ends))


def _blocks(ends: list[int]) -> list[Block]:
    return list(pairwise([0, *ends]))
