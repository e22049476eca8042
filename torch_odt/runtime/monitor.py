"""What the system says of memory now: this process, the machine, the control groups above it, and pressure.

Open `Reading` first: everything that policies decide by is in it. What a system does not show is None there, never 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

from torch_odt.memory._control_group import ControlGroup, ControlGroupLevel, control_groups
from torch_odt.memory._files import SYSTEM_ROOT, read_text
from torch_odt.memory._process import limits_of, process_bytes

__all__ = ["ControlGroupReading", "Monitor", "Pressure", "Reading", "read_pressure", "read_system"]

INTERVAL_SECONDS = 1.0
_KINDS = ("memory", "cpu", "io")


@dataclass(frozen=True)
class Pressure:
    """Shares of the last ten seconds that processes have waited for something (PSI), from 0 to 1.

    Attributes:
        some: at least one process waited.
        full: all of them did, so that nothing went on; None where the kernel does not say, as for processors.
        stalled_seconds: how long `some` has lasted in all, since the system or the group began.
    """

    some: float
    full: float | None
    stalled_seconds: float


@dataclass(frozen=True)
class ControlGroupReading:
    """The tightest control group above this process.

    Attributes:
        limit_bytes: what its processes may take together.
        used_bytes: what they take, without pages of files that the kernel can drop.
        events: how often it came to "high", "max", "oom", "oom_kill" (version 2) or "failcnt", "oom_kill" (version 1).
        pressure: inside the group, by kind: "memory", "cpu", "io". Version 2 alone has it.
    """

    folder: Path
    limit_bytes: int
    used_bytes: int
    events: dict[str, int]
    pressure: dict[str, Pressure]


@dataclass(frozen=True)
class Reading:
    """What the system said at one moment.

    Attributes:
        at_seconds: the moment, on `time.monotonic`'s clock.
        process_bytes: what this process holds and the kernel cannot take back.
        resident_bytes: what of this process is in memory (RSS), with pages of files that the kernel can drop.
        available_bytes: how many more it may have: the smallest of `limits`.
        limits: how many more, by who limits: "system", "cgroup_v2", "cgroup_v1", "rlimit_as", "rlimit_data".
        total_bytes: the machine's memory.
        swap_used_bytes: what lies in swap; None where there is no swap.
        control_group: the tightest one that limits; None where none does.
        pressure: of the whole machine, by kind: "memory", "cpu", "io". Absent kinds are not known.
    """

    at_seconds: float
    process_bytes: int
    available_bytes: int
    limits: dict[str, int]
    total_bytes: int
    resident_bytes: int | None = None
    swap_used_bytes: int | None = None
    control_group: ControlGroupReading | None = None
    pressure: dict[str, Pressure] = field(default_factory=dict)


def read_system(*, root: Path = SYSTEM_ROOT) -> Reading:
    """Ask the system now.

    Args:
        root: where `proc` and `sys` lie, for tests.

    Example:
        >>> reading = read_system()
        >>> reading.available_bytes == min(reading.limits.values())
        True
    """
    groups = control_groups(root=root)
    system, swap = psutil.virtual_memory(), psutil.swap_memory()
    limits = limits_of(int(system.available), groups, root=root)
    return Reading(
        at_seconds=time.monotonic(),
        process_bytes=process_bytes(root=root),
        available_bytes=min(limits.values()),
        limits=limits,
        resident_bytes=psutil.Process().memory_info().rss,
        total_bytes=system.total,
        swap_used_bytes=swap.used if swap.total else None,
        control_group=_tightest_group(groups),
        pressure=read_pressure(root=root),
    )


def read_pressure(*, root: Path = SYSTEM_ROOT) -> dict[str, Pressure]:
    """Pressure of the whole machine, by kind: "memory", "cpu", "io". Absent kinds are not known.

    Args:
        root: where `proc` lies, for tests.

    Example:
        >>> set(read_pressure()) <= {"memory", "cpu", "io"}
        True
    """
    return _pressures(root / "proc/pressure", "{}")


class Monitor:
    """Reads the system again and again, in a thread of its own, and remembers the last reading.

    Choose it where something is to follow what the system has left: a budget that changes while training runs, a line
    that is shown. A reading takes about a millisecond, so one each second is less than 0.5 % of a core.

    Args:
        interval_seconds: between two readings.
        read: what is asked; a test gives a function of its own.
        on_reading: called with every reading, in the monitor's thread. An exception in it ends the monitor, which
            `latest` tells until `start` begins again.

    Raises:
        ValueError: `interval_seconds` is not more than 0.

    Example:
        >>> with Monitor() as monitor:
        ...     monitor.latest.process_bytes > 0
        True
    """

    def __init__(
        self,
        interval_seconds: float = INTERVAL_SECONDS,
        *,
        read: Callable[[], Reading] = read_system,
        on_reading: Callable[[Reading], object] | None = None,
    ) -> None:
        if not interval_seconds > 0:
            raise ValueError(f"interval_seconds must be more than 0, not {interval_seconds}")
        self._interval_seconds = interval_seconds
        self._read = read
        self._on_reading = on_reading
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._latest: Reading | None = None
        self._error: Exception | None = None

    @property
    def latest(self) -> Reading:
        """The last reading; a fresh one while the monitor is not running.

        Raises:
            RuntimeError: the monitor's thread ended with an error, which is the cause.
        """
        if self._error is not None:
            raise RuntimeError("the monitor has stopped") from self._error
        if self._thread is None or self._latest is None:
            return self._read()
        return self._latest

    def start(self) -> None:
        """Begin to read, also after an error; does nothing while it reads."""
        if self._error is not None:
            self.stop()
        if self._thread is None:
            self._error = None
            self._stopped.clear()
            self._sample()
            self._thread = threading.Thread(target=self._watch, name="torch_odt monitor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread; does nothing if there is none."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Monitor:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _watch(self) -> None:
        try:
            while not self._stopped.wait(self._interval_seconds):
                self._sample()
        except Exception as error:
            self._error = error

    def _sample(self) -> None:
        self._latest = self._read()
        if self._on_reading is not None:
            self._on_reading(self._latest)


def _tightest_group(groups: Sequence[ControlGroup]) -> ControlGroupReading | None:
    levels = [
        (level.headroom_bytes, number, group.version, level)
        for number, group in enumerate(groups)
        for level in group.levels
        if level.headroom_bytes is not None
    ]
    if not levels:
        return None
    _, _, version, level = min(levels, key=lambda found: found[:2])
    assert level.limit_bytes is not None and level.used_bytes is not None
    return ControlGroupReading(
        folder=level.folder,
        limit_bytes=level.limit_bytes,
        used_bytes=level.used_bytes,
        events=_events(version, level),
        pressure=_pressures(level.folder, "{}.pressure") if version == "cgroup_v2" else {},
    )


def _events(version: str, level: ControlGroupLevel) -> dict[str, int]:
    """How often the group was short of memory."""
    if version == "cgroup_v2":
        return _numbers(read_text(level.folder / "memory.events"))
    failures = read_text(level.folder / "memory.failcnt")
    events = {} if failures is None else _numbers(f"failcnt {failures}")
    kills = _numbers(read_text(level.folder / "memory.oom_control")).get("oom_kill")
    return events if kills is None else events | {"oom_kill": kills}


def _numbers(text: str | None) -> dict[str, int]:
    pairs = [line.split() for line in (text or "").splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _pressures(folder: Path, name: str) -> dict[str, Pressure]:
    found = {kind: _pressure(read_text(folder / name.format(kind))) for kind in _KINDS}
    return {kind: pressure for kind, pressure in found.items() if pressure is not None}


def _pressure(text: str | None) -> Pressure | None:
    """From lines such as "some avg10=1.50 avg60=0.10 avg300=0.00 total=12345"; None where there are none."""
    lines: dict[str, dict[str, float]] = {}
    for line in (text or "").splitlines():
        what, *pairs = line.split()
        try:
            lines[what] = {name: float(value) for name, value in (pair.split("=") for pair in pairs)}
        except ValueError:
            return None
    some = lines.get("some", {})
    if "avg10" not in some:
        return None
    full = lines.get("full", {}).get("avg10")
    return Pressure(some["avg10"] / 100, None if full is None else full / 100, some.get("total", 0.0) / 1e6)
