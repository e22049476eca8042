"""What the Python code of a step does besides computing tensors.

A graph repeats the tensors' part of a step and nothing else. Code that also counts its calls, rebinds a buffer, draws
from Python's or NumPy's random numbers, prints, or is watched by hooks must run as Python at every step, so it is not
captured.
"""

from __future__ import annotations

import io
import itertools
import random
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_odt.capture.loss_modules import reached
from torch_odt.capture.module_walk import HOOKS
from torch_odt.capture.reads import MODULE_OWN, is_own_class, reach_of_step
from torch_odt.errors import CaptureError

# Of `nn.Module` itself; children and parameters are compared by the tracer.
_STRUCTURE = MODULE_OWN - {"_buffers", "training"}
# Lists of their parameters that recurrent layers keep up to date by themselves.
_OWN_LISTS = frozenset({"_flat_weights", "_flat_weight_refs"})
_IGNORED = _STRUCTURE | _OWN_LISTS | {"_buffers"}
# Functions of theirs keep wrappers and counts as attributes.
_LIBRARIES = frozenset({"builtins", "functools"})
# How many steps from an attribute what it holds is looked at: `self.statistics.history[0]` is two.
_DEPTH = 3


def refuse_hooks(model: nn.Module) -> None:
    """Raises CaptureError when a module has hooks: they are Python code that runs at every call."""
    for name, module in model.named_modules():
        if any(getattr(module, hooks, None) for hooks in HOOKS):
            raise CaptureError(f"{name or 'the model'} has hooks, which run as Python at every step")


@contextmanager
def plain_tensors_kept(model: nn.Module, loss_fn: Any) -> Iterator[None]:
    """Undo what happens inside to tensors that are no parameters and no buffers: in-place changes of them are real."""
    owners = [dict(reached(loss_fn)), *(vars(module) for module in model.modules())]
    plain = {id(t): t for owner in owners for t in owner.values() if type(t) is torch.Tensor}
    before = [(tensor, tensor._version, tensor.detach().clone()) for tensor in plain.values()]
    try:
        yield
    finally:
        for tensor, version, content in before:
            if tensor._version != version:
                tensor.detach().copy_(content)


@contextmanager
def effects_refused(model: nn.Module, loss_fn: Any = None) -> Iterator[None]:
    """Raise CaptureError when the code inside changes more than tensors; what it has rebound is bound as before."""
    before = _State(model, loss_fn)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    except BaseException:
        before.restore()
        raise
    effects = list(before.effects())
    before.restore()
    if printed.getvalue():
        effects.append("prints")
    if effects:
        raise CaptureError(f"the step {' and '.join(effects)}")


