"""Plans for the whole batch and for micro-batches of it, and the choice between them.

A smaller micro-batch needs less memory and, with recomputation, trades it for time in another way. Each
size is captured and planned by itself; the fastest that fits is taken. Sizes are tried from large to small until one
fits without recomputation: cutting further only costs time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_odt.cache import Cache
from torch_odt.capture.accumulate import accumulating
from torch_odt.capture.batch_axis import Separation, analyse
from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.randomness import Draw, hoist_random
from torch_odt.errors import CaptureError, PlanError
from torch_odt.execute.smallest_plans import remembered_smallest
from torch_odt.planning.auto import auto
from torch_odt.planning.pool import Layout, pack
from torch_odt.planning.registry import get_planner
from torch_odt.planning.schedule import Run, Schedule, schedule_from_data, schedule_to_data
from torch_odt.planning.simulate import Simulation, simulate

CaptureSizes = Callable[[Sequence[int]], Mapping[int, TrainingGraph]]
ProfileGraph = Callable[[TrainingGraph, bool], Costs]

# Drawing a mask as bits takes about this share of the operator that draws it as booleans and applies it.
_BITS_SHARE = 0.1


@dataclass
class LaterPart:
    """The same schedule for when gradients exist already."""

    graph: TrainingGraph
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
    """

    sizes: tuple[int, ...]
    parts: dict[int, PlannedPart]
    arena_bytes: int
    outside_bytes: int
    masks: Masks
    seconds: float

    @property
    def total_bytes(self) -> int:
        return self.arena_bytes + self.outside_bytes + self.masks.peak_bytes

    @property
    def tensor_peak_bytes(self) -> int:
        """The most bytes in tensors at once: what the allocator counts."""
        peaks = [self.masks.drawing_bytes]
        for size, part in self.parts.items():
            slices = self.masks.slice_bytes[size]
            peaks.append(slices + part.simulation.peak_bytes)
            if part.later is not None:
                peaks.append(slices + gradient_bytes_of(part.graph) + part.later.simulation.peak_bytes)
        return self.masks.kept_bytes + max(peaks)

    @property
    def recomputes(self) -> bool:
        return any(part.simulation.recomputed_ops for part in self.parts.values())


@dataclass(frozen=True)
class SizedGraph:
    """The step at one micro-batch size; `separation` is None for the whole batch.

    `adding` is what may run once gradients exist, with its costs: the batch is cut, so the order of sums is free.
    """

    graph: TrainingGraph
    costs: Costs
    separation: Separation | None = None
    draws: Sequence[Draw] = ()
    adding: tuple[TrainingGraph, Costs] | None = None

    @property
    def is_measured(self) -> bool:
        """Whether nothing was left out for its size."""
        return not self.costs.too_large and (self.adding is None or not self.adding[1].too_large)

    def later(self, schedule: Schedule) -> tuple[TrainingGraph, Costs]:
        """What a schedule of `graph` executes when gradients exist."""
        if self.adding is None:
            return self.graph, self.costs
        graph, costs = self.adding
        runs = Counter(instruction.op for instruction in schedule.instructions if isinstance(instruction, Run))
        changed = {op.index for op, own in zip(graph.ops, self.graph.ops, strict=True) if op is not own}
        again = {op for op in changed if runs[op] > 1}
        if not again:
            return graph, costs
        partial = accumulating(self.graph, without=again)
        if partial is None:
            return self.graph, self.costs
        kept = {op.index for op, own in zip(partial.ops, self.graph.ops, strict=True) if op is not own}
        return partial, replace(costs, ops={**costs.ops, **{op: self.costs.ops[op] for op in changed - kept}})


