"""Which Python code belongs to torch, to Python or to us, and what of it looks at the world outside.

Such code changes with a version, which is easily compared. All other code is the user's and may change at any time.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch

# torch and what it imports: this code runs while a step is traced.
_NAMES = frozenset(
    ("torch", "torch_odt", "torchgen", "functorch", "numpy", "sympy", "mpmath", "networkx", "typing_extensions",
     "opt_einsum", "jinja2", "markupsafe", "fsspec", "filelock", "optree", "setuptools", "_distutils_hack")
)  # fmt: skip
_PACKAGES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_PYTHON = tuple(f"{folder}{os.sep}" for folder in (sysconfig.get_path("stdlib"), Path(os.__file__).parent))
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")

# Modules of Python that compute from their arguments alone; a leading underscore is their part in C.
_PURE = frozenset(
    ("abc", "argparse", "array", "bisect", "builtins", "cmath", "collections", "contextlib", "copy", "copyreg",
     "dataclasses", "enum", "fractions", "functools", "future__", "heapq", "inspect", "itertools", "keyword", "logging",
     "math", "numbers", "operator", "re", "reprlib", "statistics", "string", "struct", "textwrap", "types", "typing",
     "warnings", "weakref")
)  # fmt: skip
# What reads files, process, clock or random state, or can reach any name at all.
_IMPURE_MODULES = ("torch.random", "torch.distributed", "torch.multiprocessing", "torch.hub", "torch.serialization",
                   "torch.utils.data", "numpy.random")  # fmt: skip
_IMPURE_NAMES = {
    "builtins": ("open", "eval", "exec", "compile", "input", "breakpoint", "__import__", "globals", "id", "hash"),
    "numpy": ("load", "fromfile", "memmap", "loadtxt", "genfromtxt"),
    "torch": ("from_file",),
}
_HEAP_TYPE = 1 << 9


@functools.cache
def is_library_file(path: str) -> bool:
    """Whether code from this file is torch's, Python's or ours."""
    if path.startswith(("<frozen ", *_PACKAGES)):
        return True
    installed = _INSTALLED.search(path)
    return path.startswith(_PYTHON) if installed is None else installed[1] in _NAMES


def is_installed_file(path: str) -> bool:
    """Whether a file belongs to an installed package."""
    return _INSTALLED.search(path) is not None


def is_library_module(name: str) -> bool:
    """Whether the module of this name is torch's, Python's or ours."""
    top = name.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return top in _NAMES
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or is_library_file(file)


def is_library_code(code: types.CodeType, module: str) -> bool:
    """Whether a code object that runs in the namespace of `module` is torch's, Python's or ours."""
    if is_generated(code):
        # Methods of dataclasses belong to the class's module; those of named tuples know only their fields.
        return is_library_module(module) or module.startswith("namedtuple_")
    return is_library_file(code.co_filename)


def is_generated(code: types.CodeType) -> bool:
    """Whether code was compiled from a string, not from a file."""
    return code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen ")


def is_library_class(cls: type) -> bool:
    """Whether a class is torch's, Python's or ours: written there, not made there at run time."""
    if not cls.__flags__ & _HEAP_TYPE:
        return True
    return is_library_module(cls.__module__) and is_importable(cls, cls.__module__)


def is_importable(value: Any, module: str) -> bool:
    """Whether a class or function stands in a module under its own name."""
    found: Any = sys.modules.get(module)
    for name in value.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is value


def is_pure(module: str, name: str = "") -> bool:
    """Whether something of torch or Python depends on nothing but its arguments and torch's settings."""
    top = module.partition(".")[0]
    if name in _IMPURE_NAMES.get(top, ()) or any(f"{module}.".startswith(f"{m}.") for m in _IMPURE_MODULES):
        return False
    return top in _NAMES or top.lstrip("_") in _PURE
