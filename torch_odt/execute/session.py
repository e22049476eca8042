"""What one preparation of a step knows: its graphs at every size that was asked for, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_odt import memory
from torch_odt.cache import Cache
from torch_odt.capture.cost_table import view_cost
from torch_odt.capture.costs import Costs
from torch_odt.capture.device import costs_on
from torch_odt.capture.graph import OutputKind, TrainingGraph
from torch_odt.capture.profile import Progress, apply_costs, profile
from torch_odt.capture.rewrite import for_whole_batch, rewrite, with_updates
from torch_odt.capture.trace import TracedStep
from torch_odt.capture.trace_cache import remembered_trace
from torch_odt.execute.accounting import held_by_process
from torch_odt.execute.batches import count_samples, slice_batch
from torch_odt.execute.candidate import Candidate
from torch_odt.execute.candidates import Candidates, KnownSizes, SizedGraph
from torch_odt.execute.plan_data import PlannedProgram
from torch_odt.execute.request import StepRequest
from torch_odt.execute.requirements import Requirements
from torch_odt.runtime.budget import Allotment

_MEASURING_SHARE = 0.9


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
class Captured:
    """What has been captured of a step: preparations for several budgets share it.

    Attributes:
        traces: rewritten, by batch size.
        known: what is planned, with its costs, by the name of what paging costs.
    """

    traces: dict[int, TracedStep] = field(default_factory=dict)
    known: dict[str, KnownSizes] = field(default_factory=dict)


@dataclass
class Session:
    """One preparation: the graphs of a step at every size that was asked for, and what they cost."""

    request: StepRequest
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int
    want_results: bool
    captured: Captured = field(default_factory=Captured)
    notes: list[str] = field(default_factory=list)

    def capture(self, sizes: Sequence[int]) -> dict[int, TrainingGraph]:
        traced = self.captured.traces
        missing = [size for size in sizes if size not in traced]
        found = capture_sizes(self.request, self.args, self.kwargs, self.samples, missing)
        drop: tuple[OutputKind, ...] = () if self.want_results else ("result",)
        disabled = self.request.disabled_rewrites
        for size, step in found.items():
            traced[size] = replace(step, graph=rewrite(step.graph, drop=drop, disabled=disabled))
        return {size: traced[size].graph for size in sizes}

    def for_whole_batch(self, graph: TrainingGraph, *, pages: bool = False) -> TrainingGraph:
        request = self.request
        # A transfer that fails must not leave some parameters updated.
        if request.updates is not None and not pages:
            # Gradients that are there already would have to be added first.
            rules = {} if request.accumulates else request.updates.rules_for(graph)
            graph = with_updates(graph, rules) if rules else graph
        return for_whole_batch(graph, request.disabled_rewrites)

    @property
    def results(self) -> TracedStep | None:
        """How the model's outputs are put together, if they are wanted."""
        return self.captured.traces[self.samples] if self.want_results else None

    def program(self, candidate: Candidate) -> PlannedProgram:
        """What a file needs to execute a candidate."""
        request = self.request
        requirements = Requirements.of(request.model, request.loss_fn, self.args, self.kwargs)
        return PlannedProgram(candidate, requirements, self.adds, request.disabled_rewrites, self.results)

    @property
    def adds(self) -> bool:
        """Whether gradients may be there when a step begins; where calls are undone, they lie aside."""
        return self.request.accumulates and not self.request.transactional

    def candidates(self, *, pages: bool = False) -> Candidates:
        """What makes plans; those that page keep all gradients until the optimizer's step."""
        request = self.request
        transfers = request.page_file.costs if pages and request.page_file is not None else None

        def measure(graph: TrainingGraph, limited: bool) -> Costs:
            return replace(profile_graph(request, graph, within_budget=limited), transfers=transfers)

        passes = 1 if request.page_file is None else 2
        pages_by = "" if transfers is None else transfers.name
        known = self.captured.known.setdefault(pages_by, KnownSizes())
        # By now there may be room to measure them.
        known.forget_estimates()
        return Candidates(
            batch=self.samples,
            capture=self.capture,
            for_whole_batch=lambda graph: self.for_whole_batch(graph, pages=pages),
            profile=measure,
            planner=request.planner,
            gradients_exist=self.adds,
            # What takes fewest bytes is remembered for this machine.
            cache=request.cache if request.costs is None and request.device is None else Cache(enabled=False),
            goal=request.goal,
            # What does not page and what does share the time.
            planning_seconds=request.planning_seconds / passes,
            time_share=1 / passes,
            pages_by=pages_by,
            is_passing=isinstance(request.budget, Allotment),
            known=known,
        )

    def makers(self) -> list[Candidates]:
        """What makes plans that do not page and, where there is a file, what makes plans that may."""
        pages = [] if self.request.page_file is None else [self.candidates(pages=True)]
        return [self.candidates(), *pages]


def capture_whole(request: StepRequest, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingGraph:
    """The graph of the step over the whole batch."""
    samples = count_samples(args, kwargs)
    session = Session(request, args, kwargs, samples, False)
    return session.for_whole_batch(session.capture((samples,))[samples])


def traced_sizes(
    request: StepRequest, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int], *, want_results: bool
) -> dict[int, SizedGraph]:
    """The step at several micro-batch sizes, traced and rewritten but not measured."""
    session = Session(request, args, kwargs, count_samples(args, kwargs), want_results)
    unmeasured = replace(
        session.candidates(), profile=lambda graph, _: Costs({o.index: view_cost(o) for o in graph.ops})
    )
    return {size: unmeasured.sized(size) for size in sizes}


def profile_graph(
    request: StepRequest, graph: TrainingGraph, *, within_budget: bool = False, progress: Progress | None = None
) -> Costs:
    """What the graph's operators cost: as given with the request, on its device, or measured here."""
    given = None if request.costs is None else apply_costs(graph, request.costs)
    if request.device is not None:
        return costs_on(graph, request.device, given)
    costs = given or _measure(request, graph, within_budget, progress)
    if request.power is None:
        return costs
    return replace(costs, watts=request.power.busy_watts, notes=[*costs.notes, request.power.note])


def _measure(request: StepRequest, graph: TrainingGraph, within_budget: bool, progress: Progress | None) -> Costs:
    """What they cost here."""

    def limit_bytes() -> int:
        if not within_budget:
            return memory.available()
        # To measure takes what is held for steps.
        if request.arena is not None:
            request.arena.release()
        room = request.resolve_budget().total_bytes - held_by_process()
        # What operators and libraries allocate inside of a call is known only after it.
        return max(0, min(memory.available(), int(_MEASURING_SHARE * room)))

    return profile(graph, cache=request.cache, limit_bytes=limit_bytes, progress=progress)
