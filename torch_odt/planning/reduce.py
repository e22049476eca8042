"""A smaller problem for planners that solve integer programs: fewer storages to decide about, fewer moments to do it.

A storage is one of three things. A *unit* may be kept or given up between any two stages. A *frozen* one stays from
its birth for as long as anything may need it: those of a few bytes, and those that nothing can bring back. A *passing*
one stays as long as the program reads it, and is made again, within whatever needs it later: that fuses pointwise
chains into what reads them. A *stage* is a run of consecutive steps; recomputation happens at its start.

Bytes are counted for every single step of the program, and for the dearest op of a recomputation, so that what fits
here fits there: only choices are lost, never bytes. A problem that is small enough loses none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch_odt.planning.problem import BOUNDARY, Problem

_NEGLIGIBLE_SHARE = 5e-4
_LEAST_IDLE_STEPS = 2
_NEVER_RUN_AGAIN = -1


@dataclass(frozen=True)
class Unit:
    """A storage that may be kept or given up at the start of each stage.

    Attributes:
        storage: which.
        nbytes: of it.
        born: the stage in which the program computes it.
        last: the last stage in which it is of any use.
        uses: the stages after its birth whose steps read it.
        action: the action that brings it back, or -1.
    """

    storage: int
    nbytes: int
    born: int
    last: int
    uses: tuple[int, ...]
    action: int


@dataclass(frozen=True)
class Action:
    """Ops that run together to bring units back; actions are numbered in the order in which they can run.

    Attributes:
        ops: in order; the last one makes the units, the others make what it reads and nothing keeps.
        reads: units that must be in memory.
        makes: units that are in memory afterwards.
        seconds: of all ops.
        peak_bytes: the most that they allocate at once.
        first: the first stage in which it may run.
        last: the last stage in which it is of any use.
    """

    ops: tuple[int, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float
    peak_bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Moment:
    """The bytes while a step of the program runs: some in any case, and those of units that stay beyond the stage."""

    fixed_bytes: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class Reduced:
    """The smaller problem.

    Attributes:
        problem: what it was made from.
        starts: for each stage, the position of its first step; one more stands for the end.
        units, actions: what is kept and what brings it back, by number.
        fixed_bytes: for each stage, what is in memory at its start besides units.
        moments: for each stage, the moments that can be the peak.
        is_exact: nothing was left out: its optimum is that of the problem.
    """

    problem: Problem
    starts: tuple[int, ...]
    units: tuple[Unit, ...]
    actions: tuple[Action, ...]
    fixed_bytes: tuple[int, ...]
    moments: tuple[tuple[Moment, ...], ...]
    is_exact: bool

    @property
    def stages(self) -> int:
        return len(self.starts) - 1

    def has_same_choices_as(self, other: Reduced) -> bool:
        """Whether both have the same stages and units."""
        return self.starts == other.starts and self.units == other.units

    @property
    def crossing(self) -> int:
        """The first stage of the backward pass."""
        return next(i for i, start in enumerate(self.starts) if start > self.problem.boundary)

    @cached_property
    def used(self) -> list[list[int]]:
        """For each stage, the units that its steps read and earlier ones made."""
        found: list[list[int]] = [[] for _ in range(self.stages)]
        for number, unit in enumerate(self.units):
            for stage in unit.uses:
                found[stage].append(number)
        return found


def reduce(problem: Problem, max_nodes: int = 100) -> Reduced:
    """Condense a problem to at most so many stages and so many units.

    Args:
        problem: what to condense.
        max_nodes: of each; the units are those storages that take the most bytes for the longest time.
    """
    return _Reduction(problem, max_nodes).reduce()


class _Reduction:
    def __init__(self, problem: Problem, max_nodes: int) -> None:
        self.problem = problem
        self.max_nodes = max_nodes
        self.storages = problem.storages()
        # For each storage, the ops that read it to bring others back.
        self.readers: dict[int, list[int]] = {storage: [] for storage in self.storages}
        for op in {problem.rerun[s]: None for s in self._rerunnable()}:
            for source in problem.reads[op]:
                self.readers[source].append(op)
        self.is_small = len(problem.steps) <= max_nodes and len(self.storages) <= max_nodes
        largest = max(
            (sum(problem.nbytes[s] for s in problem.results[op]) for op in problem.steps if op >= 0), default=0
        )
        total = sum(problem.nbytes[s] for s in self.storages)
        self.negligible_bytes = 0.0 if self.is_small else _NEGLIGIBLE_SHARE * max(largest, total / 8)

    def reduce(self) -> Reduced:
        problem = self.problem
        horizon = self._horizons()
        chosen = self._choose(horizon)
        number_of = {storage: number for number, storage in enumerate(chosen)}
        until = self._ends(horizon, number_of)
        starts = self._stages(number_of)
        stage_of = [bisect_right(starts, position) - 1 for position in range(len(problem.steps))]
        actions = self._actions(number_of, horizon, stage_of)
        action_of = {u: number for number, action in enumerate(actions) for u in action.makes}
        units = tuple(
            Unit(
                storage=s,
                nbytes=problem.nbytes[s],
                born=stage_of[problem.born[s]],
                last=stage_of[horizon[s]],
                uses=tuple(
                    dict.fromkeys(stage_of[p] for p in problem.uses[s] if stage_of[p] > stage_of[problem.born[s]])
                ),
                action=action_of.get(number, _NEVER_RUN_AGAIN),
            )
            for number, s in enumerate(chosen)
        )
        fixed = self._fixed_bytes(until)
        return Reduced(
            problem=problem,
            starts=(*starts, len(problem.steps)),
            units=units,
            actions=actions,
            fixed_bytes=tuple(fixed[start] for start in starts),
            moments=self._moments(number_of, starts, fixed),
            is_exact=self.is_small,
        )

    def _horizons(self) -> list[int]:
        """For each storage, the last step that may need it, for recomputing something as well."""
        problem = self.problem
        end = len(problem.steps) - 1
        horizon = [
            positions[-1] if positions else born for positions, born in zip(problem.uses, problem.born, strict=True)
        ]
        # A rematerializer may read other results of the op that it stands in for, so ranks decide and not births.
        for storage in sorted(self._rerunnable(), key=lambda s: problem.rank[problem.rerun[s]], reverse=True):
            if horizon[storage] > problem.born[storage]:
                for source in problem.reads[problem.rerun[storage]]:
                    horizon[source] = max(horizon[source], horizon[storage])
        for storage in self.storages:
            if problem.is_sticky[storage]:
                horizon[storage] = end
        return horizon

    def _rerunnable(self) -> list[int]:
        problem = self.problem
        return [s for s in self.storages if problem.rerun[s] >= 0 and not problem.is_sticky[s]]

    def _choose(self, horizon: Sequence[int]) -> list[int]:
        """The storages that become units, in the order in which they can be made again."""
        problem = self.problem
        weight: dict[int, int] = {}
        for storage in self.storages:
            size = problem.nbytes[storage]
            if problem.is_sticky[storage] or size <= self.negligible_bytes:
                continue
            since = problem.born[storage]
            if problem.rerun[storage] < 0 and storage not in problem.paging:
                # What cannot come back is a choice only once the program itself needs it no more.
                since = max([since, *problem.uses[storage][-1:]])
            if horizon[storage] > since and (self.is_small or not self._serves_one(storage)):
                idle = max(b - a for a, b in pairwise((since, *problem.uses[storage], horizon[storage])))
                if self.is_small or idle > _LEAST_IDLE_STEPS:
                    weight[storage] = size * idle
        chosen = sorted(weight, key=lambda s: (-weight[s], s))
        if not self.is_small:
            chosen = chosen[: self.max_nodes]
        return sorted(chosen, key=lambda s: problem.rank[problem.rerun[s]] if problem.rerun[s] >= 0 else (-1, s))

    def _serves_one(self, storage: int) -> bool:
        """Whether a storage that the program needs no more is good only for one op whose results are no larger.

        To keep those instead takes no more bytes and saves the op.
        """
        problem = self.problem
        readers = self.readers[storage]
        if len(readers) != 1 or problem.rerun[storage] < 0:
            return False
        results = [s for s in problem.results[readers[0]] if problem.rerun[s] == readers[0]]
        is_over = all(use <= max(problem.born[s] for s in results) for use in problem.uses[storage][-1:])
        return is_over and sum(problem.nbytes[s] for s in results) <= problem.nbytes[storage]

    def _is_frozen(self, storage: int) -> bool:
        problem = self.problem
        never_back = problem.rerun[storage] < 0 or problem.is_sticky[storage]
        return never_back or problem.nbytes[storage] <= self.negligible_bytes

    def _ends(self, horizon: Sequence[int], number_of: dict[int, int]) -> dict[int, int]:
        """The last step at which each storage that is no unit is in memory."""
        problem = self.problem
        ends = {}
        for storage in self.storages:
            if storage not in number_of:
                last_use = max([problem.born[storage], *problem.uses[storage][-1:]])
                ends[storage] = horizon[storage] if self._is_frozen(storage) else last_use
        return ends

    def _stages(self, number_of: dict[int, int]) -> list[int]:
        """Merge consecutive steps, those first whose merging holds the fewest bytes for the fewest steps longer."""
        problem = self.problem
        reads = [{s for s in problem.reads[op] if s in number_of} for op in problem.steps]
        touched = [
            dict.fromkeys((s for s in (*reads[p], *problem.results.get(op, ())) if s in number_of), p)
            for p, op in enumerate(problem.steps)
        ]
        starts = list(range(len(problem.steps)))
        if self.is_small:
            return starts

        def loss(index: int) -> int:
            first, second = starts[index], starts[index + 1]
            since = touched[first]
            return sum(problem.nbytes[s] * (second - 1 - since.get(s, first - 1)) for s in reads[second])

        losses = [loss(index) for index in range(len(starts) - 1)]
        while losses:
            least = min(losses)
            if least > 0 and len(starts) <= self.max_nodes:
                break
            index = losses.index(least)
            first, second = starts[index], starts[index + 1]
            # What is made here and read here needs no earlier stage.
            reads[first] |= {s for s in reads[second] if problem.born[s] < first}
            touched[first] |= touched[second]
            del starts[index + 1], losses[index]
            for neighbour in (index - 1, index):
                if 0 <= neighbour < len(losses):
                    losses[neighbour] = loss(neighbour)
        return starts

    def _actions(
        self, number_of: dict[int, int], horizon: Sequence[int], stage_of: Sequence[int]
    ) -> tuple[Action, ...]:
        problem = self.problem
        made_by: dict[int, list[int]] = {}
        for storage in number_of:
            if problem.rerun[storage] >= 0:
                made_by.setdefault(problem.rerun[storage], []).append(storage)
        return tuple(
            self._action(op, made_by[op], number_of, horizon, stage_of)
            for op in sorted(made_by, key=problem.rank.__getitem__)
        )

    def _action(
        self,
        main: int,
        makes: Sequence[int],
        number_of: dict[int, int],
        horizon: Sequence[int],
        stage_of: Sequence[int],
    ) -> Action:
        problem = self.problem
        ops = {main}
        reads: dict[int, None] = {}
        stack = list(problem.reads[main])
        known = set(makes)
        while stack:
            storage = stack.pop()
            if storage in number_of:
                reads[number_of[storage]] = None
            elif not self._is_frozen(storage) and problem.rerun[storage] not in ops:
                ops.add(problem.rerun[storage])
                stack += problem.reads[problem.rerun[storage]]
            known.add(storage)
        ordered = tuple(sorted(ops, key=problem.rank.__getitem__))
        first = 1 + max(stage_of[problem.born[s]] for s in known)
        return Action(
            ops=ordered,
            reads=tuple(sorted(reads)),
            makes=tuple(sorted(number_of[s] for s in makes)),
            seconds=sum(problem.seconds[op] for op in ordered),
            peak_bytes=self._peak_within(ordered),
            first=first,
            last=max(stage_of[horizon[s]] for s in makes),
        )

    def _peak_within(self, ops: Sequence[int]) -> int:
        """The most bytes that ops in a row allocate at once when what only they read is freed right after."""
        problem = self.problem
        last_read = {s: position for position, op in enumerate(ops) for s in problem.reads[op]}
        live = peak = 0
        made: set[int] = set()
        for position, op in enumerate(ops):
            peak = max(peak, live + problem.transient_bytes[op])
            for storage in problem.results[op]:
                if last_read.get(storage, -1) > position and storage not in made:
                    made.add(storage)
                    live += problem.nbytes[storage]
            live -= sum(problem.nbytes[s] for s in problem.reads[op] if s in made and last_read[s] == position)
        return peak

    def _fixed_bytes(self, until: dict[int, int]) -> list[int]:
        """For each position, the bytes of storages that are no units, came before it and are still there."""
        problem = self.problem
        change = [0] * (len(problem.steps) + 1)
        for storage, last in until.items():
            born = problem.born[storage]
            if last > born:
                change[born + 1] += problem.nbytes[storage]
                change[last + 1] -= problem.nbytes[storage]
        fixed, live = [], 0
        for position in range(len(problem.steps)):
            live += change[position]
            fixed.append(live)
        return fixed

    def _moments(
        self, number_of: dict[int, int], starts: Sequence[int], fixed: Sequence[int]
    ) -> tuple[tuple[Moment, ...], ...]:
        problem = self.problem
        stages = []
        for start, stop in zip(starts, [*starts[1:], len(problem.steps)], strict=True):
            last_read = {s: p for p in range(start, stop) for s in problem.reads[problem.steps[p]] if s in number_of}
            found: list[Moment] = []
            for position in range(start, stop):
                op = problem.steps[position]
                born = {s for s in number_of if problem.born[s] < position}
                needed = {s for s in born if last_read.get(s, -1) >= position}
                transient = 0 if op == BOUNDARY else problem.transient_bytes[op]
                bytes_ = fixed[position] + transient + sum(problem.nbytes[s] for s in needed)
                moment = Moment(bytes_, tuple(sorted(number_of[s] for s in born - needed)))
                found = [m for m in found if not (m.fixed_bytes <= bytes_ and set(m.units) <= set(moment.units))]
                if not any(m.fixed_bytes >= bytes_ and set(m.units) >= set(moment.units) for m in found):
                    found.append(moment)
            stages.append(tuple(found))
        return tuple(stages)
