"""What an optimizer will hold: its state, and the temporaries of a step.

Nothing is known of the optimizer but that it is a `torch.optim.Optimizer`: it is run on a few small parameters, and
what it allocated is scaled to the real ones.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from torch_odt import memory

_SAMPLE_ELEMENTS = 4096


@dataclass(frozen=True)
class OptimizerCost:
    """Attributes:
    state_bytes: the optimizer's whole state after its first step.
    missing_state_bytes: the part of it that does not exist yet.
    workspace_bytes: the most that a step holds besides state, gradients and parameters.
    keeps_state_in_place: a step changes the state's tensors and makes no new ones, so that all it allocates is
        temporary.
    """

    state_bytes: int
    missing_state_bytes: int
    workspace_bytes: int
    keeps_state_in_place: bool


def optimizer_cost(optimizer: torch.optim.Optimizer) -> OptimizerCost:
    """Predict what `optimizer` will allocate, by running copies of it on small parameters.

    Raises:
        ValueError: its `step` needs a closure (LBFGS): it evaluates the model several times in a step.
    """
    state = workspace = 0
    in_place = not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    for group in optimizer.param_groups:
        trainable = [p for p in group["params"] if p.requires_grad]
        if not trainable:
            continue
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        per_parameter = {}
        for parameter in trainable:
            key = (parameter.dim(), parameter.dtype)
            if key not in per_parameter:
                per_parameter[key] = _sample(optimizer, options, parameter, 1)
            state += int(per_parameter[key].state * _nbytes(parameter))
            in_place = in_place and per_parameter[key].in_place
        largest = max(trainable, key=_nbytes)
        one = per_parameter[(largest.dim(), largest.dtype)].workspace
        four = _sample(optimizer, options, largest, 4).workspace
        # Optimizers that work on all parameters at once hold temporaries for all of them.
        total = sum(_nbytes(p) for p in trainable) if four > 2 * one else _nbytes(largest)
        ratio = four / 4 if four > 2 * one else one
        workspace = max(workspace, int(ratio * total))
    existing = sum(_nbytes(t) for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    return OptimizerCost(state, max(0, state - existing), workspace, in_place)


@dataclass(frozen=True)
class _Sample:
    """State and workspace bytes as multiples of one parameter's bytes."""

    state: float
    workspace: float
    in_place: bool


def _sample(optimizer: torch.optim.Optimizer, options: dict[str, object], like: nn.Parameter, count: int) -> _Sample:
    """What a step of the optimizer takes for `count` small parameters."""
    shape = list(like.shape)
    while torch.Size(shape).numel() > _SAMPLE_ELEMENTS:
        widest = max(range(len(shape)), key=lambda d: shape[d])
        shape[widest] = (shape[widest] + 1) // 2
    parameters = [nn.Parameter(torch.zeros(shape, dtype=like.dtype)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    clone = copy.copy(optimizer)
    clone.__dict__ = dict(optimizer.__dict__)
    clone.state = defaultdict(dict)
    clone.param_groups = [{**copy.deepcopy(options), "params": parameters}]
    clone._optimizer_step_pre_hooks = OrderedDict()
    clone._optimizer_step_post_hooks = OrderedDict()
    step = type(optimizer).step
    unit = max(1, _nbytes(parameters[0]))
    try:
        step(clone)
        before = _state_addresses(clone)
        peak = _allocated_during(lambda: step(clone))
    except TypeError as error:
        if "closure" in str(error):
            raise ValueError(
                f"{type(optimizer).__name__} needs a closure that evaluates the model several times in a step; "
                "use an optimizer whose step() takes none"
            ) from error
        raise
    state = sum(_nbytes(t) for s in clone.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    scalars = sum(
        _nbytes(t) for s in clone.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim() == 0
    )
    return _Sample((state - scalars) / count / unit, peak / unit, before == _state_addresses(clone))


def _state_addresses(optimizer: torch.optim.Optimizer) -> list[int]:
    return [t.data_ptr() for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]


def _allocated_during(function: Callable[[], object]) -> int:
    """Bytes that a call holds at most, beyond what was there; an estimate of two tensors where nothing counts them."""
    if not memory.is_tracking():
        function()
        return 2 * _SAMPLE_ELEMENTS * 4
    before = memory.stats().allocated_bytes or 0
    memory.reset_peak()
    function()
    return max(0, (memory.stats().peak_bytes or 0) - before)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
