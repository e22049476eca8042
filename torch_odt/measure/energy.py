"""Energy: counters of processors, sensors of boards, batteries, graphics cards; or a model that says so.

Each source is a meter of its own, because they measure different things: a package of processors, a whole board, what a
battery gave. What a machine draws while nothing runs is to be measured in a window of its own and taken off.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torch_odt.capture.power import MOST_WATTS
from torch_odt.measure.meter import Absent, Quantity, read_number, read_text
from torch_odt.memory._files import SYSTEM_ROOT

# Of a battery's reading: what was given is then known to within about a fifth.
LEAST_CHANGES = 5

_INPUT_RAILS = ("VDD_IN", "POM_5V_IN")


class Rapl:
    """Joules of the processors' packages and, where they are counted apart, of memory.

    The counters begin anew at their range, after minutes under load: each look adds what has been counted since the one
    before. A counter that was set back in between seems to have run through its range; what is more than a machine
    draws is absent.
    """

    source = "rapl"

    def __init__(self, root: Path = SYSTEM_ROOT) -> None:
        self._folder = root / "sys/class/powercap"

    def begin(self) -> None:
        self._began = time.perf_counter()
        self._zones = {"package": self._find("package"), "memory": self._find("dram")}

    def poll(self) -> None:
        for zones in self._zones.values():
            for zone in zones:
                zone.look()

    def end(self) -> dict[str, Quantity]:
        self.poll()
        seconds = time.perf_counter() - self._began
        found = {f"{name}_energy_joules": self._sum(zones, seconds) for name, zones in self._zones.items()}
        if not self._zones["memory"] and not isinstance(found["package_energy_joules"], Absent):
            found["memory_energy_joules"] = Absent("these processors do not count memory apart")
        return found

    def _find(self, name: str) -> list[_Counter]:
        # Zones of a package are children of it; "psys" counts the same again, and is neither.
        zones = sorted(self._folder.glob("intel-rapl:*"))
        wanted = [zone for zone in zones if str(read_text(zone / "name")).startswith(name)]
        return [_Counter(zone / "energy_uj", read_number(zone / "max_energy_range_uj")) for zone in wanted]

    def _sum(self, zones: Sequence[_Counter], seconds: float) -> Quantity:
        if not zones:
            return Absent(f"no counter of packages in {self._folder}")
        refused = [zone.refusal for zone in zones if zone.refusal is not None]
        if refused:
            return refused[0]
        joules = sum(zone.microjoules for zone in zones) / 1e6
        if joules > MOST_WATTS * max(seconds, 1.0):
            return Absent(f"the counters say {joules:.0f} J in {seconds:.1f} s, which no machine draws")
        return joules


class _Counter:
    """A counter of microjoules that begins anew behind its range."""

    def __init__(self, path: Path, range_microjoules: int | Absent) -> None:
        self._path = path
        self.refusal: Absent | None = None
        self.microjoules = 0
        if isinstance(range_microjoules, Absent):
            self.refusal = range_microjoules
        else:
            self._range = range_microjoules + 1
        self._last = self._read()

    def look(self) -> None:
        now = self._read()
        if self.refusal is None:
            self.microjoules += (now - self._last) % self._range
            self._last = now

    def _read(self) -> int:
        reading = read_number(self._path)
        if isinstance(reading, Absent):
            self.refusal = self.refusal or reading
            return 0
        return reading


class Board:
    """Joules of a board by its INA sensors (Jetson, many single-board computers): watts at each look, times seconds.

    A rail whose label names the input (VDD_IN, POM_5V_IN) carries what the others take, and is taken alone. Where there
    is none, the rails are summed, and one that cannot be read makes the sum absent.
    """

    source = "ina"

    def __init__(self, root: Path = SYSTEM_ROOT, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._folder = root / "sys/class/hwmon"
        self._older = root / "sys/bus/i2c/drivers/ina3221x"
        self._clock = clock

    def begin(self) -> None:
        chips = [
            chip for chip in sorted(self._folder.glob("hwmon*")) if str(read_text(chip / "name")).startswith("ina")
        ]
        rails = [rail for chip in chips for rail in _rails_of(chip)]
        # Jetsons before JetPack 5, in milliwatts.
        for path in sorted(self._older.glob("*/iio:device*/in_power*_input")):
            label = path.with_name(path.name.replace("in_power", "rail_name_").removesuffix("_input"))
            rails.append((str(read_text(label)), partial(_scaled, path, 1e-3)))
        inputs = [read for label, read in rails if label.upper() in _INPUT_RAILS]
        self._rails = inputs[:1] or [read for _, read in rails]
        self._joules, self._refusal = 0.0, None if self._rails else Absent(f"no INA sensor in {self._folder}")
        self._watts, self._at = self._read(), self._clock()

    def poll(self) -> None:
        watts, at = self._read(), self._clock()
        self._joules += (watts + self._watts) / 2 * (at - self._at)
        self._watts, self._at = watts, at

    def end(self) -> dict[str, Quantity]:
        self.poll()
        return {"board_energy_joules": self._refusal or self._joules}

    def _read(self) -> float:
        readings = [rail() for rail in self._rails]
        self._refusal = self._refusal or next((each for each in readings if isinstance(each, Absent)), None)
        return sum(each for each in readings if not isinstance(each, Absent))


def _scaled(path: Path, unit: float) -> float | Absent:
    reading = read_number(path)
    return reading if isinstance(reading, Absent) else reading * unit


def _rails_of(chip: Path) -> list[tuple[str, Callable[[], float | Absent]]]:
    """What a chip measures, by label, in watts: as such, or as volts and amperes."""

    def product(millivolts: Path, milliamperes: Path) -> float | Absent:
        volts, amperes = read_number(millivolts), read_number(milliamperes)
        if isinstance(volts, Absent):
            return volts
        return amperes if isinstance(amperes, Absent) else volts * amperes / 1e6

    powers = sorted(chip.glob("power*_input"))
    if powers:
        return [(_label(path, "power"), partial(_scaled, path, 1e-6)) for path in powers]
    currents = [path for path in sorted(chip.glob("curr*_input")) if re.fullmatch(r"curr\d+_input", path.name)]
    return [
        (_label(path, "in"), partial(product, path.with_name(path.name.replace("curr", "in")), path))
        for path in currents
    ]


def _label(path: Path, kind: str) -> str:
    """Of a rail by one of its files; a label lies beside its volts, or beside its watts."""
    number = re.sub(r"\D", "", path.name)
    return str(read_text(path.with_name(f"{kind}{number}_label")))


class Battery:
    """Joules that a machine's batteries gave, by what they say is left in them.

    Their readings change in coarse steps, of 36 J or more or once in many seconds: a window that sees fewer than
    `LEAST_CHANGES` of them says nothing, so measure for minutes. While a supply carries the machine, batteries
    say nothing of what it takes: every look asks whether one does, also for a part of the window.
    """

    source = "battery"

    def __init__(self, root: Path = SYSTEM_ROOT) -> None:
        self._folder = root / "sys/class/power_supply"

    def begin(self) -> None:
        self._refusal: Absent | None = None
        self._changes = 0
        self._before = self._now = self._left()

    def poll(self) -> None:
        left = self._left()
        self._changes += left != self._now
        self._now = left

    def end(self) -> dict[str, Quantity]:
        self.poll()
        if self._changes < LEAST_CHANGES:
            why = (
                f"the battery's reading changed {self._changes} times, and it takes {LEAST_CHANGES}: measure for longer"
            )
            self._refuse(Absent(why))
        return {"battery_energy_joules": self._refusal or self._before - self._now}

    def _left(self) -> float:
        """The joules that are left, or 0 with a refusal that stays."""
        supplies = sorted(self._folder.glob("*"))
        batteries = [supply for supply in supplies if read_text(supply / "type") == "Battery"]
        # Of peripherals, such as a mouse.
        batteries = [supply for supply in batteries if read_text(supply / "scope") != "Device"]
        if not batteries:
            return self._refuse(Absent(f"there is no battery in {self._folder}"))
        joules = 0.0
        for battery in batteries:
            status = read_text(battery / "status")
            if status != "Discharging":
                return self._refuse(Absent(f"{battery.name} is not discharging: it says {status}"))
            left = _joules_in(battery)
            if isinstance(left, Absent):
                return self._refuse(left)
            joules += left
        return joules

    def _refuse(self, why: Absent) -> float:
        self._refusal = self._refusal or why
        return 0.0


def _joules_in(battery: Path) -> float | Absent:
    """From microwatt-hours, or from microampere-hours at the voltage that the battery is made for."""
    energy = read_number(battery / "energy_now")
    if not isinstance(energy, Absent):
        return energy * 3600 / 1e6
    charge, volts = read_number(battery / "charge_now"), read_number(battery / "voltage_min_design")
    if isinstance(charge, Absent):
        return charge
    return volts if isinstance(volts, Absent) else charge * 3600 / 1e6 * volts / 1e6


class Nvml:
    """Joules of NVIDIA's graphics cards, by the counters of their driver. Needs `pip install nvidia-ml-py`.

    Each card has a number of its own, in the driver's order. "gpu_energy_joules" is that of the card which computes,
    found by its identity, for torch may order them otherwise; where none is named, it is the sum of all.

    Args:
        device: that computes, as torch names it.
    """

    source = "nvml"

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def begin(self) -> None:
        self._before = self._read()

    def poll(self) -> None:
        """The driver counts."""

    def end(self) -> dict[str, Quantity]:
        before, now = self._before, self._read()
        if isinstance(before, Absent):
            return {"gpu_energy_joules": before}
        if isinstance(now, Absent):
            return {"gpu_energy_joules": now}
        cards = {identity: _joules_between(before.get(identity), count) for identity, count in now.items()}
        named = {f"card{number}_energy_joules": joules for number, joules in enumerate(cards.values())}
        return {"gpu_energy_joules": self._chosen(cards), **named}

    def _chosen(self, cards: Mapping[str, Quantity]) -> Quantity:
        if self._device.startswith("cuda"):
            identity = str(torch.cuda.get_device_properties(self._device).uuid)
            return cards.get(identity, Absent(f"NVML knows no card {identity}, which is {self._device}"))
        refused = [joules for joules in cards.values() if isinstance(joules, Absent)]
        return refused[0] if refused else sum(joules for joules in cards.values() if not isinstance(joules, Absent))

    def _read(self) -> dict[str, Quantity] | Absent:
        """Millijoules of each card since the driver was loaded, by its identity."""
        try:
            pynvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return Absent("nvidia-ml-py is not installed")
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            if not handles:
                return Absent("the driver knows no card")
            return {
                str(pynvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-"): _millijoules(pynvml, handle)
                for handle in handles
            }
        except pynvml.NVMLError as error:
            return Absent(f"NVML says: {error}")


def _millijoules(pynvml: Any, handle: Any) -> Quantity:
    """Cards before Volta have no counter."""
    try:
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    except pynvml.NVMLError as error:
        return Absent(f"NVML says: {error}")


def _joules_between(before: Quantity | None, now: Quantity) -> Quantity:
    if before is None:
        return Absent("the card was not there when the window began")
    if isinstance(before, Absent):
        return before
    return now if isinstance(now, Absent) else (now - before) / 1e3


@dataclass
class StatedPower:
    """Joules of a model: watts that the user states for a busy processor-second and for a second of the wall.

    Attributes:
        busy_watts: for each second of a processor that this process takes.
        idle_watts: for each second of the wall.
    """

    busy_watts: float
    idle_watts: float = 0.0
    source: str = "model"

    def begin(self) -> None:
        self._wall, self._busy = time.perf_counter(), time.process_time()

    def poll(self) -> None:
        """Nothing is to be looked at."""

    def end(self) -> dict[str, Quantity]:
        wall, busy = time.perf_counter() - self._wall, time.process_time() - self._busy
        return {"modelled_energy_joules": self.busy_watts * busy + self.idle_watts * wall}
