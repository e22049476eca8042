"""The tensors of a step by the names that its graph uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from torch_odt.capture.loss_modules import loss_module

T = TypeVar("T")


def named_parameters(model: nn.Module, loss_fn: Any) -> dict[str, nn.Parameter]:
    """All parameters under the names that the graph uses, tied ones under each of theirs."""
    return _named(nn.Module.named_parameters, model, loss_fn)


def named_buffers(model: nn.Module, loss_fn: Any) -> dict[str, torch.Tensor]:
    """All buffers under the names that the graph uses."""
    return _named(nn.Module.named_buffers, model, loss_fn)


def _named(tensors_of: Callable[..., Iterable[tuple[str, T]]], model: nn.Module, loss_fn: Any) -> dict[str, T]:
    found = dict(tensors_of(model, remove_duplicate=False))
    own = loss_module(model, loss_fn)
    if own is not None:
        found |= {f"loss_fn:{name}": tensor for name, tensor in tensors_of(own, remove_duplicate=False)}
    return found
