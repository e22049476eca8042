"""What a captured step depends on besides the numbers in its tensors.

A capture is right as long as its signature is: shapes, strides and dtypes of the batch, which modules train, which
parameters want gradients, autocast, hooks (the outline), and the plain Python values that models and losses compute
with (the values). Torch's settings (threads, oneDNN, ...) belong to it because kernels are chosen by them, and
allocations with the kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from torch_odt.capture.describe_step import MODULE_STRUCTURE
from torch_odt.capture.machine import settings_name
from torch_odt.capture.reads import Read, has_contents, is_own_class, reach_of_step
from torch_odt.execute.named_tensors import StepTensors

_PLAIN = (bool, int, float, str, bytes, type(None))
_CLASS_CONSTANTS = (*_PLAIN, list, dict, tuple, torch.Tensor)
_DEEPEST = 4
_LONGEST = 256


def step_outline(tensors: StepTensors, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What tensors and modules a step is made of.

    Raises:
        TypeError: a tensor of the batch lies on another device or requires gradients.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return (
        tuple(_leaf_signature(leaf) for leaf in leaves),
        str(spec),
        tensors.structure,
        tensors.forms(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        settings_name(),
        torch.get_default_dtype(),
    )


def step_values(tensors: StepTensors, loss_fn: Any) -> Hashable:
    """The plain Python values that a step's code can read: attributes, closures, what it names."""
    modules, plain = tensors.telling_modules, tensors.plain_values
    reach = reach_of_step(modules, loss_fn, plain=plain)
    reader = _Reader(reach.attributes, tensors.module_identities)
    return (
        tensors.all_plain_values,
        tuple(reader.items(vars(module), MODULE_STRUCTURE, 0) for module in modules if id(module) not in plain),
        tuple(reader.value(value, 0) for value in _class_values(modules)),
        None if isinstance(loss_fn, nn.Module) else reader.value(loss_fn, 0),
        tuple((read.label, reader.value(read.value, 1)) for read in reach.reads if _is_looked_at(read)),
        tuple(reader.value(function, 1) for function in reach.functions),
    )


def _class_values(modules: Iterable[nn.Module]) -> Iterable[Any]:
    """Plain values that stand in the user's classes."""
    classes = dict.fromkeys(cls for kind in dict.fromkeys(map(type, modules)) for cls in kind.__mro__)
    own = (cls for cls in classes if not cls.__module__.startswith("torch."))
    return [v for cls in own for k, v in vars(cls).items() if k[:2] != "__" and isinstance(v, _CLASS_CONSTANTS)]


def _leaf_signature(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        if leaf.device.type != "cpu":
            raise TypeError(f"the batch holds a tensor on {leaf.device}; torch_odt trains on the CPU in this version")
        if leaf.requires_grad:
            raise TypeError(
                "the batch holds a tensor that requires gradients; detach it, or compute it inside the model"
            )
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype)
    if isinstance(leaf, _PLAIN):
        return (type(leaf), leaf)
    return type(leaf).__qualname__


def _is_looked_at(read: Read) -> bool:
    """Whether what code names holds values that it may compute with; what libraries keep for themselves is not."""
    value = read.value
    if isinstance(
        value, (*_PLAIN, torch.Tensor, nn.Module, dict, list, set, tuple, types.FunctionType, functools.partial)
    ):
        return True
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)) or dataclasses.is_dataclass(value):
        return True
    return is_own_class(type(value))


class _Same:
    """Equal for one object alone, as long as that lives; it is not kept alive where Python allows that."""

    __slots__ = ("_get", "_hash", "_version")

    def __init__(self, value: Any, version: int = 0) -> None:
        self._version = version
        self._hash = id(value) ^ version
        try:
            self._get: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or other._version != self._version:
            return False
        value = self._get()
        return value is not None and other._get() is value

    def __hash__(self) -> int:
        return self._hash


class _Reader:
    """Turns Python values into hashable ones; each object is looked at once."""

    def __init__(self, attribute_names: frozenset[str], step_modules: frozenset[int]) -> None:
        self._attribute_names = attribute_names
        self._step_modules = step_modules
        self._known: dict[int, Hashable] = {}

    def value(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, float) and value != value:
            return "nan"
        if isinstance(value, _PLAIN):
            return (type(value), value)
        if depth > _DEEPEST or isinstance(value, (type, types.ModuleType)) or id(value) in self._step_modules:
            return _Same(value)
        if id(value) not in self._known:
            # Before the descent, for objects that hold themselves.
            self._known[id(value)] = _Same(value)
            self._known[id(value)] = self._describe(value, depth)
        return self._known[id(value)]

    def items(self, items: dict[Any, Any], without: frozenset[str], depth: int) -> Hashable:
        kept = [(k, v) for k, v in items.items() if k not in without][:_LONGEST]
        return tuple((str(k), self.value(v, depth + 1)) for k, v in kept)

    def _describe(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, types.FunctionType):
            cells = [c.cell_contents for c in value.__closure__ or () if has_contents(c)]
            # None stays None: what is made here would be another object, and so another value, at each call.
            defaults = (*(value.__defaults__ or ()), value.__kwdefaults__)
            return (_Same(value.__code__), self._all((*cells, *defaults), depth))
        if isinstance(value, torch.Tensor):
            # Parameters are expected to change: their content belongs to the step.
            is_fixed = isinstance(value, nn.Parameter) or value.is_inference()
            return _Same(value, 0 if is_fixed else value._version)
        if isinstance(value, nn.Module):
            return tuple(self._module(module, depth) for module in value.modules())
        if isinstance(value, (list, tuple, set, frozenset)):
            return (type(value), self._all(value, depth))
        if isinstance(value, dict):
            return self.items(value, frozenset(), depth)
        if isinstance(value, functools.partial):
            return ("partial", self.value(value.func, depth), self._all((*value.args, value.keywords), depth))
        if isinstance(value, types.MethodType):
            return ("method", self.value(value.__func__, depth), self.value(value.__self__, depth + 1))
        attributes = getattr(value, "__dict__", None)
        if attributes is None or type(value).__module__.partition(".")[0] in ("torch", "torch_odt"):
            return (type(value), _Same(value))
        if is_own_class(type(value)):
            # Of a trainer that holds all and everything, what the step's code reads.
            attributes = {name: item for name, item in attributes.items() if name in self._attribute_names}
        return (type(value), self.items(attributes, frozenset(), depth))

    def _module(self, module: nn.Module, depth: int) -> Hashable:
        """One that is no part of the step: all that it has is a constant of the graph."""
        tensors = (*module._parameters.values(), *module._buffers.values())
        versions = tuple(None if t is None or t.is_inference() else (_Same(t), t._version) for t in tensors)
        return (type(module), module.training, versions, self.items(vars(module), MODULE_STRUCTURE, depth))

    def _all(self, values: Iterable[Any], depth: int) -> Hashable:
        return tuple(self.value(v, depth + 1) for v in itertools.islice(values, _LONGEST))
