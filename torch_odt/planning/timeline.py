"""Memory over one pass through a schedule, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torch_odt.capture.costs import Costs
from torch_odt.capture.estimates import estimate
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning import packing
from torch_odt.planning.pool import allocations
from torch_odt.planning.problem import Gradients
from torch_odt.planning.schedule import Run, Schedule


@dataclass(frozen=True)
class Timeline:
    """What is in the arena while each op runs; one entry of every list for each op that takes time.

    Attributes:
        start_seconds: when it starts, from the beginning of the pass.
        kept_bytes: results that are in memory for the first time, its own included.
        recomputed_bytes: results that were dropped and came back.
        workspace_bytes: what the op holds on top of that until it ends.
        seconds: of the whole pass.
        boundary_seconds: when the forward pass is over.
    """

    start_seconds: list[float]
    kept_bytes: list[int]
    recomputed_bytes: list[int]
    workspace_bytes: list[int]
    seconds: float
    boundary_seconds: float

    @property
    def total_bytes(self) -> list[int]:
        parts = zip(self.kept_bytes, self.recomputed_bytes, self.workspace_bytes, strict=True)
        return [sum(part) for part in parts]


def timeline_of(graph: TrainingGraph, costs: Costs, schedule: Schedule, *, gradients: Gradients = "keep") -> Timeline:
    """Follow a schedule that has passed the simulator; see `pack` for `gradients`."""
    made = allocations(graph, costs, schedule, gradients=gradients)
    again = recomputing_runs(graph, schedule)
    clock = np.array([0, *made.clock_after], dtype=np.int64)
    inside = [block for block in made.blocks if not block.outside]
    kept = packing.as_blocks([(b.start, b.end, b.nbytes) for b in inside if b.instruction not in again])
    recomputed = packing.as_blocks([(b.start, b.end, b.nbytes) for b in inside if b.instruction in again])
    everything = packing.as_blocks([(b.start, b.end, b.nbytes) for b in inside])
    kept_after, recomputed_after = _live_at(kept, clock[1:]), _live_at(recomputed, clock[1:])
    peaks = _peaks_between(everything, clock)

    result = Timeline([], [], [], [], 0.0, 0.0)
    elapsed = boundary = 0.0
    for position, instruction in enumerate(schedule.instructions):
        if position == schedule.boundary:
            boundary = elapsed
        if not isinstance(instruction, Run):
            continue
        cost = costs.ops.get(instruction.op) or estimate(graph, graph.ops[instruction.op])
        if cost.seconds == 0.0:
            continue
        result.start_seconds.append(elapsed)
        result.kept_bytes.append(int(kept_after[position]))
        result.recomputed_bytes.append(int(recomputed_after[position]))
        result.workspace_bytes.append(int(peaks[position] - kept_after[position] - recomputed_after[position]))
        elapsed += cost.seconds
    if schedule.boundary >= len(schedule.instructions):
        boundary = elapsed
    return Timeline(
        result.start_seconds,
        result.kept_bytes,
        result.recomputed_bytes,
        result.workspace_bytes,
        elapsed,
        boundary,
    )


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
