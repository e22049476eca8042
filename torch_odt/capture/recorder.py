"""Which of the user's Python code runs while a step is traced."""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch_odt._collection import no_collection
from torch_odt.capture.library import is_library_code

T = TypeVar("T")

# Operators of these are computed by torch's own code alone.
_TORCH_OPERATORS = ("aten", "prim", "prims")


def run_recorded(function: Callable[[], T]) -> tuple[T, frozenset[str] | None]:
    """Call `function`; returns what it returns, and the names (see `code_name`) of the user's code that has run in it.

    The names are None when somebody else watches this process, a debugger or coverage, and must not be disturbed.
    """
    seen = _Seen()
    with no_collection(), _watch(seen) as is_watching:
        result = function()
        is_complete = is_watching()
    return result, seen.names() if is_complete else None


def code_name(code: types.CodeType, module: str) -> str:
    """A name that tells code apart by what it does: the same in every process, and another one after an edit."""
    return f"{module}:{code.co_name}:{_digest(code)}"


@functools.cache
def _digest(code: types.CodeType) -> str:
    # Not `co_qualname` or a line: code objects that differ in nothing else are equal, so the first would be remembered.
    parts = (
        (code.co_name, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        (code.co_code, code.co_exceptiontable, tuple(map(_constant, code.co_consts))),
    )
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _constant(value: object) -> object:
    if isinstance(value, types.CodeType):
        return _digest(value)
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, frozenset):
        # The order of a set of strings differs from process to process.
        return ("frozenset", *sorted(map(repr, value)))
    return (type(value).__name__, repr(value))


class _Seen:
    """The user's code that has run."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._known: dict[int, types.CodeType] = {}

    def note(self, frame: types.FrameType) -> bool:
        """Take down the code of a frame; whether it need not be shown again."""
        code = frame.f_code
        if id(code) in self._known:
            return True
        module = str(frame.f_globals.get("__name__"))
        if not (is_library_code(code, module) or _defines_graph_module(code)):
            if _is_aside(frame):
                return False
            self._names[id(code)] = code_name(code, module)
        self._known[id(code)] = code
        return True

    def names(self) -> frozenset[str]:
        return frozenset(self._names.values())


def _defines_graph_module(code: types.CodeType) -> bool:
    """Whether this is torch.fx making a method of a new graph; the method itself has code of its own."""
    return code.co_name == "<module>" and code.co_filename.startswith("<eval_with_key>")


def _is_aside(frame: types.FrameType | None) -> bool:
    """Whether this is no part of the step: torch imports and logs while it traces, by others' finders and handlers."""
    while frame is not None and frame.f_code is not run_recorded.__code__:
        if frame.f_code.co_filename.startswith(("<frozen importlib", logging.__file__)):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _untraced_operators() -> Iterator[None]:
    """Spare torch's operators the trace function: nine tenths of a trace are spent in them, where no user's code runs.

    Before Python 3.12 a trace function makes all Python code run at half its speed, whatever the function does.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    original = FunctionalTensorMode.__torch_dispatch__

    def dispatch(self: Any, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_torchs = func.namespace in _TORCH_OPERATORS and all(kind.__module__.startswith("torch.") for kind in kinds)
        if not is_torchs:
            return original(self, func, kinds, args, kwargs)
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            return original(self, func, kinds, args, kwargs)
        finally:
            sys.settrace(trace)

    mode: Any = FunctionalTensorMode
    mode.__torch_dispatch__ = dispatch
    try:
        yield
    finally:
        mode.__torch_dispatch__ = original


if sys.version_info >= (3, 12):

    @contextmanager
    def _watch(seen: _Seen) -> Iterator[Callable[[], bool]]:
        monitoring = sys.monitoring
        tool = next((i for i in (3, 4, monitoring.PROFILER_ID) if monitoring.get_tool(i) is None), None)
        if tool is None:
            yield lambda: False
            return

        def note(code: types.CodeType, offset: int) -> object:
            return monitoring.DISABLE if seen.note(sys._getframe(1)) else None

        monitoring.use_tool_id(tool, "torch_odt")
        monitoring.register_callback(tool, monitoring.events.PY_START, note)
        monitoring.restart_events()
        monitoring.set_events(tool, monitoring.events.PY_START)
        try:
            yield lambda: monitoring.get_tool(tool) == "torch_odt"
        finally:
            monitoring.set_events(tool, 0)
            monitoring.register_callback(tool, monitoring.events.PY_START, None)
            monitoring.free_tool_id(tool)

else:

    @contextmanager
    def _watch(seen: _Seen) -> Iterator[Callable[[], bool]]:
        if sys.gettrace() is not None:
            yield lambda: False
            return

        def note(frame: types.FrameType, event: str, argument: object) -> None:
            seen.note(frame)

        with _untraced_operators():
            sys.settrace(note)
            try:
                yield lambda: sys.gettrace() is note
            finally:
                sys.settrace(None)
