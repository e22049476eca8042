"""What code reads from its modules: global variables, attributes of the user's modules, functions and classes by name.

The code that ran while a step was traced is looked for among the functions that the step's objects hold. What it
names is described, which brings more functions, until all code that ran is found. Code that is not found was reached in
a way that nobody can compare with another process (a patched function of torch, a registry), so it is refused.
"""

from __future__ import annotations

import builtins
import dis
import sys
import types
from collections.abc import Iterator
from importlib.util import resolve_name

import torch

from torch_odt.capture.describe import Describer, Undescribable
from torch_odt.capture.library import is_library_module, is_pure
from torch_odt.capture.recorder import code_name

_IMPORT = dis.opmap["IMPORT_NAME"]
# With these, code can read from a module what it does not name.
_BY_STRING = frozenset(("getattr", "hasattr", "vars", "dir", "__dict__", "__getattribute__", "attrgetter"))


def describe_executed(describer: Describer, executed: frozenset[str]) -> str:
    """Add to a description of a step all that this code names.

    Args:
        executed: names of code, see `code_name`.

    Returns:
        A digest of the code and of everything that it reads besides what the step holds.

    Raises:
        Undescribable: the code reads what cannot be compared, or cannot be found.
    """
    found: set[str] = set()
    position = 0
    describer.describe_classes()
    while position < len(describer.functions):
        function = describer.functions[position]
        describer.write("function", position)
        position += 1
        _Reading(describer, function.__globals__, executed, found).code(function.__code__)
        describer.describe_classes()
    if executed - found:
        raise Undescribable(f"code ran that the step's objects do not hold: {min(executed - found)}")
    return describer.code.hexdigest()


class _Reading:
    """What the code of one function reads, and code that is written inside it."""

    def __init__(
        self, describer: Describer, namespace: dict[str, object], executed: frozenset[str], found: set[str]
    ) -> None:
        self._describer = describer
        self._namespace = namespace
        self._executed = executed
        self._found = found

    def code(self, code: types.CodeType) -> None:
        name = code_name(code, str(self._namespace.get("__name__")))
        if name not in self._executed:
            return
        self._found.add(name)
        self._describer.write("executed", name)
        for module in self._imported(code):
            self._describer.write("import")
            self._attributes(module, code, {module.__name__})
        for name in code.co_names:
            if name in self._namespace:
                self._describer.write("global", name)
                self._global(self._namespace[name], code)
            elif hasattr(builtins, name) and not is_pure("builtins", name) and _reads_global(code, name):
                raise Undescribable(f"{code.co_name} calls {name}")
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant)

    def _imported(self, code: types.CodeType) -> Iterator[types.ModuleType]:
        """The modules that code imports when it is called."""
        if _IMPORT not in code.co_code[::2]:
            return
        instructions = list(dis.get_instructions(code))
        for index, instruction in enumerate(instructions):
            if instruction.opcode != _IMPORT:
                continue
            # The statement's two constants are loaded before: how many dots it has, and which names it takes.
            level = instructions[index - 2].argval
            name = f"{'.' * level}{instruction.argval}" if isinstance(level, int) else ""
            found = sys.modules.get(resolve_name(name, str(self._namespace.get("__package__")))) if name else None
            if found is None:
                raise Undescribable(f"{code.co_name} imports {name or 'a module'}, which is not imported before")
            yield found
            yield sys.modules[found.__name__.partition(".")[0]]

    def _global(self, value: object, code: types.CodeType) -> None:
        if isinstance(value, types.ModuleType):
            self._attributes(value, code, {value.__name__})
        else:
            self._describer.value(value)

    def _attributes(self, module: types.ModuleType, code: types.CodeType, seen: set[str]) -> None:
        """What code may read from a module: every name in it that stands anywhere in the code."""
        is_library = is_library_module(module.__name__)
        self._describer.write("module", module.__name__)
        if is_library:
            _refuse_impure(module.__name__, code)
        elif type(module) is not types.ModuleType or "__getattr__" in vars(module):
            raise Undescribable(f"{module.__name__} computes its attributes")
        elif not _BY_STRING.isdisjoint(code.co_names):
            raise Undescribable(f"{code.co_name} may read anything from {module.__name__}")
        for name in code.co_names:
            if name not in vars(module):
                continue
            item = vars(module)[name]
            self._describer.write("attribute", name)
            if isinstance(item, types.ModuleType):
                if item.__name__ not in seen:
                    self._attributes(item, code, seen | {item.__name__})
            elif not is_library:
                self._describer.value(item)
            elif isinstance(item, torch.Generator):
                raise Undescribable(f"{code.co_name} reads the state of a random generator")
            else:
                _refuse_impure(str(getattr(item, "__module__", None) or module.__name__), code, name)


def _refuse_impure(module: str, code: types.CodeType, name: str = "") -> None:
    if is_library_module(module) and not is_pure(module, name):
        raise Undescribable(f"{code.co_name} uses {f'{module}.{name}'.rstrip('.')}")


def _reads_global(code: types.CodeType, name: str) -> bool:
    """Whether a name stands for a global variable in code, and not only for an attribute."""
    return any(
        instruction.argval == name and instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        for instruction in dis.get_instructions(code)
    )
