"""The modules that a loss brings along: it is one, or it is a function that reaches some by name.

What they learn and keep belongs to the step as the model's own does.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from torch_odt.capture.module_walk import modules_of


def loss_module(model: nn.Module, loss_fn: Any) -> nn.Module | None:
    """All modules of a loss as one; None when it has none, or none that `model` does not have already.

    Args:
        model: the module that is trained with it.
        loss_fn: an `nn.Module`, or a function; of a function, its closure, its defaults, bound arguments and the
            globals that it names are looked through.
    """
    if isinstance(loss_fn, nn.Module):
        return loss_fn
    if loss_fn is None:
        return None
    modules = {name: module for name, module in reached(loss_fn) if isinstance(module, nn.Module)}
    if not modules:
        return None
    known = {id(tensor) for tensor in _tensors(model)}
    found = {
        name: module for name, module in modules.items() if any(id(tensor) not in known for tensor in _tensors(module))
    }
    if not found:
        return None
    together = nn.Module()
    for name, module in found.items():
        # Not `add_module`: `_modules` takes any name, as `self` or the number of an argument.
        together._modules[name] = module
    return together


def all_modules(model: nn.Module, loss_fn: Any) -> nn.Module:
    """All modules that a step may change, as one."""
    own = loss_module(model, loss_fn)
    return model if own is None else nn.ModuleList([model, own])


def _tensors(module: nn.Module) -> Iterator[Any]:
    for member in modules_of(module):
        yield from (tensor for tensor in member._parameters.values() if tensor is not None)
        yield from (tensor for tensor in member._buffers.values() if tensor is not None)


def reached(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function can reach by name: its closure, its defaults, arguments bound to it, the globals it names."""
    if isinstance(function, functools.partial):
        yield from ((f"argument {position}", value) for position, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from reached(function.func)
    elif isinstance(function, types.MethodType):
        yield "self", function.__self__
        yield from getattr(function.__self__, "__dict__", {}).items()
        yield from reached(function.__func__)
    elif isinstance(function, types.FunctionType):
        yield from _reached_by_code(function)
    else:
        yield from getattr(function, "__dict__", {}).items()


def _reached_by_code(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue
    yield from ((f"default {position}", value) for position, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
