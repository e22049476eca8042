"""The plan of a prepared step, for people."""

from __future__ import annotations

from torch_odt._extensions import has_kernels
from torch_odt.execute.accounting import Allowance
from torch_odt.execute.candidates import Candidate, Candidates
from torch_odt.execute.request import StepRequest
from torch_odt.execute.uncaptured import UncapturedStep
from torch_odt.planning.plan import Plan, eager_seconds, recomputed_in
from torch_odt.planning.timeline import timeline_of


def summarize(
    request: StepRequest,
    candidate: Candidate,
    candidates: Candidates,
    allowance: Allowance,
    planning_seconds: float | None = None,
) -> Plan:
    """What was decided for a captured step."""
    part = candidate.parts[candidate.sizes[0]]
    whole = candidates.sized(candidates.batch)
    passes = len(candidate.sizes)
    return Plan(
        planner=part.schedule.planner,
        lines=tuple(line for line in allowance.lines(candidate) if line.nbytes),
        step_seconds=candidate.seconds,
        eager_seconds=eager_seconds(whole.graph, whole.costs),
        batch=candidates.batch,
        micro_batch=candidate.sizes[0] if passes > 1 else None,
        budget=allowance.budget,
        recomputed=recomputed_in(part.graph, part.costs, part.schedule, passes=passes),
        notes=tuple(dict.fromkeys((*part.graph.notes, *part.costs.notes, *candidates.notes, *_remarks(request)))),
        tensor_peak_bytes=candidate.tensor_peak_bytes + allowance.state_bytes,
        planning_seconds=planning_seconds,
        schedule=part.schedule,
        layout=part.first,
        later_layout=None if part.later is None else part.later.layout,
        timeline=timeline_of(part.graph, part.costs, part.schedule),
    )


def summarize_fallback(request: StepRequest, allowance: Allowance, samples: int, step: UncapturedStep) -> Plan:
    """What was decided for a step that has no graph."""
    return Plan(
        planner="checkpointing",
        lines=step.lines,
        step_seconds=0.0,
        eager_seconds=0.0,
        batch=samples,
        budget=allowance.budget,
        notes=(*step.notes, *_remarks(request)),
        captured=False,
    )


def _remarks(request: StepRequest) -> tuple[str, ...]:
    remarks = []
    if not request.has_arena:
        remarks.append("without the compiled allocator: no arena, bytes are estimates from shapes")
    if not has_kernels:
        remarks.append("without the compiled operators: nothing is fused")
    return tuple(remarks)
