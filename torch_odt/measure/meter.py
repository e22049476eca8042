"""What all meters have in common, and how something that cannot be measured is said."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Absent:
    """In the place of a number that there is not, never 0.

    Attributes:
        reason: why, in words: that the device has no such sensor, or that this user may not read it.
    """

    reason: str

    def __str__(self) -> str:
        return f"absent ({self.reason})"


Quantity = int | float | Absent


class Meter(Protocol):
    """Something that measures over a window of time.

    A window calls `begin` once, `poll` now and then from a thread of its own, and `end` once, which polls a last time.

    Attributes:
        source: where the numbers come from: "rapl", "proc", "cpufreq".
    """

    source: str

    def begin(self) -> None:
        """Start anew."""
        ...

    def poll(self) -> None:
        """Look: at what may wrap around, and at what has a mean and a highest value."""
        ...

    def end(self) -> dict[str, Quantity]:
        """What was measured, by names that end in their unit ("energy_joules")."""
        ...


def read_text(path: Path) -> str | Absent:
    """What a file of the kernel's says, or why that cannot be known."""
    try:
        return path.read_text().strip()
    except PermissionError:
        return Absent(f"no permission to read {path}")
    except (FileNotFoundError, NotADirectoryError):
        return Absent(f"there is no {path}")
    except OSError as error:
        return Absent(f"{path} cannot be read: {error.strerror}")


def read_number(path: Path) -> int | Absent:
    """The whole number that a file of the kernel's says, or why that cannot be known."""
    text = read_text(path)
    if isinstance(text, Absent):
        return text
    try:
        return int(text)
    except ValueError:
        return Absent(f"{path} says {text!r}, which is no number")


class Gauge:
    """Readings of something that goes up and down: their mean and the highest.

    Example:
        >>> gauge = Gauge()
        >>> for celsius in (40.0, 50.0):
        ...     gauge.add(celsius)
        >>> gauge.mean, gauge.highest
        (45.0, 50.0)
    """

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0
        self._highest = float("-inf")
        self._reason = "nothing was read"

    def add(self, reading: Quantity) -> None:
        if isinstance(reading, Absent):
            self._reason = reading.reason
            return
        self._sum += reading
        self._count += 1
        self._highest = max(self._highest, float(reading))

    @property
    def mean(self) -> Quantity:
        return self._sum / self._count if self._count else Absent(self._reason)

    @property
    def highest(self) -> Quantity:
        return self._highest if self._count else Absent(self._reason)