@dataclass
class Candidates:
    """Makes candidates, capturing and profiling a size when it is first asked for.

    Args:
        batch: samples in the batch.
        capture: captures the step at several sizes at once.
        profile: measures a graph; inside the budget, or whatever that takes.
        planner: a planner's name.
        cache: where the schedules of the fewest bytes are kept.
        gradients_exist: gradients may already be there when the step begins.
    """

    batch: int
    capture: CaptureSizes
    profile: ProfileGraph
    planner: str
    gradients_exist: bool
    cache: Cache
    notes: list[str] = field(default_factory=list)
    _limited: bool = True
    _graphs: dict[int, TrainingGraph] = field(default_factory=dict)
    _sized: dict[int, SizedGraph] = field(default_factory=dict)

    def fastest(self, limit_bytes: int, micro_batch: int | None = None) -> Candidate | None:
        """The fastest way that fits into so many bytes, or None.

        Raises:
            NotSeparable: `micro_batch` was asked for and the samples of the step influence each other.
        """
        if micro_batch is not None:
            forced = self.make(self.sizes_of(min(micro_batch, self.batch)), limit_bytes)
            return forced if forced.total_bytes <= limit_bytes else None
        best: Candidate | None = None
        for sizes in self._cuts():
            try:
                candidate = self.make(sizes, limit_bytes)
            except CaptureError as reason:
                self._note(f"no micro-batches of {sizes[0]}: {reason}")
                break
            if candidate.total_bytes > limit_bytes:
                continue
            if best is None or candidate.seconds < best.seconds:
                best = candidate
            if not candidate.recomputes:
                break
        return best

    def measure_all(self) -> None:
        """Measure also what does not fit into the budget: to refuse it, one that is large enough must be named."""
        self._limited = False
        self._sized = {size: sized for size, sized in self._sized.items() if sized.is_measured}

    def smallest(self, micro_batch: int | None = None) -> Candidate:
        """The way that needs the fewest bytes."""
        whole = self.make((self.batch,), None)
        if self.batch == 1 or micro_batch == self.batch:
            return whole
        for size in (micro_batch,) if micro_batch is not None else (1, 2):
            try:
                cut = self.make(self.sizes_of(size), None)
            except CaptureError as reason:
                self._note(f"no micro-batches of {size}: {reason}")
                continue
            return cut if micro_batch is not None or cut.total_bytes < whole.total_bytes else whole
        return whole

    @property
    def library_bytes(self) -> int:
        """What math libraries take besides, unseen by any allocator of torch's."""
        costs = [c for s in self._sized.values() for c in (s.costs, *([] if s.adding is None else [s.adding[1]]))]
        return max((cost.library_bytes for cost in costs), default=0)

    @property
    def cuts(self) -> int:
        """How many sizes of micro-batches may be tried."""
        coupled = any(True for _ in self.sized(self.batch).graph.outputs_of("mutation"))
        return 0 if coupled else sum(1 for _ in self._cuts()) - 1

    def _cuts(self) -> Iterator[tuple[int, ...]]:
        """The whole batch, then halves, quarters, ... of it, down to single samples."""
        yield (self.batch,)
        size = self.batch
        while size > 1:
            size = (size + 1) // 2
            yield self.sizes_of(size)

    def sizes_of(self, micro_batch: int) -> tuple[int, ...]:
        whole, rest = divmod(self.batch, micro_batch)
        return (micro_batch,) * whole + ((rest,) if rest else ())

    def make(self, sizes: tuple[int, ...], limit_bytes: int | None) -> Candidate:
        """Plan a cut for a limit, or for the fewest bytes."""
        prepared = self._prepare(sizes)
        first = prepared[sizes[0]]
        room = None if limit_bytes is None else limit_bytes - Masks.of(first.draws, sizes).peak_bytes
        several = len(sizes) > 1 or self.gradients_exist
        return self._assemble(sizes, {n: self._schedule(sized, room, several) for n, sized in prepared.items()})

    def restore(self, data: dict[str, Any]) -> Candidate:
        """A candidate from the data of an earlier one.

        Raises:
            PlanError, ValueError, KeyError, TypeError, IndexError: the data does not belong to these graphs.
        """
        sizes = tuple(int(size) for size in data["sizes"])
        if sum(sizes) != self.batch:
            raise PlanError("the plan is for another batch size")
        self._prepare(sizes)
        return self._assemble(sizes, {int(n): schedule_from_data(d) for n, d in data["schedules"].items()})

    def _assemble(self, sizes: tuple[int, ...], schedules: Mapping[int, Schedule]) -> Candidate:
        several = len(sizes) > 1 or self.gradients_exist
        parts = {size: self._place(self.sized(size), schedule, several) for size, schedule in schedules.items()}
        later = [part.later.layout for part in parts.values() if part.later is not None]
        layouts = [*(part.first for part in parts.values()), *later]
        outside = max(layout.outside_peak_bytes for layout in layouts)
        if several:
            gradients = gradient_bytes_of(parts[sizes[0]].graph)
            outside = max(outside, gradients + max(layout.outside_peak_bytes for layout in later))
        return Candidate(
            sizes=sizes,
            parts=parts,
            arena_bytes=max(layout.address_peak_bytes for layout in layouts),
            outside_bytes=outside,
            masks=Masks.of(parts[sizes[0]].draws, sizes),
            seconds=self._draw_seconds(parts[sizes[0]].draws)
            + sum(_seconds(parts[size], is_first=position == 0) for position, size in enumerate(sizes)),
        )

    def _draw_seconds(self, draws: Sequence[Draw]) -> float:
        """What is drawn for the whole batch costs what it costs there, unless it is drawn as bits."""
        costs = self.sized(self.batch).costs.ops
        return sum(costs[draw.op.index].seconds * (_BITS_SHARE if draw.is_drawn_as_bits else 1) for draw in draws)

    def _schedule(self, sized: SizedGraph, room: int | None, several: bool) -> Schedule:
        graph, costs = sized.graph, sized.costs

        def footprint(schedule: Schedule) -> int:
            first = pack(graph, costs, schedule).total_bytes
            if not several:
                return first
            later = pack(*sized.later(schedule), schedule, gradients="accumulate").total_bytes
            return max(first, gradient_bytes_of(graph) + later)

        if room is None:
            if self.planner != "auto":
                return get_planner(self.planner)(graph, costs, 1)
            kind = "whole" if not several else "accumulates" if sized.adding is None else "adds"
            # One that rests on estimates is not to be remembered.
            cache = self.cache if sized.is_measured else Cache(enabled=False)
            return remembered_smallest(cache, graph, costs, kind=kind, footprint=footprint)
        if self.planner == "auto":
            return auto(graph, costs, room, footprint=footprint)
        return get_planner(self.planner)(graph, costs, room)

    def _place(self, sized: SizedGraph, schedule: Schedule, several: bool) -> PlannedPart:
        graph, costs = sized.graph, sized.costs
        later_graph, later_costs = sized.later(schedule)
        later = LaterPart(
            graph=later_graph,
            simulation=simulate(later_graph, later_costs, schedule, gradients="accumulate"),
            layout=pack(later_graph, later_costs, schedule, gradients="accumulate"),
        )
        return PlannedPart(
            graph=graph,
            costs=costs,
            schedule=schedule,
            simulation=simulate(graph, costs, schedule),
            first=pack(graph, costs, schedule),
            later=later if several else None,
            separation=sized.separation,
            draws=sized.draws,
        )

    def _prepare(self, sizes: tuple[int, ...]) -> dict[int, SizedGraph]:
        return {size: self.sized(size) for size in dict.fromkeys(sizes)}

    def sized(self, size: int) -> SizedGraph:
        """The graph of one micro-batch size, captured and profiled when first asked for.

        Raises:
            NotSeparable: micro-batches of the step would not add up to it.
            CaptureError: the step has no graph.
        """
        if size not in self._sized:
            if self.batch not in self._graphs:
                self._graphs |= self.capture((self.batch,))
            whole = self._graphs[self.batch]
            if size == self.batch:
                self._sized[size] = SizedGraph(whole, self.profile(whole, self._limited))
            else:
                self._refuse_mutations(whole)
                if size not in self._graphs:
                    self._graphs |= self.capture((size,))
                micro = self._graphs[size]
                hoisted = hoist_random(micro, whole, analyse(whole, micro, self.batch, size))
                costs = self.profile(hoisted.graph, self._limited)
                adds = accumulating(hoisted.graph)
                adding = None if adds is None else (adds, self.profile(adds, self._limited))
                self._sized[size] = SizedGraph(hoisted.graph, costs, hoisted.separation, hoisted.draws, adding)
        return self._sized[size]

    def _refuse_mutations(self, whole: TrainingGraph) -> None:
        """Asks the analysis before a second capture is paid for: BatchNorm is the common case."""
        if any(True for _ in whole.outputs_of("mutation")):
            analyse(whole, whole, self.batch, max(1, self.batch // 2))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _seconds(part: PlannedPart, *, is_first: bool) -> float:
    return (part.simulation if is_first or part.later is None else part.later.simulation).seconds


def gradient_bytes_of(graph: TrainingGraph) -> int:
    """Bytes of all the gradients that the step delivers."""
    targets = {output.target for output in graph.outputs_of("gradient")}
    parameters = {v.target: v for v in graph.values if v.kind == "parameter"}
    return sum(parameters[target].nbytes for target in targets if target in parameters)


def candidate_to_data(candidate: Candidate) -> dict[str, Any]:
    """What must be kept of a candidate to make it again from the same graphs."""
    return {
        "sizes": list(candidate.sizes),
        "schedules": {str(size): schedule_to_data(part.schedule) for size, part in candidate.parts.items()},
    }
