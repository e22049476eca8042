"""What code reads from the world by name: global variables, and attributes of the user's modules.

A graph holds what these were when it was traced. So a step looks at them again before it trusts its graph, and a trace
looks whether the code has changed them itself.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_odt.capture.library import is_installed_file, is_library_code, is_library_module

Function = types.FunctionType

_KINDS = {
    **dict.fromkeys(("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"), "variables"),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "IMPORT_FROM"), "attributes"),
    "IMPORT_NAME": "imported",
}


@dataclass(frozen=True, slots=True)
class Read:
    """A place that code names: `namespace[name]`, for people `label`."""

    label: str
    namespace: dict[str, Any]
    name: str

    @property
    def value(self) -> Any:
        return self.namespace[self.name]


def code_of_step(modules: Iterable[nn.Module], loss_fn: Any) -> list[Function]:
    """The code that a step runs first: the modules' classes and the loss."""
    one_of_each_class = {type(module): module for module in modules}.values()
    found = [function for module in one_of_each_class for function in functions_of(module)]
    return [*found, *functions_in(loss_fn)]


def functions_of(module: nn.Module) -> Iterator[Function]:
    """The code of a module: all methods of the user's own classes, `forward` of an installed package's."""
    yield from _own_methods(type(module))
    forward = type(module).forward
    if isinstance(forward, Function) and not is_own(forward) and not forward.__module__.startswith("torch."):
        yield forward


def _own_methods(kind: type) -> Iterator[Function]:
    for cls in kind.__mro__:
        if cls is object or cls.__module__.startswith("torch."):
            continue
        for value in list(vars(cls).values()):
            function = getattr(value, "__func__", value)
            if isinstance(function, Function) and is_own(function):
                yield function


def functions_in(value: Any) -> Iterator[Function]:
    """The code that calling an object may run first: of a function, a method, a partial, or an object's class."""
    if isinstance(value, functools.partial):
        yield from functions_in(value.func)
    elif isinstance(value, types.MethodType):
        yield from functions_in(value.__func__)
    elif isinstance(value, Function):
        yield value
    elif isinstance(value, nn.Module):
        yield from functions_of(value)
    else:
        yield from _own_methods(type(value))


def reads(roots: Iterable[Function]) -> Iterator[Read]:
    """What these functions name, and what those of the user's own functions name that they reach by name."""
    waiting = list(roots)
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for read in _named(function):
            yield read
            waiting += _reached(read.value)
        for cell in function.__closure__ or ():
            if has_contents(cell):
                waiting += _reached(cell.cell_contents)


def _named(function: Function) -> Iterator[Read]:
    namespace, names = function.__globals__, _names(function.__code__)
    modules = [(name, sys.modules.get(name)) for name in names.imported]
    for name in names.variables:
        if name in namespace:
            yield Read(name, namespace, name)
            modules.append((name, namespace[name]))
    for name, module in modules:
        if isinstance(module, types.ModuleType) and _is_own_module(module.__name__, getattr(module, "__file__", "")):
            content = vars(module)
            yield from (Read(f"{name}.{a}", content, a) for a in names.attributes if a in content)


def _reached(value: Any) -> list[Function]:
    if isinstance(value, Function):
        return [value] if is_own(value) else []
    if isinstance(value, type) and not issubclass(value, nn.Module):
        return list(_own_methods(value))
    return []


@dataclass(frozen=True, slots=True)
class _Names:
    """The names in code: of global variables, of attributes of anything, of modules that it imports when it runs."""

    variables: tuple[str, ...]
    attributes: tuple[str, ...]
    imported: tuple[str, ...]


@functools.cache
def _names(code: types.CodeType) -> _Names:
    found: dict[str, dict[str, None]] = {"variables": {}, "attributes": {}, "imported": {}}
    for instruction in _instructions(code):
        kind = _KINDS.get(instruction.opname)
        if kind is not None:
            found[kind][instruction.argval] = None
    return _Names(*map(tuple, found.values()))


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Those of code, and of functions that are written inside it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def has_contents(cell: types.CellType) -> bool:
    """Whether a variable of a closure has been given a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


@functools.cache
def _is_own_code(code: types.CodeType, module: str) -> bool:
    return not is_library_code(code, module) and not is_installed_file(code.co_filename)


@functools.cache
def _is_own_module(name: str, file: str | None) -> bool:
    return not is_library_module(name) and not is_installed_file(file or "")


def is_own(function: Function) -> bool:
    """Whether a function is the user's own: not torch's or Python's, and of no installed package."""
    return _is_own_code(function.__code__, function.__module__ or "")
