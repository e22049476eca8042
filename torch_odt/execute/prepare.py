"""From a model and a batch to a step that is ready to run: capture, profile, plan, place.

This file is the way through the house. Each stage is one call into its room; what is decided here is only how much
memory is left for the step, and into how many micro-batches the batch is cut.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from torch_odt import memory
from torch_odt.cache import plan_key
from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import OutputKind, TrainingGraph
from torch_odt.capture.profile import Progress, apply_costs, costs_to_json, machine_name, profile, settings_name
from torch_odt.capture.rewrite import rewrite
from torch_odt.capture.trace import TracedStep
from torch_odt.capture.trace_cache import remembered_trace
from torch_odt.errors import CaptureError, InfeasibleBudget, PlanError
from torch_odt.execute.accounting import Allowance, allow, held_by_process, nearby, rounded
from torch_odt.execute.candidates import Candidate, Candidates, PlannedPart, candidate_to_data
from torch_odt.execute.executor import Executor
from torch_odt.execute.gradients import StepReceiver
from torch_odt.execute.program import Part, StepProgram
from torch_odt.execute.request import StepRequest
from torch_odt.execute.summary import summarize, summarize_fallback
from torch_odt.execute.uncaptured import UncapturedStep
from torch_odt.planning.plan import Plan
from torch_odt.planning.pool import Layout

# Planning may have to be repeated for what it has left behind itself.
_MOST_ATTEMPTS = 3
_NOISE_BYTES = 1 << 20
_MEASURING_SHARE = 0.9


@dataclass
class Prepared:
    """A step that is ready to run.

    Attributes:
        plan: what will happen, for people.
        samples: the batch size.
        tables: the addresses that it has loaded into the arena.
        traces: the rewritten step at every batch size that was captured: another budget needs no other capture.
        steps: how many it has begun.
    """

    plan: Plan
    samples: int
    program: StepProgram | None = None
    traced: TracedStep | None = None
    result_axes: Mapping[int, int | None] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    fallback: UncapturedStep | None = None
    tables: Sequence[int] = ()
    wants_results: bool = False
    traces: dict[int, TracedStep] = field(default_factory=dict)
    steps: int = 0

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        *,
        gradients_exist: bool,
        gradient_scale: float = 1.0,
    ) -> tuple[torch.Tensor, Any]:
        """Forward and backward of a batch; returns the loss and the model's outputs where they were asked for."""
        if self.fallback is not None:
            done = self.fallback.run(args, kwargs, gradient_scale)
            self.plan.lines = self.fallback.lines
            self.plan.notes = tuple(dict.fromkeys((*self.fallback.notes, *self.plan.notes)))
            return done
        assert self.program is not None and self.traced is not None
        receiver = StepReceiver(parameters, buffers, self.shared)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = {name: p.detach() for name, p in parameters.items()} | dict(buffers)
        self.program.run(leaves, tensors, receiver, gradients_exist=gradients_exist, gradient_scale=gradient_scale)
        assert receiver.loss is not None
        results = [self._join(position, pieces) for position, pieces in sorted(receiver.results.items())]
        return receiver.loss, self.traced.rebuild_results(results) if self.wants_results else None

    def _join(self, position: int, pieces: list[torch.Tensor]) -> torch.Tensor:
        if len(pieces) == 1:
            return pieces[0]
        axis = self.result_axes[position]
        # What does not depend on the batch is the same in every micro-batch.
        return pieces[0] if axis is None else torch.cat(pieces, axis)


def slice_batch(args: tuple[Any, ...], kwargs: dict[str, Any], samples: int, size: int) -> tuple[Any, Any]:
    """The first `size` samples of a batch: of each tensor whose first dimension is the batch."""

    def cut(leaf: Any) -> Any:
        is_batched = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples
        return leaf[:size] if is_batched and size < samples else leaf

    return pytree.tree_map(cut, (args, kwargs))


def capture_sizes(
    request: StepRequest, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int, sizes: Sequence[int]
) -> dict[int, TracedStep]:
    """Trace the step at several batch sizes, or find what an earlier process has traced.

    Raises:
        CaptureError: the step has no graph.
    """
    batches = {size: slice_batch(args, kwargs, samples, size) for size in sizes}
    return {
        size: remembered_trace(request.cache, request.model, request.loss_fn, request.compute, batch)
        for size, batch in batches.items()
    }


@dataclass
class _Session:
    """One preparation: the graphs of a step at every size that was asked for, and what they cost."""

    request: StepRequest
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int
    want_results: bool
    traced: dict[int, TracedStep] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def capture(self, sizes: Sequence[int]) -> dict[int, TrainingGraph]:
        missing = [size for size in sizes if size not in self.traced]
        found = capture_sizes(self.request, self.args, self.kwargs, self.samples, missing)
        drop: tuple[OutputKind, ...] = () if self.want_results else ("result",)
        disabled = self.request.disabled_rewrites
        for size, step in found.items():
            self.traced[size] = replace(step, graph=rewrite(step.graph, drop=drop, disabled=disabled))
        return {size: self.traced[size].graph for size in sizes}

    def candidates(self) -> Candidates:
        request = self.request
        return Candidates(
            batch=self.samples,
            capture=self.capture,
            profile=lambda graph, limited: profile_graph(request, graph, within_budget=limited),
            planner=request.planner,
            gradients_exist=request.accumulates,
            cache=request.cache,
        )


