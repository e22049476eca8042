"""From a batch to a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_odt.errors import LossError


def make_compute(loss_fn: Callable[..., Any] | None) -> Callable[..., tuple[torch.Tensor, Any]]:
    """How a batch becomes a loss: `(model, args, kwargs) -> (loss, outputs)`."""

    def compute(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        if kwargs:
            outputs = model(*args, **kwargs)
            loss = _own_loss(outputs) if loss_fn is None else loss_fn(outputs, kwargs)
        elif loss_fn is None:
            outputs = model(*args)
            loss = _own_loss(outputs)
        else:
            *inputs, target = args
            outputs = model(*inputs)
            loss = loss_fn(outputs, target)
        return check_loss(loss), outputs

    return compute


def check_loss(loss: Any) -> torch.Tensor:
    """The loss, if it is one.

    Raises:
        LossError: it is no tensor, no scalar, or no function of the parameters.
    """
    if not isinstance(loss, torch.Tensor):
        raise LossError(f"the loss is a {type(loss).__name__}; it must be a tensor with one element")
    if loss.numel() != 1:
        raise LossError(f"the loss has shape {tuple(loss.shape)}; reduce it to one number, for example by .mean()")
    if not loss.requires_grad:
        raise LossError("the loss does not depend on any trainable parameter")
    return loss.reshape(()) if loss.dim() else loss


def _own_loss(outputs: Any) -> Any:
    found = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if found is None:
        raise LossError("the model's outputs hold no loss: give a loss_fn, or pass labels as the model expects them")
    return found
