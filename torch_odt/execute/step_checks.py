"""What a step is made of, looked at before anything is done with it."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from torch_odt.errors import NonFiniteLossWarning
from torch_odt.execute.compiled import refuse_compiled
from torch_odt.execute.named_tensors import named_parameters
from torch_odt.execute.optimizer_updates import require_own_parameters

NonFinite = Literal["warn", "raise", "ignore"]


def check_trainable(model: nn.Module) -> None:
    """Raises ValueError when there is nothing to train, or not on the CPU; TypeError when torch.compile was here."""
    refuse_compiled(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("the model has no trainable parameter: set requires_grad on those that are to learn")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name} is on {tensor.device}; torch_odt trains on the CPU in this version: use model.cpu()"
            )


def check_roles(model: nn.Module, loss_fn: Any, optimizer: Any) -> None:
    """Raises TypeError or ValueError when the parts of a step are mixed up, or do not belong together."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"the optimizer is a {type(optimizer).__name__}; TrainStep takes model, loss_fn, optimizer")
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, torch.optim.Optimizer)):
        raise TypeError(f"the loss_fn is a {type(loss_fn).__name__}; TrainStep takes model, loss_fn, optimizer")
    require_own_parameters(optimizer, named_parameters(model, loss_fn).values())


def check_batch(model: nn.Module, loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises TypeError when a batch is not laid out as a step takes it."""
    if not args and not kwargs:
        raise TypeError("a step takes a batch: step(x, y), or step(**batch) for batches by keyword")
    if kwargs or loss_fn is None or len(args) > 1:
        return
    if isinstance(args[0], dict):
        raise TypeError("a batch in a dict is handed over by keyword: step(**batch)")
    if isinstance(args[0], (tuple, list)):
        raise TypeError("inputs and target are handed over one by one: step(*batch)")
    required = [p for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty]
    if any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in required):
        raise TypeError("there is no target: a step takes the model's inputs and then the target, step(x, y)")


def require_accumulation_steps(steps: int) -> None:
    """Raises ValueError where that is no number of calls."""
    if steps < 1:
        raise ValueError(f"accumulation_steps must be at least 1, not {steps}")


def check_choices(accumulation_steps: int, micro_batch: int | None, planning_seconds: float, nonfinite: str) -> None:
    """Raises ValueError where one is out of its range."""
    require_accumulation_steps(accumulation_steps)
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"micro_batch must be at least 1, not {micro_batch}")
    require_planning_seconds(planning_seconds)
    if nonfinite not in ("warn", "raise", "ignore"):
        raise ValueError(f'nonfinite is "warn", "raise" or "ignore", not {nonfinite!r}')


def require_planning_seconds(seconds: float) -> None:
    """Raises ValueError where that is no length of time."""
    if not 0 <= seconds < math.inf:
        raise ValueError(f"planning_seconds must be a number that is not below 0, not {seconds!r}")


def nonfinite_text(loss: torch.Tensor) -> str:
    """What to say of a loss that is NaN or infinite."""
    return f"the loss is {loss.item()}; a lower learning rate or clip_grad_norm may help"


def refuse_nonfinite(loss: torch.Tensor) -> None:
    """Raises FloatingPointError when a loss is NaN or infinite."""
    if not bool(torch.isfinite(loss)):
        raise FloatingPointError(nonfinite_text(loss))


def disabled_rewrites_of(planner: str, names: Iterable[str]) -> frozenset[str]:
    """What a plan is to be made without; raises where there is no such planner or rewrite."""
    from torch_odt.capture.rewrite import switched_off
    from torch_odt.planning.registry import get_planner

    get_planner(planner)
    return switched_off(names, planner)


def check_finite(loss: torch.Tensor, nonfinite: NonFinite) -> None:
    """Refuse or tell of a loss that is no number, as was asked for; called by a method of a step's `__call__`."""
    if nonfinite == "raise":
        refuse_nonfinite(loss)
    elif nonfinite == "warn" and not bool(torch.isfinite(loss)):
        warnings.warn(nonfinite_text(loss), NonFiniteLossWarning, stacklevel=4)
