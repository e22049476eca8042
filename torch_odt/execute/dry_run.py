"""Plan and profile a step without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from torch_odt import memory
from torch_odt.cache import Cache, CacheOption
from torch_odt.capture.cost_table import CostTable, table_of
from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.machine import settings_name
from torch_odt.capture.profile import Progress
from torch_odt.capture.rewrite import switched_off
from torch_odt.execute.loss import make_compute
from torch_odt.execute.optimizer_cost import optimizer_cost
from torch_odt.execute.prepare import capture_whole, make_plan, profile_graph
from torch_odt.execute.request import StepRequest
from torch_odt.execute.step import check_trainable
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
    micro_batch: int | None = None,
    costs: CostTable | None = None,
    cache: CacheOption = None,
) -> Plan:
    """Plan a training step without running it, and find the smallest feasible budget.

    Choose it to learn before training what a budget costs in time, or what a model needs at least.

    Args:
        model, loss_fn, budget, planner, disable_rewrites, micro_batch, cache: as for `TrainStep`.
        batch: what a step would be called with: a tuple of inputs and the target, or a dict of keyword arguments.
        optimizer: its state and temporaries are counted; without one nothing is reserved for it.
        costs: measurements of another machine; by default this machine is measured.

    Raises:
        InfeasibleBudget: no plan fits; it names the smallest budget that does.
        CaptureError: the step cannot be captured, so it cannot be planned without running it.

    Example:
        >>> import torch, torch_odt as odt
        >>> model = torch.nn.Linear(4, 2)
        >>> batch = (torch.ones(3, 4), torch.tensor([0, 1, 1]))
        >>> odt.plan(model, torch.nn.functional.cross_entropy, batch, budget="8GiB", cache=False).planner
        'keep-all'
    """
    request = _request(model, loss_fn, budget, optimizer, planner, disable_rewrites, micro_batch, costs, cache)
    args, kwargs = ((), batch) if isinstance(batch, dict) else (tuple(batch), {})
    try:
        return make_plan(request, args, kwargs)
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
    disable_rewrites: Iterable[str] = (),
    cache: CacheOption = None,
    progress: Progress | None = None,
) -> tuple[TrainingGraph, Costs]:
    """The graph of a training step, and what each of its operators costs on this machine.

    Raises:
        CaptureError: the step cannot be captured.
    """
    request = _request(model, loss_fn, "auto", None, "auto", disable_rewrites, None, None, cache)
    args, kwargs = ((), batch) if isinstance(batch, dict) else (tuple(batch), {})
    graph = capture_whole(request, args, kwargs)
    try:
        return graph, profile_graph(request, graph, progress=progress)
    finally:
        request.release()


def _request(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    budget: int | str | Budget,
    optimizer: torch.optim.Optimizer | None,
    planner: str,
    disable_rewrites: Iterable[str],
    micro_batch: int | None,
    costs: CostTable | None,
    cache: CacheOption,
) -> StepRequest:
    check_trainable(model)
    get_planner(planner)
    disabled_rewrites = switched_off(disable_rewrites, planner)
    memory.install()
    return StepRequest(
        model=model,
        loss_fn=loss_fn,
        compute=make_compute(loss_fn),
        budget=Budget.of_value(budget),
        level_bytes=memory.process_bytes(),
        optimizer_cost=None if optimizer is None else optimizer_cost(optimizer),
        planner=planner,
        disabled_rewrites=disabled_rewrites,
        micro_batch=micro_batch,
        accumulates=False,
        cache=Cache.of_value(cache),
        costs=costs,
    )
