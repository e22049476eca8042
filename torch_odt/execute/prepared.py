"""A step that is ready to run, and how it becomes ready once it is planned."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.update_in_backward import UPDATES
from torch_odt.errors import PlanError
from torch_odt.execute.accounting import Allowance
from torch_odt.execute.candidate import Candidate, PlannedPart
from torch_odt.execute.executor import Executor
from torch_odt.execute.gradients import StepReceiver
from torch_odt.execute.named_tensors import detached
from torch_odt.execute.operator_guards import guards_of
from torch_odt.execute.optimizer_updates import OptimizerUpdates
from torch_odt.execute.program import Part, StepProgram
from torch_odt.execute.request import StepRequest
from torch_odt.planning.plan import Plan
from torch_odt.planning.pool import Layout
from torch_odt.planning.rest import Checked

if TYPE_CHECKING:
    from torch_odt.capture.trace import TracedStep
    from torch_odt.execute.pressure import Pressure
    from torch_odt.execute.retries import Lowered
    from torch_odt.execute.uncaptured import UncapturedStep

# The least of so many steps is what a step takes where nothing disturbs it, once there are ...
_LAST_STEPS = 16
# ... so many: the first ones find their memory untouched.
_LEAST_STEPS = 4


@dataclass
class Prepared:
    """A step that is ready to run.

    Attributes:
        plan: what will happen, for people.
        samples: the batch size.
        results: how the model's outputs are put together; None where they are not wanted.
        tables: the addresses that it has loaded into the arena.
        steps: how many it has begun.
        updates: the optimizer whose step is a part of the program.
        pages: tensors go to a file and come back.
        is_foreign: the graphs were not traced here.
        outside_limit_bytes: the torch-counted bytes at which the idle arena must give way to other allocations.
        pressure: asks while the step runs whether it may still hold what was planned; None where that is fixed.
        last_seconds: that its last steps took, forward and backward.
    """

    plan: Plan
    samples: int
    program: StepProgram | None = None
    results: TracedStep | None = None
    result_axes: Mapping[int, int | None] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    fallback: UncapturedStep | None = None
    tables: Sequence[int] = ()
    steps: int = 0
    updates: OptimizerUpdates | None = None
    pages: bool = False
    is_foreign: bool = False
    outside_limit_bytes: int = 0
    pressure: Pressure | None = None
    last_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST_STEPS))

    @property
    def measured_seconds(self) -> float | None:
        """What a step takes; None where too few have been made."""
        return min(self.last_seconds) if len(self.last_seconds) >= _LEAST_STEPS else None

    def enter(self, request: StepRequest, lowered: Lowered | None) -> None:
        """Before a step, where the one before may have been made with less: what both share is set for this one."""
        if self.fallback is not None:
            self.fallback.lower(None if lowered is None else lowered.growth_bytes)
        elif request.arena is not None:
            request.arena.set_yield_limit(self.outside_limit_bytes)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        *,
        gradients_exist: bool,
        gradient_scale: float = 1.0,
        check_loss: Callable[[torch.Tensor], None] | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Forward and backward of a batch; returns the loss and the model's outputs where they were asked for.

        Args:
            check_loss: called with the loss before anything depends on its gradients; it may raise.
        """
        if self.fallback is not None:
            done = self.fallback.run(args, kwargs, gradient_scale)
            self.plan.lines = self.fallback.lines
            self.plan.notes = tuple(dict.fromkeys((*self.fallback.notes, *self.plan.notes)))
            return done
        assert self.program is not None
        receiver = StepReceiver(parameters, buffers, self.shared, check_loss)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = detached(parameters) | dict(buffers)
        if self.updates is not None:
            self.updates.read_options()
            tensors |= self.updates.state(self.program.parts[self.program.sizes[0]].graph)
        began = time.perf_counter()
        try:
            with contextlib.nullcontext() if self.pressure is None else self.pressure:
                self.program.run(
                    leaves,
                    tensors,
                    receiver,
                    gradients_exist=gradients_exist,
                    gradient_scale=gradient_scale,
                    pressure=self.pressure,
                )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # Operators refuse a bad batch by other errors.
            if not self.is_foreign:
                raise
            raise PlanError(f"the plan contradicts itself: {error!r}") from error
        finally:
            # Before there is a loss, nothing has been changed.
            if self.updates is not None and receiver.loss is not None:
                self.updates.note_changes()
        self.last_seconds.append(time.perf_counter() - began)
        assert receiver.loss is not None
        results = [self._join(position, pieces) for position, pieces in sorted(receiver.results.items())]
        return receiver.loss, None if self.results is None else self.results.rebuild_results(results)

    def _join(self, position: int, pieces: list[torch.Tensor]) -> torch.Tensor:
        if len(pieces) == 1:
            return pieces[0]
        axis = self.result_axes[position]
        # What does not depend on the batch is the same in every micro-batch.
        return pieces[0] if axis is None else torch.cat(pieces, axis)


