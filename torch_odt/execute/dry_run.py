"""Plan and profile a step without running it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_odt import memory
from torch_odt.cache import Cache, CacheOption
from torch_odt.capture.cost_table import CostTable, table_of
from torch_odt.capture.costs import Costs
from torch_odt.capture.device import Device
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.machine import settings_name
from torch_odt.capture.power import Power, measure_power
from torch_odt.capture.profile import Progress
from torch_odt.capture.rewrite import switched_off
from torch_odt.execute.loss import make_compute
from torch_odt.execute.named_tensors import StepTensors
from torch_odt.execute.optimizer_cost import optimizer_cost
from torch_odt.execute.optimizer_updates import updates_of, why_all_gradients
from torch_odt.execute.page_file import OpenPageFile, PageFile, open_page_file, page_file_on
from torch_odt.execute.prepare import make_plan
from torch_odt.execute.request import StepRequest
from torch_odt.execute.session import capture_whole, profile_graph
from torch_odt.execute.step_checks import check_trainable, require_accumulation_steps, require_planning_seconds
from torch_odt.planning.objective import FASTEST, Goal, Objective
from torch_odt.planning.plan import Plan
from torch_odt.planning.registry import get_planner
from torch_odt.runtime.budget import Budget

Batch = tuple[Any, ...] | dict[str, Any]


def plan(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    batch: Batch,
    *,
    budget: int | str | Budget,
    optimizer: torch.optim.Optimizer | None = None,
    planner: str = "auto",
    disable_rewrites: Iterable[str] = (),
    page_to: str | Path | PageFile | None = None,
    micro_batch: int | None = None,
    device: str | Path | Device = "this",
    objective: Objective = "seconds",
    deadline_seconds: float = math.inf,
    planning_seconds: float = 0.0,
    accumulation_steps: int = 1,
    clip_grad_norm: float | None = None,
    with_outputs: bool = False,
    costs: CostTable | None = None,
    cache: CacheOption = None,
) -> Plan:
    """Plan a training step without running it, and find the smallest feasible budget.

    Choose it to learn before training what a budget costs in time, or what a model needs at least; or to plan for
    another process or machine: `TrainStep(plan=...)` follows the plan, or the file that `Plan.save` makes of it.

    Args:
        model, loss_fn, budget, planner, disable_rewrites, page_to, micro_batch, cache: as for `TrainStep`.
        batch: what a step would be called with: a tuple of inputs and the target, or a dict of keyword arguments.
        optimizer: its state and temporaries are counted; without one nothing is reserved for it.
        device: what the plan is for: "this" machine, which is measured, "cortex-a72" or another one that comes along,
            or a TOML file that describes one (see `torch_odt.capture.device`), of which nothing is measured. Its
            storage takes the place of the folder `page_to`. Say the budget of="training" then: what this process holds
            is nothing to the device.
        objective: what a step is to spend least of, "seconds" or "joules". What this machine draws is read from its
            power sensor; where there is none, or it shows nonsense, a model takes its place, and the plan says so.
        deadline_seconds: what a step may take at most.
        planning_seconds: how long to look for a better plan than the one that is found at once; a named planner that
            stops when it is told to takes so long at most for all that it tries, instead of its own limit.
        accumulation_steps, clip_grad_norm: what the step will be made with, as for `TrainStep`: both make the optimizer
            wait for all gradients, and gradients of several calls lie beside the step.
        with_outputs: plan for `step.with_outputs(...)`, which keeps the model's outputs; plain calls may follow such a
            plan, too.
        costs: measurements of another machine; by default this machine is measured. With `device`, the allocations of
            these measurements count, which are guessed otherwise.

    Raises:
        InfeasibleBudget: no plan fits; it names the smallest budget that does.
        CaptureError: the step cannot be captured, so it cannot be planned without running it.
        PlanError: the fastest plan takes longer than `deadline_seconds`; there is no such planner or objective, or the
            planner's solver is not installed, or it does not stop.
        ValueError: there is no such device, or its file describes none, or it has no storage to page to.
        OSError: the device's file cannot be read.

    Example:
        >>> import torch, torch_odt as odt
        >>> model = torch.nn.Linear(4, 2)
        >>> batch = (torch.ones(3, 4), torch.tensor([0, 1, 1]))
        >>> odt.plan(model, torch.nn.functional.cross_entropy, batch, budget="8GiB", cache=False).peak_bytes < 8 * 2**30
        True
    """
    request = request_for(
        model,
        loss_fn,
        budget=budget,
        optimizer=optimizer,
        planner=planner,
        disable_rewrites=disable_rewrites,
        page_to=page_to,
        micro_batch=micro_batch,
        device=Device.of_value(device),
        goal=Goal(objective, deadline_seconds),
        planning_seconds=planning_seconds,
        accumulation_steps=accumulation_steps,
        clip_grad_norm=clip_grad_norm,
        costs=costs,
        cache=cache,
    )
    args, kwargs = ((), batch) if isinstance(batch, dict) else (tuple(batch), {})
    try:
        return make_plan(request, args, kwargs, want_results=with_outputs)
    finally:
        request.release()


def profile(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    batch: Batch,
    *,
    disable_rewrites: Iterable[str] = (),
    cache: CacheOption = None,
) -> CostTable:
    """Measure every operator of a training step on this machine, one at a time.

    Args:
        model, loss_fn, batch, disable_rewrites, cache: as for `plan`, which needs costs of the operators that it plans.

    Returns:
        The measurements by operator signature; `torch_odt.capture.profile.costs_to_json` writes them to a file.

    Raises:
        CaptureError: the step cannot be captured.
    """
    return table_of(
        *measured(model, loss_fn, batch, disable_rewrites=disable_rewrites, cache=cache), settings=settings_name()
    )


def measured(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    batch: Batch,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    disable_rewrites: Iterable[str] = (),
    cache: CacheOption = None,
    progress: Progress | None = None,
) -> tuple[TrainingGraph, Costs]:
    """The graph of a training step, and what each of its operators costs on this machine.

    With an optimizer, the graph has those of its updates that are made in the backward pass.

    Raises:
        CaptureError: the step cannot be captured.
    """
    request = request_for(
        model, loss_fn, budget="auto", optimizer=optimizer, disable_rewrites=disable_rewrites, cache=cache
    )
    args, kwargs = ((), batch) if isinstance(batch, dict) else (tuple(batch), {})
    graph = capture_whole(request, args, kwargs)
    try:
        return graph, profile_graph(request, graph, progress=progress)
    finally:
        request.release()


def request_for(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    *,
    budget: int | str | Budget,
    optimizer: torch.optim.Optimizer | None = None,
    planner: str = "auto",
    disable_rewrites: Iterable[str] = (),
    page_to: str | Path | PageFile | None = None,
    micro_batch: int | None = None,
    device: Device | None = None,
    goal: Goal = FASTEST,
    planning_seconds: float = 0.0,
    accumulation_steps: int = 1,
    clip_grad_norm: float | None = None,
    costs: CostTable | None = None,
    cache: CacheOption = None,
) -> StepRequest:
    """What a step that is not run is to be prepared for. For the arguments see `plan`; a device of None is this one."""
    check_trainable(model)
    require_planning_seconds(planning_seconds)
    require_accumulation_steps(accumulation_steps)
    get_planner(planner)
    disabled_rewrites = switched_off(disable_rewrites, planner)
    needs_all = why_all_gradients(accumulation_steps, clip_grad_norm)
    power = measure_power() if goal.objective == "joules" and device is None else None
    page_file = _page_file(PageFile.of_value(page_to), device, power)
    memory.install()
    return StepRequest(
        model=model,
        loss_fn=loss_fn,
        compute=make_compute(loss_fn),
        budget=Budget.of_value(budget),
        level_bytes=memory.process_bytes(),
        optimizer_cost=None if optimizer is None else optimizer_cost(optimizer),
        updates=None
        if optimizer is None
        else updates_of(optimizer, StepTensors(model, loss_fn), disabled_rewrites, needs_all),
        planner=planner,
        disabled_rewrites=disabled_rewrites,
        micro_batch=micro_batch,
        accumulates=accumulation_steps > 1,
        cache=Cache.of_value(cache),
        costs=costs,
        page_file=page_file,
        device=device,
        power=power,
        goal=goal,
        planning_seconds=planning_seconds,
    )


def _page_file(page_file: PageFile | None, device: Device | None, power: Power | None) -> OpenPageFile | None:
    """What is planned to be paged to."""
    if page_file is None:
        return None
    if device is not None:
        return page_file_on(page_file, device)
    opened = open_page_file(page_file)
    return opened if power is None else replace(opened, costs=replace(opened.costs, waiting_watts=power.idle_watts))
