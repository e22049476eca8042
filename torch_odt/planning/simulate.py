"""The simulator: what a schedule needs and whether it is right.

Every planner's output goes through it, and its byte count is what the allocator counts when the schedule is executed:
each op's recorded allocations are replayed on top of what is live.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, overload

from torch_odt.capture.costs import Costs, OpCost, TransferCosts
from torch_odt.capture.estimates import estimate
from torch_odt.capture.graph import Op, TrainingGraph
from torch_odt.capture.update_in_backward import changed_by
from torch_odt.errors import ScheduleError
from torch_odt.planning.problem import Gradients, is_alias, live_ops, peak_without, unmovable_storages
from torch_odt.planning.schedule import Deliver, Free, Instruction, PageIn, PageOut, Run, Schedule
from torch_odt.planning.transfer_clock import TransferClock


class Moment(NamedTuple):
    """The planned memory around one instruction.

    Attributes:
        arena_bytes: after it, in storages that end with the step.
        outside_bytes: after it, in storages that leave the step (loss, results, kept gradients).
        peak_bytes: the most that was live while it ran, of both together.
        arena_peak_bytes: the same without what leaves the step.
    """

    arena_bytes: int
    outside_bytes: int
    peak_bytes: int
    arena_peak_bytes: int

    @property
    def live_bytes(self) -> int:
        return self.arena_bytes + self.outside_bytes


_FIELDS = len(Moment._fields)


@dataclass(frozen=True)
class Moments(Sequence[Moment]):
    """Moments in a fifth of the memory of a list of them: plans are held for as long as they are followed.

    Attributes:
        numbers: those of all moments, one moment after the other.
    """

    numbers: array[int]

    @classmethod
    def of(cls, moments: Iterable[Moment]) -> Moments:
        return cls(array("q", chain.from_iterable(moments)))

    def __len__(self) -> int:
        return len(self.numbers) // _FIELDS

    def __iter__(self) -> Iterator[Moment]:
        return iter(self[:])

    @overload
    def __getitem__(self, index: int) -> Moment: ...
    @overload
    def __getitem__(self, index: slice) -> list[Moment]: ...
    def __getitem__(self, index: int | slice) -> Moment | list[Moment]:
        if isinstance(index, slice):
            columns = (self.numbers[column::_FIELDS][index] for column in range(_FIELDS))
            return list(map(Moment, *columns))
        begin = range(len(self))[index] * _FIELDS
        return Moment(*self.numbers[begin : begin + _FIELDS])


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs.

    Attributes:
        peak_bytes: the most planned memory live at once, arena and outside together.
        arena_peak_bytes, outside_peak_bytes: of each of the two alone.
        seconds: of all ops, and of waiting for transfers.
        recompute_seconds: of those that run because something was dropped.
        boundary_bytes: live where the forward pass ends.
        timeline: one `Moment` for each instruction.
        recomputed_ops: the ops that run because something was dropped, in order; an op may stand in it often.
        written_bytes, read_bytes: of transfers to and from the file.
        wait_seconds: that ops wait for transfers.
        joules: of ops and transfers, as far as the costs know what they draw.
        file_peak_bytes: the most that the file holds at once.
    """

    peak_bytes: int
    arena_peak_bytes: int
    outside_peak_bytes: int
    seconds: float
    recompute_seconds: float
    boundary_bytes: int
    timeline: Moments
    recomputed_ops: tuple[int, ...]
    written_bytes: int = 0
    read_bytes: int = 0
    wait_seconds: float = 0.0
    joules: float = 0.0
    file_peak_bytes: int = 0


@dataclass(slots=True)
class _Storage:
    """One allocation of a storage: from the `Run` that makes it until its last value is freed."""

    nbytes: int
    ordinal: int | None
    made_by: int
    values: int = 0
    ended_by: int | None = None
    is_outside: bool = False


