"""Loads the compiled parts, once, and knows why when they are missing.

No missing part raises: without an extension the package works in pure Python, and `status()` says what is missing and
why.
Set `TORCH_ODT_DISABLE_EXTENSIONS=1` before the first import to run as if nothing had been compiled.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from torch_odt.errors import OdtWarning

DISABLE_VARIABLE = "TORCH_ODT_DISABLE_EXTENSIONS"
ISA_VARIABLE = "TORCH_ODT_ISA"
REINSTALL = "reinstall torch_odt to build it"


@dataclass(frozen=True)
class ExtensionStatus:
    """Whether one compiled part is in use.

    Attributes:
        name: its import name.
        loaded: it is in use.
        reason: why it is not; None if it is.
    """

    name: str
    loaded: bool
    reason: str | None = None


def _versions_built(folder: Path) -> list[str]:
    """The torch versions that allocator modules in `folder` were built for, such as "2.13"."""
    names = sorted(path.name.split(".")[0] for path in folder.glob("_memory_*_*.so"))
    return [name.removeprefix("_memory_").replace("_", ".") for name in names]


def _why_absent(name: str, folder: Path) -> str:
    built = _versions_built(folder)
    if name == "torch_odt._C" or not built:
        if (folder.parent / "setup.py").exists():
            return (
                f"not built in {folder.parent}, the source folder, which Python finds before an installed torch_odt; "
                "start it elsewhere, or build here: pip install -e ."
            )
        return f"not built; {REINSTALL}"
    return f"built for torch {' and '.join(built)} while torch {torch.__version__} is running; {REINSTALL}"


def _load(public_name: str, module_name: str, folder: Path) -> tuple[ModuleType | None, ExtensionStatus]:
    if os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0"):
        return None, ExtensionStatus(public_name, False, f"disabled by {DISABLE_VARIABLE}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError:
        return None, ExtensionStatus(public_name, False, _why_absent(public_name, folder))
    except Exception as error:  # a broken build must not take the package down with it
        return None, ExtensionStatus(public_name, False, f"does not load: {error}")
    sys.modules[public_name] = module
    return module, ExtensionStatus(public_name, True)


def _memory_module_name() -> str:
    major, minor = torch.__version__.split(".")[:2]
    return f"torch_odt._memory_{major}_{minor}"


_folder = Path(__file__).parent
_kernels, _kernels_status = _load("torch_odt._C", "torch_odt._C", _folder)

memory_module: ModuleType | None
memory_module, _memory_status = _load("torch_odt._memory", _memory_module_name(), _folder)

has_kernels: bool = _kernels is not None


def status() -> dict[str, ExtensionStatus]:
    """The state of every compiled part, by its short name.

    When to choose it: to report on an installation, as `torch-odt doctor` does.

    Returns:
        "_C" (the operators) and "_memory" (the allocator), each with whether it is loaded and, if not, why.

    Example:
        >>> sorted(status())
        ['_C', '_memory']
    """
    return {"_C": _kernels_status, "_memory": _memory_status}


def instruction_set() -> str | None:
    """The instruction set that the operators' kernels use.

    When to choose it: to report on an installation, or to tell measurements of one set from those of another. The
    variable TORCH_ODT_ISA keeps the sets above the one that it names switched off.

    Returns:
        One of `instruction_sets()`; None without kernels.

    Example:
        >>> instruction_set()  # doctest: +SKIP
        'avx2'
    """
    return None if _kernels is None else str(_kernels.instruction_set())


def int8_table() -> str | None:
    """The table of int8 kernels in use: of those that the instruction set holds, the fastest.

    When to choose it: to report on an installation, or to tell measurements of one table from those of another.

    Returns:
        "scalar", "avx2", "avx_vnni", "avx512_vnni", "amx", "neon", "neon_dotprod" or "neon_i8mm"; None without kernels.

    Example:
        >>> int8_table()  # doctest: +SKIP
        'avx512_vnni'
    """
    return None if _kernels is None else str(_kernels.int8_table())


def instruction_sets() -> tuple[str, ...]:
    """All instruction sets that kernels are written for, of every architecture, in the order of preference.

    When to choose it: to see which words TORCH_ODT_ISA takes.

    Returns:
        "scalar" (no vectors in the int8 kernels), "baseline" (what every processor of an architecture has), those of
        Arm, those of x86; empty without kernels.

    Example:
        >>> instruction_sets()  # doctest: +SKIP
        ('scalar', 'baseline', 'neon_dotprod', 'neon_i8mm', 'avx2', 'avx_vnni', 'avx512', 'avx512_vnni', 'amx')
    """
    return () if _kernels is None else tuple(_kernels.instruction_sets())


def why_uncapped() -> str | None:
    """Why TORCH_ODT_ISA has no effect; None if it has, or is not set."""
    word = os.environ.get(ISA_VARIABLE)
    if not word or _kernels is None or word in (names := instruction_sets()):
        return None
    return f"{ISA_VARIABLE} is {word!r}, which is none of {', '.join(names)}: no instruction set is switched off"


if _problem := why_uncapped():
    warnings.warn(_problem, OdtWarning, stacklevel=2)
