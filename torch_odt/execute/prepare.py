"""From a model and a batch to a step that is ready to run: capture, profile, plan, place.

This file is the way through the house. Each stage is one call into its room; what is decided here is only how much
memory is left for the step, and into how many micro-batches the batch is cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch_odt import memory
from torch_odt._collection import no_collection
from torch_odt.cache import plan_key
from torch_odt.capture.profile import costs_to_json, machine_name, settings_name
from torch_odt.errors import CaptureError, InfeasibleBudget, PlanError
from torch_odt.execute.accounting import Allowance, UndoCost, allow, nearby, rounded
from torch_odt.execute.batches import count_samples
from torch_odt.execute.candidate import Candidate
from torch_odt.execute.candidates import Candidates, candidate_to_data
from torch_odt.execute.prepared import Prepared, assemble
from torch_odt.execute.refusal import infeasible
from torch_odt.execute.request import Refused, StepRequest
from torch_odt.execute.session import Captured, Session
from torch_odt.execute.summary import summarize, summarize_fallback
from torch_odt.execute.uncaptured import UncapturedStep
from torch_odt.planning.objective import Goal
from torch_odt.planning.plan import Plan
from torch_odt.planning.smallest import forget_trials
from torch_odt.runtime.budget import Allotment, ResolvedBudget

# Planning may have to be repeated for what it has left behind itself.
_MOST_ATTEMPTS = 3
_NOISE_BYTES = 1 << 20
_SPARE_SHARE = 0.03
_NO_LIMIT = 1 << 50


@no_collection()
def prepare(
    request: StepRequest,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    want_results: bool = False,
    captured: Captured | None = None,
) -> Prepared:
    """Make a step ready for batches like this one.

    Plans leave hardly any garbage, and what tracing leaves is looked for where it is counted.

    Args:
        captured: by an earlier preparation of the same step, for another budget; what is new is added, even if the
            budget is then refused.

    Raises:
        InfeasibleBudget: no plan fits.
    """
    captured = captured or Captured()
    # To look for garbage takes as long as a step, and tracing leaves most of it.
    collects = not captured.traces
    session = Session(request, args, kwargs, count_samples(args, kwargs), want_results, captured)
    plain, *pages = session.makers()
    try:
        plain.sized(session.samples)
    except CaptureError as reason:
        return _prepare_fallback(request, session.samples, str(reason))
    held = sum(p.grad.nbytes for p in request.model.parameters() if p.grad is not None) if request.accumulates else 0
    started = time.perf_counter()
    made = _plan(request, plain, *pages, held_bytes=held, collects=collects)
    if not isinstance(request.budget, Allotment):
        # Where budgets pass, the next plan is of the same problem.
        forget_trials()
    planning_seconds = time.perf_counter() - started
    plan = summarize(request, made.candidate, made.candidates, made.allowance, planning_seconds)
    plan.program = session.program(made.candidate)
    prepared = assemble(request, plan, made.candidate, made.allowance)
    prepared.results = session.results
    return prepared


@dataclass(frozen=True)
class _Made:
    """A plan, what it leaves room for, and what made it."""

    candidates: Candidates
    candidate: Candidate
    allowance: Allowance


def _plan(
    request: StepRequest,
    candidates: Candidates,
    pages: Candidates | None = None,
    *,
    held_bytes: int = 0,
    collects: bool = True,
) -> _Made:
    """The plan to follow: one that pages only where that is faster, or nothing else fits.

    Args:
        candidates, pages: what makes plans that do not page, and such that may.
        held_bytes: of gradients that exist already.
        collects: look for garbage where more was spent than is usual, not only where there is too little.

    Raises:
        InfeasibleBudget: neither fits; it names the smaller of the budgets that would be accepted.
    """
    plain: _Made | None = None
    refusal: InfeasibleBudget | None = None
    try:
        plain = _Made(candidates, *_plan_inside(request, candidates, held_bytes, collects=collects))
    except InfeasibleBudget as error:
        refusal = error
    if pages is None or (plain is not None and not plain.candidate.recomputes):
        if plain is None:
            assert refusal is not None
            raise refusal
        return plain
    try:
        paged = _Made(pages, *_plan_inside(request, pages, held_bytes, collects=collects))
    except InfeasibleBudget as error:
        if plain is not None:
            return plain
        assert refusal is not None
        raise min(refusal, error, key=lambda e: e.smallest_feasible_bytes) from None
    return paged if plain is None or candidates.rank(paged.candidate) < candidates.rank(plain.candidate) else plain


def _plan_inside(
    request: StepRequest, candidates: Candidates, held_bytes: int = 0, *, collects: bool = True
) -> tuple[Candidate, Allowance]:
    """A candidate, and an allowance in which it fits beside all that looking for it has left in the process."""
    budget = request.resolve_budget()

    def take_stock(collects: bool = True) -> Allowance:
        return _take_stock(request, budget, candidates, held_bytes, collects=collects)

    def stock_for(candidate: Candidate | None) -> Allowance:
        # What garbage takes is no reason to refuse, nor is it the step's; but to look for it takes as long as one.
        allowance = take_stock(collects=False)
        is_usual = allowance.spent_bytes <= allowance.usual_spent_bytes + allowance.planning_bytes
        fits = candidate is not None and allowance.admits(candidate)
        return allowance if fits and (is_usual or not collects) else take_stock()

    candidate = _load(request, candidates, take_stock(collects=False))
    if candidate is None:
        allowance = take_stock(collects)
        candidate = _everything_kept(request, candidates, allowance)
    if candidate is None:
        spare_bytes = allowance.planning_bytes + _spare_for_return(request, allowance)
        candidate = _fastest(request, candidates, allowance, spare_bytes)
    # Where budgets pass, to look twice for what hardly fits takes longer than it gains.
    attempts = 0 if candidate is None and candidates.is_passing else _MOST_ATTEMPTS
    for _ in range(attempts):
        allowance = stock_for(candidate)
        if candidate is not None and allowance.admits(candidate):
            candidate, allowance = _with_time(request, candidates, candidate, allowance, take_stock)
            if allowance.admits(candidate):
                return candidate, allowance
        # What planning has really left behind is known now.
        candidate = _fastest(request, candidates, allowance, _NOISE_BYTES)
        if candidate is None:
            break
    smallest = candidates.smallest(request.micro_batch)
    candidate, allowance = _with_time(request, candidates, smallest, stock_for(smallest), take_stock)
    if allowance.admits(candidate):
        return candidate, allowance
    if candidates.measure_all():
        smallest, allowance = candidates.smallest(request.micro_batch), take_stock()
    refusal = infeasible(request, candidates, allowance, smallest)
    request.refused[candidates.fingerprint] = Refused(smallest.total_bytes, refusal.smallest_feasible_bytes)
    raise refusal


def _everything_kept(request: StepRequest, candidates: Candidates, allowance: Allowance) -> Candidate | None:
    """The whole batch at once with nothing computed twice, if that fits.

    There is nothing to look for then, which leaves nothing behind that room would have to be kept for.
    """
    is_cut = request.micro_batch is not None and request.micro_batch < candidates.batch
    if request.planner != "auto" or is_cut or isinstance(request.budget, Allotment) or allowance.step_bytes <= 0:
        return None
    candidate = candidates.make((candidates.batch,), _NO_LIMIT)
    fits = candidate.total_bytes <= rounded(max(0, allowance.step_bytes - _NOISE_BYTES))
    return candidate if fits and allowance.admits(candidate) else None


def _spare_for_return(request: StepRequest, allowance: Allowance) -> int:
    """Where budgets change they also come back: what the process holds by then must not keep the plan from fitting."""
    return int(_SPARE_SHARE * allowance.growth_bytes) if isinstance(request.budget, Allotment) else 0


def _take_stock(
    request: StepRequest, budget: ResolvedBudget, candidates: Candidates, held_bytes: int = 0, *, collects: bool = True
) -> Allowance:
    """What the budget leaves for the plans of one maker."""
    graph = candidates.sized(candidates.batch).graph
    return allow(
        budget,
        request.optimizer_cost,
        graph,
        held_bytes=held_bytes,
        arena_bytes=request.held_bytes,
        cuts=candidates.cuts,
        library_bytes=candidates.library_bytes,
        collects=collects,
        undo=UndoCost.of(graph, accumulates=request.accumulates) if request.transactional else None,
    )


def _with_time(
    request: StepRequest,
    candidates: Candidates,
    candidate: Candidate,
    allowance: Allowance,
    take_stock: Callable[[], Allowance],
) -> tuple[Candidate, Allowance]:
    """A candidate, or a better one if time was given to look for it; remembered if it fits."""
    if request.planner == "auto" and candidate.planning_seconds < candidates.planning_seconds:
        left = allowance.growth_bytes - allowance.total_with(candidate)
        # Looking may leave something behind; what is no larger than this candidate fits as it does.
        limit = candidate.total_bytes + (max(0, left - _NOISE_BYTES) if left > 0 else left)
        better = candidates.improved(candidate, limit, request.micro_batch)
        allowance = take_stock()
        candidate = better if allowance.admits(better) else candidate
    if allowance.admits(candidate):
        _save(request, candidates, candidate, allowance)
    return candidate, allowance


def _save(request: StepRequest, candidates: Candidates, candidate: Candidate, allowance: Allowance) -> None:
    candidate.planning_seconds = max(candidate.planning_seconds, candidates.planning_seconds)
    key = _plan_key(request, candidates, allowance, rounded(allowance.growth_bytes))
    request.cache.save_plan(key, candidate_to_data(candidate))


def _fastest(request: StepRequest, candidates: Candidates, allowance: Allowance, spare_bytes: int) -> Candidate | None:
    """The fastest candidate that leaves so many bytes for what looking for it leaves behind."""
    # The next start may be left with a little less, and the plan must fit there too.
    limit = rounded(max(0, allowance.step_bytes - spare_bytes))
    refused = request.refused.get(candidates.fingerprint)
    if refused is not None and isinstance(request.budget, Allotment):
        is_named = request.budget.total_bytes <= refused.budget_bytes
        if is_named or limit < refused.fewest_bytes:
            # Nothing fits, or what is followed for want of more.
            return None
    candidate = candidates.fastest(limit, request.micro_batch) if limit else None
    if candidate is not None and not allowance.admits(candidate):
        # The optimizer's temporaries do not fit into this arena: leave them room.
        limit -= allowance.total_with(candidate) - allowance.growth_bytes
        candidate = candidates.fastest(limit, request.micro_batch)
    return candidate


def _load(request: StepRequest, candidates: Candidates, allowance: Allowance) -> Candidate | None:
    """The plan of an earlier process, if it is still about what would be made; one that was looked for long enough."""
    best: Candidate | None = None
    for nbytes in nearby(allowance.growth_bytes):
        data = request.cache.load_plan(_plan_key(request, candidates, allowance, nbytes))
        if data is None:
            continue
        try:
            candidate = candidates.restore(data)
        except (PlanError, CaptureError, ValueError, KeyError, TypeError, IndexError):
            continue
        if not allowance.admits(candidate):
            continue
        if candidate.planning_seconds >= candidates.planning_seconds:
            return candidate
        best = best or candidate
    return best


def _plan_key(request: StepRequest, candidates: Candidates, allowance: Allowance, rounded_bytes: int) -> str:
    """By the budget, not by what capture has left of it: that is less when everything had to be measured first."""
    return plan_key(
        candidates.fingerprint,
        machine_name(),
        settings_name(),
        rounded_bytes,
        # What comes back to an amount may have been there before the optimizer made its state.
        0 if candidates.is_passing else allowance.state_bytes + allowance.undo_bytes,
        request.planner,
        # Other planners than auto begin anew with another limit.
        0 if request.planner == "auto" else request.planning_seconds,
        request.micro_batch,
        request.accumulates,
        candidates.pages_by,
        "" if request.costs is None else costs_to_json(request.costs),
        request.device,
        request.goal,
        *(("passing",) if candidates.is_passing else ()),
    )


def _prepare_fallback(request: StepRequest, samples: int, reason: str) -> Prepared:
    """A step that has no graph runs as plain PyTorch, with measured submodules checkpointed where it must be."""
    # No arena serves such a step, and what malloc kept of freed tensors would stand in its way.
    memory.tune_malloc()
    if request.arena is not None:
        request.arena.release()
    undo = _undo_cost(request) if request.transactional else None
    allowance = allow(request.resolve_budget(), request.optimizer_cost, None, undo=undo)
    if undo is not None:
        _require_room_to_commit(request, allowance)
    step = UncapturedStep(
        request.model, request.loss_fn, request.compute, allowance, reason, transactional=request.transactional
    )
    return Prepared(plan=summarize_fallback(request, allowance, samples, step), samples=samples, fallback=step)


def _undo_cost(request: StepRequest) -> UndoCost:
    """What it takes to undo calls of a step without a graph, whose code may change any buffer."""
    gradients = [p.nbytes for p in request.model.parameters() if p.requires_grad] if request.accumulates else [0]
    return UndoCost(sum(b.nbytes for b in request.model.buffers()), sum(gradients) + max(gradients))


def _require_room_to_commit(request: StepRequest, allowance: Allowance) -> None:
    """Raises InfeasibleBudget when gradients do not fit beside the copies that undo the optimizer's step."""
    cost = request.optimizer_cost
    parameter_bytes = sum(p.nbytes for p in request.model.parameters() if p.requires_grad)
    needed = 2 * parameter_bytes + (0 if cost is None else cost.state_bytes + cost.workspace_bytes)
    if needed > allowance.step_bytes:
        fixed = allowance.growth_bytes - allowance.step_bytes
        smallest = allowance.smallest_budget(fixed + needed)
        raise InfeasibleBudget(allowance.budget.text, smallest, detail=allowance.describe())


