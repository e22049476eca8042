"""Reasons to wait between two steps: a signal, a predicate, a hot processor, an empty battery."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import psutil

from torch_odt.runtime.signals import SignalWatch

_LOOK_SECONDS = 5.0
_WAIT_SECONDS = 0.2
# Where training goes on at the very limit, it stops again at once.
_COOLER_CELSIUS = 5.0
_FULLER_PERCENT = 5.0
# Drivers whose sensors are the processor's, by what their names hold; a board's own zone stands for it where there is
# none of these.
_PROCESSOR = ("coretemp", "k8temp", "k10temp", "zenpower", "cpu", "soc", "x86_pkg")
_BOARD = ("acpitz", "thermal")


@dataclass(frozen=True)
class Battery:
    """A battery's state.

    Attributes:
        percent: of a full charge.
        plugged: the supply carries the machine; None where that is not known.
    """

    percent: float
    plugged: bool | None


def read_celsius() -> float | None:
    """The processor's hottest sensor; of all sensors where its own cannot be told; None where there is none.

    A disk is often hotter than the processor, and no pause cools it.
    """
    # Absent on some systems.
    read = getattr(psutil, "sensors_temperatures", None)
    found = {
        name.lower(): [entry.current for entry in entries if entry.current is not None]
        for name, entries in (read() if read else {}).items()
    }
    for known in (_PROCESSOR, _BOARD, ("",)):
        celsius = [each for name, values in found.items() if any(part in name for part in known) for each in values]
        if celsius:
            return max(celsius)
    return None


def read_battery() -> Battery | None:
    """The battery; None where there is none."""
    read = getattr(psutil, "sensors_battery", None)
    found = read() if read else None
    return None if found is None else Battery(found.percent, found.power_plugged)


@dataclass
class Pauses:
    """When to wait, and the waiting.

    Args:
        when: True while training is to wait.
        above_celsius: wait above this, until it is five degrees less.
        below_battery_percent: wait below this, until it is five percent more or the machine is plugged in.
        celsius, battery: the sensors; a test gives its own.
        clock, sleep: a test gives its own.

    Attributes:
        notes: limits that cannot be watched here.
        paused_seconds: how long training has waited in all.
    """

    when: Callable[[], bool] | None = None
    above_celsius: float | None = None
    below_battery_percent: float | None = None
    celsius: Callable[[], float | None] = read_celsius
    battery: Callable[[], Battery | None] = read_battery
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    notes: list[str] = field(default_factory=list)
    paused_seconds: float = 0.0
    _by_signal: bool = False
    _is_hot: bool = False
    _is_empty: bool = False
    _looked_seconds: float | None = None
    _previous_handlers: dict[int, Any] = field(default_factory=dict)
    _ends: SignalWatch = field(default_factory=SignalWatch)

    def __post_init__(self) -> None:
        if self.above_celsius is not None and self.celsius() is None:
            self.notes.append("no temperature can be read here: its limit is not watched")
        if self.below_battery_percent is not None and self.battery() is None:
            self.notes.append("no battery can be read here: its limit is not watched")

    def listen(self, pause: int, resume: int) -> None:
        """Wait from one signal to the other; what handled them before does so again after `ignore`."""
        if threading.current_thread() is not threading.main_thread():
            self.notes.append("signals reach the main thread alone: pausing by signal is off")
            return
        for number, handler in ((pause, self._pause), (resume, self._resume)):
            self._previous_handlers[number] = signal.signal(number, handler)

    def ignore(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous_handlers.items():
            # None stands for a handler that was not made in Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers.clear()

    def reason(self) -> str | None:
        """Why training is to wait now; None where it is not."""
        if self._by_signal:
            return "a signal"
        if self.when is not None and self.when():
            return "the caller's condition"
        self._look()
        if self._is_hot:
            return f"a temperature above {self.above_celsius} degrees Celsius"
        return f"a battery below {self.below_battery_percent} percent" if self._is_empty else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, a signal that asks the process to end is seen whenever it comes, not only while training waits."""
        with SignalWatch() as self._ends:
            yield

    def wait(self, on_pause: Callable[[str], object]) -> bool:
        """Return when nothing speaks against the next step; sleeps until then.

        When SIGTERM or SIGINT has come, and whoever handles it has only taken note, it returns at once: the process is
        to end, and after a step there is a place for that.

        Args:
            on_pause: called with the reason before a wait begins.

        Returns:
            Whether there was a reason to wait.
        """
        is_asked_to_end, self._ends.has_seen = self._ends.has_seen, False
        reason = self.reason()
        if reason is None or is_asked_to_end:
            return False
        began_seconds = self.clock()
        on_pause(reason)
        # Whoever takes note may have come later than those that `watching` knows.
        with SignalWatch() as ends:
            while self.reason() is not None and not ends.has_seen:
                self.sleep(_WAIT_SECONDS)
        self._ends.has_seen = False
        self.paused_seconds += self.clock() - began_seconds
        return True

    def _look(self) -> None:
        now = self.clock()
        if self._looked_seconds is not None and now - self._looked_seconds < _LOOK_SECONDS:
            return
        self._looked_seconds = now
        if self.above_celsius is not None:
            celsius = self.celsius()
            limit = self.above_celsius - (_COOLER_CELSIUS if self._is_hot else 0.0)
            self._is_hot = celsius is not None and celsius > limit
        if self.below_battery_percent is not None:
            battery = self.battery()
            percent = self.below_battery_percent + (_FULLER_PERCENT if self._is_empty else 0.0)
            # Nothing is fuller than full.
            self._is_empty = battery is not None and not battery.plugged and battery.percent < min(percent, 100.0)

    def _pause(self, number: int, frame: FrameType | None) -> None:
        self._by_signal = True

    def _resume(self, number: int, frame: FrameType | None) -> None:
        self._by_signal = False
