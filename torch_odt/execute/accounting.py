"""How much of a budget is left for a step, and what takes the rest."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch_odt import memory
from torch_odt.capture.graph import TrainingGraph
from torch_odt.execute.candidate import Candidate, gradient_bytes_of, mutated_bytes
from torch_odt.execute.optimizer_cost import OptimizerCost
from torch_odt.planning.plan import PlanLine
from torch_odt.runtime.budget import ResolvedBudget, format_bytes

_MIB = 2**20
# What oneDNN and MKL keep for each kind of call (compiled code, primitives), and what Python and malloc lose besides.
_BYTES_PER_KIND = 64 * 1024
_BASE_RESERVE_BYTES = 2 * _MIB
# A graph with its costs, schedules and addresses, for each op and value.
_BYTES_PER_ENTRY = 4 * 1024
_PLANNING_BYTES_PER_ENTRY = 1536
_NOISE_BYTES = 2 * _MIB
# What math libraries take unseen by torch's allocator in a step that has no graph, whose calls nobody has measured.
_UNCAPTURED_LIBRARY_BYTES = 8 * _MIB
_SETTLING_STEPS = 3
# What processors have not yet added to the three counters of resident pages: Linux's batches of them.
_CPUS = os.cpu_count() or 1
_UNCOUNTED_BYTES = 3 * max(32, 2 * _CPUS) * _CPUS * resource.getpagesize()
# A plan that was made for this share of what is allowed is hardly slower than one that would take seconds to make.
_GOOD_ENOUGH = 0.97


@dataclass(frozen=True)
class UndoCost:
    """What a step takes that is undone when it fails.

    Attributes:
        buffer_bytes: copies of what the forward pass changes.
        earlier_gradient_bytes: of an accumulation, untouched beside those of the call, and a sum while it is made.
    """

    buffer_bytes: int
    earlier_gradient_bytes: int

    @classmethod
    def of(cls, graph: TrainingGraph, *, accumulates: bool) -> UndoCost:
        """What the steps of a graph take."""
        if not accumulates:
            return cls(mutated_bytes(graph), 0)
        targets = {output.target for output in graph.outputs_of("gradient")}
        largest = max((v.nbytes for v in graph.values if v.kind == "parameter" and v.target in targets), default=0)
        return cls(mutated_bytes(graph), gradient_bytes_of(graph) + largest)

    @property
    def total_bytes(self) -> int:
        return self.buffer_bytes + self.earlier_gradient_bytes


@dataclass(frozen=True)
class Allowance:
    """What a budget leaves for a step.

    Attributes:
        budget: the budget in numbers.
        optimizer: what the optimizer holds; None where there is none.
        spent_bytes: what capturing, measuring and planning have added to the process.
        reserve_bytes: for what no allocator of torch's sees.
        usual_spent_bytes: what capture and measurement of a graph of this size add at most.
        planning_bytes: what looking for a plan adds to that: more with every micro-batch size that may be tried.
        held_bytes: gradients that exist already.
        undo: what it takes to undo a call; None where nothing is undone.
    """

    budget: ResolvedBudget
    optimizer: OptimizerCost | None
    spent_bytes: int
    reserve_bytes: int
    usual_spent_bytes: int = 0
    planning_bytes: int = 0
    held_bytes: int = 0
    undo: UndoCost | None = None

    @property
    def growth_bytes(self) -> int:
        return self.budget.growth_bytes

    @property
    def state_bytes(self) -> int:
        return 0 if self.optimizer is None else self.optimizer.missing_state_bytes

    @property
    def step_bytes(self) -> int:
        """For the arena, gradients, losses and results."""
        return self.growth_bytes - self.spent_bytes - self.reserve_bytes - self.state_bytes - self.undo_bytes

    @property
    def undo_bytes(self) -> int:
        """What lies beside a step for as long as it may have to be undone."""
        return 0 if self.undo is None else self.undo.total_bytes

    def outside_limit_bytes(self, arena: Any) -> int:
        """The torch-counted bytes at which an idle arena must give way to other allocations."""
        counted = max(0, counted_beside(arena) - self.held_bytes)
        return counted + max(0, self.growth_bytes - self.spent_bytes - self.reserve_bytes)

    def optimizer_extra_bytes(self, candidate: Candidate) -> int:
        """What the optimizer's temporaries, and the copies that undo its step, need beyond the step's own peak.

        They lie in the idle arena.
        """
        if self.optimizer is None or not candidate.gradient_bytes:
            return 0
        # The copies are of all that has a gradient, and of the whole state.
        copies = 0 if self.undo is None else candidate.gradient_bytes + self.optimizer.state_bytes
        beyond_arena = max(0, self.optimizer.workspace_bytes + copies - candidate.arena_bytes)
        return max(0, candidate.gradient_bytes + beyond_arena - candidate.outside_bytes - candidate.masks.peak_bytes)

    def total_with(self, candidate: Candidate) -> int:
        """Everything above the level at construction."""
        return sum(line.nbytes for line in self.lines(candidate))

    def admits(self, candidate: Candidate) -> bool:
        return self.total_with(candidate) <= self.growth_bytes

    def lines(self, candidate: Candidate) -> list[PlanLine]:
        gradients = min(candidate.gradient_bytes, candidate.outside_bytes)
        return [
            PlanLine("activations and temporaries", candidate.arena_bytes, "one arena, mapped once"),
            PlanLine("gradients", gradients, ""),
            PlanLine("losses and outputs", candidate.outside_bytes - gradients, ""),
            PlanLine("random masks", candidate.masks.peak_bytes, "drawn for the whole batch"),
            PlanLine(
                "copies of buffers", 0 if self.undo else candidate.copied_bytes, "to undo a step whose transfer fails"
            ),
            PlanLine("optimizer temporaries", self.optimizer_extra_bytes(candidate), "beyond the idle arena"),
            *self.fixed_lines(),
        ]

    def fixed_lines(self) -> list[PlanLine]:
        """What does not depend on the schedule."""
        return [
            PlanLine("optimizer state", self.state_bytes, "made by its first step"),
            PlanLine("undoing", self.undo_bytes, "buffers and earlier gradients as they were before a call"),
            PlanLine("capture and planning", self.spent_bytes, "counted in the process"),
            PlanLine("reserve", self.reserve_bytes, "compiled kernels and buffers of the math libraries"),
        ]

    def smallest_budget(self, growth_bytes: int) -> int:
        """The budget to name for a growth above the level, in the terms of the one that was refused.

        What capture leaves in the process differs a little from start to start; the budget that is named must be
        accepted every time.
        """
        expected_bytes = max(self.spent_bytes, self.usual_spent_bytes + self.planning_bytes)
        named = growth_bytes - self.spent_bytes + expected_bytes + expected_bytes // 4 + _NOISE_BYTES
        return self.budget.in_terms_of(named)

    def describe(self) -> str:
        held, children = format_bytes(self.budget.level_bytes), self.budget.children_bytes
        before = f"the process held {held} before; " if self.budget.of == "process" else ""
        before += f"its child processes hold {format_bytes(children)} under the same limit; " if children else ""
        fixed = self.spent_bytes + self.reserve_bytes + self.state_bytes + self.undo_bytes
        return f"{before}{format_bytes(fixed)} are taken by optimizer state, capture and reserve"


def allow(
    budget: ResolvedBudget,
    optimizer: OptimizerCost | None,
    graph: TrainingGraph | None,
    *,
    held_bytes: int = 0,
    arena_bytes: int = 0,
    cuts: int = 0,
    library_bytes: int = 0,
    collects: bool = True,
    undo: UndoCost | None = None,
) -> Allowance:
    """Take stock after capture and profiling: what is spent is measured, not guessed.

    Args:
        held_bytes: gradients that exist already; the plan counts them.
        arena_bytes: what is held of the arena, which the plan counts too.
        cuts: how many sizes of micro-batches may be tried.
        graph: None for a step without one.
        library_bytes: what math libraries were seen to take for the graph's calls.
        collects: look for garbage first, which takes a fraction of a second; without, what is spent may seem more.
        undo: what it takes to undo a call; None where nothing is undone.
    """
    held = held_by_process() if collects else memory.process_bytes()
    kinds = 0 if graph is None else len(_calls(graph))
    entries = 0 if graph is None else len(graph.ops) + len(graph.values)
    library_bytes = _UNCAPTURED_LIBRARY_BYTES if graph is None else library_bytes
    return Allowance(
        budget=budget,
        optimizer=optimizer,
        spent_bytes=max(0, held - budget.level_bytes - held_bytes - arena_bytes),
        reserve_bytes=_BASE_RESERVE_BYTES + kinds * _BYTES_PER_KIND + library_bytes,
        usual_spent_bytes=entries * _BYTES_PER_ENTRY,
        planning_bytes=entries * _PLANNING_BYTES_PER_ENTRY * (1 + cuts),
        held_bytes=held_bytes,
        undo=undo,
    )


def counted_beside(arena: Any) -> int:
    """Bytes that torch allocates outside of arenas, and the pages of other arenas, such as another step's."""
    stats = memory.stats()
    others = 0 if stats.arena is None else stats.arena.resident_bytes - int(arena.resident_bytes)
    return (stats.outside_bytes or 0) + max(0, others)


