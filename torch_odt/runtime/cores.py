"""The processor's cores by kind, and the sets of them that are worth a try.

Linux alone shows its cores. What it does not show of one (its clock in a virtual machine) is None.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch_odt.memory._files import SYSTEM_ROOT, read_number, read_text

Kind = Literal["big", "little"]

# Cores of one kind differ a little in their highest clocks.
_LITTLE_SHARE = 0.8


@dataclass(frozen=True)
class Core:
    """One core, as the scheduler counts them.

    Attributes:
        kind: "little" where its speed is well below the fastest core's; all are "big" where no speed is known.
        siblings: the numbers that share one piece of hardware (SMT), its own among them.
        allowed: this process may run on it (affinity, and with it the control group's set).
        max_hertz: its highest clock.
        capacity: its speed as the scheduler sees it; the fastest core has 1024.
    """

    number: int
    kind: Kind
    siblings: frozenset[int]
    allowed: bool
    max_hertz: int | None = None
    capacity: int | None = None


def read_cores(*, root: Path = SYSTEM_ROOT, allowed: Iterable[int] | None = None) -> tuple[Core, ...]:
    """The cores that are online, by number; none where the system does not show them.

    Args:
        root: where `sys` lies, for tests.
        allowed: the numbers that this process may run on; None asks the system.

    Example:
        >>> all(core.number in core.siblings for core in read_cores())
        True
    """
    folder = root / "sys/devices/system/cpu"
    online = _numbers(read_text(folder / "online"))
    may_use = allowed_numbers() if allowed is None else frozenset(allowed)
    clocks = {number: read_number(folder / f"cpu{number}/cpufreq/cpuinfo_max_freq") for number in online}
    capacities = {number: read_number(folder / f"cpu{number}/cpu_capacity") for number in online}
    little = _little(capacities) or _little(clocks)
    return tuple(
        Core(
            number=number,
            kind="little" if number in little else "big",
            siblings=_numbers(read_text(folder / f"cpu{number}/topology/thread_siblings_list")) | {number},
            allowed=may_use is None or number in may_use,
            max_hertz=None if (kilohertz := clocks[number]) is None else kilohertz * 1000,
            capacity=capacities[number],
        )
        for number in sorted(online)
    )


def allowed_numbers() -> frozenset[int] | None:
    """The cores that the calling thread may run on; None where the system has no such thing."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def core_sets(cores: Iterable[Core]) -> tuple[frozenset[int], ...]:
    """Sets that are worth a try: all allowed ones, those of one kind, and one of each group of siblings.

    Example:
        >>> one = frozenset({0})
        >>> core_sets([Core(0, "big", one, allowed=True)])
        (frozenset({0}),)
    """
    allowed = [core for core in cores if core.allowed]
    big = [core for core in allowed if core.kind == "big"]
    little = [core for core in allowed if core.kind == "little"]
    candidates = [_set(part) for part in (allowed, big, little, _apart(allowed), _apart(big))]
    return tuple(dict.fromkeys(numbers for numbers in candidates if numbers))


def _set(cores: Iterable[Core]) -> frozenset[int]:
    return frozenset(core.number for core in cores)


def _apart(cores: list[Core]) -> list[Core]:
    """The first of each group of siblings."""
    numbers = _set(cores)
    return [core for core in cores if core.number == min(core.siblings & numbers)]


def _little(speeds: dict[int, int | None]) -> frozenset[int]:
    known = [speed for speed in speeds.values() if speed]
    if not known:
        return frozenset()
    bound = _LITTLE_SHARE * max(known)
    return frozenset(number for number, speed in speeds.items() if speed and speed < bound)


def _numbers(text: str | None) -> frozenset[int]:
    """From a list such as "0-3,8"."""
    found: set[int] = set()
    for part in (text or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last if last.isdigit() else first) + 1))
    return frozenset(found)
