"""What this machine draws, from sensors that are files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_odt.capture.power import Power, find_sensors, measure_power


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")
    return folder


def package(system: Path, number: int, microjoules: int, range_microjoules: int = 1000) -> Path:
    folder = system / "powercap" / f"intel-rapl:{number}"
    return write(folder, name=f"package-{number}", energy_uj=microjoules, max_energy_range_uj=range_microjoules)


def test_packages_are_added_and_begin_anew_at_their_range(tmp_path: Path) -> None:
    one, other = package(tmp_path, 0, 900), package(tmp_path, 1, 10)
    # Parts of a package, and the platform with all packages in it.
    write(tmp_path / "powercap" / "intel-rapl:0:0", name="core", energy_uj=0, max_energy_range_uj=1000)
    write(tmp_path / "powercap" / "intel-rapl:2", name="psys", energy_uj=0, max_energy_range_uj=1000)
    (sensor,) = find_sensors(tmp_path)
    assert "RAPL" in sensor.name
    (one / "energy_uj").write_text("99")
    (other / "energy_uj").write_text("30")
    assert sensor.joules(1.0) == pytest.approx((99 + 1001 - 900 + 20) / 1e6)
    assert sensor.joules(1.0) == 0.0


def test_of_a_boards_rails_the_input_counts(tmp_path: Path) -> None:
    rails = {"in1_input": 5000, "curr1_input": 800, "in2_input": 5000, "curr2_input": 300}
    write(tmp_path / "hwmon" / "hwmon0", name="ina3221", **rails)
    write(tmp_path / "hwmon" / "hwmon1", name="coretemp", power1_input=9e9)
    (sensor,) = find_sensors(tmp_path)
    assert sensor.joules(2.0) == pytest.approx(2 * 5.0 * 0.8)
    (tmp_path / "hwmon" / "hwmon0" / "power1_input").write_text("7000000")
    (sensor,) = find_sensors(tmp_path)
    assert sensor.joules(1.0) == pytest.approx(7.0)


def test_a_steady_sensor_is_averaged(tmp_path: Path) -> None:
    write(tmp_path / "hwmon" / "hwmon0", name="ina219", power1_input=2500000)
    power = measure_power(tmp_path)
    assert power.busy_watts == power.idle_watts == pytest.approx(2.5)
    assert "INA" in power.note and "2.5 W" in power.note


@pytest.mark.parametrize("content", [None, "nonsense"])
def test_without_a_sensor_a_model_says_that_it_is_one(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (package(tmp_path, 0, 0) / "energy_uj").write_text(content)
        write(tmp_path / "hwmon" / "hwmon0", name="ina219", power1_input=content)
    assert find_sensors(tmp_path) == []
    power = measure_power(tmp_path)
    assert "no power sensor can be read" in power.note
    assert_is_a_models(power)


def assert_is_a_models(power: Power) -> None:
    assert "joules are a model's" in power.note
    assert power.busy_watts == pytest.approx(5.0 * torch.get_num_threads())
    assert 0 < power.idle_watts < power.busy_watts


@pytest.mark.parametrize(("microwatts", "shown"), [(0, "0 W"), (-3_000_000, "-3 W"), (10**14, "1e+08 W")])
def test_a_supply_that_shows_nonsense_gives_way_to_a_model(tmp_path: Path, microwatts: int, shown: str) -> None:
    write(tmp_path / "hwmon" / "hwmon0", name="ina219", power1_input=microwatts)
    power = measure_power(tmp_path)
    assert_is_a_models(power)
    assert "INA sensor is of no use" in power.note and shown in power.note


def test_a_counter_that_stands_still_gives_way_to_a_model(tmp_path: Path) -> None:
    package(tmp_path, 0, 500)
    power = measure_power(tmp_path)
    assert_is_a_models(power)
    assert "RAPL" in power.note and "0 W while operators run" in power.note


def test_a_counter_that_is_set_back_gives_way_to_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = package(tmp_path, 0, 10**12, range_microjoules=10**15) / "energy_uj"

    def set_back(seconds: float) -> None:
        counter.write_text(str(int(counter.read_text()) - 1))

    monkeypatch.setattr("torch_odt.capture.power.time.sleep", set_back)
    assert_is_a_models(measure_power(tmp_path))


def test_a_counter_without_a_range_is_none(tmp_path: Path) -> None:
    for number, last in enumerate((-1, 0)):
        package(tmp_path, number, 0, range_microjoules=last)
    (package(tmp_path, 2, 0) / "max_energy_range_uj").unlink()
    assert find_sensors(tmp_path) == []


@pytest.mark.parametrize("content", [None, "nan", ""])
def test_a_sensor_that_fails_later_gives_way_to_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    path = write(tmp_path / "hwmon" / "hwmon0", name="ina219", power1_input=2500000) / "power1_input"

    def fail(seconds: float) -> None:
        path.unlink() if content is None else path.write_text(content)
        monkeypatch.undo()

    monkeypatch.setattr("torch_odt.capture.power.time.sleep", fail)
    power = measure_power(tmp_path)
    assert_is_a_models(power)
    assert "INA sensor is of no use" in power.note


def test_another_sensor_is_asked_before_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "hwmon" / "hwmon0", name="ina219", power1_input=0)
    package(tmp_path, 0, 0)
    monkeypatch.setattr("torch_odt.capture.power.Packages.joules", lambda _, seconds: 7.0 * seconds)
    power = measure_power(tmp_path)
    assert power.busy_watts == pytest.approx(7.0)
    assert "RAPL" in power.note
