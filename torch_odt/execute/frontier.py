"""The frontier of a step: for each number of bytes the fastest plan, micro-batches included."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_odt.cache import CacheOption
from torch_odt.capture.cost_table import CostTable
from torch_odt.capture.device import Device
from torch_odt.errors import CaptureError, InfeasibleBudget, PlanError, ScheduleError
from torch_odt.execute.accounting import Allowance, allow
from torch_odt.execute.batches import count_samples
from torch_odt.execute.candidate import Candidate
from torch_odt.execute.candidates import Candidates
from torch_odt.execute.compare import WITHOUT_LIMIT
from torch_odt.execute.dry_run import Batch, request_for
from torch_odt.execute.page_file import PageFile
from torch_odt.execute.request import StepRequest
from torch_odt.execute.session import Session
from torch_odt.execute.summary import summarize
from torch_odt.planning.frontier import frontier as frontier_of_graph
from torch_odt.planning.frontier import non_dominated
from torch_odt.planning.objective import Goal, Objective
from torch_odt.planning.plan import Plan
from torch_odt.planning.registry import get_planner
from torch_odt.runtime.budget import format_bytes, parse_bytes

# What is left of a batch that micro-batches do not divide is planned for each of their plans.
_SHARE_OF_THE_REST = 0.3


@dataclass(frozen=True)
class Frontier:
    """The plans of a step that no other one beats in both bytes and seconds, or joules. `print` it for a table.

    Attributes:
        plans: in order of falling bytes and rising seconds (or joules). None of them was made for a budget.
        notes: which of the other planners that were asked for have no frontier, and why.
    """

    plans: tuple[Plan, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def within(self, nbytes: int | str) -> Plan:
        """The fastest plan that takes no more than so many bytes above the level before ("512MiB", or an int).

        Raises:
            InfeasibleBudget: every plan takes more.
            ValueError: it is no number of bytes.
        """
        limit_bytes = parse_bytes(nbytes)
        for plan in self.plans:
            if plan.peak_bytes <= limit_bytes:
                return plan
        raise InfeasibleBudget(f"{format_bytes(limit_bytes)} for training", self.plans[-1].peak_bytes)

    def __str__(self) -> str:
        knows_joules = any(plan.step_joules is not None for plan in self.plans)
        lines = [f"{'peak':>10}  {'of all':>6}  {'step':>9}  {'slowdown':>8}  {'micro-batch':>11}  {'recomputed':>10}"]
        lines[0] += f"  {'joules':>9}" if knows_joules else ""
        highest = self.plans[0]
        for plan in self.plans:
            slowdown = plan.step_seconds / highest.step_seconds if highest.step_seconds else 1.0
            lines.append(
                f"{format_bytes(plan.peak_bytes):>10}  {plan.peak_bytes / highest.peak_bytes:>6.0%}  "
                f"{plan.step_seconds:>7.3f} s  {slowdown:>8.2f}  {plan.micro_batch or 'whole':>11}  "
                f"{plan.recomputed_ops:>10}" + (f"  {plan.step_joules:>7.3g} J" if knows_joules else "")
            )
        return "\n".join((*lines, *(f"note: {note}" for note in self.notes)))


def frontier(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    batch: Batch,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    planner: str = "auto",
    rungs: int = 8,
    time_limit_seconds: float = 30.0,
    disable_rewrites: Iterable[str] = (),
    page_to: str | Path | PageFile | None = None,
    micro_batch: int | None = None,
    device: str | Path | Device = "this",
    objective: Objective = "seconds",
    deadline_seconds: float = math.inf,
    costs: CostTable | None = None,
    cache: CacheOption = None,
) -> Frontier:
    """Find the fastest plan for each budget, from everything kept down to the fewest bytes, without running a step.

    Choose it to learn which budget is worth its bytes; `plan` answers for one budget.

    Args:
        model, loss_fn, batch, optimizer, planner, disable_rewrites, page_to, device, objective: as for `plan`.
        costs, cache: as for `plan`.
        rungs: how many budgets are planned for at each micro-batch size, between the most and the fewest bytes.
        time_limit_seconds: for planning, shared by the micro-batch sizes; a planner that stops when it is told to is
            told. Capturing and measuring each size comes on top; after the limit no other one is looked at.
        micro_batch: samples to a micro-batch; None for every size from the whole batch down to one sample by halves.
        deadline_seconds: plans that take longer are left out.

    Raises:
        PlanError: every plan takes longer than `deadline_seconds`; there is no such planner or objective, or its solver
            is not installed.
        CaptureError: the step cannot be captured, or `micro_batch` is given and micro-batches would not add up to it.

    Example:
        >>> import torch, torch_odt as odt
        >>> model = torch.nn.Linear(4, 2)
        >>> batch = (torch.ones(3, 4), torch.tensor([0, 1, 1]))
        >>> found = odt.frontier(model, torch.nn.functional.cross_entropy, batch, cache=False)
        >>> found.within("1GiB") is found.plans[0]
        True
    """
    goal = Goal(objective, deadline_seconds)
    request = request_for(
        model,
        loss_fn,
        budget=WITHOUT_LIMIT,
        optimizer=optimizer,
        planner=planner,
        disable_rewrites=disable_rewrites,
        page_to=page_to,
        micro_batch=micro_batch,
        device=Device.of_value(device),
        goal=goal,
        costs=costs,
        cache=cache,
    )
    return _find(request, batch, (planner,), rungs, time_limit_seconds)[planner]


def frontiers(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    batch: Batch,
    *,
    planners: Sequence[str],
    optimizer: torch.optim.Optimizer | None = None,
    rungs: int = 8,
    time_limit_seconds: float = 30.0,
    disable_rewrites: Iterable[str] = (),
    page_to: str | Path | PageFile | None = None,
    micro_batch: int | None = None,
    device: str | Path | Device = "this",
    objective: Objective = "seconds",
    deadline_seconds: float = math.inf,
    costs: CostTable | None = None,
    cache: CacheOption = None,
    report: Callable[[str], None] = lambda planner: None,
) -> dict[str, Frontier]:
    """The frontier of each of several planners, on the same graphs and costs.

    Choose it to see what one planner is worth against others; `torch_odt.planning.page.document.page` draws it.

    Args:
        model, loss_fn, batch, optimizer, rungs, disable_rewrites, page_to, micro_batch: as for `frontier`.
        device, objective, deadline_seconds, costs, cache: as for `frontier`.
        planners: their names.
        time_limit_seconds: for each of them.
        report: called with the name of each planner that is done.

    Returns:
        The frontiers by name, in the order of the names. A planner that fails, or whose every plan takes longer than
        `deadline_seconds`, is left out, and the others' `notes` say so.

    Raises:
        PlanError: there is no planner of one of the names, or all of them had to be left out.
        CaptureError: as for `frontier`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> batch = (torch.ones(3, 4), torch.tensor([0, 1, 1]))
        >>> list(frontiers(model, torch.nn.functional.cross_entropy, batch, planners=("melon", "chen"), cache=False))
        ['melon', 'chen']
    """
    for name in planners:
        get_planner(name)
    goal = Goal(objective, deadline_seconds)
    request = request_for(
        model,
        loss_fn,
        budget=WITHOUT_LIMIT,
        optimizer=optimizer,
        planner="auto",
        disable_rewrites=disable_rewrites,
        page_to=page_to,
        micro_batch=micro_batch,
        device=Device.of_value(device),
        goal=goal,
        costs=costs,
        cache=cache,
    )
    return _find(request, batch, planners, rungs, time_limit_seconds, report)


def _find(
    request: StepRequest,
    batch: Batch,
    planners: Sequence[str],
    rungs: int,
    time_limit_seconds: float,
    report: Callable[[str], None] = lambda planner: None,
) -> dict[str, Frontier]:
    args, kwargs = ((), batch) if isinstance(batch, dict) else (tuple(batch), {})
    session = Session(request, args, kwargs, count_samples(args, kwargs), False)
    ways = session.makers()
    try:
        found: dict[str, list[tuple[Candidates, Candidate]]] = {}
        notes = []
        for name in planners:
            try:
                found[name] = _of_planner(name, ways, request, rungs, time_limit_seconds)
            except ScheduleError:
                raise
            except PlanError as reason:
                notes.append(f"no frontier of {name}: {reason}")
                if len(notes) == len(planners):
                    raise
            report(name)
        # After all of them, so that what planning leaves in the process counts alike for everybody.
        graph = ways[0].sized(session.samples).graph
        library_bytes = max(way.library_bytes for way in ways)
        allowance = allow(request.resolve_budget(), request.optimizer_cost, graph, library_bytes=library_bytes)
        return {name: _frontier(session, made, allowance, tuple(notes)) for name, made in found.items()}
    finally:
        request.release()


def _of_planner(
    name: str, ways: Sequence[Candidates], request: StepRequest, rungs: int, time_limit_seconds: float
) -> list[tuple[Candidates, Candidate]]:
    """What one planner makes, with and without paging.

    Raises:
        PlanError: it fails, or nothing that it makes is in time.
    """
    found = []
    for way in ways:
        own = replace(way, planner=name)
        made = _candidates(own, request.micro_batch, rungs, time_limit_seconds / len(ways))
        found += [(own, candidate) for candidate in made]
    if not found:
        raise PlanError(f"every plan takes longer than the deadline of {request.goal.deadline_seconds:.3g} s")
    return found


def _frontier(
    session: Session, found: list[tuple[Candidates, Candidate]], allowance: Allowance, notes: tuple[str, ...]
) -> Frontier:
    request = session.request
    plans = []
    for own, candidate in found:
        plan = summarize(request, candidate, own, allowance)
        plans.append(replace(plan, budget=None, program=session.program(candidate)))
    return Frontier(tuple(non_dominated(plans, lambda plan: (plan.peak_bytes, _cost(request.goal, plan)))), notes)


def _candidates(
    candidates: Candidates, micro_batch: int | None, rungs: int, time_limit_seconds: float
) -> list[Candidate]:
    """Those of every micro-batch size that are in time and that no other one beats."""
    splits = [*candidates.splits()]
    if micro_batch is not None:
        splits = [candidates.sizes_of(min(micro_batch, candidates.batch))]
    stop_at = time.perf_counter() + time_limit_seconds
    found: list[Candidate] = []
    for position, sizes in enumerate(splits):
        begin = time.perf_counter()
        if position > 0 and begin > stop_at:
            break
        try:
            for size in dict.fromkeys(sizes):
                candidates.sized(size)
        except CaptureError:
            if micro_batch is not None or position == 0:
                raise
            break
        # Capturing and measuring are not planning.
        now = time.perf_counter()
        stop_at += now - begin
        found += _of_one_split(candidates, sizes, rungs, now + (stop_at - now) / (len(splits) - position))
    goal = candidates.goal
    in_time = [candidate for candidate in found if candidate.seconds <= goal.deadline_seconds]
    return non_dominated(in_time, lambda each: (each.total_bytes, goal.cost(each.seconds, each.joules or 0.0)))


def _cost(goal: Goal, plan: Plan) -> float:
    return goal.cost(plan.step_seconds, plan.step_joules or 0.0)


def _of_one_split(candidates: Candidates, sizes: tuple[int, ...], rungs: int, stop_at: float) -> list[Candidate]:
    several = len(sizes) > 1
    sized = candidates.sized(sizes[0])
    others = set(sizes) - {sizes[0]}
    left_seconds = stop_at - time.perf_counter()
    points = frontier_of_graph(
        sized.graph,
        sized.costs,
        planners=(candidates.planner,),
        rungs=rungs,
        time_limit_seconds=(1 - _SHARE_OF_THE_REST) * left_seconds if others else left_seconds,
        footprint=candidates.footprint(sized, several),
        goal=candidates.goal.for_part(sizes[0] / candidates.batch),
    )
    found = []
    for position, point in enumerate(points):
        schedules = {sizes[0]: point.schedule}
        now = time.perf_counter()
        own = now + (stop_at - now) / (len(points) - position)
        for rest in others:
            schedules[rest] = candidates.schedule(candidates.sized(rest), point.peak_bytes, several, stop_at=own)
        found.append(candidates.assemble(sizes, schedules))
    return found
