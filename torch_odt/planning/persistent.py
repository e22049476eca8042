"""Dynamic programming over a chain of groups: what is kept stays until the backward pass has reached it.

For a part of the chain, from group `first` to group `last`, with the inputs of the first in memory: either its first
group saves what its backward segment needs and the rest of the part follows, or forward passes lead to some later
group whose inputs are kept, the part from there runs to its end, and what lies before it begins anew from the same
inputs. The cheapest way is tabulated for every part and every number of bytes. With transfers, what is kept may also
wait in the file.

Bytes are counted in slots, rounded up, and in a network with branches some are counted twice: a way for a few more
bytes than there are may fit. So `cheapest` tries several and counts what they really take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from torch_odt.planning.chain import Forward, Group, Option, chain_of
from torch_odt.planning.paging_incumbent import PagingIncumbent, PricedGoal
from torch_odt.planning.problem import BOUNDARY, Problem
from torch_odt.planning.schedule import Schedule

_SLACK = 1.3
_LEAST_SHARE = 0.5
_TRIALS = 32

Costs = NDArray[np.float64]
"""By slots: seconds of transfers and of all forward runs but the first ones; infinity where they do not suffice."""

Part = tuple[int, int, bool]
"""The first and the last group, and whether the inputs of the first are held, and counted, outside."""


class _OutOfTimeError(Exception):
    """A table is of no use before it is complete."""


def cheapest(
    problem: Problem, budget_bytes: int, planner: str, *, pages: bool = False, stop_at: float = math.inf
) -> Schedule:
    """The cheapest schedule of a table that fits; where none does, the one that takes fewest bytes.

    Args:
        problem: what to schedule.
        budget_bytes: planned memory that must not be exceeded.
        planner: the name of the planner that asks.
        pages: whether storages may wait in the file.
        stop_at: the `time.perf_counter()` at which to be content with what has been found.
    """
    incumbent = PagingIncumbent(problem, budget_bytes, problem.steps, PricedGoal())
    groups = chain_of(problem)
    everything_bytes = incumbent.counted.peak_bytes
    for most_bytes in (min(everything_bytes, int(_SLACK * max(0, budget_bytes))), everything_bytes):
        if not groups or incumbent.fits:
            break
        try:
            table = Table(problem, groups, most_bytes, pages=pages, stop_at=stop_at)
        except _OutOfTimeError:
            break
        for slots in table.worth_trying():
            if time.perf_counter() >= stop_at:
                break
            runs = table.runs(slots)
            if runs is not None:
                incumbent.offer(runs)
    return incumbent.schedule(planner)


@dataclass(frozen=True)
class _Way:
    """A way to run a part.

    Attributes:
        costs: by slots.
        middle: where the part within begins: behind the first group, if that is saved.
        beside_bytes: what is held beside the part within.
        holds_inputs: the inputs of the part within are among it.
        option: what the first group saves; None where it is not saved.
        paged: storages that wait in the file.
    """

    costs: Costs
    middle: int
    beside_bytes: int
    holds_inputs: bool
    option: Option | None
    paged: tuple[int, ...] = ()


class Table:
    """The cheapest ways for all parts.

    Args:
        problem: what is scheduled.
        groups: its chain; at least one.
        most_bytes: the largest number of bytes to ask for.
        slots: into how many those are divided at most.
        pages: whether storages may wait in the file.
        stop_at: the `time.perf_counter()` at which to give up.
    """

    def __init__(
        self,
        problem: Problem,
        groups: Sequence[Group],
        most_bytes: int,
        *,
        slots: int = 400,
        pages: bool = False,
        stop_at: float = math.inf,
    ) -> None:
        self.problem = problem
        self.groups = groups
        self.slot_bytes = max(1, -(-most_bytes // slots))
        self.slots = most_bytes // self.slot_bytes
        self._pages = pages and problem.transfers is not None
        self._seconds = np.cumsum([0.0, *(group.forward.seconds for group in groups)])
        self._segment_seconds = np.cumsum([0.0, *(group.segment_seconds for group in groups)])
        self._whole: Part = (0, len(groups) - 1, False)
        self._costs: dict[Part, Costs] = {}
        for length in range(len(groups)):
            for first in range(len(groups) - length):
                if time.perf_counter() >= stop_at:
                    raise _OutOfTimeError
                for is_held in (False, True):
                    part = (first, first + length, is_held)
                    self._costs[part] = np.minimum.reduce([way.costs for way in self._ways(part)])

    def worth_trying(self) -> list[int]:
        """Numbers of slots, from all of them to half, and the fewest that suffice for anything."""
        step = max(1, int(self.slots * (1 - _LEAST_SHARE)) // _TRIALS)
        fewest = int(np.isinf(self._costs[self._whole]).sum())
        return [*range(self.slots, int(self.slots * _LEAST_SHARE), -step), min(fewest, self.slots)]

    def runs(self, slots: int) -> list[int] | None:
        """The steps of the cheapest way within so many slots, without page-outs; None where there is none."""
        if not np.isfinite(self._costs[self._whole][slots]):
            return None
        return list(self._run(self._whole, slots, set()))

    def _ways(self, part: Part) -> Iterator[_Way]:
        first, last, is_held = part
        if first == last:
            yield self._leaf(part)
            return
        group, before_bytes = self.groups[first], self.groups[last].before_bytes
        own = frozenset() if is_held else group.inputs
        # A part to the end of the chain is what the program itself runs: it has not run before.
        has_run = last < len(self.groups) - 1
        for option in group.options:
            needed = max(
                before_bytes + option.forward.peak_bytes(has_run=has_run, beside_inputs=is_held),
                option.backward_bytes + self._bytes(option.inputs & own),
            )
            seconds = has_run * option.forward.seconds + option.seconds
            for way in self._waiting(option, option.saved | (option.inputs & own), first + 1, last):
                yield replace(way, costs=self._from(needed, seconds + way.costs))
        own_bytes = self._bytes(own)
        needed = before_bytes + own_bytes + group.forward.peak_bytes(has_run=has_run, beside_inputs=True)
        for middle in range(first + 1, last + 1):
            seconds = has_run * (self._seconds[middle] - self._seconds[first])
            rest = seconds + self._costs[first, middle - 1, is_held]
            for way in self._waiting(None, own, middle, last):
                yield replace(way, costs=self._from(needed, rest + way.costs))
            passing_bytes = self.groups[middle].forward.peak_bytes(has_run=has_run, beside_inputs=False)
            needed = max(needed, before_bytes + own_bytes + passing_bytes)

    def _leaf(self, part: Part) -> _Way:
        """A group whose segment follows at once."""
        number, _, is_held = part
        group = self.groups[number]
        option, has_run = group.options[0], number < len(self.groups) - 1
        needed = max(
            group.before_bytes + option.leaf.peak_bytes(has_run=has_run, beside_inputs=is_held),
            option.backward_bytes + (0 if is_held else self._bytes(option.inputs)),
        )
        costs = np.full(self.slots + 1, has_run * float(option.leaf.seconds))
        return _Way(self._from(needed, costs), number + 1, 0, False, option)

    def _waiting(self, option: Option | None, kept: frozenset[int], middle: int, last: int) -> Iterator[_Way]:
        """The part within while something is kept beside it, in memory or in the file."""
        inputs = self.groups[middle].inputs
        is_held = not inputs.isdisjoint(kept)
        beside_bytes = self._bytes(kept | inputs if is_held else kept)
        inner = self._costs[middle, last, is_held]
        yield _Way(self._less(beside_bytes, inner), middle, beside_bytes, is_held, option)
        paging, transfers = self.problem.paging, self.problem.transfers
        paged = tuple(sorted(s for s in kept - inputs if s in paging)) if self._pages else ()
        if transfers is None or not paged:
            return
        beside_bytes -= self._bytes(paged)
        costs = self._less(beside_bytes, inner)
        seconds = sum(self.problem.seconds[step] for s in paged for step in (paging[s].out, paging[s].back))
        if transfers.overlaps:
            hidden = np.where(np.isfinite(costs), costs, 0.0)
            hidden = hidden + self._segment_seconds[last + 1] - self._segment_seconds[middle]
            costs = costs + np.maximum(0.0, seconds - hidden)
        else:
            costs = costs + seconds
        yield _Way(costs, middle, beside_bytes, is_held, option, paged)

    def _run(self, part: Part, slots: int, ran: set[int]) -> Iterator[int]:
        """The steps of a part; groups in `ran` have run before."""
        first, last, is_held = part
        way = min(self._ways(part), key=lambda each: float(each.costs[slots]))
        inner: Part = (way.middle, last, way.holds_inputs)
        inner_slots = slots - self._slots(way.beside_bytes)
        backs = [self.problem.paging[s].back for s in way.paged]
        group = self.groups[first]
        if way.option is None:
            for number in range(first, way.middle):
                yield from self._forward(number, ran, self.groups[number].forward)
            yield from self._run(inner, inner_slots, ran)
            yield from backs
            yield from self._run((first, way.middle - 1, is_held), slots, ran)
            return
        if first < last:
            yield from self._forward(first, ran, way.option.forward)
            yield from self._run(inner, inner_slots, ran)
        else:
            yield from self._forward(first, ran, way.option.leaf)
            if last == len(self.groups) - 1:
                yield BOUNDARY
        yield from backs
        yield from way.option.rebuild
        yield from group.segment

    def _forward(self, number: int, ran: set[int], forward: Forward) -> Sequence[int]:
        if number in ran:
            return forward.again
        ran.add(number)
        return self.groups[number].steps

    def _from(self, needed_bytes: int, costs: Costs) -> Costs:
        """The costs where there are so many bytes; infinity below."""
        found = costs.copy()
        found[: self._slots(needed_bytes)] = np.inf
        return found

    def _less(self, held_bytes: int, costs: Costs) -> Costs:
        """The costs of what is left beside held bytes."""
        held = self._slots(held_bytes)
        if held == 0:
            return costs
        found = np.full_like(costs, np.inf)
        found[held:] = costs[: max(0, len(costs) - held)]
        return found

    def _slots(self, nbytes: int) -> int:
        return -(-nbytes // self.slot_bytes)

    def _bytes(self, storages: Collection[int]) -> int:
        return sum(self.problem.nbytes[s] for s in storages)
