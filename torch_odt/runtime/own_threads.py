"""What this process's threads may take of the machine: priority, scheduling, storage, cores.

On Linux all of these belong to a thread, not to the process: OpenMP's workers that are there already are changed as
well, and threads that begin later take after the one that begins them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from torch_odt.memory._files import SYSTEM_ROOT

Scheduling = Literal["normal", "batch", "idle"]
_POLICIES: dict[str, str] = {"normal": "SCHED_OTHER", "batch": "SCHED_BATCH", "idle": "SCHED_IDLE"}


@dataclass
class OwnThreads:
    """Changes of what the process's threads may take, and the way back.

    Attributes:
        notes: what the system has refused, one sentence each.
    """

    root: Path = SYSTEM_ROOT
    notes: list[str] = field(default_factory=list)
    _undo: dict[str, Callable[[int], None]] = field(default_factory=dict)

    def set_nice(self, nice: int) -> None:
        """Lower the priority; a process that is nicer already stays so."""
        if not hasattr(os, "setpriority"):
            self._note(f"nice {nice}: this system has no such priority")
            return
        before = os.getpriority(os.PRIO_PROCESS, 0)
        if nice > before:
            self._change(
                f"nice {nice}",
                lambda thread: os.setpriority(os.PRIO_PROCESS, thread, nice),
                lambda thread: os.setpriority(os.PRIO_PROCESS, thread, before),
            )

    def set_scheduling(self, scheduling: Scheduling) -> None:
        """Let others go first: "batch" when they wake up, "idle" whenever they want to run."""
        if scheduling == "normal":
            return
        if not hasattr(os, "sched_setscheduler") or not hasattr(os, _POLICIES[scheduling]):
            self._note(f'scheduling "{scheduling}": this system does not have it')
            return
        before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
        policy = getattr(os, _POLICIES[scheduling])
        self._change(
            f'scheduling "{scheduling}"',
            lambda thread: os.sched_setscheduler(thread, policy, os.sched_param(0)),
            lambda thread: os.sched_setscheduler(thread, before, parameters),
        )

    def set_idle_storage(self) -> None:
        """Read and write when nobody else does."""
        if not hasattr(psutil, "IOPRIO_CLASS_IDLE"):
            self._note("storage when it is idle: this system has no such priority")
            return
        try:
            before = psutil.Process().ionice()
        except (OSError, psutil.Error) as error:
            self._note(f"storage when it is idle: {error}")
            return
        self._change(
            "storage when it is idle",
            lambda thread: psutil.Process(thread).ionice(psutil.IOPRIO_CLASS_IDLE),
            lambda thread: psutil.Process(thread).ionice(before.ioclass, before.value),
        )

    def set_cores(self, numbers: Iterable[int]) -> None:
        """Run on these cores alone."""
        chosen = frozenset(numbers)
        if not hasattr(os, "sched_setaffinity"):
            self._note(f"cores {sorted(chosen)}: this system does not bind threads to cores")
            return
        before = os.sched_getaffinity(0)
        self._change(
            f"cores {sorted(chosen)}",
            lambda thread: os.sched_setaffinity(thread, chosen),
            lambda thread: os.sched_setaffinity(thread, before),
            kind="cores",
        )

    def restore(self) -> None:
        """Undo what can be undone; the rest is noted. A priority rises again only with privileges."""
        for what, undo in reversed(self._undo.items()):
            self._apply(f"{what}, undone", undo)
        self._undo.clear()

    def _change(
        self, what: str, change: Callable[[int], None], undo: Callable[[int], None], *, kind: str | None = None
    ) -> None:
        if self._apply(what, change):
            self._undo.setdefault(kind or what, undo)

    def _apply(self, what: str, change: Callable[[int], None]) -> bool:
        """Whether it took effect on at least one thread."""
        done = False
        for thread in self._threads():
            try:
                change(thread)
                done = True
            except (ProcessLookupError, psutil.NoSuchProcess):
                # It ended in between.
                continue
            except (OSError, psutil.Error) as error:
                self._note(f"{what}: {getattr(error, 'strerror', None) or error}")
        return done

    def _threads(self) -> list[int]:
        tasks = self.root / "proc/self/task"
        return [int(path.name) for path in tasks.iterdir()] if tasks.is_dir() else [os.getpid()]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
