"""The modules of a step, and its tensors by the names that its graph uses.

Each call of a step looks at all of them several times over, so they are found once, and again where modules hold other
objects than before; and what is asked of hundreds of tensors is asked in one call, where `torch_odt._memory` is built.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cached_property
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from torch_odt import _extensions
from torch_odt.capture.loss_modules import loss_module
from torch_odt.capture.module_walk import HOOKS, Walk, hook_identities

if TYPE_CHECKING:
    from torch_odt.execute.plain_modules import Values

T = TypeVar("T")
# The attributes of a module that are dicts.
_HOLDERS = ("_parameters", "_buffers", "_modules", *HOOKS)


class StepTensors:
    """The modules, parameters and buffers of a step as they are now.

    Args:
        model, loss_fn: of the step; a loss may have modules of its own.

    Attributes:
        walks: through the model and through the loss's own modules, if there are any.
    """

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self._model, self._loss_fn = model, loss_fn
        own = loss_module(model, loss_fn)
        self.walks = (Walk(model),) if own is None else (Walk(model), Walk(own))
        self._held: _Held | None = _Held(self.modules)

    @classmethod
    def current(cls, model: nn.Module, loss_fn: Any, before: StepTensors | None) -> StepTensors:
        """The tensors as they are now; those of an earlier call where nothing has changed since."""
        if before is None or before._model is not model or before._loss_fn is not loss_fn:
            return cls(model, loss_fn)
        return before if before._is_current() else cls(model, loss_fn)

    def _is_current(self) -> bool:
        """Whether another one would find the same: modules are of the same classes and hold the same objects by the
        same names. What such an object holds in turn, as a tensor its shape, may have changed.
        """
        # A function may reach other modules by now.
        is_module = isinstance(self._loss_fn, nn.Module)
        if not is_module and (len(self.walks) > 1 or loss_module(self._model, self._loss_fn) is not None):
            return False
        return self._held is not None and self._held.is_unchanged()

    def let_go(self) -> None:
        """Hold nothing of the modules that these may replace while they run; the next call looks anew."""
        self._held = None

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

    @cached_property
    def identities(self) -> Hashable:
        """The names of parameters, and the identities of parameters and buffers."""
        return tuple(self.parameters), tuple(map(id, self._all))

    @cached_property
    def structure(self) -> Hashable:
        """Modules, names of buffers and hooks, of each walk."""
        return tuple(_structure(walk) for walk in self.walks)

    @cached_property
    def plain_values(self) -> dict[int, Values]:
        """See `plain_values`."""
        # A start from a plan does without.
        from torch_odt.execute.plain_modules import plain_values

        return plain_values(self.modules)

    @cached_property
    def all_plain_values(self) -> Values:
        """The same as one."""
        from torch_odt.execute.plain_modules import Values

        return Values(tuple(self.plain_values.get(id(module)) for module in self.modules))

    @cached_property
    def telling_modules(self) -> list[nn.Module]:
        """One of each class, and all of those that hold more than plain values."""
        of_class = set(map(id, {type(module): module for module in reversed(self.modules)}.values()))
        return [module for module in self.modules if id(module) in of_class or id(module) not in self.plain_values]

    @cached_property
    def module_identities(self) -> frozenset[int]:
        return frozenset(map(id, self.modules))

    def forms(self) -> Hashable:
        """Those of the tensors of each walk, as they are now."""
        return tuple((forms_of(parameters), forms_of(buffers)) for parameters, buffers in self._of_walks)

    def places(self) -> Hashable:
        """The forms of all tensors with their addresses, as they are now."""
        return forms_of(self._all, addresses=True)

    @cached_property
    def _all(self) -> list[torch.Tensor]:
        return [*self.parameters.values(), *self.buffers.values()]

    @cached_property
    def _of_walks(self) -> list[tuple[list[nn.Parameter], list[torch.Tensor | None]]]:
        return [
            (walk.parameters(), [buffer for module in walk.modules() for buffer in module._buffers.values()])
            for walk in self.walks
        ]

    def _named(self, tensors_of: Callable[[Walk], dict[str, T]]) -> dict[str, T]:
        found = tensors_of(self.walks[0])
        for own in self.walks[1:]:
            found |= {f"loss_fn:{name}": tensor for name, tensor in tensors_of(own).items()}
        return found


class _Held:
    """What modules hold, by identity: their attributes, tensors, children and hooks."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._classes = list(map(type, modules))
        self._own = held = [vars(module) for module in modules]
        holders = [each[name] for each in held for name in _HOLDERS if name in each]
        # Those of scripted modules are something else, of which nothing is known.
        self._are_dicts = all(isinstance(each, dict) for each in holders)
        dicts: list[dict[str, Any]] = [*held, *holders] if self._are_dicts else held
        self._dicts = [each for each in dicts if each]
        self._empty = [each for each in dicts if not each]
        # Modules of a class have the same names, by identity: one tuple for all of them.
        of_names: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._names = [of_names.setdefault(tuple(map(id, each)), tuple(each)) for each in self._dicts]
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))

    def is_unchanged(self) -> bool:
        if not self._are_dicts:
            return False
        module = _extensions.memory_module
        if module is not None:
            return bool(
                module.are_of(self._modules, self._classes, self._own)
                and module.hold(self._dicts, self._names, self._values, self._empty)
            )
        if any(self._empty) or list(map(type, self._modules)) != self._classes:
            return False
        if not all(map(is_, map(vars, self._modules), self._own)):
            return False
        return (
            list(map(len, self._dicts)) == list(map(len, self._names))
            and all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._values))
            and all(map(is_, chain.from_iterable(self._dicts), chain.from_iterable(self._names)))
        )


def _structure(walk: Walk) -> Hashable:
    found = walk.modules()
    modules = tuple((type(m), m.training) for m in found)
    names = tuple(name for module in found for name in module._buffers)
    return modules, names, hook_identities(found)


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


def note_changed(tensors: list[torch.Tensor]) -> None:
    """As `torch.autograd.graph.increment_version`, of tensors that compiled code has changed."""
    module = _extensions.memory_module
    if module is not None:
        module.note_changed(tensors)
    else:
        torch.autograd.graph.increment_version(tensors)