def assemble(
    request: StepRequest, plan: Plan, candidate: Candidate, allowance: Allowance, *, is_foreign: bool = False
) -> Prepared:
    """Load the addresses into the arena and compile the executors.

    Args:
        is_foreign: the graphs were not traced here; what operators do not check themselves is checked for them.
    """
    arena = request.place(candidate.arena_bytes)
    outside_limit_bytes = 0 if arena is None else allowance.outside_limit_bytes(arena)
    if arena is not None:
        arena.set_yield_limit(outside_limit_bytes)
    tables: list[int] = []
    parts = {size: _make_part(request, arena, part, tables, is_foreign) for size, part in candidate.parts.items()}
    separation = candidate.parts[candidate.sizes[0]].separation
    return Prepared(
        plan=plan,
        samples=sum(candidate.sizes),
        program=StepProgram(parts, candidate.sizes),
        shared=_shared_gradients(candidate.parts[candidate.sizes[0]].graph),
        tables=tables,
        updates=request.updates,
        pages=candidate.pages,
        is_foreign=is_foreign,
        outside_limit_bytes=outside_limit_bytes,
        result_axes={} if separation is None else separation.result_axes,
    )


def _make_part(request: StepRequest, arena: Any, part: PlannedPart, tables: list[int], is_foreign: bool) -> Part:
    def executor(graph: TrainingGraph, layout: Layout) -> Executor:
        table = -1
        if arena is not None:
            table = arena.load(layout.table)
            tables.append(table)
        pager = None if request.page_file is None else request.page_file.pager
        operators = _updates_in(request, graph) | (guards_of(graph) if is_foreign else {})
        return Executor(graph, part.schedule, arena=arena, arena_table=table, operators=operators, pager=pager)

    first = executor(part.graph, part.first)
    first_checked = later_checked = Checked(part.graph, part.costs, part.schedule, part.simulation)
    if (later := part.later) is not None:
        later_checked = Checked(later.graph, later.costs, part.schedule, later.simulation, "accumulate")
    return Part(
        graph=part.graph,
        first=first,
        later=first if part.later is None else executor(part.later.graph, part.later.layout),
        first_checked=first_checked,
        later_checked=later_checked,
        draws=part.draws,
        separation=part.separation,
    )


def _updates_in(request: StepRequest, graph: TrainingGraph) -> dict[int, Callable[..., Any]]:
    """The optimizer's own updates, in the place of those that were measured."""
    if request.updates is None:
        return {}
    ops = [op for op in graph.program if op.target in UPDATES]
    return {op.index: request.updates.bind(op, str(graph.values[op.reads[0]].target)) for op in ops}


def _shared_gradients(graph: TrainingGraph) -> frozenset[str]:
    """Parameters whose gradients lie in one storage: each needs its own."""
    by_storage: dict[int, list[str]] = {}
    for output in graph.outputs_of("gradient"):
        by_storage.setdefault(graph.values[output.value].base, []).append(str(output.target))
    return frozenset(name for names in by_storage.values() if len(names) > 1 for name in names)
