"""What the tensors of a training step take, by the simulator, without measuring or running anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.update_in_backward import UPDATE
from torch_odt.execute.dry_run import Batch, request_for
from torch_odt.execute.session import capture_whole
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.simulate import simulate


def step_graph(
    model: nn.Module, loss_fn: Callable[..., Any] | None, batch: Batch, *, optimizer: torch.optim.Optimizer
) -> TrainingGraph:
    """The graph that `TrainStep` would execute over a whole batch, with the optimizer's updates.

    Raises:
        CaptureError: the step cannot be captured.
    """
    request = request_for(model, loss_fn, budget="auto", optimizer=optimizer, cache=False)
    args, kwargs = ((), batch) if isinstance(batch, dict) else (tuple(batch), {})
    try:
        return capture_whole(request, args, kwargs)
    finally:
        request.release()


def step_bytes(
    model: nn.Module, loss_fn: Callable[..., Any] | None, batch: Batch, *, optimizer: torch.optim.Optimizer
) -> int:
    """What the tensors of a step take at most, weights apart: activations, gradients and the optimizer's state.

    It is the simulator's count of the schedule that computes nothing twice; what operators allocate inside of a call is
    not in it. A plan (`odt.plan`) says more and takes longer: it measures every operator.

    Args:
        model, loss_fn, batch: as for `odt.plan`.
        optimizer: SGD, Adam or AdamW, which update each parameter in the backward pass; of another one the gradients
            are counted and not the state.

    Raises:
        CaptureError: the step cannot be captured.

    Example:
        >>> model = nn.Linear(1000, 10)
        >>> batch = (torch.ones(1, 1000), torch.tensor([3]))
        >>> plain, momentum = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=m) for m in (0.0, 0.9))
        >>> loss_fn = nn.functional.cross_entropy
        >>> step_bytes(model, loss_fn, batch, optimizer=momentum) - step_bytes(model, loss_fn, batch, optimizer=plain)
        40040
    """
    graph = step_graph(model, loss_fn, batch, optimizer=optimizer)
    # Every op is estimated from its shapes.
    costs = Costs({})
    state = {v for op in graph.program if op.target == UPDATE for v in op.reads if graph.values[v].kind == "state"}
    return simulate(graph, costs, keep_all(graph, costs)).peak_bytes + sum(graph.values[v].nbytes for v in state)