def prepare(
    request: StepRequest,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    want_results: bool = False,
    traces: dict[int, TracedStep] | None = None,
) -> Prepared:
    """Make a step ready for batches like this one.

    Args:
        traces: those of an earlier preparation of the same step, for another budget; new ones are added, even if the
            budget is then refused.

    Raises:
        InfeasibleBudget: no plan fits.
    """
    traced = {} if traces is None else traces
    session = _Session(request, args, kwargs, count_samples(args, kwargs), want_results, traced)
    candidates = session.candidates()
    try:
        candidates.sized(session.samples)
    except CaptureError as reason:
        return _prepare_fallback(request, session.samples, str(reason))
    held = sum(p.grad.nbytes for p in request.model.parameters() if p.grad is not None) if request.accumulates else 0
    started = time.perf_counter()
    candidate, allowance = _plan_inside(request, candidates, held)
    planning_seconds = time.perf_counter() - started
    plan = summarize(request, candidate, candidates, allowance, planning_seconds)
    return _assemble(request, session, plan, candidate, allowance)


def _plan_inside(request: StepRequest, candidates: Candidates, held_bytes: int = 0) -> tuple[Candidate, Allowance]:
    """A candidate, and an allowance in which it fits beside all that looking for it has left in the process."""
    budget = request.resolve_budget()
    graph = candidates.sized(candidates.batch).graph

    def take_stock(collects: bool = True) -> Allowance:
        return allow(
            budget,
            request.optimizer_cost,
            graph,
            held_bytes=held_bytes,
            cuts=candidates.cuts,
            library_bytes=candidates.library_bytes,
            collects=collects,
        )

    candidate = _load(request, candidates, take_stock(collects=False))
    if candidate is None:
        allowance = take_stock()
        candidate = _fastest(request, candidates, allowance, allowance.planning_bytes)
    for _ in range(_MOST_ATTEMPTS):
        allowance = take_stock()
        if candidate is not None and allowance.admits(candidate):
            return _saved(request, candidates, candidate, allowance), allowance
        # What planning has really left behind is known now.
        candidate = _fastest(request, candidates, allowance, _NOISE_BYTES)
        if candidate is None:
            break
    smallest = candidates.smallest(request.micro_batch)
    allowance = take_stock()
    if allowance.admits(smallest):
        return _saved(request, candidates, smallest, allowance), allowance
    candidates.measure_all()
    smallest = candidates.smallest(request.micro_batch)
    raise infeasible(request, candidates, take_stock(), smallest)


def _saved(request: StepRequest, candidates: Candidates, candidate: Candidate, allowance: Allowance) -> Candidate:
    key = _plan_key(request, candidates, allowance, rounded(allowance.growth_bytes))
    request.cache.save_plan(key, candidate_to_data(candidate))
    return candidate


def _fastest(request: StepRequest, candidates: Candidates, allowance: Allowance, spare_bytes: int) -> Candidate | None:
    """The fastest candidate that leaves so many bytes for what looking for it leaves behind."""
    # The next start may be left with a little less, and the plan must fit there too.
    limit = rounded(max(0, allowance.step_bytes - spare_bytes))
    candidate = candidates.fastest(limit, request.micro_batch) if limit else None
    if candidate is not None and not allowance.admits(candidate):
        # The optimizer's temporaries do not fit into this arena: leave them room.
        limit -= allowance.total_with(candidate) - allowance.growth_bytes
        candidate = candidates.fastest(limit, request.micro_batch)
    return candidate


def _load(request: StepRequest, candidates: Candidates, allowance: Allowance) -> Candidate | None:
    """The plan of an earlier process, if it is still about what would be made."""
    for nbytes in nearby(allowance.growth_bytes):
        data = request.cache.load_plan(_plan_key(request, candidates, allowance, nbytes))
        if data is None:
            continue
        try:
            candidate = candidates.restore(data)
        except (PlanError, CaptureError, ValueError, KeyError, TypeError, IndexError):
            continue
        if allowance.admits(candidate):
            return candidate
    return None


def _plan_key(request: StepRequest, candidates: Candidates, allowance: Allowance, rounded_bytes: int) -> str:
    """By the budget, not by what capture has left of it: that is less when everything had to be measured first."""
    return plan_key(
        candidates.sized(candidates.batch).graph.fingerprint,
        machine_name(),
        settings_name(),
        rounded_bytes,
        allowance.state_bytes,
        request.planner,
        request.micro_batch,
        request.accumulates,
        "" if request.costs is None else costs_to_json(request.costs),
    )


