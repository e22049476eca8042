"""Addresses for a schedule: where every allocation of a step lies inside one arena.

The schedule says when each block comes and goes, so nothing is left to an allocator at run time: the whole sequence of
allocations is derived from the schedule and the measured events of its ops, and packed once (see `packing`). Time is
counted in allocation events, so that two temporaries of one op that do not overlap may share bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from torch_odt.capture.costs import Costs, OpCost
from torch_odt.capture.estimates import estimate
from torch_odt.capture.graph import Op, Output, TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning import packing
from torch_odt.planning.problem import Gradients
from torch_odt.planning.schedule import Deliver, Free, PageIn, Run, Schedule

OUTSIDE = -1

# Blocks that together are less than this share of the peak are stacked without a search.
_SMALL_SHARE = 0.002

# For comparing schedules: so many placements find what the chosen one then takes, or a few percent more.
QUICK = 4_000


@dataclass(slots=True)
class Block:
    """One allocation of a schedule.

    Attributes:
        instruction: the instruction that makes it.
        nbytes: as the op asks for them.
        start, end: it is in memory in [start, end), counted in allocation events; `end` is -1 while it lives.
        outside: it outlives the step, so it is an ordinary allocation and no part of the arena.
        holders: how many values live in it at present.
    """

    instruction: int
    nbytes: int
    start: int
    end: int = -1
    outside: bool = False
    holders: int = 0


@dataclass(frozen=True)
class Layout:
    """Where the allocations of a schedule lie.

    Attributes:
        address_peak_bytes: the size of the arena.
        outside_peak_bytes: the most bytes at once in blocks that outlive the step.
        live_peak_bytes: the most bytes at once inside the arena, blocks rounded up to the alignment; the address
            peak cannot be lower.
        table: for each instruction, (offset, bytes) of its allocations in order; offset `OUTSIDE` for an ordinary
            allocation.
    """

    address_peak_bytes: int
    outside_peak_bytes: int
    live_peak_bytes: int
    table: list[tuple[tuple[int, int], ...]]

    @property
    def total_bytes(self) -> int:
        return self.address_peak_bytes + self.outside_peak_bytes


def pack(
    graph: TrainingGraph,
    costs: Costs,
    schedule: Schedule,
    *,
    gradients: Gradients = "keep",
    alignment: int = 64,
    effort: int = 150_000,
) -> Layout:
    """Give every allocation of a schedule an address.

    Args:
        graph: the graph that the schedule executes.
        costs: the events of its ops; ops that are missing are estimated.
        schedule: it must have passed the simulator.
        gradients: "keep" when delivered gradients become the parameters' own (the first micro-batch), so that they
            live outside the arena; "accumulate" when they are added to them and dropped (every later one).
        alignment: every offset is a multiple of it, in bytes.
        effort: how many placements a search for a lower peak may make.

    Raises:
        PlanError: the schedule frees or delivers a value that is not in memory.
        ValueError: `alignment` is no positive number.
    """
    if alignment <= 0:
        raise ValueError(f"an alignment of {alignment} bytes is impossible")
    blocks = allocations(graph, costs, schedule, gradients=gradients).blocks
    inside = [block for block in blocks if not block.outside]
    rectangles = _rectangles(inside, alignment)
    offsets, address_peak_bytes = _place(rectangles, effort)
    return Layout(
        address_peak_bytes=address_peak_bytes,
        outside_peak_bytes=packing.live_peak(_rectangles([b for b in blocks if b.outside], 1)),
        live_peak_bytes=packing.live_peak(rectangles),
        table=_table(blocks, offsets, len(schedule.instructions)),
    )


@dataclass(frozen=True)
class Allocations:
    """What a schedule allocates.

    Attributes:
        blocks: in the order in which they are allocated.
        clock_after: for each instruction, the time when it is over, in allocation events.
    """

    blocks: list[Block]
    clock_after: list[int]


def allocations(
    graph: TrainingGraph, costs: Costs, schedule: Schedule, *, gradients: Gradients = "keep"
) -> Allocations:
    """Every allocation of a schedule, with the time that it is in memory.

    Raises:
        PlanError: the schedule frees or delivers a value that is not in memory.
    """
    walk = _Walk(graph, costs, gradients)
    clock_after: list[int] = []
    for position, instruction in enumerate(schedule.instructions):
        match instruction:
            case Run(op):
                walk.run(position, graph.ops[op])
            case Free(value):
                walk.free(position, value)
            case Deliver(output):
                walk.deliver(position, graph.outputs[output])
            case PageIn(value):
                walk.page_in(position, value)
        clock_after.append(walk.clock)
    walk.finish()
    return Allocations(walk.blocks, clock_after)


def storage_bytes(graph: TrainingGraph, costs: Costs, value: int) -> int:
    """What is allocated for a computed value, which is what moves when it is paged."""
    maker = graph.ops[graph.values[value].producer or 0]
    cost = costs.ops.get(maker.index) or estimate(graph, maker)
    ordinal = cost.result_ordinals[maker.writes.index(value)]
    return 0 if ordinal is None else cost.block_bytes[ordinal]


def check(
    graph: TrainingGraph, costs: Costs, schedule: Schedule, layout: Layout, *, gradients: Gradients = "keep"
) -> None:
    """Replay a schedule in its layout.

    Raises:
        PlanError: two blocks overlap, one lies outside of the arena, or the table does not match the schedule.
    """
    if len(layout.table) != len(schedule.instructions):
        raise PlanError(f"a layout of {len(layout.table)} instructions for a schedule of {len(schedule.instructions)}")
    blocks = allocations(graph, costs, schedule, gradients=gradients).blocks
    places = [(i, *place) for i, row in enumerate(layout.table) for place in row]
    if [(i, nbytes) for i, _, nbytes in places] != [(b.instruction, b.nbytes) for b in blocks]:
        raise PlanError("the layout's allocations are not those of the schedule")
    moments = sorted(
        [(block.start, 1, index) for index, block in enumerate(blocks)]
        + [(block.end, 0, index) for index, block in enumerate(blocks)]
    )
    # Of what lives at once no two overlap, so that a new block can only overlap its neighbours.
    live: list[tuple[int, int, int]] = []
    for _, begins, index in moments:
        instruction, offset, nbytes = places[index]
        if offset == OUTSIDE:
            continue
        block = (offset, offset + nbytes, instruction)
        position = bisect_left(live, block)
        if not begins:
            del live[position]
            continue
        if offset < 0 or offset + nbytes > layout.address_peak_bytes:
            raise PlanError(f"a block of instruction {instruction} lies outside of the arena")
        for other in live[max(0, position - 1) : position + 1]:
            if other[0] < block[1] and offset < other[1]:
                raise PlanError(f"blocks of instructions {other[2]} and {instruction} overlap")
        live.insert(position, block)


class _Walk:
    """Follows a schedule and keeps account of which value lives in which blocks."""

    def __init__(self, graph: TrainingGraph, costs: Costs, gradients: Gradients) -> None:
        self.blocks: list[Block] = []
        self._graph = graph
        self._costs = costs
        self._leaving = ("loss", "result", "gradient") if gradients == "keep" else ("loss", "result")
        self._homes: dict[int, tuple[Block, ...]] = {}
        self.clock = 0

    def run(self, position: int, op: Op) -> None:
        cost = self._costs.ops.get(op.index) or estimate(self._graph, op)
        made = self._replay(position, cost)
        ordinals = cost.result_ordinals
        for result, ordinal in zip(op.writes, _padded(ordinals, len(op.writes)), strict=True):
            if result is not None:
                self._settle(result, self._home(op, result, made.get(ordinal) if ordinal is not None else None))
        self._end_unused(block for ordinal, block in made.items() if ordinal in ordinals)
        for block in made.values():
            if block.end < 0 and block.holders == 0:
                # Neither freed nor a result: a cache inside the operator that nobody knows the end of.
                block.outside = True
                block.holders = 1

    def free(self, position: int, value: int) -> None:
        if value not in self._homes:
            raise PlanError(f"instruction {position} frees value {value}, which is not in memory")
        self._leave(self._homes.pop(value))

    def deliver(self, position: int, output: Output) -> None:
        if output.value not in self._homes and self._graph.values[output.value].kind == "computed":
            raise PlanError(f"instruction {position} delivers value {output.value}, which is not in memory")
        if output.kind in self._leaving:
            for block in self._homes.get(output.value, ()):
                block.outside = True
                block.holders += 1

    def page_in(self, position: int, value: int) -> None:
        self.clock += 1
        block = Block(position, storage_bytes(self._graph, self._costs, value), self.clock)
        self.blocks.append(block)
        self._settle(value, (block,))

    def finish(self) -> None:
        self.clock += 1
        for block in self.blocks:
            if block.end < 0:
                block.end = self.clock

    def _replay(self, position: int, cost: OpCost) -> dict[int, Block]:
        """The blocks that a call makes, by ordinal; what it frees itself has ended."""
        made: dict[int, Block] = {}
        for ordinal, size in cost.events:
            self.clock += 1
            if size > 0:
                made[ordinal] = Block(position, size, self.clock)
                self.blocks.append(made[ordinal])
            elif size < 0:
                made[ordinal].end = self.clock
        return made

    def _home(self, op: Op, result: int, block: Block | None) -> tuple[Block, ...]:
        if block is not None:
            return (block,)
        if op.is_view:
            return self._homes.get(op.reads[0], ())
        value = self._graph.values[result]
        if value.base != result:
            return self._homes.get(value.base if op.overwrites is None else op.overwrites, ())
        if value.nbytes == 0:
            return ()
        # It allocates nothing and yet has data: it may share that of anything it reads.
        return tuple({id(b): b for read in op.reads for b in self._homes.get(read, ())}.values())

    def _settle(self, value: int, home: tuple[Block, ...]) -> None:
        for block in home:
            block.holders += 1
        self._leave(self._homes.get(value, ()))
        self._homes[value] = home

    def _leave(self, home: Iterable[Block]) -> None:
        for block in home:
            block.holders -= 1
        self._end_unused(home)

    def _end_unused(self, blocks: Iterable[Block]) -> None:
        self.clock += 1
        for block in blocks:
            if block.holders == 0 and block.end < 0:
                block.end = self.clock


def _padded(ordinals: Sequence[int | None], count: int) -> Sequence[int | None]:
    return (*ordinals, *(None,) * (count - len(ordinals)))


def _rectangles(blocks: Sequence[Block], alignment: int) -> packing.Blocks:
    return packing.as_blocks([(b.start, b.end, -(-b.nbytes // alignment) * alignment) for b in blocks])


def _place(blocks: packing.Blocks, effort: int) -> tuple[packing.Ints, int]:
    """Offsets and arena size. The many blocks of hardly any weight lie on top, outside of the search."""
    order = np.argsort(blocks.nbytes, kind="stable")
    weight = np.cumsum(blocks.nbytes[order])
    small_count = int(np.searchsorted(weight, packing.live_peak(blocks) * _SMALL_SHARE, side="right"))
    small, large = np.sort(order[:small_count]), np.sort(order[small_count:])
    offsets = np.zeros(len(blocks), dtype=np.int64)
    offsets[large], large_bytes = packing.place_all(blocks.select(large), effort=effort)
    small_offsets, small_bytes = packing.stack_in_order(blocks.select(small))
    offsets[small] = small_offsets + large_bytes
    return offsets, large_bytes + small_bytes


def _table(blocks: Sequence[Block], offsets: packing.Ints, instructions: int) -> list[tuple[tuple[int, int], ...]]:
    rows: dict[int, list[tuple[int, int]]] = {}
    places = iter(offsets.tolist())
    for block in blocks:
        place = (OUTSIDE if block.outside else next(places), block.nbytes)
        rows.setdefault(block.instruction, []).append(place)
    # Most instructions allocate nothing, and all of those have the one empty tuple.
    return [tuple(rows.get(instruction, ())) for instruction in range(instructions)]
