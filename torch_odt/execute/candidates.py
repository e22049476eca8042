"""Plans for the whole batch and for micro-batches of it, and the choice between them.

A smaller micro-batch needs less memory and, with recomputation, trades it for time in another way. Each
size is captured and planned by itself; the fastest that fits is taken. Sizes are tried from large to small until
cutting further only costs time: the whole batch, where it fits without recomputation or paging, is not cut, and of
smaller sizes that do, the next one is looked at as long as it is faster: its tensors may fit into a cache.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch_odt.cache import Cache
from torch_odt.capture.accumulate import accumulating
from torch_odt.capture.batch_axis import analyse
from torch_odt.capture.costs import Costs
from torch_odt.capture.draws import Draw
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.pack_dropout_masks import PACKED
from torch_odt.capture.randomness import hoist_random
from torch_odt.capture.separation import Separation
from torch_odt.errors import CaptureError, PlanError
from torch_odt.execute.candidate import (
    Candidate,
    LaterPart,
    Masks,
    PlannedPart,
    gradient_bytes_of,
    mutated_bytes,
    update_seconds,
)
from torch_odt.execute.planning_time import PlannerStuck, PlanningTime, planned_apart
from torch_odt.execute.smallest_plans import remembered_smallest
from torch_odt.planning.auto import QUICK_SECONDS, auto
from torch_odt.planning.by_name import schedule_by_name
from torch_odt.planning.objective import FASTEST, Goal, schedule_for
from torch_odt.planning.pool import QUICK, pack
from torch_odt.planning.registry import get_planner, limited, own_time_limit
from torch_odt.planning.schedule import Run, Schedule, schedule_from_data, schedule_to_data
from torch_odt.planning.search import Footprint
from torch_odt.planning.simulate import Simulation, simulate

ForWholeBatch = Callable[[TrainingGraph], TrainingGraph]
CaptureSizes = Callable[[Sequence[int]], Mapping[int, TrainingGraph]]
ProfileGraph = Callable[[TrainingGraph, bool], Costs]

# In less, nothing is found.
_LEAST_SECONDS = 0.1
# Drawing a mask as bits takes about this share of the operator that draws it as booleans and applies it.
_BITS_SHARE = 0.1


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
class KnownSizes:
    """What has been captured and measured of a step, for all that plans it.

    Attributes:
        sized: by batch size.
        placed: what was placed last, by batch size and whether gradients may exist.
    """

    sized: dict[int, SizedGraph] = field(default_factory=dict)
    placed: dict[tuple[int, bool], PlannedPart] = field(default_factory=dict)

    def forget_estimates(self) -> bool:
        """Forget the sizes of which not everything was measured; returns whether there were any."""
        estimated = [size for size, each in self.sized.items() if not each.is_measured]
        for size in estimated:
            del self.sized[size]
        return bool(estimated)


@dataclass
class Candidates:
    """Makes candidates, capturing and profiling a size when it is first asked for.

    Args:
        batch: samples in the batch.
        capture: captures the step at several sizes at once.
        for_whole_batch: makes of a captured graph what is executed where all samples run at once, maybe with
            the optimizer's step in it.
        profile: measures a graph; inside the budget, or whatever that takes.
        planner: a planner's name.
        cache: where the schedules of the fewest bytes are kept.
        gradients_exist: gradients may already be there when the step begins.
        pages_by: the name of what paging costs; empty where nothing is paged.
        goal: what a step is to spend least of.
        planning_seconds: how long to look for something better than what is found at once; a named planner that
            stops when it is told to takes so long at most for all its plans, and where this is 0, its own limit.
        time_share: how much of its own limit a named planner may take for these plans.
        reserves_time: a named planner's time is kept in part for planning again, as for the fewest bytes.
        is_passing: the limit will be another one soon, so that `auto` looks no longer than a step takes.
        known: what has been captured and measured before; what is new is added.
    """

    batch: int
    capture: CaptureSizes
    for_whole_batch: ForWholeBatch
    profile: ProfileGraph
    planner: str
    gradients_exist: bool
    cache: Cache
    pages_by: str = ""
    goal: Goal = FASTEST
    planning_seconds: float = 0.0
    time_share: float = 1.0
    reserves_time: bool = True
    is_passing: bool = False
    known: KnownSizes = field(default_factory=KnownSizes)
    notes: list[str] = field(default_factory=list)
    _limited: bool = True
    _time: PlanningTime = field(init=False)
    _graphs: dict[int, TrainingGraph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own_seconds = 0.0 if self.planner == "auto" else own_time_limit(get_planner(self.planner)) or 0.0
        self._time = PlanningTime(self.planning_seconds or self.time_share * own_seconds)

    def fastest(self, limit_bytes: int, micro_batch: int | None = None) -> Candidate | None:
        """The fastest way that fits into so many bytes, or None.

        Raises:
            NotSeparable: `micro_batch` was asked for and the samples of the step influence each other.
        """
        best: Candidate | None = None
        wanted = 1 + self.cuts if micro_batch is None and self._looks_at_time else 1
        for position, sizes in enumerate(self._splits(micro_batch)):
            # The last part is for the fewest bytes, if nothing fits.
            seconds = self._share_of_named_planner(int(self.reserves_time) + max(1, wanted - position))
            if best is not None and seconds is not None and seconds < _LEAST_SECONDS:
                break
            try:
                candidate = self.make(sizes, limit_bytes, seconds=seconds)
            except CaptureError as reason:
                if micro_batch is not None:
                    raise
                self._note(f"no micro-batches of {sizes[0]}: {reason}")
                break
            if candidate.total_bytes > limit_bytes:
                continue
            if best is None or self.rank(candidate) < self.rank(best):
                best = candidate
            is_free = not candidate.recomputes and not candidate.pages
            if is_free and (len(sizes) == 1 or best is not candidate):
                break
        if best is not None and self.goal.objective != "seconds" and best.seconds > self.goal.deadline_seconds:
            # Micro-batches that are in time need not be so together.
            hasty = replace(self, goal=replace(self.goal, objective="seconds"))
            hasty._time = self._time
            found = hasty.fastest(limit_bytes, micro_batch)
            best = best if found is None else min(best, found, key=self.rank)
        return best

    def improved(self, best: Candidate, limit_bytes: int, micro_batch: int | None = None) -> Candidate:
        """What is better than a candidate, if there is time to find it.

        Half of the time goes into the same micro-batches, half of the rest into the next size that has been looked at,
        and so on. None is captured for it: what that leaves behind would count against the budget.
        """
        looked_at = [sizes for sizes in self._splits(micro_batch) if all(size in self.known.sized for size in sizes)]
        others = [sizes for sizes in looked_at if sizes != best.sizes]
        for sizes in (best.sizes, *others):
            fits = best.total_bytes <= limit_bytes
            left_seconds = self._time.left_seconds
            if left_seconds < _LEAST_SECONDS or (fits and not best.recomputes and not best.pages):
                break
            start = best if sizes == best.sizes else None
            try:
                again = self.make(sizes, limit_bytes, seconds=left_seconds / 2 if others else left_seconds, start=start)
            except PlannerStuck as reason:
                self._note(f"nothing better was found in planning_seconds: {reason}")
                break
            best = min(best, again, key=self._order(limit_bytes))
        return best

    def _splits(self, micro_batch: int | None) -> list[tuple[int, ...]]:
        return [*self.splits()] if micro_batch is None else [self.sizes_of(min(micro_batch, self.batch))]

    def _share_of_named_planner(self, parts: int) -> float | None:
        """One of so many parts of its time, if it looks at it; what `auto` finds at once is improved afterwards."""
        return self._time.left_seconds / parts if self._looks_at_time else None

    @property
    def _looks_at_time(self) -> bool:
        return self.planner != "auto" and own_time_limit(get_planner(self.planner)) is not None

    def _order(self, limit_bytes: int) -> Callable[[Candidate], tuple[bool, float, float]]:
        """Sorts what fits by what is to be little, behind it the rest by its bytes."""

        def order(candidate: Candidate) -> tuple[bool, float, float]:
            fits = candidate.total_bytes <= limit_bytes
            return (not fits, *(self.rank(candidate) if fits else (candidate.total_bytes, 0.0)))

        return order

    def measure_all(self) -> bool:
        """Measure also what does not fit into the budget: to refuse it, one that is large enough must be named.

        Returns:
            Whether there is something that has not been.
        """
        self._limited = False
        return self.known.forget_estimates()

    def smallest(self, micro_batch: int | None = None) -> Candidate:
        """The way that needs the fewest bytes."""
        whole = self.make((self.batch,), None, seconds=self._share_of_named_planner(3))
        if self.batch == 1 or micro_batch == self.batch:
            return whole
        for size in (micro_batch,) if micro_batch is not None else (1, 2):
            try:
                cut = self.make(self.sizes_of(size), None, seconds=self._share_of_named_planner(2))
            except CaptureError as reason:
                self._note(f"no micro-batches of {size}: {reason}")
                continue
            return cut if micro_batch is not None or cut.total_bytes < whole.total_bytes else whole
        return whole

    @property
    def fingerprint(self) -> str:
        """Of the whole batch's graph."""
        return self.sized(self.batch).graph.fingerprint

    @property
    def library_bytes(self) -> int:
        """What math libraries take besides, unseen by any allocator of torch's."""
        costs = [c for s in self.known.sized.values() for c in (s.costs, *([] if s.adding is None else [s.adding[1]]))]
        return max((cost.library_bytes for cost in costs), default=0)

    @property
    def cuts(self) -> int:
        """How many sizes of micro-batches may be tried."""
        coupled = any(True for _ in self.sized(self.batch).graph.outputs_of("mutation"))
        return 0 if coupled else sum(1 for _ in self.splits()) - 1

    def splits(self) -> Iterator[tuple[int, ...]]:
        """The whole batch, then halves, quarters, ... of it, down to single samples."""
        yield (self.batch,)
        size = self.batch
        while size > 1:
            size = (size + 1) // 2
            yield self.sizes_of(size)

    def sizes_of(self, micro_batch: int) -> tuple[int, ...]:
        whole, rest = divmod(self.batch, micro_batch)
        return (micro_batch,) * whole + ((rest,) if rest else ())

    def make(
        self,
        sizes: tuple[int, ...],
        limit_bytes: int | None,
        *,
        seconds: float | None = None,
        start: Candidate | None = None,
    ) -> Candidate:
        """Plan a cut for a limit, or for the fewest bytes.

        Args:
            seconds: for planning, where that is not left to the planner.
            start: what it is to be better than.
        """
        prepared = self._prepare(sizes)
        first = prepared[sizes[0]]
        copied_bytes = mutated_bytes(first.graph) if first.costs.transfers is not None else 0
        room = None if limit_bytes is None else limit_bytes - Masks.of(first.draws, sizes).peak_bytes - copied_bytes
        several = len(sizes) > 1 or self.gradients_exist

        def plan(stop_at: float | None) -> dict[int, Schedule]:
            schedules: dict[int, Schedule] = {}
            for size, sized in prepared.items():
                now = time.perf_counter()
                own = None if stop_at is None else now + (stop_at - now) / (len(prepared) - len(schedules))
                begin = None if start is None else start.parts[size].schedule
                schedules[size] = self.schedule(sized, room, several, stop_at=own, start=begin)
            return schedules

        if seconds is None:
            return self.assemble(sizes, plan(None))
        with self._time.spending():
            schedules = planned_apart(plan, seconds)
        return self.assemble(sizes, schedules)

    def restore(self, data: dict[str, Any]) -> Candidate:
        """A candidate from the data of an earlier one.

        Raises:
            PlanError, ValueError, KeyError, TypeError, IndexError: the data does not belong to these graphs.
        """
        sizes = tuple(int(size) for size in data["sizes"])
        if sum(sizes) != self.batch:
            raise PlanError("the plan is for another batch size")
        self._prepare(sizes)
        candidate = self.assemble(sizes, {int(n): schedule_from_data(d) for n, d in data["schedules"].items()})
        return replace(candidate, planning_seconds=float(data["planning_seconds"]))

    def assemble(self, sizes: tuple[int, ...], schedules: Mapping[int, Schedule]) -> Candidate:
        """The candidate that runs a schedule for each size."""
        several = len(sizes) > 1 or self.gradients_exist
        parts = {size: self._part(size, schedule, several) for size, schedule in schedules.items()}
        drawing = self._draw_seconds(parts[sizes[0]].draws)
        passes = [(parts[size], _pass(parts[size], is_first=i == 0)) for i, size in enumerate(sizes)]
        # Without the optimizer's step, which takes as long behind the backward pass as inside of it.
        updating = sum(update_seconds(part.graph, part.costs) for part, _ in passes)
        seconds = drawing - updating + sum(simulation.seconds for _, simulation in passes)
        watts = self.sized(self.batch).costs.watts
        joules = watts * (drawing - updating) + sum(simulation.joules for _, simulation in passes)
        return Candidate.of(sizes, parts, seconds, joules if watts else None)

    def rank(self, candidate: Candidate) -> tuple[bool, float]:
        """Sorts candidates, the best first."""
        return self.goal.rank(candidate.seconds, candidate.joules or 0.0)

    def _draw_seconds(self, draws: Sequence[Draw]) -> float:
        """What is drawn for the whole batch costs what it costs there, unless it is drawn as bits."""
        whole = self.sized(self.batch)

        def share(draw: Draw) -> float:
            is_measured_as_such = whole.graph.ops[draw.op.index].target == PACKED
            return _BITS_SHARE if draw.is_drawn_as_bits and not is_measured_as_such else 1

        return sum(whole.costs.ops[draw.op.index].seconds * share(draw) for draw in draws)

    def schedule(
        self,
        sized: SizedGraph,
        room: int | None,
        several: bool,
        *,
        stop_at: float | None = None,
        start: Schedule | None = None,
    ) -> Schedule:
        """The planner's schedule for so many bytes, or for the fewest.

        Args:
            several: it runs when gradients exist, too.
            stop_at: the `time.perf_counter()` by which to be done; None where that is left to the planner.
            start: what it is to be better than.
        """
        graph, costs = sized.graph, sized.costs
        footprint = self.footprint(sized, several)
        kind = "whole" if not several else "accumulates" if sized.adding is None else "adds"
        # One that rests on estimates, or on a device's speed, is not to be remembered.
        is_lasting = sized.is_measured and costs.transfers is None
        cache = self.cache if is_lasting else Cache(enabled=False)
        fewest = partial(remembered_smallest, cache, graph, costs, kind=kind, footprint=footprint)
        if room is None:
            if self.planner != "auto":
                planner = get_planner(self.planner)
                return (planner if stop_at is None else limited(planner, stop_at))(graph, costs, 1)
            return fewest()
        separation = sized.separation
        goal = self.goal if separation is None else self.goal.for_part(separation.micro_batch / separation.batch)
        if self.planner != "auto":
            return schedule_by_name(self.planner, graph, costs, room, footprint, goal=goal, stop_at=stop_at)
        step_seconds = sum(cost.seconds for cost in costs.ops.values())
        quick_seconds = min(QUICK_SECONDS, max(_LEAST_SECONDS, step_seconds)) if self.is_passing else QUICK_SECONDS
        searching = partial(auto, footprint=footprint, start=start, time_limit_seconds=quick_seconds, fewest=fewest)
        # A deadline of the step is met by planning again and again.
        share = 1.0 if math.isinf(goal.deadline_seconds) else 0.5
        wanted: dict[str, Any] = {"objective": goal.objective, "deadline_seconds": goal.deadline_seconds}
        in_time = searching if stop_at is None else limited(searching, stop_at, share)
        return schedule_for(in_time, graph, costs, room, **wanted)

    def footprint(self, sized: SizedGraph, several: bool) -> Footprint:
        """What a schedule really takes: the arena, and what leaves it.

        Args:
            several: it runs when gradients exist, too.
        """

        def footprint(schedule: Schedule) -> int:
            first = pack(sized.graph, sized.costs, schedule, effort=QUICK).total_bytes
            if not several:
                return first
            later = pack(*sized.later(schedule), schedule, gradients="accumulate", effort=QUICK).total_bytes
            return max(first, gradient_bytes_of(sized.graph) + later)

        return footprint

    def _part(self, size: int, schedule: Schedule, several: bool) -> PlannedPart:
        """Placed anew, unless it is what was placed last: the schedule of the fewest bytes is come back to."""
        sized, last = self.sized(size), self.known.placed.get((size, several))
        if last is None or last.costs is not sized.costs or last.schedule != schedule:
            last = self.known.placed[size, several] = self._place(sized, schedule, several)
        return last

    def _place(self, sized: SizedGraph, schedule: Schedule, several: bool) -> PlannedPart:
        graph, costs = sized.graph, sized.costs
        later_graph, later_costs = sized.later(schedule)
        later = LaterPart(
            graph=later_graph,
            costs=later_costs,
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
        if size not in self.known.sized:
            if self.batch not in self._graphs:
                self._graphs |= self.capture((self.batch,))
            whole = self._graphs[self.batch]
            if size == self.batch:
                graph = self.for_whole_batch(whole)
                self.known.sized[size] = SizedGraph(graph, self.profile(graph, self._limited))
            else:
                self._refuse_mutations(whole)
                if size not in self._graphs:
                    self._graphs |= self.capture((size,))
                micro = self._graphs[size]
                hoisted = hoist_random(micro, whole, analyse(whole, micro, self.batch, size))
                costs = self.profile(hoisted.graph, self._limited)
                adds = accumulating(hoisted.graph)
                adding = None if adds is None else (adds, self.profile(adds, self._limited))
                self.known.sized[size] = SizedGraph(hoisted.graph, costs, hoisted.separation, hoisted.draws, adding)
        return self.known.sized[size]

    def _refuse_mutations(self, whole: TrainingGraph) -> None:
        """Asks the analysis before a second capture is paid for: BatchNorm is the common case."""
        if any(True for _ in whole.outputs_of("mutation")):
            analyse(whole, whole, self.batch, max(1, self.batch // 2))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _pass(part: PlannedPart, *, is_first: bool) -> Simulation:
    return part.simulation if is_first or part.later is None else part.later.simulation


def candidate_to_data(candidate: Candidate) -> dict[str, Any]:
    """What must be kept of a candidate to make it again from the same graphs."""
    return {
        "sizes": list(candidate.sizes),
        "planning_seconds": candidate.planning_seconds,
        "schedules": {str(size): schedule_to_data(part.schedule) for size, part in candidate.parts.items()},
    }
