"""The plan of a prepared step, for people."""

from __future__ import annotations

import math

from torch_odt._extensions import has_kernels
from torch_odt.execute.accounting import Allowance
from torch_odt.execute.candidate import Candidate
from torch_odt.execute.candidates import Candidates
from torch_odt.execute.page_file import TORN_UPDATES, paging_notes
from torch_odt.execute.request import StepRequest
from torch_odt.execute.uncaptured import UncapturedStep
from torch_odt.planning.plan import Plan, eager_seconds, recomputed_in
from torch_odt.planning.timeline import timeline_of

_NEVER_PAGE = ("keep-all", "rotor", "poet-remat")


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
    remarks = (
        *_remarks(request),
        *paging_notes(part.simulation),
        *_why_the_optimizer_waits(request, candidates, passes),
        *_why_nothing_is_paged(request, candidate),
    )
    return Plan(
        planner=part.schedule.planner,
        lines=tuple(line for line in allowance.lines(candidate) if line.nbytes),
        step_seconds=candidate.seconds,
        step_joules=candidate.joules,
        device=whole.costs.machine,
        objective=request.goal.objective,
        deadline_seconds=None if math.isinf(request.goal.deadline_seconds) else request.goal.deadline_seconds,
        eager_seconds=eager_seconds(whole.graph, whole.costs),
        batch=candidates.batch,
        micro_batch=candidate.sizes[0] if passes > 1 else None,
        budget=allowance.budget,
        recomputed=recomputed_in(part.graph, part.costs, part.schedule, passes=passes),
        notes=tuple(dict.fromkeys((*part.graph.notes, *part.costs.notes, *candidates.notes, *remarks))),
        tensor_peak_bytes=candidate.tensor_peak_bytes + allowance.state_bytes + allowance.undo_bytes,
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


def _why_the_optimizer_waits(request: StepRequest, candidates: Candidates, passes: int) -> tuple[str, ...]:
    if request.updates is None:
        return ()
    several = f"gradients are summed over {passes} micro-batches" if passes > 1 else ""
    torn = TORN_UPDATES if candidates.pages_by else ""
    reason = request.updates.waits_for or several or torn
    if reason:
        return (f"the optimizer makes its step after the backward pass: {reason}",)
    kept = request.updates.kept.items()
    return tuple(f"{count} gradients are kept for the optimizer's step: {reason}" for reason, count in kept)


def could_page(request: StepRequest) -> bool:
    """Whether only the folder to page to is missing, of a device that is not at hand."""
    if request.device is None or request.device.storage is None or request.page_file is not None:
        return False
    return request.planner not in _NEVER_PAGE


def _why_nothing_is_paged(request: StepRequest, candidate: Candidate) -> tuple[str, ...]:
    is_scarce = candidate.recomputes or len(candidate.sizes) > 1
    if not (could_page(request) and is_scarce and request.device is not None):
        return ()
    return (f"nothing is paged: {request.device.description} has storage; page_to= (--page-to) allows its use",)


def _remarks(request: StepRequest) -> tuple[str, ...]:
    remarks = []
    if not request.has_arena:
        remarks.append("without the compiled allocator: no arena, bytes are estimates from shapes")
    if not has_kernels:
        remarks.append("without the compiled operators: nothing is fused")
    return tuple(remarks)
