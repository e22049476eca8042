"""What code reads from the world by name: global variables, and attributes of the user's modules.

A graph holds what these were when it was traced. So a step looks at them again before it trusts its graph, and a trace
looks whether the code has changed them itself.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_odt.capture.library import is_installed_file, is_library_code, is_library_module

Function = types.FunctionType
# Of `nn.Module` itself.
MODULE_OWN = frozenset(vars(nn.Module()))

_KINDS = {
    **dict.fromkeys(("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"), "variables"),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "IMPORT_FROM"), "attributes"),
    "IMPORT_NAME": "imported",
}


@dataclass(frozen=True, slots=True)
class Read:
    """A place that code names: `namespace[name]`, for people `label`."""

    label: str
    namespace: Mapping[str, Any]
    name: str

    @property
    def value(self) -> Any:
        return self.namespace[self.name]


@dataclass(frozen=True, slots=True)
class Reach:
    """What code can get at by name, through all of the user's own functions that it reaches.

    Attributes:
        functions: the code, without installed packages' beyond the first call.
        reads: global variables, and attributes of the user's modules.
        attributes: the names of all attributes that the code reads or sets of anything.
    """

    functions: tuple[Function, ...]
    reads: tuple[Read, ...]
    attributes: frozenset[str]


def reach_of_step(modules: Iterable[nn.Module], loss_fn: Any, *, plain: Container[int] = ()) -> Reach:
    """What a step's code can get at: that of the modules' classes, of what they hold, and of the loss.

    Args:
        plain: identities of modules that are known to hold no code.
    """
    found = list(modules)
    roots = list(_functions_of(dict.fromkeys(map(type, found))))
    for module in found:
        if id(module) in plain:
            continue
        held = {name: value for name, value in vars(module).items() if name not in MODULE_OWN}
        roots += _functions_held(held, 2)
    return _reach([*roots, *functions_in(loss_fn)])


def _functions_of(kinds: Collection[type[nn.Module]]) -> Iterator[Function]:
    """The code of modules of these classes: all methods of the user's own, `forward` of an installed package's."""
    yield from _methods_of_own(dict.fromkeys(cls for kind in kinds for cls in kind.__mro__))
    for kind in kinds:
        forward = kind.forward
        if isinstance(forward, Function) and not is_own(forward) and not forward.__module__.startswith("torch."):
            yield forward


def functions_in(value: Any) -> Iterator[Function]:
    """The code that calling an object may run first: of a function, a method, a partial, or an object's class."""
    if isinstance(value, functools.partial):
        yield from functions_in(value.func)
    elif isinstance(value, types.MethodType):
        yield from functions_in(value.__func__)
    elif isinstance(value, Function):
        yield value
        if hasattr(value, "__wrapped__"):
            yield from functions_in(value.__wrapped__)
    elif isinstance(value, nn.Module):
        yield from _functions_of([type(value)])
    else:
        yield from _own_methods(type(value))


def _functions_held(items: dict[Any, Any], depth: int) -> Iterator[Function]:
    """The code of what an object holds: functions, and objects of the user's classes, in lists and dicts too."""
    for value in items.values():
        if isinstance(value, (bool, int, float, str, bytes, type(None), torch.Tensor, nn.Module, type)):
            continue
        if isinstance(value, (list, tuple)) and depth:
            yield from _functions_held(dict(enumerate(value)), depth - 1)
        elif isinstance(value, dict) and depth:
            yield from _functions_held(value, depth - 1)
        else:
            yield from functions_in(value)


def _own_methods(kind: type) -> Iterator[Function]:
    return _methods_of_own(kind.__mro__)


def _methods_of_own(classes: Iterable[type]) -> Iterator[Function]:
    for cls in classes:
        if not is_own_class(cls):
            continue
        for value in list(vars(cls).values()):
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if isinstance(function, Function):
                yield from (f for f in functions_in(function) if is_own(f))


def _reach(roots: Iterable[Function]) -> Reach:
    waiting = list(roots)
    seen: dict[int, Function] = {}
    found: list[Read] = []
    attributes: set[str] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen[id(function)] = function
        attributes.update(_names(function.__code__).attributes)
        for read in _named(function):
            found.append(read)
            waiting += _reached(read.value)
        for cell in function.__closure__ or ():
            if has_contents(cell):
                waiting += _reached(cell.cell_contents)
    return Reach(tuple(seen.values()), tuple(found), frozenset(attributes))


def _named(function: Function) -> Iterator[Read]:
    namespace, names = function.__globals__, _names(function.__code__)
    modules = [(name, sys.modules.get(name)) for name in names.imported]
    for name in names.variables:
        if name in namespace:
            yield Read(name, namespace, name)
            modules.append((name, namespace[name]))
    seen: set[int] = set()
    while modules:
        label, module = modules.pop()
        if id(module) in seen or not _is_namespace(module):
            continue
        seen.add(id(module))
        content = vars(module)
        for attribute in names.attributes:
            # What a class holds is looked up there; a proxy of its namespace does.
            if attribute in content:
                yield Read(f"{label}.{attribute}", content, attribute)
                modules.append((f"{label}.{attribute}", content[attribute]))


def _is_namespace(value: Any) -> bool:
    """Whether an object is a module or class of the user's own, whose attributes code reads as variables."""
    if isinstance(value, types.ModuleType):
        return _is_own_module(value.__name__, getattr(value, "__file__", None) or "")
    return isinstance(value, type) and is_own_class(value)


def _reached(value: Any) -> list[Function]:
    if isinstance(value, (Function, functools.partial, types.MethodType)):
        return [function for function in functions_in(value) if is_own(function)]
    if isinstance(value, type):
        return [] if issubclass(value, nn.Module) else list(_own_methods(value))
    return [] if isinstance(value, nn.Module) else list(_own_methods(type(value)))


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


@functools.cache
def _is_own_class_of(module: str) -> bool:
    return _is_own_module(module, getattr(sys.modules.get(module), "__file__", None) or "")


def is_own_class(cls: type) -> bool:
    """Whether a class is the user's own."""
    return _is_own_class_of(cls.__module__)


def is_own(function: Function) -> bool:
    """Whether a function is the user's own: not torch's or Python's, and of no installed package."""
    return _is_own_code(function.__code__, function.__module__ or "")
