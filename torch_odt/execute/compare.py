"""Several planners on one step, each at several budgets: what they predict, and what a step then really takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from torch_odt import memory
from torch_odt.cache import CacheOption
from torch_odt.capture.cost_table import CostTable
from torch_odt.errors import CaptureError
from torch_odt.execute.accounting import allow
from torch_odt.execute.candidate import Candidate
from torch_odt.execute.candidates import Candidates
from torch_odt.execute.dry_run import Batch, request_for
from torch_odt.execute.named_tensors import named_buffers, named_parameters
from torch_odt.execute.prepare import Session, count_samples
from torch_odt.execute.prepared import Prepared, assemble
from torch_odt.execute.summary import summarize
from torch_odt.planning.registry import get_planner
from torch_odt.runtime.budget import Budget

WITHOUT_LIMIT = Budget(1 << 50, of="training")
_WARM_UP_STEPS = 2

BudgetBytes = Callable[[int], int]
"""What keeping everything takes -> a budget."""


@dataclass(frozen=True)
class Comparison:
    """One planner at one budget. What is not known is None.

    Attributes:
        planner: its name.
        budget_bytes: for activations, gradients, outputs and random masks.
        budget_share: of what keeping everything over the whole batch takes.
        feasible: whether the planner found a plan within the budget.
        peak_bytes: what that plan takes: its arena, and what leaves it.
        step_seconds: predicted for the operators of a step.
        slowdown: those over the seconds of keeping everything.
        micro_batch: samples that run at once; None for the whole batch.
        recomputed_ops: how many calls bring back what was dropped.
        planning_seconds: what looking for the plan took; capturing and measuring come before.
        measured_step_seconds: the median of several steps, forward and backward.
        measured_peak_bytes: the most in tensors above the level before the steps, as the allocator counts. No more than
            `peak_bytes`, whose parts are not all full at the same moment.
    """

    planner: str
    budget_bytes: int
    budget_share: float
    feasible: bool
    planning_seconds: float
    peak_bytes: int | None = None
    step_seconds: float | None = None
    slowdown: float | None = None
    micro_batch: int | None = None
    recomputed_ops: int | None = None
    measured_step_seconds: float | None = None
    measured_peak_bytes: int | None = None


def compare(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    batch: Batch,
    *,
    planners: Sequence[str],
    budgets: Sequence[BudgetBytes],
    micro_batch: int | None = None,
    planning_seconds: float = 0.0,
    steps: int = 0,
    disable_rewrites: Iterable[str] = (),
    costs: CostTable | None = None,
    cache: CacheOption = None,
    report: Callable[[Comparison], None] = lambda comparison: None,
) -> list[Comparison]:
    """Plan one step by several planners.

    All of them are given the same graph, with every rewrite that "auto" makes: also "keep-all", which `TrainStep` gives
    one that keeps every bit.

    Args:
        model, loss_fn, batch, disable_rewrites, costs, cache: as for `plan`.
        planners: their names.
        budgets: each from the bytes that keeping everything takes.
        micro_batch: samples to a micro-batch; None lets each planner choose, the batch's size forbids cutting it.
        planning_seconds: for each planner at each budget, as for `plan`.
        steps: how many steps to execute and measure of each plan. They train nothing, but buffers change as in
            training and the model's gradients are dropped.
        report: called with each comparison as soon as it is made.

    Returns:
        One comparison for each budget and planner, in this order.

    Raises:
        PlanError: there is no planner of one of the names.
        CaptureError: the step cannot be captured, or `micro_batch` is given and micro-batches would not add up to it.
    """
    for name in planners:
        get_planner(name)
    request = request_for(
        model,
        loss_fn,
        budget=WITHOUT_LIMIT,
        disable_rewrites=disable_rewrites,
        micro_batch=micro_batch,
        planning_seconds=planning_seconds,
        costs=costs,
        cache=cache,
    )
    args, kwargs = ((), batch) if isinstance(batch, dict) else (tuple(batch), {})
    session = Session(request, args, kwargs, count_samples(args, kwargs), False)
    candidates = session.candidates()
    try:
        keep_all = replace(candidates, planner="keep-all")
        everything = keep_all.make((session.samples,), WITHOUT_LIMIT.resolve(0).growth_bytes)
        _measure_sizes(candidates, micro_batch)
        found = []
        for budget_of in budgets:
            budget_bytes = budget_of(everything.total_bytes)
            for name in planners:
                planned = replace(candidates, planner=name)
                comparison, candidate = _plan(planned, budget_bytes, everything, micro_batch)
                if candidate is not None and steps:
                    comparison = _execute(session, planned, candidate, comparison, steps)
                report(comparison)
                found.append(comparison)
        return found
    finally:
        request.release()


def _measure_sizes(candidates: Candidates, micro_batch: int | None) -> None:
    """Capture and measure every size that may be tried, so that no planner's time has it in it."""
    splits = candidates.splits() if micro_batch is None else [candidates.sizes_of(min(micro_batch, candidates.batch))]
    for sizes in splits:
        for size in dict.fromkeys(sizes):
            try:
                candidates.sized(size)
            except CaptureError:
                if micro_batch is not None:
                    raise
                return


