"""Whether other programs want the processor: what changes between two looks, never an absolute number."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from torch_odt.memory._files import SYSTEM_ROOT, read_text
from torch_odt.runtime.cores import allowed_numbers
from torch_odt.runtime.monitor import read_pressure

_MOVED_CORES = 0.5
_MOVED_SHARE = 0.2


@dataclass(frozen=True)
class Load:
    """What others did with the processor for a while. What the system does not show is None.

    Attributes:
        others_cores: how many of the cores that this process may use others kept busy, on the average.
        delay_share: of the time in which this process's threads wanted to run, the share in which they had to wait.
        pressure_share: of the time, the share in which some process waited for a core.
    """

    others_cores: float | None = None
    delay_share: float | None = None
    pressure_share: float | None = None

    def differs_from(self, other: Load) -> bool:
        """Whether a neighbour has come or gone, by the first sign that the system shows.

        Waiting depends on this process's own threads, so it is compared under the same settings alone.
        """
        if self.others_cores is not None and other.others_cores is not None:
            moved = abs(self.others_cores - other.others_cores) > _MOVED_CORES
        else:
            moved = _moved(self.pressure_share, other.pressure_share)
        return moved or _moved(self.delay_share, other.delay_share)


def mean_load(loads: Sequence[Load]) -> Load:
    """The load over several looks; what none of them shows is None.

    Example:
        >>> mean_load([Load(1.0), Load(2.0)]).others_cores
        1.5
    """

    def mean_of(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    return Load(
        others_cores=mean_of(load.others_cores for load in loads),
        delay_share=mean_of(load.delay_share for load in loads),
        pressure_share=mean_of(load.pressure_share for load in loads),
    )


class Neighbours:
    """Looks at the load again and again.

    Args:
        root: where `proc` lies, for tests.
        clock: seconds, for tests.
        own_seconds: the processor's seconds that this process has taken, for tests.
        numbers: the cores to look at; None takes those that this process may use now.

    Example:
        >>> Neighbours().look().others_cores is None  # nothing lies between two looks yet
        True
    """

    def __init__(
        self,
        *,
        root: Path = SYSTEM_ROOT,
        clock: Callable[[], float] = time.monotonic,
        own_seconds: Callable[[], float] = time.process_time,
        numbers: frozenset[int] | None = None,
    ) -> None:
        self._root = root
        self._clock = clock
        self._own_seconds = own_seconds
        self._numbers = allowed_numbers() if numbers is None else numbers
        self._last: _Counters | None = None

    def look(self) -> Load:
        """The load since the last look; nothing is known at the first."""
        now, last = self._count(), self._last
        self._last = now
        if last is None or now.at_seconds <= last.at_seconds:
            return Load()
        seconds = now.at_seconds - last.at_seconds
        own = now.own_seconds - last.own_seconds
        busy = _difference(now.busy_seconds, last.busy_seconds)
        ran, waited = (
            _difference(now.ran_seconds, last.ran_seconds),
            _difference(now.waited_seconds, last.waited_seconds),
        )
        stalled = _difference(now.stalled_seconds, last.stalled_seconds)
        return Load(
            others_cores=None if busy is None else max(0.0, busy - own) / seconds,
            delay_share=None
            if ran is None or waited is None or ran + waited <= 0
            else max(0.0, waited / (ran + waited)),
            pressure_share=None if stalled is None else min(1.0, stalled / seconds),
        )

    def _count(self) -> _Counters:
        pressure = read_pressure(root=self._root).get("cpu")
        ran, waited = self._own_threads()
        return _Counters(
            at_seconds=self._clock(),
            own_seconds=self._own_seconds(),
            busy_seconds=self._busy_seconds(),
            ran_seconds=ran,
            waited_seconds=waited,
            stalled_seconds=None if pressure is None else pressure.stalled_seconds,
        )

    def _busy_seconds(self) -> float | None:
        """Of all cores that this process may use, by everybody."""
        ticks, found = 0, False
        for line in (read_text(self._root / "proc/stat") or "").splitlines():
            name, *values = line.split()
            number = name.removeprefix("cpu")
            if not name.startswith("cpu") or not number.isdigit():
                continue
            if self._numbers is None or int(number) in self._numbers:
                user, nice, system, _idle, _iowait, *interrupts = (int(value) for value in values[:8])
                ticks += user + nice + system + sum(interrupts)
                found = True
        return ticks / os.sysconf("SC_CLK_TCK") if found else None

    def _own_threads(self) -> tuple[float | None, float | None]:
        """Seconds that this process's threads ran, and that they waited for a core."""
        texts = [read_text(path) for path in (self._root / "proc/self/task").glob("*/schedstat")]
        pairs = [text.split()[:2] for text in texts if text]
        if not pairs:
            return None, None
        return sum(int(ran) for ran, _ in pairs) / 1e9, sum(int(waited) for _, waited in pairs) / 1e9


@dataclass(frozen=True)
class _Counters:
    at_seconds: float
    own_seconds: float
    busy_seconds: float | None
    ran_seconds: float | None
    waited_seconds: float | None
    stalled_seconds: float | None


def _difference(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before


def _moved(now: float | None, before: float | None) -> bool:
    return now is not None and before is not None and abs(now - before) > _MOVED_SHARE
