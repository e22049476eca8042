"""Processors: how busy each core was, how fast it ran, and how hot it became."""

from __future__ import annotations

from pathlib import Path

import psutil

from torch_odt.measure.meter import Absent, Gauge, Quantity, read_number, read_text
from torch_odt.memory._files import SYSTEM_ROOT


class Utilization:
    """The share of the window that each core was busy for any process, from 0 to 1."""

    source = "psutil"

    def begin(self) -> None:
        self._before = psutil.cpu_times(percpu=True)

    def poll(self) -> None:
        """The kernel counts."""

    def end(self) -> dict[str, Quantity]:
        found: dict[str, Quantity] = {}
        for core, (before, now) in enumerate(zip(self._before, psutil.cpu_times(percpu=True), strict=False)):
            # Guests' time is counted as the user's already.
            spent = [b - a for name, a, b in zip(now._fields, before, now, strict=True) if not name.startswith("guest")]
            idle = now.idle - before.idle + getattr(now, "iowait", 0.0) - getattr(before, "iowait", 0.0)
            name = f"core{core}_busy_share"
            if sum(spent) <= 0:
                found[name] = Absent("the window is shorter than a tick")
                continue
            # The kernel's count of waiting for disks may run backwards.
            found[name] = min(1.0, max(0.0, 1 - idle / sum(spent)))
        return found


class Frequency:
    """How fast each core ran: the mean of what cpufreq said at every look."""

    source = "cpufreq"

    def __init__(self, root: Path = SYSTEM_ROOT) -> None:
        folder = root / "sys/devices/system/cpu"
        self._folder = folder
        cores = sorted(folder.glob("cpu[0-9]*"), key=lambda path: int(path.name.removeprefix("cpu")))
        self._cores = cores if any((core / "cpufreq").exists() for core in cores) else []

    def begin(self) -> None:
        self._gauges = {core: Gauge() for core in self._cores}
        self.poll()

    def look(self) -> dict[str, Quantity]:
        """How fast each core runs now, in hertz."""
        return {core.name.replace("cpu", "core"): self._read(core) for core in self._cores}

    def poll(self) -> None:
        for core, gauge in self._gauges.items():
            gauge.add(self._read(core))

    def _read(self, core: Path) -> Quantity:
        kilohertz = read_number(core / "cpufreq/scaling_cur_freq")
        return kilohertz if isinstance(kilohertz, Absent) else kilohertz * 1000

    def end(self) -> dict[str, Quantity]:
        self.poll()
        if not self._gauges:
            return {"frequency_hertz": Absent(f"no processor in {self._folder} has cpufreq")}
        return {f"core{core.name.removeprefix('cpu')}_frequency_hertz": g.mean for core, g in self._gauges.items()}


class Temperature:
    """The mean and the highest of each sensor: thermal zones, and chips of hwmon that are none of them."""

    source = "thermal"

    def __init__(self, root: Path = SYSTEM_ROOT) -> None:
        self._class = root / "sys/class"

    def begin(self) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._files = {**_zones(self._class / "thermal"), **_chips(self._class / "hwmon")}
        self.poll()

    def look(self) -> dict[str, Quantity]:
        """How hot each sensor is now, in degrees Celsius."""
        return {name: _celsius(path) for name, path in self._files.items()}

    def poll(self) -> None:
        for name, reading in self.look().items():
            self._gauges.setdefault(name, Gauge()).add(reading)

    def end(self) -> dict[str, Quantity]:
        self.poll()
        if not self._gauges:
            return {"highest_celsius": Absent(f"no sensor in {self._class / 'thermal'} or {self._class / 'hwmon'}")}
        found: dict[str, Quantity] = {}
        for name, gauge in self._gauges.items():
            found[f"{name}_mean_celsius"] = gauge.mean
            found[f"{name}_highest_celsius"] = gauge.highest
        known = [value for key, value in found.items() if key.endswith("_highest_celsius")]
        numbers = [value for value in known if not isinstance(value, Absent)]
        return {"highest_celsius": max(numbers) if numbers else known[0], **found}


def _celsius(path: Path) -> Quantity:
    millidegrees = read_number(path)
    return millidegrees if isinstance(millidegrees, Absent) else millidegrees / 1000


def _zones(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("thermal_zone*/temp")):
        name = _named(path.parent / "type", path.parent.name)
        found[f"{name}_{path.parent.name}" if name in found else name] = path
    return found


def _chips(folder: Path) -> dict[str, Path]:
    """The kernel shows thermal zones as chips, too: those have no device of their own but the zone."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("hwmon*/temp*_input")):
        chip, channel = path.parent, path.name.removesuffix("_input")
        if "thermal_zone" in (chip / "device").resolve().name:
            continue
        label = _named(chip / f"{channel}_label", channel)
        name = f"{_named(chip / 'name', chip.name)}_{label}"
        found[f"{name}_{chip.name}" if name in found else name] = path
    return found


def _named(path: Path, otherwise: str) -> str:
    text = read_text(path)
    name = otherwise if isinstance(text, Absent) or not text else text
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower())
