"""A way to run a batch: for each micro-batch size what runs, at what cost, and where it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_odt.capture.costs import Costs
from torch_odt.capture.draws import Draw
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.separation import Separation
from torch_odt.capture.update_in_backward import UPDATE
from torch_odt.planning.pool import Layout
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.simulate import Simulation


@dataclass
class LaterPart:
    """The same schedule for when gradients exist already."""

    graph: TrainingGraph
    costs: Costs
    simulation: Simulation
    layout: Layout


@dataclass
class PlannedPart:
    """The plan of one micro-batch size.

    Attributes:
        first: addresses while `.grad` is empty: gradients leave the arena.
        later: what runs, and where, when gradients are added to those that are there; None where that never happens.
    """

    graph: TrainingGraph
    costs: Costs
    schedule: Schedule
    simulation: Simulation
    first: Layout
    later: LaterPart | None
    separation: Separation | None = None
    draws: Sequence[Draw] = ()


@dataclass(frozen=True)
class Masks:
    """Random tensors that are drawn for the whole batch before its first micro-batch.

    Attributes:
        kept_bytes: they themselves.
        drawing_bytes: what drawing one of them takes beside them.
        slice_bytes: a micro-batch's part of them, by its size.
    """

    kept_bytes: int
    drawing_bytes: int
    slice_bytes: Mapping[int, int]

    @classmethod
    def of(cls, draws: Sequence[Draw], sizes: Sequence[int]) -> Masks:
        return cls(
            kept_bytes=sum(draw.kept_bytes for draw in draws),
            drawing_bytes=max((draw.drawing_bytes for draw in draws), default=0),
            slice_bytes={size: sum(draw.slice_bytes(size) for draw in draws) for size in sizes},
        )

    @property
    def peak_bytes(self) -> int:
        return self.kept_bytes + max(self.drawing_bytes, *self.slice_bytes.values())


@dataclass
class Candidate:
    """A way to run the batch.

    Attributes:
        sizes: its micro-batches in order.
        parts: by size.
        arena_bytes: the arena that all parts share.
        outside_bytes: gradients, losses and results.
        masks: random tensors of the whole batch, drawn ahead, and a micro-batch's part of them.
        seconds: predicted for the whole batch.
        joules: the same; None where nobody knows what the machine draws.
        planning_seconds: that were granted to look for it, beyond what a first step waits for in any case.
    """

    sizes: tuple[int, ...]
    parts: dict[int, PlannedPart]
    arena_bytes: int
    outside_bytes: int
    masks: Masks
    seconds: float
    joules: float | None = None
    planning_seconds: float = 0.0

    @classmethod
    def of(
        cls, sizes: tuple[int, ...], parts: dict[int, PlannedPart], seconds: float, joules: float | None
    ) -> Candidate:
        """The parts together."""
        later = [part.later.layout for part in parts.values() if part.later is not None]
        layouts = [*(part.first for part in parts.values()), *later]
        outside = max(layout.outside_peak_bytes for layout in layouts)
        if later:
            gradients = gradient_bytes_of(parts[sizes[0]].graph)
            outside = max(outside, gradients + max(layout.outside_peak_bytes for layout in later))
        return cls(
            sizes=sizes,
            parts=parts,
            arena_bytes=max(layout.address_peak_bytes for layout in layouts),
            outside_bytes=outside,
            masks=Masks.of(parts[sizes[0]].draws, sizes),
            seconds=seconds,
            joules=joules,
        )

    @property
    def total_bytes(self) -> int:
        return self.arena_bytes + self.outside_bytes + self.masks.peak_bytes + self.copied_bytes

    @property
    def copied_bytes(self) -> int:
        """Copies of the buffers that a step changes: one that pages may fail, and is undone then."""
        return mutated_bytes(self.parts[self.sizes[0]].graph) if self.pages else 0

    @property
    def tensor_peak_bytes(self) -> int:
        """The most bytes in tensors at once: what the allocator counts."""
        peaks = [self.masks.drawing_bytes]
        for size, part in self.parts.items():
            slices = self.masks.slice_bytes[size]
            peaks.append(slices + part.simulation.peak_bytes)
            if part.later is not None:
                peaks.append(slices + gradient_bytes_of(part.graph) + part.later.simulation.peak_bytes)
        return self.masks.kept_bytes + self.copied_bytes + max(peaks)

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that there are after the backward pass."""
        return gradient_bytes_of(self.parts[self.sizes[0]].graph)

    @property
    def pages(self) -> bool:
        return any(part.schedule.pages for part in self.parts.values())

    @property
    def recomputes(self) -> bool:
        return any(part.simulation.recomputed_ops for part in self.parts.values())


def update_seconds(graph: TrainingGraph, costs: Costs) -> float:
    """What a graph's updates of parameters take."""
    return sum(costs.ops[op.index].seconds for op in graph.program if op.target == UPDATE)


def gradient_bytes_of(graph: TrainingGraph) -> int:
    """Bytes of all the gradients that the step delivers."""
    targets = {output.target for output in graph.outputs_of("gradient")}
    parameters = {v.target: v for v in graph.values if v.kind == "parameter"}
    return sum(parameters[target].nbytes for target in targets if target in parameters)


def mutated_bytes(graph: TrainingGraph) -> int:
    """Of the buffers that a step changes."""
    targets = {output.target for output in graph.outputs_of("mutation")}
    return sum(value.nbytes for value in graph.values if value.kind == "buffer" and value.target in targets)
