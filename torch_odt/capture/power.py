"""What this machine draws while it computes and while it waits: read from a sensor, or a model that says so.

Intel's and AMD's processors count their joules (RAPL, /sys/class/powercap), boards often measure their supply (INA
chips, /sys/class/hwmon). Where neither can be read, or what they show is no machine's power, joules still order plans,
by a model that the plan's notes name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

_SYSTEM = Path("/sys/class")
_BUSY_SECONDS = 0.4
_IDLE_SECONDS = 0.2
_PRODUCT_SIZE = 512
# What a thread of a processor in a portable computer takes, about.
_MODEL_WATTS = 5.0
_MODEL_IDLE_WATTS = 1.0
# A counter that was set back in between seems to have run through its whole range.
MOST_WATTS = 10_000.0


@dataclass(frozen=True)
class Power:
    """What a machine draws.

    Attributes:
        busy_watts: while operators run.
        idle_watts: while nothing runs, as where a transfer is waited for.
        note: where the numbers come from, for people.
    """

    busy_watts: float
    idle_watts: float
    note: str


class Sensor(Protocol):
    """Something that can be asked again and again."""

    name: str

    def joules(self, seconds: float) -> float:
        """Since the last question, which was so many seconds ago."""
        ...


def measure_power(system: Path = _SYSTEM) -> Power:
    """What this machine draws, with the threads that torch has now. Takes less than a second.

    Args:
        system: where the kernel's classes of devices lie.
    """
    refused = []
    for sensor in find_sensors(system):
        try:
            return _measure(sensor)
        except (OSError, ValueError) as error:
            refused.append(f"{sensor.name} is of no use ({error})")
    busy = _MODEL_WATTS * torch.get_num_threads()
    why = "; ".join(refused) or "no power sensor can be read"
    note = (
        f"{why}: joules are a model's, of {busy:.0f} W while operators run "
        f"({_MODEL_WATTS:.0f} W a thread) and {_MODEL_IDLE_WATTS:.0f} W while storage is waited for"
    )
    return Power(busy, _MODEL_IDLE_WATTS, note)


def find_sensors(system: Path = _SYSTEM) -> list[Sensor]:
    """The sensors that can be read, those that show most of the machine first."""
    rails = [rail for chip in sorted((system / "hwmon").glob("hwmon*")) for rail in _rails_of(chip)]
    zones = [zone for path in sorted((system / "powercap").glob("intel-rapl:*")) for zone in _zone_of(path)]
    supplies: list[Sensor] = [Supply(rails)] if rails else []
    return [*supplies, Packages(zones)] if zones else supplies


def _measure(sensor: Sensor) -> Power:
    """What a sensor shows.

    Raises:
        OSError, ValueError: it cannot be read any more, or shows what no machine draws.
    """
    factor = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE)
    idle = _average_watts(sensor, lambda: time.sleep(0.01), _IDLE_SECONDS)
    busy = _average_watts(sensor, lambda: torch.mm(factor, factor), _BUSY_SECONDS)
    if not (0 < idle <= MOST_WATTS and 0 < busy <= MOST_WATTS):
        raise ValueError(f"it shows {busy:.3g} W while operators run and {idle:.3g} W while nothing does")
    note = f"joules by {sensor.name}: {busy:.1f} W while operators run, {idle:.1f} W while storage is waited for"
    return Power(busy, idle, note)


@dataclass
class Zone:
    """A counter of microjoules that begins anew at its range."""

    counter: Path
    range_microjoules: int
    last_microjoules: int

    def joules(self) -> float:
        now = int(self.counter.read_text())
        gone = (now - self.last_microjoules) % self.range_microjoules
        self.last_microjoules = now
        return gone / 1e6


class Packages:
    """All packages of processors, by their own counters."""

    name = "RAPL, the processor's package"

    def __init__(self, zones: list[Zone]) -> None:
        self._zones = zones

    def joules(self, seconds: float) -> float:
        return sum(zone.joules() for zone in self._zones)


class Supply:
    """A board's supply: of all rails the one that shows most, for the input carries what the others take."""

    name = "the board's INA sensor"

    def __init__(self, rails: list[Callable[[], float]]) -> None:
        self._rails = rails

    def joules(self, seconds: float) -> float:
        return max(rail() for rail in self._rails) * seconds


def _average_watts(sensor: Sensor, work: Callable[[], object], seconds: float) -> float:
    work()
    begin = last = time.perf_counter()
    sensor.joules(0.0)
    joules = 0.0
    while last - begin < seconds:
        work()
        now = time.perf_counter()
        joules += sensor.joules(now - last)
        last = now
    return joules / (last - begin)


def _zone_of(path: Path) -> list[Zone]:
    """A package's counter; parts of packages and the whole platform, which count the same again, are none."""
    try:
        if not re.fullmatch(r"intel-rapl:\d+", path.name) or not _text(path / "name").startswith("package"):
            return []
        counter, last = path / "energy_uj", int(_text(path / "max_energy_range_uj"))
        return [Zone(counter, last + 1, int(_text(counter)))] if last > 0 else []
    except (OSError, ValueError):
        return []


def _rails_of(chip: Path) -> list[Callable[[], float]]:
    """What an INA chip measures, in watts: as such, or as volts and amperes."""
    try:
        if not _text(chip / "name").startswith("ina"):
            return []
    except OSError:
        return []
    powers = [lambda path=path: int(_text(path)) / 1e6 for path in sorted(chip.glob("power*_input"))]
    pairs = [(chip / path.name.replace("curr", "in"), path) for path in sorted(chip.glob("curr*_input"))]
    products = [lambda pair=pair: int(_text(pair[0])) * int(_text(pair[1])) / 1e6 for pair in pairs]
    return [rail for rail in (powers or products) if _works(rail)]


def _works(rail: Callable[[], float]) -> bool:
    try:
        rail()
    except (OSError, ValueError):
        return False
    return True


def _text(path: Path) -> str:
    return path.read_text().strip()