class _State:
    """The Python side of a model and a loss at one moment."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._reached = _reached_marks(loss_fn)
        self._attributes = {name: _attributes(module) for name, module in model.named_modules()}
        self._bindings = {name: dict(vars(module)) for name, module in model.named_modules()}
        self._buffers = {name: dict(module._buffers) for name, module in model.named_modules()}
        attributes = (value for found in self._bindings.values() for key, value in found.items() if key not in _IGNORED)
        objects = (held for value in attributes for held in _held_by(value) if _is_own_object(held))
        self._held = [(vars(held), dict(vars(held))) for held in objects]
        reach = reach_of_step(model.modules(), loss_fn)
        self._attribute_names = reach.attributes
        self._named = [(read, read.value, _mark(read.value)) for read in reach.reads]
        self._random = random.getstate()
        self._numpy_random = np.random.get_state()

    def effects(self) -> Iterator[str]:
        """What has happened since."""
        changed = [f"{name}.{key}".lstrip(".") for name, key in self._changed()]
        changed += [read.label for read, _, mark in self._named if _mark(read.namespace.get(read.name)) != mark]
        if changed:
            yield f"changes {', '.join(dict.fromkeys(changed[:3]))} as Python attributes"
        iterator = next(self._iterators(), None)
        if iterator is not None:
            yield f"can draw from {iterator}, an iterator whose position cannot be seen"
        if random.getstate() != self._random or not _same(np.random.get_state(), self._numpy_random):
            yield "draws from Python's or NumPy's random numbers"

    def _iterators(self) -> Iterator[str]:
        names = self._attribute_names
        bindings = [
            (f"{n}.{k}", value) for n, found in self._bindings.items() for k, value in found.items() if k in names
        ]
        named = [(read.label, value) for read, value, _ in self._named]
        for label, value in (*bindings, *named, *reached(self._loss_fn)):
            for held in _held_by(value):
                if isinstance(held, Iterator) and not isinstance(held, (nn.Module, itertools.count)):
                    yield label.lstrip(".")

    def _changed(self) -> list[tuple[str, str]]:
        found = []
        for name, module in self._model.named_modules():
            before, now = self._attributes.get(name, {}), _attributes(module)
            found += [(name, key) for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
        reached_now = _reached_marks(self._loss_fn)
        found += [("the loss's", name) for name, mark in reached_now.items() if self._reached.get(name, mark) != mark]
        return sorted(found)

    def restore(self) -> None:
        for name, module in self._model.named_modules():
            _bind_again(vars(module), self._bindings.get(name, vars(module)))
            module._buffers.update(self._buffers.get(name, {}))
        for namespace, before in self._held:
            _bind_again(namespace, before)
        for read, value, _ in self._named:
            if read.namespace.get(read.name) is not value and isinstance(read.namespace, dict):
                read.namespace[read.name] = value
        random.setstate(self._random)
        np.random.set_state(self._numpy_random)


def _reached_marks(function: Any) -> dict[str, Any]:
    """What a function's variables and its objects' attributes are bound to, as values that compare."""
    found: dict[str, Any] = {}
    for name, value in reached(function):
        found[name] = _mark(value)
        if type(value).__module__ not in _LIBRARIES and not isinstance(value, (type, types.ModuleType, nn.Module)):
            found |= {f"{name}.{key}": _mark(item) for key, item in getattr(value, "__dict__", {}).items()}
    return found


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Everything that an assignment in `forward` can change, as values that compare."""
    found = {key: _mark(value) for key, value in vars(module).items() if key not in _IGNORED}
    return found | {key: id(buffer) for key, buffer in module._buffers.items()}


def _bind_again(namespace: dict[str, Any], before: dict[str, Any]) -> None:
    for key in (before.keys() | namespace.keys()) - _IGNORED:
        if key not in before:
            del namespace[key]
        elif namespace.get(key) is not before[key]:
            namespace[key] = before[key]


def _held_by(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """A value, and what it holds: elements, and attributes of the user's own objects."""
    yield value
    items: Iterable[Any] = ()
    if isinstance(value, (list, tuple)):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    elif _is_own_object(value):
        items = vars(value).values()
    for item in items if depth else ():
        yield from _held_by(item, depth - 1)


def _is_own_object(value: Any) -> bool:
    """Whether it is an object with attributes, of a class of the user's own; modules are looked at by themselves."""
    return is_own_class(type(value)) and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module))


def _mark(value: Any, depth: int = _DEPTH) -> Any:
    """A value that compares equal as long as this one is bound to the same things."""
    if isinstance(value, (bool, int, float, str, bytes, type(None), itertools.count)):
        return (type(value), repr(value))
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if not depth:
        return id(value)
    if isinstance(value, (list, tuple)):
        return (id(value), tuple(_mark(item, depth - 1) for item in value))
    if isinstance(value, dict):
        return (id(value), tuple((id(k), _mark(v, depth - 1)) for k, v in value.items()))
    if _is_own_object(value):
        return (id(value), tuple((k, _mark(v, depth - 1)) for k, v in vars(value).items()))
    return id(value)


def _same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