def held_by_process() -> int:
    """What the process holds once everything that can be given back has been.

    What models and captures left in reference cycles may hold hundreds of MiB until the collector comes by.
    """
    gc.collect()
    memory.trim()
    return memory.process_bytes()


def make_room(arena: Any, step_bytes: int, budget_bytes: int, step: int | None = None) -> None:
    """Before a step: what other code has freed since the last one must not stand in the arena's way.

    malloc keeps freed pages for itself; they are returned when the step would not fit beside them. In the first steps
    of a plan they always are: what other plans and the optimizer's first step have freed lies scattered, where
    gradients do not fit in.

    Args:
        arena: where the step's tensors lie; None where they are ordinary allocations.
        step_bytes: what the step uses of the arena, or allocates.
        step: how many steps of the plan have run; None after one.
    """
    is_settling = step is not None and step < _SETTLING_STEPS
    resident_bytes = 0 if arena is None else int(arena.resident_bytes)
    if is_settling or not _holds_no_more_than(budget_bytes - max(0, step_bytes - resident_bytes)):
        memory.trim()


def _holds_no_more_than(allowed_bytes: int) -> bool:
    """Whether the process holds no more. /proc is read only if the process has ever held as much."""
    most_bytes = memory.most_resident_bytes()
    # A system that does not count it says 0.
    is_far = most_bytes > 0 and most_bytes + _UNCOUNTED_BYTES <= allowed_bytes
    return is_far or memory.process_bytes() <= allowed_bytes


def _calls(graph: TrainingGraph) -> set[Any]:
    """The kinds of calls: math libraries compile and keep something for each."""
    return {(op.target, *(graph.values[v].shape for v in op.reads)) for op in graph.ops if not op.is_view}


def rounded(nbytes: int) -> int:
    """Down to about one percent, so that two starts of the same program look for the same plan."""
    unit = _rounding_unit(nbytes)
    return nbytes // unit * unit


def _rounding_unit(nbytes: int) -> int:
    return 1 << max(0, nbytes.bit_length() - 8)


def nearby(nbytes: int) -> Iterator[int]:
    """The rounded bytes whose plans may serve as well, the best first: what capture leaves differs from start to start.

    A plan that was made for more than there is now may still fit: that is to be seen from the plan.
    """
    exact = rounded(nbytes)
    yield exact
    less = rounded(exact - 1)
    while less > 0 and less >= _GOOD_ENOUGH * nbytes:
        yield less
        less = rounded(less - 1)
    more = exact + _rounding_unit(exact)
    while _GOOD_ENOUGH * more <= nbytes:
        yield more
        more += _rounding_unit(more)