def make_plan(
    request: StepRequest, args: tuple[Any, ...], kwargs: dict[str, Any], *, want_results: bool = False
) -> Plan:
    """The plan that `prepare` would follow, with the smallest feasible budget in it.

    Raises:
        InfeasibleBudget, CaptureError
    """
    session = Session(request, args, kwargs, count_samples(args, kwargs), want_results)
    makers = session.makers()
    made = _plan(request, *makers)
    require_in_time(request.goal, made.candidate.seconds)
    allowance = made.allowance
    plan = summarize(request, made.candidate, made.candidates, allowance)
    smallest = min(_smallest_budget(request, allowance.budget, each) for each in makers)
    named = min(allowance.smallest_budget(plan.peak_bytes), smallest)
    # What is named has a margin for less lucky starts; this budget has just been accepted.
    accepted = allowance.budget.in_terms_of(allowance.budget.growth_bytes)
    program = session.program(made.candidate)
    return replace(plan, smallest_feasible_bytes=min(named, accepted), program=program)


def _smallest_budget(request: StepRequest, budget: ResolvedBudget, candidates: Candidates) -> int:
    """The budget to name for what takes fewest bytes of all that one maker makes."""
    smallest = candidates.smallest(request.micro_batch)
    allowance = _take_stock(request, budget, candidates)
    return allowance.smallest_budget(allowance.total_with(smallest))


def require_in_time(goal: Goal, seconds: float) -> None:
    """Raises PlanError when the fastest plan is too slow."""
    if seconds > goal.deadline_seconds:
        raise PlanError(
            f"no plan within the budget meets the deadline of {goal.deadline_seconds:.3g} s: "
            f"the fastest that was found takes {seconds:.3g} s"
        )
