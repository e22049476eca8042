"""Energy by every source, on trees of scripted values."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sensors import package, write

from torch_odt.measure.energy import Battery, Board, Nvml, Rapl, StatedPower
from torch_odt.measure.meter import Absent

BATTERY = "sys/class/power_supply/BAT0"


def test_packages_are_summed_and_memory_is_apart(tmp_path: Path) -> None:
    memory = {
        "sys/class/powercap/intel-rapl:0:0/name": "dram",
        "sys/class/powercap/intel-rapl:0:0/energy_uj": 500,
        "sys/class/powercap/intel-rapl:0:0/max_energy_range_uj": 10**9,
    }
    write(tmp_path, package(0, 1_000_000) | package(1, 7_000_000) | package(2, 0, name="psys") | memory)
    meter = Rapl(tmp_path)
    meter.begin()
    write(tmp_path, package(0, 3_500_000) | package(1, 8_000_000) | package(2, 90_000_000, name="psys"))
    write(tmp_path, {"sys/class/powercap/intel-rapl:0:0/energy_uj": 250_500})
    assert meter.end() == {"package_energy_joules": 3.5, "memory_energy_joules": 0.25}


def test_a_counter_that_begins_anew_behind_its_range(tmp_path: Path) -> None:
    write(tmp_path, package(0, 900, range_microjoules=999))
    meter = Rapl(tmp_path)
    meter.begin()
    # Twice around, and each time a look saw it.
    for microjoules in (100, 950, 50):
        write(tmp_path, package(0, microjoules, range_microjoules=999))
        meter.poll()
    joules = meter.end()["package_energy_joules"]
    assert joules == pytest.approx((200 + 850 + 100) / 1e6)


def test_a_counter_that_was_set_back_is_no_machines_power(tmp_path: Path) -> None:
    write(tmp_path, package(0, 10**14, range_microjoules=10**15))
    meter = Rapl(tmp_path)
    meter.begin()
    write(tmp_path, package(0, 0, range_microjoules=10**15))
    found = meter.end()["package_energy_joules"]
    assert isinstance(found, Absent) and "no machine draws" in found.reason


def test_no_counter_and_one_that_is_closed_are_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Rapl(tmp_path)
    meter.begin()
    assert "no counter of packages" in str(meter.end()["package_energy_joules"])
    write(tmp_path, package(0, 5))
    _close(monkeypatch, "energy_uj")
    meter.begin()
    assert "no permission to read" in str(meter.end()["package_energy_joules"])


def test_a_counter_that_says_nonsense_is_named(tmp_path: Path) -> None:
    write(tmp_path, package(0, 5) | {"sys/class/powercap/intel-rapl:0/energy_uj": "soon"})
    meter = Rapl(tmp_path)
    meter.begin()
    assert "says 'soon'" in str(meter.end()["package_energy_joules"])


def test_a_boards_watts_are_integrated(tmp_path: Path) -> None:
    chip = "sys/class/hwmon/hwmon3"
    write(tmp_path, {f"{chip}/name": "ina3221", f"{chip}/in1_input": 5000, f"{chip}/curr1_input": 1000})
    write(tmp_path, {f"{chip}/in2_input": 5000, f"{chip}/curr2_input": 200, f"{chip}/curr1_crit": 9})
    clock = _clock([0.0, 2.0, 3.0])
    meter = Board(tmp_path, clock=lambda: next(clock))
    meter.begin()
    write(tmp_path, {f"{chip}/curr1_input": 3000})
    meter.poll()
    # 6 W, then 16 W, a line between them; then 16 W for a second.
    assert meter.end() == {"board_energy_joules": pytest.approx(22 + 16)}


@pytest.mark.parametrize(("label", "joules"), [("VDD_IN", 50), ("VDD_CPU", 60)])
def test_a_boards_input_is_taken_alone(tmp_path: Path, label: str, joules: float) -> None:
    chip = "sys/class/hwmon/hwmon3"
    write(tmp_path, {f"{chip}/name": "ina3221", f"{chip}/in1_input": 5000, f"{chip}/curr1_input": 1000})
    write(tmp_path, {f"{chip}/in2_input": 5000, f"{chip}/curr2_input": 200, f"{chip}/in1_label": label})
    clock = _clock([0.0, 10.0])
    meter = Board(tmp_path, clock=lambda: next(clock))
    meter.begin()
    assert meter.end() == {"board_energy_joules": pytest.approx(joules)}


def test_a_board_that_measures_power_itself(tmp_path: Path) -> None:
    chip = "sys/class/hwmon/hwmon0"
    write(
        tmp_path, {f"{chip}/name": "ina226", f"{chip}/power1_input": 4_000_000, "sys/class/hwmon/hwmon1/name": "acpi"}
    )
    clock = _clock([0.0, 10.0])
    meter = Board(tmp_path, clock=lambda: next(clock))
    meter.begin()
    assert meter.end() == {"board_energy_joules": pytest.approx(40)}


def test_a_jetsons_older_driver(tmp_path: Path) -> None:
    folder = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    write(tmp_path, {f"{folder}/in_power0_input": 4000, f"{folder}/in_power1_input": 900})
    write(tmp_path, {f"{folder}/rail_name_0": "POM_5V_IN", f"{folder}/rail_name_1": "POM_5V_GPU"})
    clock = _clock([0.0, 10.0])
    meter = Board(tmp_path, clock=lambda: next(clock))
    meter.begin()
    assert meter.end() == {"board_energy_joules": pytest.approx(40)}


def test_a_machine_without_such_a_board(tmp_path: Path) -> None:
    meter = Board(tmp_path)
    meter.begin()
    meter.poll()
    assert "no INA sensor" in str(meter.end()["board_energy_joules"])


@pytest.mark.parametrize(
    ("files", "later", "joules"),
    [
        ({"energy_now": 10_000_000}, {"energy_now": 9_990_000}, 180.0),
        ({"charge_now": 1_000_000, "voltage_min_design": 10_000_000}, {"charge_now": 999_000}, 180.0),
    ],
    ids=["watt-hours", "ampere-hours"],
)
def test_what_a_battery_gave(tmp_path: Path, files: dict[str, int], later: dict[str, int], joules: float) -> None:
    write(tmp_path, {f"{BATTERY}/type": "Battery", f"{BATTERY}/status": "Discharging"})
    write(tmp_path, {"sys/class/power_supply/AC/type": "Mains"})
    write(tmp_path, {"sys/class/power_supply/mouse/type": "Battery", "sys/class/power_supply/mouse/scope": "Device"})
    write(tmp_path, {f"{BATTERY}/{name}": value for name, value in files.items()})
    meter = Battery(tmp_path)
    meter.begin()
    for step in range(1, 6):
        for name, value in later.items():
            write(tmp_path, {f"{BATTERY}/{name}": files[name] - step * (files[name] - value)})
        meter.poll()
    assert meter.end() == {"battery_energy_joules": pytest.approx(joules)}


def test_a_battery_that_is_charged_says_nothing(tmp_path: Path) -> None:
    write(tmp_path, {f"{BATTERY}/type": "Battery", f"{BATTERY}/status": "Discharging", f"{BATTERY}/energy_now": 5})
    meter = Battery(tmp_path)
    meter.begin()
    write(tmp_path, {f"{BATTERY}/status": "Charging"})
    assert "not discharging: it says Charging" in str(meter.end()["battery_energy_joules"])
    assert "no battery" in str(_of(Battery(tmp_path / "nowhere"))["battery_energy_joules"])


def test_a_supply_that_came_and_went_is_seen(tmp_path: Path) -> None:
    write(tmp_path, {f"{BATTERY}/type": "Battery", f"{BATTERY}/status": "Discharging", f"{BATTERY}/energy_now": 5})
    meter = Battery(tmp_path)
    meter.begin()
    write(tmp_path, {f"{BATTERY}/status": "Charging"})
    meter.poll()
    write(tmp_path, {f"{BATTERY}/status": "Discharging", f"{BATTERY}/energy_now": 3})
    assert "not discharging: it says Charging" in str(meter.end()["battery_energy_joules"])
    assert "reading changed 0 times" in str(_of(meter)["battery_energy_joules"])


def test_cards_by_their_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _driver(2, iter([1000, 2000, 4500, 2100])))
    joules = {"card0_energy_joules": 3.5, "card1_energy_joules": 0.1}
    assert _of(Nvml()) == {"gpu_energy_joules": 3.6, **joules}


def test_the_card_that_computes_is_found_by_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    identities = {"cuda:0": "1-uuid", "cuda:1": "7-uuid"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: types.SimpleNamespace(uuid=identities[d]))
    monkeypatch.setitem(sys.modules, "pynvml", _driver(2, iter([1000, 2000, 4500, 2100])))
    assert _of(Nvml("cuda:0"))["gpu_energy_joules"] == 0.1, "torch's first one is the driver's second one"
    monkeypatch.setitem(sys.modules, "pynvml", _driver(2, iter([1000, 2000, 4500, 2100])))
    assert "NVML knows no card 7-uuid, which is cuda:1" in str(_of(Nvml("cuda:1"))["gpu_energy_joules"])


def test_a_card_without_a_counter_is_absent_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _driver(2, iter([1000, RuntimeError("Not Supported"), 4500, 9])))
    found = _of(Nvml())
    assert found["card0_energy_joules"] == 3.5
    assert found["card1_energy_joules"] == found["gpu_energy_joules"] == Absent("NVML says: Not Supported")


def test_a_driver_without_cards_is_not_0_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _driver(0, iter([])))
    assert "knows no card" in str(_of(Nvml())["gpu_energy_joules"])


def test_without_a_driver_cards_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "not installed" in str(_of(Nvml())["gpu_energy_joules"])


def test_stated_watts_are_named_a_model() -> None:
    meter = StatedPower(busy_watts=3.0)
    assert meter.source == "model"
    meter.begin()
    while not (found := meter.end()["modelled_energy_joules"]) > 0.01:  # type: ignore[operator]
        pass
    assert found < 1


def _driver(cards: int, readings: Iterator[int | Exception]) -> Any:
    """Counters of cards by their identity; an error in the place of a reading is raised."""

    def count(handle: int) -> int:
        reading = next(readings)
        if isinstance(reading, Exception):
            raise reading
        return reading

    driver: Any = types.ModuleType("pynvml")
    driver.NVMLError = RuntimeError
    driver.nvmlInit = lambda: None
    driver.nvmlDeviceGetCount = lambda: cards
    driver.nvmlDeviceGetHandleByIndex = lambda index: index
    driver.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}-uuid"
    driver.nvmlDeviceGetTotalEnergyConsumption = count
    return driver


def _of(meter: Any) -> dict[str, object]:
    meter.begin()
    meter.poll()
    return dict(meter.end())


def _clock(seconds: list[float]) -> Iterator[float]:
    return iter(seconds)


def _close(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Root reads everything, so that closed files have to be made up."""
    read = Path.read_text

    def refuse(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refuse)