def infeasible(
    request: StepRequest, candidates: Candidates, allowance: Allowance, smallest: Candidate
) -> InfeasibleBudget:
    """The refusal of a budget, with the smallest one that would be accepted."""
    return InfeasibleBudget(
        allowance.budget.text,
        allowance.smallest_budget(allowance.total_with(smallest)),
        hints=_hints(candidates, request),
        detail=allowance.describe(),
    )


def _hints(candidates: Candidates, request: StepRequest) -> tuple[str, ...]:
    hints = ["a smaller batch"] if candidates.batch > 1 else []
    if any("BatchNorm" in note for note in candidates.notes):
        hints.append("BatchNorm in evaluation mode, so that the batch can be cut into micro-batches")
    if request.planner != "auto":
        hints.append('planner="auto"')
    if request.optimizer_cost is not None and request.optimizer_cost.state_bytes:
        hints.append("an optimizer with less state")
    return tuple(hints)


def _assemble(
    request: StepRequest, session: _Session, plan: Plan, candidate: Candidate, allowance: Allowance
) -> Prepared:
    """Load the addresses into the arena and compile the executors."""
    arena = request.place(candidate.arena_bytes)
    if arena is not None:
        arena.set_yield_limit(allowance.outside_limit_bytes)
    tables: list[int] = []
    parts = {size: _make_part(arena, part, tables) for size, part in candidate.parts.items()}
    separation = candidate.parts[candidate.sizes[0]].separation
    return Prepared(
        plan=plan,
        samples=session.samples,
        program=StepProgram(parts, candidate.sizes),
        traced=session.traced[session.samples],
        shared=_shared_gradients(candidate.parts[candidate.sizes[0]].graph),
        tables=tables,
        wants_results=session.want_results,
        traces=session.traced,
        result_axes={} if separation is None else separation.result_axes,
    )


def _make_part(arena: Any, part: PlannedPart, tables: list[int]) -> Part:
    def executor(graph: TrainingGraph, layout: Layout) -> Executor:
        table = -1
        if arena is not None:
            table = arena.load(layout.table)
            tables.append(table)
        return Executor(graph, part.schedule, arena=arena, arena_table=table)

    first = executor(part.graph, part.first)
    return Part(
        graph=part.graph,
        first=first,
        later=first if part.later is None else executor(part.later.graph, part.later.layout),
        draws=part.draws,
        separation=part.separation,
    )


def _prepare_fallback(request: StepRequest, samples: int, reason: str) -> Prepared:
    """A step that has no graph runs as plain PyTorch, with measured submodules checkpointed where it must be."""
    # No arena serves such a step, and what malloc kept of freed tensors would stand in its way.
    memory.tune_malloc()
    allowance = allow(request.resolve_budget(), request.optimizer_cost, None)
    step = UncapturedStep(request.model, request.loss_fn, request.compute, allowance, reason)
    return Prepared(plan=summarize_fallback(request, allowance, samples, step), samples=samples, fallback=step)


def _shared_gradients(graph: TrainingGraph) -> frozenset[str]:
    """Parameters whose gradients lie in one storage: each needs its own."""
    by_storage: dict[int, list[str]] = {}
    for output in graph.outputs_of("gradient"):
        by_storage.setdefault(graph.values[output.value].base, []).append(str(output.target))
    return frozenset(name for names in by_storage.values() if len(names) > 1 for name in names)


def capture_whole(request: StepRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingGraph:
    """The graph of the step over the whole batch."""
    samples = count_samples(args, kwargs)
    return _Session(request, args, kwargs, samples, False).capture((samples,))[samples]


def profile_graph(
    request: StepRequest, graph: TrainingGraph, *, within_budget: bool = False, progress: Progress | None = None
) -> Costs:
    """What the graph's operators cost: as given with the request, or measured here."""
    if request.costs is not None:
        return apply_costs(graph, request.costs)

    def limit_bytes() -> int:
        if not within_budget:
            return memory.available()
        room = request.resolve_budget().total_bytes - held_by_process()
        # What operators and libraries allocate inside of a call is known only after it.
        return max(0, min(memory.available(), int(_MEASURING_SHARE * room)))

    return profile(graph, cache=request.cache, limit_bytes=limit_bytes, progress=progress)


def make_plan(request: StepRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """The plan that `prepare` would follow, with the smallest feasible budget in it.

    Raises:
        InfeasibleBudget, CaptureError
    """
    session = _Session(request, args, kwargs, count_samples(args, kwargs), False)
    candidates = session.candidates()
    candidate, allowance = _plan_inside(request, candidates)
    plan = summarize(request, candidate, candidates, allowance)
    smallest = allowance.total_with(candidates.smallest(request.micro_batch))
    named = allowance.smallest_budget(min(plan.peak_bytes, smallest))
    # What is named has a margin for less lucky starts; this budget has just been accepted.
    accepted = allowance.budget.in_terms_of(allowance.budget.growth_bytes)
    return replace(plan, smallest_feasible_bytes=min(named, accepted))


def count_samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The batch size: the first dimension of the first tensor that has one."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    raise ValueError("the batch holds no tensor with a batch dimension")
