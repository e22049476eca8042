"""What Python objects hold, as digests that are the same in every process and differ when anything in the objects does.

Nothing of the user's is called on the way: no `repr`, no `==`, no property. An object whose state cannot be read like
that (a lock, a file, a random generator, most of what is written in C) is refused.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import logging
import re
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_odt.capture.library import (
    is_generated,
    is_importable,
    is_library_class,
    is_library_code,
    is_library_module,
    is_pure,
)
from torch_odt.capture.reads import has_contents
from torch_odt.capture.recorder import code_name

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range)
_BY_NAME = (torch.dtype, torch.layout, torch.memory_format, torch.device, np.dtype, torch._ops.OpOverload,
            torch._ops.OpOverloadPacket)  # fmt: skip
# What an object of a Python class may be besides its attributes.
_CONTENTS = (dict, list, set, frozenset, tuple, str, bytes, int, float, property, object)
_POINTER_BYTES = 8 if object.__basicsize__ == 16 else 4
# Of a class: what Python derives from the rest, and what only type checkers read.
_DERIVED = frozenset(
    ("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__annotate__",
     "__annotate_func__", "__annotations_cache__", "__static_attributes__", "__firstlineno__", "__slotnames__",
     "__orig_bases__", "__parameters__", "__type_params__", "_abc_impl", "__abstractmethods__",
     "_autograd_function_id")
)  # fmt: skip
_MOST_OBJECTS = 100_000
_MOST_BYTES = 1 << 20


class Undescribable(Exception):
    """A step depends on something that cannot be compared with what another process has."""


class Describer:
    """Digests objects, each once; shared and circular references are part of what is described.

    Attributes:
        data: the digest of what the objects hold.
        code: the digest of what their classes hold, and of what is added after `describe_classes`.
        functions: the user's functions among them, in the order in which they were met.
    """

    def __init__(self) -> None:
        self.data = hashlib.sha256()
        self.code = hashlib.sha256()
        self.functions: list[types.FunctionType] = []
        self._target = self.data
        self._classes: list[type] = []
        self._numbers: dict[object, int] = {}
        self._alive: list[object] = []
        self._left = _MOST_OBJECTS

    def write(self, *tokens: object) -> None:
        """Add plain values."""
        self._left -= 1
        if self._left < 0:
            raise Undescribable(f"the step holds more than {_MOST_OBJECTS} values")
        self._target.update(repr(tokens).encode("utf-8", "surrogatepass"))

    def is_new(self, value: object, identity: object = None) -> bool:
        """Whether an object is met for the first time; adds which of those met before it is.

        Args:
            identity: what tells it apart where Python makes a new object for the same thing each time.
        """
        key = id(value) if identity is None else identity
        is_new = key not in self._numbers
        if is_new:
            self._numbers[key] = len(self._numbers)
            self._alive.append(value)
        self.write("new" if is_new else "known", self._numbers[key])
        return is_new

    def value(self, value: object) -> None:
        """Add any object."""
        kind = type(value)
        if kind in _PLAIN:
            self.write(kind.__name__, repr(value))
        elif issubclass(kind, _BY_NAME):
            self.write(kind.__name__, str(value))
        elif kind is tuple or kind is torch.Size:
            self._values(value)
        elif kind in (set, frozenset):
            self._set(value)
        elif self.is_new(value):
            self._object(value)

    def items(self, items: Iterable[tuple[object, object]]) -> None:
        found = list(items)
        self.write("items", len(found))
        for key, value in found:
            self.value(key)
            self.value(value)

    def tensor(self, tensor: torch.Tensor) -> None:
        """Add a tensor of the step: all but its numbers."""
        if self.is_new(tensor):
            self._tensor(tensor)

    def _tensor(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.is_conj():
            raise Undescribable(f"the step holds a {type(tensor).__name__} on {tensor.device}")
        if tensor.layout is not torch.strided or tensor.is_neg():
            raise Undescribable(f"the step holds a tensor with the layout {tensor.layout}")
        storage = tensor.untyped_storage()
        self.write("tensor", tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), str(tensor.dtype))
        self.write(type(tensor).__name__, tensor.requires_grad, tensor.is_leaf, storage.nbytes())
        self.is_new(storage, ("storage", storage._cdata))

    def describe_classes(self) -> None:
        """Add what the classes that were met are made of, from here on to `code`."""
        self._target = self.code
        while self._classes:
            self._class_contents(self._classes.pop())

    def _object(self, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, type):
            self._class(value)
        elif kind in _READERS:
            self.write(kind.__name__)
            _READERS[kind](self, value)
        elif issubclass(kind, torch.Tensor):
            self._constant(value)
        elif issubclass(kind, nn.Module):
            raise Undescribable(f"a {kind.__name__} is no submodule of the model")
        elif issubclass(kind, types.ModuleType):
            self._module(value)
        elif issubclass(kind, (np.number, np.bool_, np.ufunc)) or _is_annotation(kind):
            self._by_name(value)
        else:
            self._instance(value)

    def _values(self, values: Any) -> None:
        found = list(values)
        self.write(type(values).__name__, len(found))
        for value in found:
            self.value(value)

    def _set(self, values: Any) -> None:
        if not all(type(value) in _PLAIN for value in values):
            raise Undescribable("a set holds more than plain values")
        self.write("set", *sorted(f"{type(value).__name__} {value!r}" for value in values))

    def _constant(self, tensor: torch.Tensor) -> None:
        """A tensor that is no parameter and no buffer becomes a constant of the graph, or decides what is in it."""
        if tensor.requires_grad or isinstance(tensor, nn.Parameter) or tensor.nbytes > _MOST_BYTES:
            raise Undescribable("a large or trainable tensor is no parameter or buffer of the model")
        self._tensor(tensor)
        self.write(tensor_bytes(tensor))

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.hasobject or array.nbytes > _MOST_BYTES:
            raise Undescribable("a large array")
        self.write("array", str(array.dtype), array.shape, array.strides, array.tobytes())

    def _module(self, module: types.ModuleType) -> None:
        name = module.__name__
        self.write(name)
        self._refuse_impure(name, "")

    def _by_name(self, value: object) -> None:
        text = repr(value)
        if " at 0x" in text:
            raise Undescribable(f"a {type(value).__name__} without a name")
        self.write(type(value).__name__, text)

    def _class(self, cls: type) -> None:
        self.write("class", cls.__module__, cls.__qualname__)
        if is_library_class(cls):
            self._refuse_impure(cls.__module__, cls.__qualname__)
        self._classes.append(cls)

    def _class_contents(self, cls: type) -> None:
        """Of a class of torch's or Python's only what somebody has put into it."""
        is_library = is_library_class(cls)
        self.write("contents", cls.__module__, cls.__qualname__)
        self._values((type(cls), *cls.__bases__))
        for name, item in list(vars(cls).items()):
            if is_library and not (is_users_function(item) or (type(item) in _PLAIN and name[0] != "_")):
                continue
            if name not in _DERIVED:
                self.write("attribute", name)
                self.value(item)

    def _function(self, function: types.FunctionType) -> None:
        self.write("function", function.__module__, function.__qualname__)
        cells = [cell.cell_contents for cell in function.__closure__ or () if has_contents(cell)]
        if is_users_function(function):
            self.functions.append(function)
            code = function.__code__
            self.write(code.co_flags, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
            self._values((function.__defaults__, function.__kwdefaults__, *cells))
            self.items(function.__dict__.items())
        else:
            if not is_generated(function.__code__):
                self._refuse_impure(_namespace(function), function.__qualname__)
            # What a decorator of torch's has made of the user's function is not torch's alone.
            self._values(() if is_importable(function, _namespace(function)) else cells)

    def _builtin(self, function: Any) -> None:
        """A function in C: one that belongs to no object, or a method with the object or class that it belongs to."""
        owner = getattr(function, "__objclass__", None) or function.__self__
        is_method = owner is not None and not isinstance(owner, types.ModuleType)
        module = _definer(owner, function.__name__).__module__ if is_method else function.__module__
        self.write(module, function.__qualname__)
        self._refuse_impure(str(module), function.__qualname__)
        if is_method:
            self.value(owner)

    def _refuse_impure(self, module: str, name: str) -> None:
        if not (is_library_module(module) and is_pure(module, name)):
            raise Undescribable(f"{f'{module}.{name}'.rstrip('.')} may depend on more than its arguments")

    def _remembering(self, function: Any) -> None:
        """`functools.cache`: what it has remembered was computed before anybody could see how."""
        if function.cache_info().currsize and is_users_function(function.__wrapped__):
            raise Undescribable(f"{function.__qualname__} returns results that it has remembered")
        self.value(function.__wrapped__)

    def _instance(self, value: Any) -> None:
        kind = type(value)
        content: Any = next(base for base in _CONTENTS if issubclass(kind, base))
        if _hides_state(kind, content):
            raise Undescribable(f"a {kind.__module__}.{kind.__qualname__}")
        self.value(kind)
        if issubclass(content, dict):
            self.items(dict.items(value))
        elif issubclass(content, (list, tuple)):
            self._values(list(content.__iter__(value)))
        elif issubclass(content, (set, frozenset)):
            self._set(list(content.__iter__(value)))
        elif content is property:
            self._values((value.fget, value.fset, value.fdel))
        elif content is not object:
            self.write(content.__repr__(value))
        if _has_dict(kind):
            self.items(object.__getattribute__(value, "__dict__").items())
        self.items((name, slot.__get__(value)) for name, slot in _slots(kind) if _is_set(slot, value))


def _definer(owner: object, name: str) -> type:
    """The class in which a method stands that belongs to a class or an object."""
    kind = owner if isinstance(owner, type) else type(owner)
    return next((base for base in kind.__mro__ if name in vars(base)), kind)


def _is_annotation(kind: type) -> bool:
    return kind.__module__ in ("typing", "types") and not _has_dict(kind)


def is_users_function(value: object) -> bool:
    """Whether this is a Python function that is neither torch's nor Python's."""
    return type(value) is types.FunctionType and not is_library_code(value.__code__, _namespace(value))


def _namespace(function: types.FunctionType) -> str:
    return str(function.__globals__.get("__name__"))


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The numbers of a dense tensor in the order of its indices."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _has_dict(kind: type) -> bool:
    return kind.__dictoffset__ != 0


def _slots(kind: type) -> list[tuple[str, Any]]:
    """Attributes that a Python class declares instead of a dictionary."""
    declaring = [c for c in kind.__mro__ if "__slots__" in vars(c)]
    return [(n, m) for c in declaring for n, m in vars(c).items() if type(m) is types.MemberDescriptorType]


def _is_set(slot: Any, value: object) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _hides_state(kind: type, content: type) -> bool:
    """Whether objects are larger than what Python can see of them, as `copyreg` asks before it pickles one."""
    own = len(_slots(kind))
    own += (kind.__dictoffset__ not in (0, -1)) + (kind.__weakrefoffset__ > 0)
    return (
        kind.__basicsize__ > content.__basicsize__ + own * _POINTER_BYTES or kind.__itemsize__ != content.__itemsize__
    )


_READERS: dict[type, Callable[[Describer, Any], None]] = {
    list: Describer._values,
    dict: lambda d, v: d.items(v.items()),
    collections.OrderedDict: lambda d, v: d.items(v.items()),
    collections.defaultdict: lambda d, v: d.items([("default", v.default_factory), *v.items()]),
    types.MappingProxyType: lambda d, v: d.items(v.items()),
    slice: lambda d, v: d._values((v.start, v.stop, v.step)),
    np.ndarray: Describer._array,
    re.Pattern: lambda d, v: d._values((v.pattern, v.flags)),
    logging.Logger: lambda d, v: d.write("logger", v.name),
    weakref.ref: lambda d, v: d.value(v()),
    types.FunctionType: Describer._function,
    types.MethodType: lambda d, v: d._values((v.__func__, v.__self__)),
    functools.partial: lambda d, v: d._values((v.func, v.args, v.keywords)),
    functools._lru_cache_wrapper: Describer._remembering,
    collections._tuplegetter: lambda d, v: d.write(repr(v.__reduce__())),  # type: ignore[attr-defined]
    functools.cached_property: lambda d, v: d.value(v.func),
    property: lambda d, v: d._values((v.fget, v.fset, v.fdel)),
    staticmethod: lambda d, v: d.value(v.__func__),
    classmethod: lambda d, v: d.value(v.__func__),
    types.CodeType: lambda d, v: d.write(code_name(v, "")),
    types.BuiltinFunctionType: Describer._builtin,
    types.MethodDescriptorType: Describer._builtin,
    types.WrapperDescriptorType: Describer._builtin,
    types.MethodWrapperType: Describer._builtin,
    types.ClassMethodDescriptorType: Describer._builtin,
    types.GetSetDescriptorType: lambda d, v: d.write(v.__qualname__),
    types.MemberDescriptorType: lambda d, v: d.write(v.__qualname__),
}
