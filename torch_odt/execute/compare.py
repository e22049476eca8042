"""Several planners on one step, each at several budgets: what they predict, and what a step then really takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from torch_odt import memory
from torch_odt.cache import CacheOption
from torch_odt.capture.cost_table import CostTable
from torch_odt.capture.device import Device
from torch_odt.errors import CaptureError
from torch_odt.execute.accounting import Allowance, allow
from torch_odt.execute.batches import count_samples
from torch_odt.execute.candidate import Candidate
from torch_odt.execute.candidates import Candidates
from torch_odt.execute.dry_run import Batch, request_for
from torch_odt.execute.named_tensors import named_buffers, named_parameters
from torch_odt.execute.page_file import PageFile
from torch_odt.execute.prepared import Prepared, assemble
from torch_odt.execute.request import StepRequest
from torch_odt.execute.session import Session
from torch_odt.execute.summary import summarize
from torch_odt.planning.objective import Goal, Objective
from torch_odt.planning.registry import get_planner, is_for_paging
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
        budget_bytes: for activations, gradients, outputs and random masks; with an optimizer, for its state and
            temporaries, too.
        budget_share: of what keeping everything over the whole batch takes.
        feasible: whether the planner found a plan within the budget and the deadline.
        peak_bytes: what that plan takes: its arena, and what leaves it; with an optimizer, what that takes beside them.
        step_seconds: predicted for the operators of a step.
        slowdown: those over the seconds of keeping everything.
        micro_batch: samples that run at once; None for the whole batch.
        recomputed_ops: how many calls bring back what was dropped.
        energy_joules: predicted for a step, where it is known what the machine draws.
        paged_bytes: what a step writes to the file of pages.
        planning_seconds: what looking for the plan took; capturing and measuring come before.
        measured_step_seconds: the median of several steps, forward and backward.
        measured_peak_bytes: the most in tensors above the level before the steps, as the allocator counts. No more than
            `peak_bytes`, whose parts are not all full at the same moment.
        notes: where seconds and joules come from, and what the planner was compared without.
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
    energy_joules: float | None = None
    paged_bytes: int | None = None
    measured_step_seconds: float | None = None
    measured_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()


def compare(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    batch: Batch,
    *,
    planners: Sequence[str],
    budgets: Sequence[BudgetBytes],
    optimizer: torch.optim.Optimizer | None = None,
    page_to: str | Path | PageFile | None = None,
    device: str | Path | Device = "this",
    objective: Objective = "seconds",
    deadline_seconds: float = math.inf,
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

    With `page_to`, each plans with paging, too, and the better plan counts; planners that are made for paging say so
    where there is nothing to page to.

    Args:
        model, loss_fn, batch, disable_rewrites, costs, cache: as for `plan`.
        planners: their names.
        budgets: each from the bytes that keeping everything takes.
        optimizer, page_to, device, objective: as for `plan`.
        deadline_seconds: plans that take longer are infeasible.
        micro_batch: samples to a micro-batch; None lets each planner choose, the batch's size forbids cutting it.
        planning_seconds: for each planner at each budget, as for `plan`.
        steps: how many steps to execute and measure of each plan. They train nothing, but buffers change as in
            training and the model's gradients are dropped.
        report: called with each comparison as soon as it is made.

    Returns:
        One comparison for each budget and planner, in this order.

    Raises:
        PlanError: there is no planner of one of the names, or no such objective.
        CaptureError: the step cannot be captured, or `micro_batch` is given and micro-batches would not add up to it.
        ValueError: `steps` together with an optimizer or another device; or as for `plan`.
        OSError: as for `plan`; or there is no folder `page_to`.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> batch = (torch.ones(3, 4), torch.tensor([0, 1, 1]))
        >>> budgets = [lambda everything_bytes: everything_bytes]
        >>> found = compare(model, nn.functional.cross_entropy, batch, planners=("chen",), budgets=budgets, cache=False)
        >>> found[0].feasible
        True
    """
    for name in planners:
        get_planner(name)
    goal, machine = Goal(objective, deadline_seconds), Device.of_value(device)
    if steps and (optimizer is not None or machine is not None):
        what = (
            "the optimizer: measured steps train nothing"
            if machine is None
            else "the device: steps run on this machine"
        )
        raise ValueError(f"steps cannot be measured like this; leave out the steps, or {what}")
    request = request_for(
        model,
        loss_fn,
        budget=WITHOUT_LIMIT,
        optimizer=optimizer,
        disable_rewrites=disable_rewrites,
        page_to=page_to,
        micro_batch=micro_batch,
        device=machine,
        goal=goal,
        planning_seconds=planning_seconds,
        costs=costs,
        cache=cache,
    )
    args, kwargs = ((), batch) if isinstance(batch, dict) else (tuple(batch), {})
    session = Session(request, args, kwargs, count_samples(args, kwargs), False)
    ways = [session.candidates()]
    if request.page_file is not None:
        ways.append(session.candidates(pages=True))
    try:
        keep_all = replace(ways[0], planner="keep-all")
        everything = keep_all.make((session.samples,), WITHOUT_LIMIT.resolve(0).growth_bytes)
        field = _Field(request, ways, everything)
        for way in ways:
            _measure_sizes(way, micro_batch)
        found = []
        for budget_of in budgets:
            budget_bytes = budget_of(field.total_bytes(everything))
            for name in planners:
                made = field.plan(name, budget_bytes)
                if made.candidate is not None and steps:
                    made = replace(made, comparison=_execute(session, made, steps))
                report(made.comparison)
                found.append(made.comparison)
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


