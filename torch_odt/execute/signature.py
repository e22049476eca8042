"""What a captured step depends on besides the numbers in its tensors.

A capture is right as long as its signature is: shapes, strides and dtypes of the batch, which modules train, which
parameters want gradients, autocast, hooks, and the plain Python values that models and losses compute with. Torch's
settings (threads, oneDNN, ...) belong to it because kernels are chosen by them, and allocations with the kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import types
from collections.abc import Hashable, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from torch_odt.capture.describe import has_contents
from torch_odt.capture.describe_step import MODULE_STRUCTURE
from torch_odt.capture.effects import hook_identities, tensor_identity
from torch_odt.capture.loss_modules import loss_module
from torch_odt.capture.machine import settings_name

_PLAIN = (bool, int, float, str, bytes, type(None))
_DEEPEST = 4
_LONGEST = 256


def step_signature(model: nn.Module, loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """A value that differs whenever the step must be captured anew.

    Raises:
        TypeError: a tensor of the batch lies on another device or requires gradients.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    reader = _Reader()
    return (
        tuple(_leaf_signature(leaf) for leaf in leaves),
        str(spec),
        reader.modules(model),
        reader.parameters(model),
        hook_identities(model),
        reader.loss(model, loss_fn),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        settings_name(),
        torch.get_default_dtype(),
    )


def _users_forward(module: nn.Module) -> types.FunctionType | None:
    """The code of a module that is none of torch's own."""
    forward = type(module).forward
    is_torchs = type(module).__module__.startswith("torch.")
    return forward if isinstance(forward, types.FunctionType) and not is_torchs else None


def _is_settings(value: object, function: types.FunctionType) -> bool:
    """Whether a global object holds plain values that a function may compute with: parsed arguments, a config."""
    if isinstance(value, (type, nn.Module, torch.Tensor, types.FunctionType)):
        return False
    is_namespace = isinstance(value, (argparse.Namespace, types.SimpleNamespace)) or dataclasses.is_dataclass(value)
    return is_namespace or type(value).__module__ == function.__module__


def _leaf_signature(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        if leaf.device.type != "cpu":
            raise TypeError(f"the batch holds a tensor on {leaf.device}; torch_odt trains on the CPU in this version")
        if leaf.requires_grad:
            raise TypeError(
                "the batch holds a tensor that requires gradients; detach it, or compute it inside the model"
            )
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype)
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else repr(leaf)


class _Reader:
    """Turns Python values into hashable ones; each object is looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, Hashable] = {}

    def modules(self, root: nn.Module) -> Hashable:
        found = list(root.modules())
        code = tuple(self.value(forward, 0) for forward in dict.fromkeys(map(_users_forward, found)))
        return tuple((type(m), self._items(vars(m), MODULE_STRUCTURE, 0)) for m in found), code

    def parameters(self, root: nn.Module) -> Hashable:
        return tuple((p.requires_grad, p.dtype, p.shape, p.stride()) for p in root.parameters())

    def loss(self, model: nn.Module, loss_fn: Any) -> Hashable:
        own = loss_module(model, loss_fn)
        of_modules = None if own is None else (self.modules(own), self.parameters(own))
        return of_modules if own is loss_fn else (self.value(loss_fn, 0), of_modules)

    def value(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, float) and value != value:
            return "nan"
        if isinstance(value, _PLAIN):
            return (type(value), value)
        if depth > _DEEPEST or isinstance(value, (type, types.ModuleType, nn.Module)):
            return id(value)
        if id(value) not in self._known:
            # Before the descent, for objects that hold themselves.
            self._known[id(value)] = id(value)
            self._known[id(value)] = self._describe(value, depth)
        return self._known[id(value)]

    def _describe(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, torch.Tensor):
            return tensor_identity(value)
        if isinstance(value, (list, tuple, set, frozenset)):
            return (type(value), self._all(value, depth))
        if isinstance(value, dict):
            return self._items(value, frozenset(), depth)
        if isinstance(value, functools.partial):
            return ("partial", self.value(value.func, depth), self._all((*value.args, value.keywords), depth))
        if isinstance(value, types.MethodType):
            return ("method", self.value(value.__func__, depth), self.value(value.__self__, depth + 1))
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        attributes = getattr(value, "__dict__", None)
        return (type(value), id(value) if attributes is None else self._items(attributes, frozenset(), depth))

    def _function(self, function: types.FunctionType, depth: int) -> Hashable:
        cells = [c.cell_contents for c in function.__closure__ or () if has_contents(c)]
        found = [function.__globals__.get(name) for name in function.__code__.co_names]
        seen = [value for value in found if isinstance(value, (*_PLAIN, dict, list)) or _is_settings(value, function)]
        return (id(function.__code__), self._all((*cells, *(function.__defaults__ or ()), *seen), depth))

    def _all(self, values: Iterable[Any], depth: int) -> Hashable:
        return tuple(self.value(v, depth + 1) for v, _ in zip(values, range(_LONGEST), strict=False))

    def _items(self, items: dict[Any, Any], without: frozenset[str], depth: int) -> Hashable:
        kept = [(k, v) for k, v in items.items() if k not in without][:_LONGEST]
        return tuple((str(k), self.value(v, depth + 1)) for k, v in kept)
