"""Processes in which torch_odt's int8 kernels, and torch itself, use one instruction set."""

from __future__ import annotations

import os
import subprocess
import sys

SETS = ("avx2", "avx_vnni", "avx512_vnni", "amx")
# What keeps torch to a set: its own kernels, oneDNN's, MKL's. AVX-VNNI has no name in torch of its own.
_TORCH_CAPS = {
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx_vnni": ("avx2", "AVX2_VNNI", "AVX2"),
    "avx512_vnni": ("avx512", "AVX512_CORE_VNNI", "AVX512"),
    "amx": ("avx512", "AVX512_CORE_AMX", "AVX512"),
}


def environment_of(used: str, threads: int) -> dict[str, str]:
    """The environment of a process that is kept to a set."""
    aten, onednn, mkl = _TORCH_CAPS[used]
    caps = {"TORCH_ODT_ISA": used, "ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    return {**os.environ, **caps, "MKL_ENABLE_INSTRUCTIONS": mkl, "OMP_NUM_THREADS": str(threads)}


def require_set(wanted: str) -> None:
    """End this process with a message unless the kernels use a set."""
    from torch_odt import _extensions

    used = _extensions.instruction_set()
    if used != wanted:
        raise SystemExit(f"the kernels use {used}, not {wanted}")


def sets_here() -> list[str]:
    """The sets that this processor has."""
    return [name for name in SETS if _set_under(name) == name]


def _set_under(cap: str) -> str:
    """The set that kernels use if they may use none behind this one: another where the processor lacks it."""
    ask = "from torch_odt import _extensions; print(_extensions.instruction_set())"
    environment = {**os.environ, "TORCH_ODT_ISA": cap}
    found = subprocess.run([sys.executable, "-c", ask], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return found.stdout.strip()
