"""Memory over one pass through a schedule, for people to look at."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from torch_odt.capture.costs import Costs, TransferCosts
from torch_odt.capture.estimates import estimate
from torch_odt.capture.graph import Op, TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning import packing
from torch_odt.planning.plan_fields import Fields, is_number, is_whole
from torch_odt.planning.pool import Block, allocations, storage_bytes
from torch_odt.planning.problem import Gradients, is_alias
from torch_odt.planning.schedule import Free, PageIn, PageOut, Run, Schedule
from torch_odt.planning.transfer_clock import TransferClock

_BYTES = ("kept_bytes", "recomputed_bytes", "returned_bytes", "moving_bytes", "workspace_bytes", "file_bytes")
WAIT = "waits for the file"
"""The name of the moments in which no op runs."""


class Transfer(NamedTuple):
    """A storage that moves to the file ("out") or back ("in")."""

    direction: Literal["out", "in"]
    name: str
    nbytes: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Timeline:
    """What is in the arena at each moment; one entry of every list for each op that takes time, and for each wait.

    An op during which transfers end has several entries, one after the other.

    Attributes:
        start_seconds: when it starts, from the beginning of the pass.
        kept_bytes: results that are in memory for the first time, its own included.
        recomputed_bytes: results that were dropped and came back.
        returned_bytes: results that were in the file and came back.
        moving_bytes: results that are being written to the file or read from it; they are in none of the other lists.
        workspace_bytes: what the op holds on top of all that until it ends.
        file_bytes: what the file holds.
        names: of the op, and the module or the value that it is about; `WAIT` for a wait.
        recomputes: whether the op brings back what was dropped.
        continues: whether it is still the op of the entry before.
        transfers: to the file and back, in the order in which they happen.
        seconds: of the whole pass.
        boundary_seconds: when the forward pass is over.
    """

    start_seconds: list[float]
    kept_bytes: list[int]
    recomputed_bytes: list[int]
    returned_bytes: list[int]
    moving_bytes: list[int]
    workspace_bytes: list[int]
    file_bytes: list[int]
    names: list[str]
    recomputes: list[bool]
    continues: list[bool]
    transfers: list[Transfer]
    seconds: float
    boundary_seconds: float

    @property
    def total_bytes(self) -> list[int]:
        results = (self.kept_bytes, self.recomputed_bytes, self.returned_bytes, self.moving_bytes)
        return [sum(part) for part in zip(*results, self.workspace_bytes, strict=True)]

    @property
    def end_seconds(self) -> list[float]:
        """When each entry is over."""
        return [*self.start_seconds[1:], self.seconds] if self.start_seconds else []

    @property
    def wait_seconds(self) -> float:
        """That ops wait for transfers."""
        return self._seconds_where([name == WAIT for name in self.names])

    @property
    def recompute_seconds(self) -> float:
        """Of the ops that bring back what was dropped."""
        return self._seconds_where(self.recomputes)

    def moved_bytes(self, direction: Literal["out", "in"]) -> int:
        """Written to the file ("out"), or read from it ("in")."""
        return sum(transfer.nbytes for transfer in self.transfers if transfer.direction == direction)

    def _seconds_where(self, chosen: Sequence[bool]) -> float:
        spans = zip(self.start_seconds, self.end_seconds, chosen, strict=True)
        return sum((end - start for start, end, is_chosen in spans if is_chosen), start=0.0)

    @classmethod
    def from_fields(cls, fields: Fields) -> Timeline:
        """The inverse of `dataclasses.asdict`, through JSON as well.

        Raises:
            PlanError: it is something else; the text names the field.
        """
        columns: dict[str, Any] = {"start_seconds": fields.items("start_seconds", is_number, "a number")}
        for name in _BYTES:
            columns[name] = fields.items(name, lambda n: type(n) is int, "a number of bytes")
        columns["names"] = fields.items("names", lambda name: isinstance(name, str), "a text")
        for name in ("recomputes", "continues"):
            columns[name] = fields.items(name, lambda flag: isinstance(flag, bool), "true or false")
        if len(set(map(len, columns.values()))) != 1:
            raise PlanError(f"this is no plan: the lists of {fields.place} differ in length; make the plan again")
        return cls(
            **columns,
            transfers=[Transfer(*item) for item in fields.items("transfers", _is_transfer, "a transfer")],
            seconds=fields.number("seconds"),
            boundary_seconds=fields.number("boundary_seconds"),
        )


def _is_transfer(item: Any) -> bool:
    if not isinstance(item, (list, tuple)) or len(item) != len(Transfer._fields):
        return False
    direction, name, nbytes, *seconds = item
    return direction in ("out", "in") and isinstance(name, str) and is_whole(nbytes) and all(map(is_number, seconds))


def timeline_of(graph: TrainingGraph, costs: Costs, schedule: Schedule, *, gradients: Gradients = "keep") -> Timeline:
    """Follow a schedule that has passed the simulator; see `pack` for `gradients`."""
    made = allocations(graph, costs, schedule, gradients=gradients)
    again = recomputing_runs(graph, schedule)
    clock = np.array([0, *made.clock_after], dtype=np.int64)
    inside = [block for block in made.blocks if not block.outside]

    def source(position: int) -> _Source:
        if isinstance(schedule.instructions[position], PageIn):
            return "returned"
        return "recomputed" if position in again else "kept"

    walk = _Walk(graph, costs, schedule, again)
    entries = _split(walk.entries, walk.clock.seconds, sorted(move.transfer.end_seconds for move in walk.moves))
    positions = np.array([entry.position for entry in entries], dtype=np.int64)
    sizes = {
        name: _live_at(_blocks([b for b in inside if source(b.instruction) == name]), clock[1:])[positions]
        for name in ("kept", "recomputed", "returned")
    }
    peaks = _peaks_between(_blocks(inside), clock)[positions]
    waits = np.array([entry.name == WAIT for entry in entries], dtype=bool)
    workspace = np.where(waits, 0, peaks - sum(sizes.values()))
    starts = [entry.start_seconds for entry in entries]
    moving = np.zeros(len(positions), dtype=np.int64)
    for move in walk.moves:
        meanwhile = slice(*(bisect_left(starts, moment) for moment in (move.begin_seconds, move.transfer.end_seconds)))
        moving[meanwhile] += move.transfer.nbytes
        sizes[source(move.made_by)][meanwhile] -= move.transfer.nbytes
    return Timeline(
        start_seconds=starts,
        kept_bytes=sizes["kept"].tolist(),
        recomputed_bytes=sizes["recomputed"].tolist(),
        returned_bytes=sizes["returned"].tolist(),
        moving_bytes=moving.tolist(),
        workspace_bytes=workspace.tolist(),
        file_bytes=[entry.file_bytes for entry in entries],
        names=[entry.name for entry in entries],
        recomputes=[entry.recomputes for entry in entries],
        continues=[entry.continues for entry in entries],
        transfers=[move.transfer for move in walk.moves],
        seconds=walk.clock.seconds,
        boundary_seconds=walk.boundary_seconds,
    )


_Source = Literal["kept", "recomputed", "returned"]


class _Entry(NamedTuple):
    """A moment, and the instruction after which memory is as it is then."""

    position: int
    start_seconds: float
    name: str
    recomputes: bool
    file_bytes: int
    continues: bool = False


class _Move(NamedTuple):
    """A transfer, when its storage begins to wait for it, and the instruction that made the storage."""

    transfer: Transfer
    begin_seconds: float
    made_by: int


@dataclass
class _Walk:
    """Follows a schedule's time as the simulator does."""

    graph: TrainingGraph
    costs: Costs
    schedule: Schedule
    again: frozenset[int]
    entries: list[_Entry] = field(default_factory=list)
    moves: list[_Move] = field(default_factory=list)
    boundary_seconds: float = 0.0
    file_bytes: int = 0

    def __post_init__(self) -> None:
        self.clock = TransferClock(self.costs.transfers)
        self._made_by: dict[int, int] = {}
        instructions = self.schedule.instructions
        last_page_in = {i.value: position for position, i in enumerate(instructions) if isinstance(i, PageIn)}
        for position, instruction in enumerate(instructions):
            if position == self.schedule.boundary:
                self.boundary_seconds = self.clock.seconds
            match instruction:
                case Run(index):
                    self._run(position, self.graph.ops[index])
                case Free(value):
                    self._wait_for([value], position - 1)
                case PageOut(value):
                    self._page_out(position, value)
                case PageIn(value):
                    self._page_in(position, value, is_last=last_page_in[value] == position)
        if self.schedule.boundary >= len(instructions):
            self.boundary_seconds = self.clock.seconds

    def _run(self, position: int, op: Op) -> None:
        for value in op.results:
            self._made_by[value] = position
        if is_alias(self.graph, op):
            return
        self._wait_for([self.graph.values[value].base for value in op.reads], position - 1)
        cost = self.costs.ops.get(op.index) or estimate(self.graph, op)
        if cost.seconds:
            self._enter(position, self.clock.seconds, _name(self.graph, op), position in self.again)
        self.clock.run(cost.seconds, ())

    def _page_out(self, position: int, value: int) -> None:
        nbytes, begin = storage_bytes(self.graph, self.costs, value), self.clock.seconds
        self.file_bytes += TransferCosts.file_bytes(nbytes)
        interval = self.clock.page_out(value, nbytes)
        transfer = Transfer("out", _value_name(self.graph, value), nbytes, *interval)
        self.moves.append(_Move(transfer, begin, self._made_by[value]))
        self._waited_since(begin, position)

    def _page_in(self, position: int, value: int, *, is_last: bool) -> None:
        nbytes, begin = storage_bytes(self.graph, self.costs, value), self.clock.seconds
        self._made_by[value] = position
        interval = self.clock.page_in(value, nbytes)
        transfer = Transfer("in", _value_name(self.graph, value), nbytes, *interval)
        self.moves.append(_Move(transfer, begin, position))
        self._waited_since(begin, position)
        if is_last:
            self.file_bytes -= TransferCosts.file_bytes(nbytes)

    def _wait_for(self, storages: Sequence[int], position: int) -> None:
        begin = self.clock.seconds
        for storage in storages:
            self.clock.wait_for(storage)
        self._waited_since(begin, position)

    def _waited_since(self, begin: float, position: int) -> None:
        if self.clock.seconds > begin:
            self._enter(position, begin, WAIT, False)

    def _enter(self, position: int, start_seconds: float, name: str, recomputes: bool) -> None:
        self.entries.append(_Entry(position, start_seconds, name, recomputes, self.file_bytes))


