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
from collections.abc import Hashable, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from torch_odt.capture.describe_step import MODULE_STRUCTURE
from torch_odt.capture.effects import hook_identities
from torch_odt.capture.loss_modules import loss_module
from torch_odt.capture.machine import settings_name
from torch_odt.capture.reads import Read, code_of_step, has_contents, reads

_PLAIN = (bool, int, float, str, bytes, type(None))
_DEEPEST = 4
_LONGEST = 256


def step_outline(model: nn.Module, loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What tensors and modules a step is made of.

    Raises:
        TypeError: a tensor of the batch lies on another device or requires gradients.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    own = loss_module(model, loss_fn)
    return (
        tuple(_leaf_signature(leaf) for leaf in leaves),
        str(spec),
        _structure(model),
        None if own is None or own is model else _structure(own),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        settings_name(),
        torch.get_default_dtype(),
    )


def step_values(model: nn.Module, loss_fn: Any) -> Hashable:
    """The plain Python values that a step's code can read: attributes, closures, what it names."""
    reader = _Reader()
    own = loss_module(model, loss_fn)
    modules = [*model.modules(), *(own.modules() if own is not None else ())]
    code = code_of_step(modules, loss_fn)
    return (
        tuple(reader.items(vars(module), MODULE_STRUCTURE, 0) for module in modules),
        tuple(reader.value(value, 0) for value in _class_values(modules)),
        None if isinstance(loss_fn, nn.Module) else reader.value(loss_fn, 0),
        tuple((read.label, reader.value(read.value, 1)) for read in reads(code) if _is_looked_at(read)),
        tuple(map(_Same, code)),
    )


def _structure(root: nn.Module) -> Hashable:
    modules = tuple((type(m), m.training) for m in root.modules())
    parameters = tuple((p.requires_grad, p.dtype, p.shape, p.stride()) for p in root.parameters())
    return modules, parameters, hook_identities(root)


def _class_values(modules: Iterable[nn.Module]) -> Iterable[Any]:
    """Plain values that stand in the user's classes."""
    classes = dict.fromkeys(cls for kind in dict.fromkeys(map(type, modules)) for cls in kind.__mro__)
    own = (cls for cls in classes if not cls.__module__.startswith("torch."))
    return [v for cls in own for k, v in vars(cls).items() if isinstance(v, (*_PLAIN, list, dict)) and k[:2] != "__"]


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


def _is_looked_at(read: Read) -> bool:
    """Whether what code names holds values that it may compute with; what libraries keep for themselves is not."""
    value = read.value
    if isinstance(value, (*_PLAIN, torch.Tensor)) or type(value) in (dict, list, set, tuple):
        return True
    if isinstance(value, types.FunctionType):
        return True
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)) or dataclasses.is_dataclass(value):
        return True
    return type(value).__module__ == read.namespace.get("__name__")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Equal for one object alone, which lives as long as this does: no other one can come to its address."""

    value: Any
    version: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value and other.version == self.version

    def __hash__(self) -> int:
        return id(self.value) ^ self.version


class _Reader:
    """Turns Python values into hashable ones; each object is looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, Hashable] = {}

    def value(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, float) and value != value:
            return "nan"
        if isinstance(value, _PLAIN):
            return (type(value), value)
        if depth > _DEEPEST or isinstance(value, (type, types.ModuleType, nn.Module)):
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
        if isinstance(value, torch.Tensor):
            # Parameters are expected to change: their content belongs to the step.
            return _Same(value, 0 if isinstance(value, nn.Parameter) else value._version)
        if isinstance(value, (list, tuple, set, frozenset)):
            return (type(value), self._all(value, depth))
        if isinstance(value, dict):
            return self.items(value, frozenset(), depth)
        if isinstance(value, functools.partial):
            return ("partial", self.value(value.func, depth), self._all((*value.args, value.keywords), depth))
        if isinstance(value, types.MethodType):
            return ("method", self.value(value.__func__, depth), self.value(value.__self__, depth + 1))
        if isinstance(value, types.FunctionType):
            cells = [c.cell_contents for c in value.__closure__ or () if has_contents(c)]
            defaults = (*(value.__defaults__ or ()), value.__kwdefaults__ or {})
            return (_Same(value.__code__), self._all((*cells, *defaults), depth))
        attributes = getattr(value, "__dict__", None)
        return (type(value), _Same(value) if attributes is None else self.items(attributes, frozenset(), depth))

    def _all(self, values: Iterable[Any], depth: int) -> Hashable:
        return tuple(self.value(v, depth + 1) for v in itertools.islice(values, _LONGEST))
