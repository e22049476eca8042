"""What a step is made of, looked at before anything is done with it."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsFloat

import torch
from torch import nn

from torch_odt.errors import NonFiniteLossWarning, OdtWarning
from torch_odt.execute.compiled import refuse_compiled
from torch_odt.execute.named_tensors import named_parameters
from torch_odt.execute.optimizer_updates import IN_STEP, require_own_parameters

_MOST_NAMES = 3
NonFinite = Literal["warn", "raise", "ignore"]


def check_trainable(model: nn.Module) -> None:
    """Raises ValueError when there is nothing to train, or not on the CPU; TypeError when torch.compile was here."""
    if isinstance(model, type):
        raise TypeError(f"the model is the class {model.__name__}: give an object of it, {model.__name__}(...)")
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
    if isinstance(loss_fn, type):
        raise TypeError(f"the loss_fn is the class {loss_fn.__name__}: give an object of it, {loss_fn.__name__}()")
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, torch.optim.Optimizer)):
        raise TypeError(f"the loss_fn is a {type(loss_fn).__name__}; TrainStep takes model, loss_fn, optimizer")
    parameters = named_parameters(model, loss_fn)
    require_own_parameters(optimizer, parameters.values())
    _refuse_integers(optimizer, parameters)


def _refuse_integers(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """What torch calls floats of 8 bits are integers to NITI's layers, which its own optimizer changes."""
    kind, held = type(optimizer), _held_by(optimizer)
    integers = [name for name, p in parameters.items() if p.requires_grad and p.element_size() == 1 and id(p) in held]
    if integers and kind.__module__.startswith("torch.optim"):
        raise ValueError(
            f"{integers[0]} holds integers of 8 bits, which {kind.__name__} cannot change: use NitiSGD(model)"
        )


def require_updatable(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ValueError where an optimizer would fail at a parameter in the midst of its step."""
    held, in_own_way = _held_by(optimizer), vars(optimizer).get(IN_STEP, {})
    for name, parameter in parameters.items():
        is_changed = parameter.requires_grad and id(parameter) in held and id(parameter) not in in_own_way
        if is_changed and parameter.nbytes > parameter.untyped_storage().nbytes():
            raise ValueError(
                f"the elements of {name} share memory, so that an optimizer cannot change them: where it is the weight "
                "of an int8 layer, call odt.quant.train_int8_(model, optimizer) first"
            )


def _held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def left_out(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    before: Collection[str] | None = None,
    *,
    stacklevel: int,
) -> list[str]:
    """The names of parameters that require gradients and are not the optimizer's.

    A warning tells of them where the optimizer was made too early: it holds some that the model does not have, or more
    are left out than were `before`, as when an adaptation is merged.
    """
    held = _held_by(optimizer)
    missing = [name for name, parameter in parameters.items() if parameter.requires_grad and id(parameter) not in held]
    strangers = held.difference(map(id, parameters.values()))
    new = [] if before is None else [name for name in missing if name not in before]
    if missing and (strangers or new):
        which = f"holds {len(strangers)} parameters that the model does not have, and " if strangers else ""
        warnings.warn(
            f"the optimizer {which}lacks {len(missing)} that require gradients ({_shortened(missing)}), which are not "
            "updated: make it anew from what trains now, model.parameters() or an adaptation's parameters()",
            OdtWarning,
            stacklevel,
        )
    return missing


def note_of_left_out(missing: Sequence[str]) -> str:
    """For a plan, of those that `left_out` has found."""
    return (
        f"{len(missing)} parameters that require gradients are not the optimizer's, which does not update them: "
        f"{_shortened(missing)}"
    )


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


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


def check_choices(
    accumulation_steps: int,
    micro_batch: int | None,
    planning_seconds: float,
    nonfinite: str,
    clip_grad_norm: float | None = None,
) -> None:
    """Raises ValueError where one is out of its range, TypeError where what is to be a number is none."""
    if clip_grad_norm is not None and not isinstance(clip_grad_norm, SupportsFloat):
        raise TypeError(f"clip_grad_norm={clip_grad_norm!r}: it is a number")
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
    if not math.isfinite(loss.item()):
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
    elif nonfinite == "warn" and not math.isfinite(loss.item()):
        warnings.warn(nonfinite_text(loss), NonFiniteLossWarning, stacklevel=4)
