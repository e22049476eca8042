"""A problem as a chain of groups: what the planners that work by dynamic programming see.

The forward pass is cut where few storages cross: on a chain behind every op, in a network with branches between its
blocks, where everything passes through one storage. What crosses into a group is its inputs; its backward segment is
the part of the backward pass that needs nothing from before it. What a segment reads of its own group may be saved
whole, or the cheap part of it made again when the segment begins: those are the group's options.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch_odt.planning.problem import BOUNDARY, Problem

_LEAST_GROUPS = 8
_MOST_GROUPS = 64
_MOST_OPTIONS = 6


@dataclass(frozen=True)
class Forward:
    """A forward run of a group.

    Attributes:
        again: ops that make what is wanted of it from its inputs; the first time, all its steps run.
        seconds: of those ops.
        first_bytes, again_bytes: the most the first time and later, the group's inputs included, which leave as soon
            as they can.
        first_beside_bytes, again_beside_bytes: the same without the inputs, which stay.
    """

    again: tuple[int, ...]
    seconds: float
    first_bytes: int
    again_bytes: int
    first_beside_bytes: int
    again_beside_bytes: int

    def peak_bytes(self, *, has_run: bool, beside_inputs: bool) -> int:
        """The most, the first time or later, with the inputs or besides them."""
        if beside_inputs:
            return self.again_beside_bytes if has_run else self.first_beside_bytes
        return self.again_bytes if has_run else self.first_bytes


@dataclass(frozen=True)
class Option:
    """What of a group is saved for its backward segment.

    Attributes:
        saved: storages of the group that stay from its forward to its backward run.
        inputs: those of the group's inputs that the segment or `rebuild` reads.
        rebuild: ops that make the rest again, in order, when the segment begins.
        seconds: of those.
        forward: the run that saves it, and hands on what the next group reads.
        leaf: the same where the segment follows at once, so that nothing is handed on.
        backward_bytes: the most during `rebuild` and the segment, with everything that is live then besides `inputs`.
    """

    saved: frozenset[int]
    inputs: frozenset[int]
    rebuild: tuple[int, ...]
    seconds: float
    forward: Forward
    leaf: Forward
    backward_bytes: int


@dataclass(frozen=True)
class Group:
    """Consecutive steps of the forward pass, and the segment of the backward pass that belongs to them.

    Attributes:
        steps: of the forward pass.
        segment: of the backward pass.
        inputs: storages that cross into it.
        forward: the run that hands on what the next group reads.
        segment_seconds: of the segment.
        before_bytes: live right before the segment besides what groups save: gradients, and what never leaves.
        options: the one that saves most first.
    """

    steps: tuple[int, ...]
    segment: tuple[int, ...]
    inputs: frozenset[int]
    forward: Forward
    segment_seconds: float
    before_bytes: int
    options: tuple[Option, ...]


def chain_of(problem: Problem) -> list[Group]:
    """Cut a problem into groups; no groups where it has no forward pass."""
    return _Cutting(problem).groups() if problem.boundary else []


class _Cutting:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.born_in: dict[int, int] = {}

    def groups(self) -> list[Group]:
        starts = self._starts()
        stops = [*starts[1:], self.problem.boundary]
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            for op in self.problem.steps[start:stop]:
                self.born_in |= dict.fromkeys(self._movable(self.problem.results[op]), number)
        inputs = [frozenset(s for s in self._forward if self._crosses(s, start - 1)) for start in starts]
        segments = self._segments(inputs)
        return [
            self._group(number, start, stop, inputs, segments[number])
            for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
        ]

    @cached_property
    def _forward(self) -> list[int]:
        """The storages of the forward pass that can be made again."""
        return [
            s for op in self.problem.steps[: self.problem.boundary] for s in self._movable(self.problem.results[op])
        ]

    def _movable(self, storages: Collection[int]) -> list[int]:
        problem = self.problem
        return [s for s in storages if problem.rerun[s] >= 0 and problem.nbytes[s] and not problem.is_sticky[s]]

    @cached_property
    def _last_read(self) -> dict[int, int]:
        """For each of them, the last step of the forward pass that reads it, to make its results again as well."""
        problem = self.problem
        last = dict.fromkeys(self._forward, -1)
        for position, op in enumerate(problem.steps[: problem.boundary]):
            again = [problem.rerun[s] for s in self._movable(problem.results[op])]
            for source in (s for reader in (op, *again) for s in problem.reads[reader]):
                if source in last and problem.born[source] < position:
                    last[source] = position
        return last

    def _crosses(self, storage: int, position: int) -> bool:
        return self.problem.born[storage] <= position < self._last_read[storage]

    def _starts(self) -> list[int]:
        boundary = self.problem.boundary
        crossing: list[list[int]] = [[] for _ in range(boundary)]
        for storage in self._forward:
            for position in range(self.problem.born[storage], self._last_read[storage]):
                crossing[position].append(storage)
        candidates = [p for p in range(boundary - 1) if crossing[p] and crossing[p] != crossing[p - 1]]
        width = 1
        while sum(len(crossing[p]) <= width for p in candidates) < min(_LEAST_GROUPS, len(candidates)):
            width += 1
        cuts = [p for p in candidates if len(crossing[p]) <= width]
        narrow = sorted(cuts, key=lambda p: (sum(self.problem.nbytes[s] for s in crossing[p]), p))
        return [0, *sorted(p + 1 for p in narrow[: _MOST_GROUPS - 1])]

    def _segments(self, inputs: Sequence[frozenset[int]]) -> list[list[int]]:
        """The positions of each group's backward segment: those that can do without earlier groups."""
        problem = self.problem
        latest = dict(self.born_in)
        for number, storages in enumerate(inputs):
            latest |= dict.fromkeys(storages, number)
        segments: list[list[int]] = [[] for _ in inputs]
        current = len(inputs) - 1
        for position in range(problem.boundary + 1, len(problem.steps)):
            needed = [latest[s] for s in problem.reads[problem.steps[position]] if s in latest]
            current = min([current, *needed])
            segments[current].append(position)
        return segments

    def _group(
        self, number: int, start: int, stop: int, inputs: Sequence[frozenset[int]], positions: Sequence[int]
    ) -> Group:
        problem = self.problem
        steps = tuple(problem.steps[start:stop])
        own, following = inputs[number], inputs[number + 1] if number + 1 < len(inputs) else frozenset()
        before = self._other_bytes[positions[0]] if positions else 0
        return Group(
            steps=steps,
            segment=tuple(problem.steps[p] for p in positions),
            inputs=own,
            forward=self._forward_run(number, steps, own, following, following),
            segment_seconds=sum(problem.seconds[problem.steps[p]] for p in positions),
            before_bytes=before,
            options=tuple(self._options(number, steps, own, following, positions, before)),
        )

    def _options(
        self,
        number: int,
        steps: Sequence[int],
        inputs: frozenset[int],
        following: frozenset[int],
        positions: Sequence[int],
        before_bytes: int,
    ) -> list[Option]:
        problem = self.problem
        last_read = {s: p for p in positions for s in problem.reads[problem.steps[p]]}
        needed = frozenset(s for s in last_read if self.born_in.get(s) == number)
        segment = max(
            (
                self._other_bytes[p] + self._transient(p) + self._bytes([s for s in needed if last_read[s] >= p])
                for p in positions
            ),
            default=0,
        )
        cheap_first = sorted(needed, key=lambda s: (problem.seconds[problem.rerun[s]] / problem.nbytes[s], s))
        options: list[Option] = []
        for dropped in dict.fromkeys(len(needed) * share // (_MOST_OPTIONS - 1) for share in range(_MOST_OPTIONS)):
            saved = frozenset(cheap_first[dropped:])
            rebuild = self._closure(number, needed - saved, saved)
            used = inputs.intersection(last_read) | inputs.intersection(s for op in rebuild for s in problem.reads[op])
            options.append(
                Option(
                    saved=saved,
                    inputs=used,
                    rebuild=rebuild,
                    seconds=sum(problem.seconds[op] for op in rebuild),
                    forward=self._forward_run(number, steps, inputs, following | saved, used | following | saved),
                    leaf=self._forward_run(number, steps, inputs, saved, used | saved),
                    backward_bytes=max(
                        segment,
                        before_bytes + self._bytes(saved) + self._peak(rebuild, frozenset(), needed),
                    ),
                )
            )
        return options

    def _forward_run(
        self,
        number: int,
        steps: Sequence[int],
        inputs: frozenset[int],
        wanted: Collection[int],
        held: frozenset[int],
    ) -> Forward:
        again = self._closure(number, wanted)
        stay, input_bytes = held | inputs, self._bytes(inputs)
        return Forward(
            again=again,
            seconds=sum(self.problem.seconds[op] for op in again),
            first_bytes=self._peak(steps, inputs, held),
            again_bytes=self._peak(again, inputs, held),
            first_beside_bytes=self._peak(steps, inputs, stay) - input_bytes,
            again_beside_bytes=self._peak(again, inputs, stay) - input_bytes,
        )

    def _closure(self, number: int, wanted: Collection[int], present: Collection[int] = ()) -> tuple[int, ...]:
        """The ops of a group that make some of its storages from its inputs and from what is present."""
        problem = self.problem
        ops: set[int] = set()
        stack = list(wanted)
        while stack:
            storage = stack.pop()
            is_missing = self.born_in.get(storage) == number and storage not in present
            if is_missing and problem.rerun[storage] not in ops:
                ops.add(problem.rerun[storage])
                stack += problem.reads[problem.rerun[storage]]
        return tuple(sorted(ops, key=problem.rank.__getitem__))

    def _peak(self, ops: Sequence[int], inputs: Collection[int], held: Collection[int]) -> int:
        """The most bytes of storages that can be made again, while ops run: `held` ones stay, others while read."""
        problem = self.problem
        last = {s: position for position, op in enumerate(ops) for s in problem.reads[op]}
        resident = set(inputs)
        live = peak = self._bytes(resident)
        for position, op in enumerate(ops):
            peak = max(peak, live + problem.transient_bytes[op])
            for storage in self._movable(problem.results[op]):
                if storage not in resident:
                    resident.add(storage)
                    live += problem.nbytes[storage]
            for storage in [s for s in resident if s not in held and last.get(s, -1) <= position]:
                resident.discard(storage)
                live -= problem.nbytes[storage]
        return peak

    @cached_property
    def _other_bytes(self) -> list[int]:
        """For each step, what is live before it besides the forward pass's storages that can be made again."""
        problem = self.problem
        change = [0] * (len(problem.steps) + 2)
        movable = set(self._forward)
        for storage in problem.storages():
            if storage not in movable:
                last = max([problem.born[storage], *problem.uses[storage][-1:]])
                end = len(problem.steps) if problem.is_sticky[storage] else last
                change[problem.born[storage] + 1] += problem.nbytes[storage]
                change[end + 1] -= problem.nbytes[storage]
        live, found = 0, []
        for each in change:
            live += each
            found.append(live)
        return found

    def _transient(self, position: int) -> int:
        op = self.problem.steps[position]
        return 0 if op == BOUNDARY else self.problem.transient_bytes[op]

    def _bytes(self, storages: Collection[int]) -> int:
        return sum(self.problem.nbytes[s] for s in storages)
