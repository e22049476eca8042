"""How a cell's process ends: with the one that started it, and for want of memory or for another reason."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
from pathlib import Path

import torch

from torch_odt.errors import InfeasibleBudget
from torch_odt.memory._control_group import control_groups
from torch_odt.memory._files import SYSTEM_ROOT, field, read_text
from torch_odt.runtime.monitor import read_pressure

_PR_SET_PDEATHSIG = 1
# Of the last ten seconds; a process of a machine that has memory left waits for none.
_SHORT_SHARE = 0.01
_TEXTS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "MemoryError",
    "OutOfMemoryError",
)


def end_with_parent() -> None:
    """From now on this process ends when the one that started it does, also by SIGKILL; on Linux only."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It has ended in between.
        os.kill(os.getpid(), signal.SIGKILL)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short: of the machine, of a device, of a limit or of a budget."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, InfeasibleBudget)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def says_out_of_memory(text: str) -> bool:
    """Whether a message is one of those by which torch, C++, Python and MPS say that memory was short."""
    return any(known.lower() in text.lower() for known in _TEXTS)


class Shortage:
    """Made before a process starts: whether the system killed it for want of memory.

    Args:
        root: where `proc` and `sys` lie, for tests.
    """

    def __init__(self, root: Path = SYSTEM_ROOT) -> None:
        self._root = root
        self._kills = self._count_kills()

    def evidence(self) -> str:
        """What shows that memory was short; empty where nothing does."""
        kills = self._count_kills()
        if any(count > self._kills.get(who, count) for who, count in kills.items()):
            return "the system killed the process for want of memory"
        pressure = read_pressure(root=self._root).get("memory")
        if pressure is not None and pressure.some >= _SHORT_SHARE:
            return "the process was killed while memory was short"
        return ""

    def _count_kills(self) -> dict[str, int]:
        """Of this process's control groups and of the machine, where they are counted."""
        counts = {"machine": field(read_text(self._root / "proc/vmstat"), "oom_kill")}
        for group in control_groups(root=self._root):
            file = "memory.events" if group.version == "cgroup_v2" else "memory.oom_control"
            for level in group.levels:
                counts[str(level.folder)] = field(read_text(level.folder / file), "oom_kill")
        return {who: count for who, count in counts.items() if count is not None}
