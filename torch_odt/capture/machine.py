"""What a measurement depends on besides the op: the machine, and torch's settings."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

# What makes one CPU of a family faster at training than another.
_NOTABLE_FEATURES = (
    "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16", "asimddp", "i8mm", "bf16", "sve", "rvv",
)  # fmt: skip

_LEAST_CACHE_BYTES = 4 << 20
_MOST_CACHE_BYTES = 64 << 20


@cache
def machine_name() -> str:
    """The CPU's model, the cores that this process may use, and the instruction sets that matter.

    Example:
        >>> machine_name()  # doctest: +SKIP
        'Cortex-A72, 4 cores, DEFAULT'
    """
    model, features = _cpu()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    capability = torch.backends.cpu.get_cpu_capability()
    notable = [name for name in _NOTABLE_FEATURES if name in features]
    return ", ".join([model, f"{cores} core{'s' if cores != 1 else ''}", " ".join([capability, *notable])])


@cache
def cache_bytes(root: Path = Path("/")) -> int:
    """The last-level cache: what has been touched after so many other bytes is read from memory again.

    Between 4 and 64 MiB: the least where the system does not say, the most where a large cache is many processes'.
    """
    folders = (root / "sys/devices/system/cpu/cpu0/cache").glob("index*")
    sizes = [_size_of_cache(folder / "size") for folder in folders]
    return min(max([_LEAST_CACHE_BYTES, *sizes]), _MOST_CACHE_BYTES)


def _size_of_cache(path: Path) -> int:
    """From text such as "32768K"; 0 where there is none."""
    try:
        number = path.read_text().strip().removesuffix("K")
    except OSError:
        return 0
    return int(number) * 1024 if number.isdigit() else 0


def settings_name() -> str:
    """The settings of torch that change what an op costs, as they are now."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to answer when its newer interface was used to set it
        precision = "mixed"
    parts = [
        f"torch {torch.__version__}",
        f"{torch.get_num_threads()} threads",
        f"matmul {precision}",
        f"mkldnn {'on' if torch.backends.mkldnn.enabled else 'off'}",
    ]
    if torch.are_deterministic_algorithms_enabled():
        parts.append("deterministic")
    return ", ".join(parts)


def _cpu() -> tuple[str, frozenset[str]]:
    """Model name and feature flags."""
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip(), frozenset()
        except (OSError, subprocess.CalledProcessError):
            return platform.machine(), frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    entries: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        entries.setdefault(key.strip().lower(), value.strip())
    # Arm kernels name the model of the board, if anything, on lines of their own.
    model = entries.get("model name") or entries.get("hardware") or entries.get("model") or _arm_part(entries)
    features = frozenset((entries.get("flags") or entries.get("features") or "").split())
    return model or platform.machine(), features


def _arm_part(entries: dict[str, str]) -> str:
    part = entries.get("cpu part")
    return f"{platform.machine()} part {part}" if part else ""