@dataclass(frozen=True)
class _Made:
    """A comparison, the plan that it is about if there is one, and what made that."""

    comparison: Comparison
    candidates: Candidates
    candidate: Candidate | None


@dataclass(frozen=True)
class _Field:
    """What planners are compared on.

    Attributes:
        ways: what makes plans without paging, and with it if there is a file.
        everything: the plan that keeps everything.
    """

    request: StepRequest
    ways: Sequence[Candidates]
    everything: Candidate

    def total_bytes(self, candidate: Candidate) -> int:
        """With what the optimizer takes."""
        return self._optimizers_share.total_with(candidate)

    @property
    def _optimizers_share(self) -> Allowance:
        request = self.request
        return Allowance(request.resolve_budget(), request.optimizer_cost, spent_bytes=0, reserve_bytes=0)

    @property
    def _may_plan_again(self) -> bool:
        """For the optimizer's temporaries, or for a deadline; nothing is refused here, so not for the fewest bytes."""
        return self.request.optimizer_cost is not None or self.request.goal.deadline_seconds < math.inf

    def plan(self, name: str, budget_bytes: int) -> _Made:
        """One planner at one budget: without paging, or with it where that is better."""
        begin = time.perf_counter()
        best: Candidate | None = None
        made_by = self.ways[0]
        for way in self.ways:
            if best is not None and not best.recomputes:
                break
            candidates = replace(way, planner=name, reserves_time=self._may_plan_again)
            candidate = self._fastest(candidates, budget_bytes)
            if candidate is not None and (best is None or way.rank(candidate) < way.rank(best)):
                best, made_by = candidate, candidates
        planning_seconds = time.perf_counter() - begin
        goal = self.request.goal
        is_late = best is not None and best.seconds > goal.deadline_seconds
        notes = list(made_by.sized(made_by.batch).costs.notes)
        if is_for_paging(name) and self.request.page_file is None:
            notes.append(f"{name} is made for paging and is compared without it: it was given nothing to page to")
        if best is not None and is_late:
            notes.append(
                f"{name}: the fastest plan within {budget_bytes} bytes takes {best.seconds:.3g} s and is too late"
            )
        comparison = Comparison(
            planner=name,
            budget_bytes=budget_bytes,
            budget_share=budget_bytes / self.total_bytes(self.everything),
            feasible=best is not None and not is_late,
            planning_seconds=planning_seconds,
            notes=tuple(notes),
        )
        if best is None or is_late:
            return _Made(comparison, made_by, None)
        return _Made(self._with_figures(comparison, best), made_by, best)

    def _fastest(self, candidates: Candidates, budget_bytes: int) -> Candidate | None:
        micro_batch, share = self.request.micro_batch, self._optimizers_share
        limit_bytes = budget_bytes - share.state_bytes
        if limit_bytes <= 0:
            return None
        candidate = candidates.fastest(limit_bytes, micro_batch)
        if candidate is not None and (excess_bytes := share.total_with(candidate) - budget_bytes) > 0:
            # The optimizer's temporaries do not fit into this arena: leave them room.
            limit_bytes -= excess_bytes
            candidate = candidates.fastest(limit_bytes, micro_batch)
        if candidates.planner == "auto" and candidates.planning_seconds:
            start = candidate or candidates.smallest(micro_batch)
            candidate = candidates.improved(start, limit_bytes, micro_batch)
        return candidate if candidate is not None and share.total_with(candidate) <= budget_bytes else None

    def _with_figures(self, comparison: Comparison, candidate: Candidate) -> Comparison:
        simulations = [candidate.parts[size].simulation for size in candidate.sizes]
        everything = self.everything
        return replace(
            comparison,
            peak_bytes=self.total_bytes(candidate),
            step_seconds=candidate.seconds,
            slowdown=candidate.seconds / everything.seconds if everything.seconds else None,
            micro_batch=candidate.sizes[0] if len(candidate.sizes) > 1 else None,
            recomputed_ops=sum(len(simulation.recomputed_ops) for simulation in simulations),
            energy_joules=candidate.joules,
            paged_bytes=sum(simulation.written_bytes for simulation in simulations),
        )


def _execute(session: Session, made: _Made, steps: int) -> Comparison:
    """Run steps of a plan, and put what they took into its comparison."""
    request, candidates, candidate = session.request, made.candidates, made.candidate
    assert candidate is not None
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
        made.comparison,
        measured_step_seconds=median(seconds[_WARM_UP_STEPS:]),
        measured_peak_bytes=None if peak_bytes is None or level_bytes is None else peak_bytes - level_bytes,
    )


def _run(session: Session, prepared: Prepared) -> torch.Tensor:
    request = session.request
    parameters = named_parameters(request.model, request.loss_fn)
    buffers = named_buffers(request.model, request.loss_fn)
    return prepared.run(session.args, session.kwargs, parameters, buffers, gradients_exist=False)[0]
