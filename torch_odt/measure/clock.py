"""Time, and what the kernel counts for this process: faults, switches, waiting."""

from __future__ import annotations

import resource
import time
from pathlib import Path

from torch_odt.measure.meter import Absent, Quantity, read_text
from torch_odt.memory._files import SYSTEM_ROOT
from torch_odt.runtime.monitor import read_pressure


class Clock:
    """Seconds on the wall, and of processors: this process's, all threads together."""

    source = "clock"

    def begin(self) -> None:
        self._wall, self._user, self._system = _times()

    def poll(self) -> None:
        """Clocks run by themselves."""

    def end(self) -> dict[str, Quantity]:
        wall, user, system = _times()
        return {
            "wall_seconds": wall - self._wall,
            "user_seconds": user - self._user,
            "system_seconds": system - self._system,
        }


class Events:
    """Page faults and context switches of this process."""

    source = "getrusage"

    def begin(self) -> None:
        self._before = resource.getrusage(resource.RUSAGE_SELF)

    def poll(self) -> None:
        """The kernel counts."""

    def end(self) -> dict[str, Quantity]:
        now, before = resource.getrusage(resource.RUSAGE_SELF), self._before
        return {
            "minor_page_faults": now.ru_minflt - before.ru_minflt,
            "major_page_faults": now.ru_majflt - before.ru_majflt,
            "voluntary_context_switches": now.ru_nvcsw - before.ru_nvcsw,
            "involuntary_context_switches": now.ru_nivcsw - before.ru_nivcsw,
        }


class Pressure:
    """How long processes of this machine waited for a processor, for memory or for storage (PSI)."""

    source = "psi"

    def __init__(self, root: Path = SYSTEM_ROOT) -> None:
        self._root = root

    def begin(self) -> None:
        self._before = read_pressure(root=self._root)

    def poll(self) -> None:
        """The kernel counts."""

    def end(self) -> dict[str, Quantity]:
        now = read_pressure(root=self._root)
        found: dict[str, Quantity] = {}
        for kind in ("cpu", "memory", "io"):
            name = f"{kind}_stalled_seconds"
            if kind in now and kind in self._before:
                found[name] = now[kind].stalled_seconds - self._before[kind].stalled_seconds
            else:
                found[name] = self._why(kind)
        return found

    def _why(self, kind: str) -> Absent:
        path = self._root / "proc/pressure" / kind
        text = read_text(path)
        # A kernel whose PSI is switched off has the files, and reads of them are "not supported".
        return text if isinstance(text, Absent) else Absent(f"{path} does not say how long was waited")


def _times() -> tuple[float, float, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), usage.ru_utime, usage.ru_stime