def _split(entries: Sequence[_Entry], seconds: float, moments: Sequence[float]) -> list[_Entry]:
    """The same entries until the end, with another one at each of the moments, which are in order."""
    ends = [*(entry.start_seconds for entry in entries), seconds][1:]
    result = []
    for entry, end in zip(entries, ends, strict=True):
        inside = moments[bisect_right(moments, entry.start_seconds) : bisect_left(moments, end)]
        later = [entry._replace(start_seconds=moment, continues=True) for moment in dict.fromkeys(inside)]
        result += [entry, *later]
    return result


def _name(graph: TrainingGraph, op: Op) -> str:
    """The operator, and what it is about as far as that can be told."""
    about = _module(graph, op) or (graph.values[op.results[0]].name if op.results else "")
    target = op.target.removesuffix(".default")
    return f"{target} ({about})" if about else target


def _value_name(graph: TrainingGraph, value: int) -> str:
    module = _module(graph, graph.ops[graph.values[value].producer or 0])
    return f"{graph.values[value].name} ({module})" if module else graph.values[value].name


def _module(graph: TrainingGraph, op: Op) -> str:
    """The module whose parameter an op reads; empty where it reads none."""
    for value in map(graph.values.__getitem__, op.reads):
        if value.kind == "parameter":
            return str(value.target).rpartition(".")[0]
    return ""