def _plan(
    candidates: Candidates, budget_bytes: int, everything: Candidate, micro_batch: int | None
) -> tuple[Comparison, Candidate | None]:
    begin = time.perf_counter()
    candidate = candidates.fastest(budget_bytes, micro_batch)
    if candidates.planner == "auto" and candidates.planning_seconds:
        start = candidate or candidates.smallest(micro_batch)
        better = candidates.improved(start, budget_bytes, micro_batch)
        candidate = better if better.total_bytes <= budget_bytes else None
    comparison = Comparison(
        planner=candidates.planner,
        budget_bytes=budget_bytes,
        budget_share=budget_bytes / everything.total_bytes,
        feasible=candidate is not None,
        planning_seconds=time.perf_counter() - begin,
    )
    if candidate is None:
        return comparison, None
    recomputed = sum(len(candidate.parts[size].simulation.recomputed_ops) for size in candidate.sizes)
    return (
        replace(
            comparison,
            peak_bytes=candidate.total_bytes,
            step_seconds=candidate.seconds,
            slowdown=candidate.seconds / everything.seconds if everything.seconds else None,
            micro_batch=candidate.sizes[0] if len(candidate.sizes) > 1 else None,
            recomputed_ops=recomputed,
        ),
        candidate,
    )


def _execute(
    session: Session, candidates: Candidates, candidate: Candidate, comparison: Comparison, steps: int
) -> Comparison:
    """Run steps of a plan, and put what they took into its comparison."""
    request = session.request
    allowance = allow(request.resolve_budget(), None, candidates.sized(candidates.batch).graph)
    plan = summarize(request, candidate, candidates, allowance)
    request.release()
    prepared = assemble(request, plan, candidate, allowance)
    parameters = list(request.model.parameters())
    seconds = []
    for step in range(_WARM_UP_STEPS + steps):
        for parameter in parameters:
            parameter.grad = None
        if step == _WARM_UP_STEPS:
            memory.reset_peak()
            level_bytes = memory.stats().allocated_bytes
        begin = time.perf_counter()
        _run(session, prepared)
        seconds.append(time.perf_counter() - begin)
    peak_bytes = memory.stats().peak_bytes
    for parameter in parameters:
        parameter.grad = None
    return replace(
        comparison,
        measured_step_seconds=median(seconds[_WARM_UP_STEPS:]),
        measured_peak_bytes=None if peak_bytes is None or level_bytes is None else peak_bytes - level_bytes,
    )


def _run(session: Session, prepared: Prepared) -> torch.Tensor:
    request = session.request
    parameters = named_parameters(request.model, request.loss_fn)
    buffers = named_buffers(request.model, request.loss_fn)
    return prepared.run(session.args, session.kwargs, parameters, buffers, gradients_exist=False)[0]
