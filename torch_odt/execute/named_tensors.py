"""The tensors of a step by the names that its graph uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from torch_odt.capture.loss_modules import loss_module
from torch_odt.capture.module_walk import named_buffers_of, named_parameters_of

T = TypeVar("T")


def named_parameters(model: nn.Module, loss_fn: Any) -> dict[str, nn.Parameter]:
    """All parameters under the names that the graph uses, tied ones under each of theirs."""
    return _named(named_parameters_of, model, loss_fn)


def named_buffers(model: nn.Module, loss_fn: Any) -> dict[str, torch.Tensor]:
    """All buffers under the names that the graph uses."""
    return _named(named_buffers_of, model, loss_fn)


def _named(tensors_of: Callable[[nn.Module], dict[str, T]], model: nn.Module, loss_fn: Any) -> dict[str, T]:
    found = tensors_of(model)
    own = loss_module(model, loss_fn)
    if own is not None:
        found |= {f"loss_fn:{name}": tensor for name, tensor in tensors_of(own).items()}
    return found