def simulate(graph: TrainingGraph, costs: Costs, schedule: Schedule, *, gradients: Gradients = "keep") -> Simulation:
    """Check every instruction of a schedule and count its bytes and seconds.

    Args:
        graph: what the schedule executes.
        costs: seconds and allocations by op; ops that are missing are estimated.
        schedule: what to check.
        gradients: "keep" when delivered gradients stay in memory until the end of the step (the first micro-batch),
            "accumulate" when they are added to gradients that exist already.

    Raises:
        ScheduleError: an instruction breaks a rule of the graph; the text names the instruction.
    """
    return _Simulator(graph, costs, schedule, gradients).run()


class _Simulator:
    def __init__(self, graph: TrainingGraph, costs: Costs, schedule: Schedule, gradients: Gradients) -> None:
        self.graph = graph
        self.costs = costs
        self.schedule = schedule
        self.leaving = ("loss", "result", "gradient") if gradients == "keep" else ("loss", "result")
        self.position = 0
        self.storage_of: dict[int, _Storage | None] = {}
        self.storages: list[_Storage] = []
        self.ran: set[int] = set()
        self.delivered: set[int] = set()
        self.recomputed: list[int] = []
        self.updated: set[int] = set()
        self.overwritten: set[int] = set()
        self.on_file: set[int] = set()
        self.bytes_paged_out: dict[int, int] = {}
        self.unmovable = unmovable_storages(graph)
        self._cost_of: dict[int, tuple[OpCost, dict[int, int]]] = {}

    def run(self) -> Simulation:
        instructions = self.schedule.instructions
        if not 0 <= self.schedule.boundary <= len(instructions):
            raise ScheduleError(f"the boundary {self.schedule.boundary} lies outside of the schedule")
        for self.position, instruction in enumerate(instructions):
            if isinstance(instruction, Run):
                self._run(instruction.op)
            elif isinstance(instruction, Free):
                self._free(instruction.value)
            elif isinstance(instruction, Deliver):
                self._deliver(instruction.output)
            elif isinstance(instruction, PageOut):
                self._page_out(instruction.value)
            elif isinstance(instruction, PageIn):
                self._page_in(instruction.value)
            else:
                raise self._error("it is no instruction of a schedule")
        self._check_end()
        return self._count()

    def _run(self, index: int) -> None:
        if not 0 <= index < len(self.graph.ops):
            raise self._error("the graph has no such op")
        op = self.graph.ops[index]
        for value in op.reads:
            self._check_readable(value)
        again = index in self.ran or index >= self.graph.program_length
        self._check_may_run(op, again)
        self.ran.add(index)
        self.updated |= changed_by(self.graph, op)
        if is_alias(self.graph, op):
            self._alias(op)
            return
        if again:
            self.recomputed.append(index)
        cost, ordinals = self._cost(op)
        blocks = cost.block_bytes
        for value in op.results:
            self._check_absent(value)
            storage = None
            if self.graph.values[value].base == value:
                ordinal = ordinals.get(value)
                storage = _Storage(0 if ordinal is None else blocks.get(ordinal, 0), ordinal, self.position)
                self.storages.append(storage)
            else:
                storage = self.storage_of.get(self._source_of(op, value))
            self._hold(value, storage)

    def _source_of(self, op: Op, value: int) -> int:
        """The value in whose storage a result lies that is no storage's own."""
        if op.overwrites is None:
            return self.graph.values[value].base
        self.overwritten.add(op.overwrites)
        return op.overwrites

    def _cost(self, op: Op) -> tuple[OpCost, dict[int, int]]:
        """The cost of an op and the block that each of its results lives in."""
        if op.index not in self._cost_of:
            cost = self.costs.ops.get(op.index) or estimate(self.graph, op)
            pairs = zip(op.writes, cost.result_ordinals, strict=False)
            ordinals = {value: ordinal for value, ordinal in pairs if value is not None and ordinal is not None}
            self._cost_of[op.index] = (cost, ordinals)
        return self._cost_of[op.index]

    def _alias(self, op: Op) -> None:
        storage = self.storage_of.get(op.reads[0]) if op.reads else None
        for value in op.results:
            self._check_absent(value)
            self._hold(value, storage)

    def _hold(self, value: int, storage: _Storage | None) -> None:
        self.storage_of[value] = storage
        if storage is not None:
            storage.values += 1

    def _free(self, value: int) -> None:
        if value not in self.storage_of:
            raise self._error(f"{self._name(value)} is not in memory")
        storage = self.storage_of.pop(value)
        if storage is not None:
            storage.values -= 1
            if storage.values == 0:
                storage.ended_by = self.position

    def _page_out(self, value: int) -> None:
        if value not in self.storage_of:
            raise self._error(f"{self._name(value)} is not in memory")
        if value in self.on_file:
            raise self._error(f"{self._name(value)} is in the file already")
        if self.costs.transfers is None:
            raise self._error("there is no file to page to")
        if self.graph.values[value].base != value or value in self.unmovable:
            raise self._error(f"{self._name(value)} is a view, an output, or written into by an op")
        storage = self.storage_of[value]
        self.bytes_paged_out[self.position] = 0 if storage is None else storage.nbytes
        self.on_file.add(value)

    def _page_in(self, value: int) -> None:
        if value not in self.on_file:
            raise self._error(f"{self._name(value)} is not in the file")
        self._check_absent(value)
        maker = self.graph.ops[self.graph.values[value].producer or 0]
        cost, ordinals = self._cost(maker)
        ordinal = ordinals.get(value)
        nbytes = 0 if ordinal is None else cost.block_bytes.get(ordinal, 0)
        storage = _Storage(nbytes, 0, self.position)
        self.storages.append(storage)
        self._hold(value, storage)

    def _deliver(self, index: int) -> None:
        if not 0 <= index < len(self.graph.outputs):
            raise self._error("the graph has no such output")
        output = self.graph.outputs[index]
        if index in self.delivered:
            raise self._error(f"output {index} ({output.kind} {output.target}) is delivered twice")
        if output.kind == "gradient" and self.position < self.schedule.boundary:
            raise self._error(f"the gradient of {output.target} is delivered in the forward pass")
        if output.kind != "gradient" and self.position >= self.schedule.boundary:
            raise self._error(f"the {output.kind} {output.target} is delivered after the forward pass")
        self._check_readable(output.value)
        self.delivered.add(index)
        storage = self.storage_of.get(output.value)
        if storage is not None and output.kind in self.leaving:
            storage.is_outside = True

    def _check_readable(self, value: int) -> None:
        if self.graph.values[value].base in self.updated:
            raise self._error(f"{self._name(value)} has been updated")
        if value in self.overwritten:
            raise self._error(f"{self._name(value)} has been overwritten")
        kind = self.graph.values[value].kind
        if kind == "tangent" and self.position < self.schedule.boundary:
            raise self._error(f"{self._name(value)} is given only after the forward pass")
        if kind == "computed" and value not in self.storage_of:
            raise self._error(f"{self._name(value)} is not in memory")

    def _check_absent(self, value: int) -> None:
        if value in self.storage_of:
            raise self._error(f"its result {self._name(value)} is in memory already")

    def _check_may_run(self, op: Op, again: bool) -> None:
        if op.index in self.ran and op.is_random:
            raise self._error("a random op runs twice")
        if op.index in self.ran and op.is_pinned:
            raise self._error("an op that must run once runs twice")
        if is_alias(self.graph, op):
            return
        in_forward = self.position < self.schedule.boundary
        if op.phase == "backward" and in_forward:
            raise self._error("an op of the backward pass runs before the boundary")
        if op.phase == "forward" and not in_forward and not again:
            raise self._error("an op of the forward pass runs for the first time after the boundary")

    def _check_end(self) -> None:
        self.position = -1
        missing = sorted(i for i in live_ops(self.graph) - self.ran if not self.graph.ops[i].is_random)
        if missing:
            op = self.graph.ops[missing[0]]
            raise ScheduleError(f"op {op.index} ({op.target}) and {len(missing) - 1} others never run")
        for index, output in enumerate(self.graph.outputs):
            if index not in self.delivered:
                raise ScheduleError(f"output {index} ({output.kind} {output.target}) is never delivered")
        if self.storage_of:
            names = ", ".join(self._name(v) for v in list(self.storage_of)[:5])
            raise ScheduleError(f"{len(self.storage_of)} values are never freed: {names}")

    def _count(self) -> Simulation:
        """Replay the allocations, now that it is known which of them leave the step."""
        instructions = self.schedule.instructions
        made: dict[int, list[_Storage]] = {}
        ended: dict[int, int] = {}
        for storage in self.storages:
            made.setdefault(storage.made_by, []).append(storage)
            if storage.ended_by is not None and not storage.is_outside:
                ended[storage.ended_by] = ended.get(storage.ended_by, 0) + storage.nbytes
        last_page_in = {i.value: position for position, i in enumerate(instructions) if isinstance(i, PageIn)}
        arena = outside = peak = arena_peak = boundary_bytes = 0
        file = file_peak = written = read = 0
        clock = TransferClock(self.costs.transfers)
        paged_bytes: dict[int, int] = {}
        timeline: list[Moment] = []
        for position, instruction in enumerate(instructions):
            if position == self.schedule.boundary:
                boundary_bytes = arena + outside
            during, arena_during = arena + outside, arena
            if isinstance(instruction, Run) and instruction.op in self._cost_of:
                cost = self._cost_of[instruction.op][0]
                storages = made.get(position, [])
                left = {s.ordinal for s in storages if s.is_outside}
                during = arena + outside + cost.peak_bytes
                arena_during = arena + (peak_without(cost, left) if left else cost.peak_bytes)
                clock.run(cost.seconds, self._storages_of(instruction.op))
                for storage in storages:
                    if storage.is_outside:
                        outside += storage.nbytes
                    else:
                        arena += storage.nbytes
            elif isinstance(instruction, PageOut):
                nbytes = paged_bytes[instruction.value] = self.bytes_paged_out[position]
                clock.page_out(instruction.value, nbytes)
                file, written = file + TransferCosts.file_bytes(nbytes), written + nbytes
                file_peak = max(file_peak, file)
                if self.costs.transfers is not None and file > self.costs.transfers.limit_bytes:
                    self.position = position
                    raise self._error(f"the file would hold {file} bytes of {self.costs.transfers.limit_bytes}")
            elif isinstance(instruction, PageIn):
                (storage,) = made[position]
                clock.page_in(instruction.value, storage.nbytes)
                arena, read = arena + storage.nbytes, read + storage.nbytes
                during, arena_during = arena + outside, arena
                if last_page_in[instruction.value] == position:
                    file -= TransferCosts.file_bytes(paged_bytes[instruction.value])
            else:
                if isinstance(instruction, Free):
                    clock.wait_for(instruction.value)
                arena -= ended.get(position, 0)
            peak = max(peak, during)
            arena_peak = max(arena_peak, arena_during)
            timeline.append(Moment(arena, outside, during, arena_during))
        if self.schedule.boundary == len(instructions):
            boundary_bytes = arena + outside
        return Simulation(
            peak_bytes=peak,
            arena_peak_bytes=arena_peak,
            outside_peak_bytes=outside,
            seconds=clock.seconds,
            recompute_seconds=sum(self._cost_of[op][0].seconds for op in self.recomputed),
            boundary_bytes=boundary_bytes,
            timeline=Moments.of(timeline),
            recomputed_ops=tuple(self.recomputed),
            written_bytes=written,
            read_bytes=read,
            wait_seconds=clock.wait_seconds,
            joules=clock.op_seconds * self.costs.watts + clock.transfer_joules,
            file_peak_bytes=file_peak,
        )

    def _storages_of(self, op: int) -> set[int]:
        return {self.graph.values[value].base for value in self.graph.ops[op].reads}

    def _name(self, value: int) -> str:
        known = 0 <= value < len(self.graph.values)
        return f"value {value} ({self.graph.values[value].name})" if known else f"value {value}"

    def _error(self, what: str) -> ScheduleError:
        instruction: Instruction = self.schedule.instructions[self.position]
        text = str(instruction)
        if isinstance(instruction, Run) and 0 <= instruction.op < len(self.graph.ops):
            text += f" {self.graph.ops[instruction.op].target}"
        return ScheduleError(f"instruction {self.position}, {text}: {what}")