def recomputing_runs(graph: TrainingGraph, schedule: Schedule) -> frozenset[int]:
    """The positions of instructions that bring back what was there before."""
    found: set[int] = set()
    ran: set[int] = set()
    for position, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Run):
            if instruction.op in ran or instruction.op >= graph.program_length:
                found.add(position)
            ran.add(instruction.op)
    return frozenset(found)


def _blocks(blocks: Sequence[Block]) -> packing.Blocks:
    return packing.as_blocks([(block.start, block.end, block.nbytes) for block in blocks])


def _live_at(blocks: packing.Blocks, times: packing.Ints) -> packing.Ints:
    """The bytes in memory at each of the times."""
    moments, live = packing.live_bytes(blocks)
    return np.concatenate([[0], live])[np.searchsorted(moments, times, side="right")]


def _peaks_between(blocks: packing.Blocks, clock: packing.Ints) -> packing.Ints:
    """The most bytes in memory within each of the intervals between successive clock readings, their ends included."""
    moments, live = packing.live_bytes(blocks)
    live = np.concatenate([[0], live])
    first = np.searchsorted(moments, clock[:-1], side="right")
    last = np.searchsorted(moments, clock[1:], side="right")
    return np.array([live[a : b + 1].max() for a, b in zip(first, last, strict=True)], dtype=np.int64)
