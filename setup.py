"""Builds torch_odt's two extension modules against the torch that is installed.

`torch_odt._C` holds the operators. It uses torch's stable ABI only, so one build serves several versions of torch.
`torch_odt._memory_<major>_<minor>` holds the allocator, and how operators are called in a schedule. It uses torch's C++
classes, whose ABI follows torch's minor version; the name carries that version, so that a build for another torch is
recognised instead of loaded.

Set TORCH_ODT_NO_CPP=1 to leave both out.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup

# The oldest torch whose stable ABI has everything that the operators use.
STABLE_ABI_TARGET = "0x020b000000000000"
# What GCC says of vectors as arguments is about functions that others call; none of those takes any.
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi"]
HELP = "install a C++20 compiler and Python's headers, or set TORCH_ODT_NO_CPP=1 to install without compiled parts"


def wants_extensions() -> bool:
    """Whether this run of setup.py compiles anything."""
    return os.environ.get("TORCH_ODT_NO_CPP", "0") in ("", "0") and "sdist" not in sys.argv and os.name == "posix"


def require_compiler() -> None:
    """Stops the build with one sentence unless a minimal C++20 extension compiles."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    includes = sorted({sysconfig.get_path("include"), sysconfig.get_path("platinclude")})
    probe = "#include <Python.h>\n#include <concepts>\ntemplate <std::integral T> T same(T x) { return x; }\n"
    command = [*compiler, "-std=c++20", *(f"-I{path}" for path in includes), "-x", "c++", "-fsyntax-only", "-"]
    try:
        works = subprocess.run(command, input=probe, text=True, capture_output=True).returncode == 0
    except OSError:
        works = False
    if not works:
        raise SystemExit(f"torch_odt cannot be built because {' '.join(compiler)!r} does not compile C++20: {HELP}.")


def sources(folder: str) -> list[str]:
    return sorted(str(path) for path in Path("csrc", folder).glob("*.cpp"))


def headers() -> list[str]:
    return sorted(str(path) for path in Path("csrc").rglob("*.h"))


def extensions() -> dict[str, Any]:
    """The arguments of setup() that make it compile."""
    require_compiler()
    import torch
    from setuptools import Extension
    from torch.utils.cpp_extension import BuildExtension, include_paths, library_paths

    major, minor = torch.__version__.split(".")[:2]
    # As system headers, so that warnings are about this package alone. Debug information is ten times the code.
    flags = [*WARNINGS, "-g0", *(f"-isystem{path}" for path in include_paths())]
    operators = Extension(
        "torch_odt._C",
        [*sources("."), *sources("kernels"), *sources("kernels/int8")],
        depends=headers(),
        library_dirs=library_paths(),
        libraries=["c10", "torch", "torch_cpu"],
        language="c++",
        py_limited_api=True,
        # Clang would not fuse multiply-adds across statements by itself, and kernels/batch_norm.cpp relies on it. GCC
        # would not compare within vectors, because comparing sets flags of the processor that nobody looks at.
        extra_compile_args=[
            *("-O3", "-ffp-contract=fast", "-fno-trapping-math"),
            f"-DTORCH_TARGET_VERSION={STABLE_ABI_TARGET}",
            *flags,
        ],
    )
    memory = Extension(
        f"torch_odt._memory_{major}_{minor}",
        [*sources("memory"), *sources("execute")],
        depends=headers(),
        library_dirs=library_paths(),
        libraries=["c10", "torch_cpu", "torch_python"],
        language="c++",
        extra_compile_args=["-O2", f'-DTORCH_ODT_TORCH_VERSION="{torch.__version__}"', *flags],
    )
    return {"ext_modules": [operators, memory], "cmdclass": {"build_ext": BuildExtension}}


setup(**(extensions() if wants_extensions() else {}))
