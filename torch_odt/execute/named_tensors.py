"""The modules of a step, and its tensors by the names that its graph uses.

Each call of a step looks at all of them several times over, so they are found once; and what is asked of hundreds of
tensors is asked in one call, where `torch_odt._memory` is built.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from torch_odt import _extensions
from torch_odt.capture.loss_modules import loss_module
from torch_odt.capture.module_walk import Walk

T = TypeVar("T")


class StepTensors:
    """The modules, parameters and buffers of a step as they are now.

    Args:
        model, loss_fn: of the step; a loss may have modules of its own.

    Attributes:
        walks: through the model and through the loss's own modules, if there are any.
    """

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        own = loss_module(model, loss_fn)
        self.walks = (Walk(model),) if own is None else (Walk(model), Walk(own))

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters under the names that the graph uses, tied ones under each of theirs."""
        return self._named(Walk.named_parameters)

    @cached_property
    def buffers(self) -> dict[str, torch.Tensor]:
        """All buffers under the names that the graph uses."""
        return self._named(Walk.named_buffers)

    @cached_property
    def modules(self) -> list[nn.Module]:
        """All modules; those of the loss come last."""
        return [module for walk in self.walks for module in walk.modules()]

    def _named(self, tensors_of: Callable[[Walk], dict[str, T]]) -> dict[str, T]:
        found = tensors_of(self.walks[0])
        for own in self.walks[1:]:
            found |= {f"loss_fn:{name}": tensor for name, tensor in tensors_of(own).items()}
        return found


def named_parameters(model: nn.Module, loss_fn: Any) -> dict[str, nn.Parameter]:
    """See `StepTensors.parameters`."""
    return StepTensors(model, loss_fn).parameters


def named_buffers(model: nn.Module, loss_fn: Any) -> dict[str, torch.Tensor]:
    """See `StepTensors.buffers`."""
    return StepTensors(model, loss_fn).buffers


def forms_of(tensors: Iterable[torch.Tensor | None], *, addresses: bool = False) -> Hashable:
    """Whether tensors require gradients, their dtypes, shapes and strides: equal where tensors are alike.

    Args:
        addresses: also where they lie, and how large their storages are.
    """
    module = _extensions.memory_module
    if module is not None:
        return bytes(module.forms(list(tensors), addresses))
    return tuple(None if tensor is None else _form_of(tensor, addresses) for tensor in tensors)


def _form_of(tensor: torch.Tensor, addresses: bool) -> Hashable:
    form = (tensor.requires_grad, tensor.dtype, tensor.shape, tensor.stride())
    if not addresses:
        return form
    storage = tensor.untyped_storage()
    return (*form, storage.data_ptr(), storage.nbytes())


def detached(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As `tensor.detach()`, of each."""
    module = _extensions.memory_module
    if module is not None:
        return dict(zip(tensors, module.detached(list(tensors.values())), strict=True))
    return {name: tensor.detach() for name, tensor in tensors.items()}
