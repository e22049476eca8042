"""Meters over a window: what they say of work that is known, and beside other counts of it."""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
import threading
import time
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import torch
from sensors import write

from torch_odt import memory
from torch_odt.measure import Absent, Window, find_meters
from torch_odt.measure.clock import Clock, Events, Pressure
from torch_odt.measure.machine import describe_machine, memory_bytes
from torch_odt.measure.memory import AllocatedMemory, ProcessMemory
from torch_odt.measure.meter import Gauge, Quantity
from torch_odt.measure.processors import Frequency, Temperature, Utilization

MIB = 2**20


def test_seconds_are_those_of_the_work() -> None:
    with Window([Clock()]) as window:
        busy_until = time.process_time() + 0.1
        while time.process_time() < busy_until:
            pass
        time.sleep(0.1)
    found = window.quantities["clock"]
    cpu_seconds = found["user_seconds"] + found["system_seconds"]  # type: ignore[operator]
    assert 0.05 <= cpu_seconds <= found["wall_seconds"] - 0.05  # type: ignore[operator]


def test_faults_are_those_of_the_pages_that_are_touched() -> None:
    with Window([Events()], poll_seconds=60) as window, mmap.mmap(-1, 64 * MIB) as pages:
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        for offset in range(0, len(pages), mmap.PAGESIZE):
            pages[offset] = 1
    faults = window.quantities["getrusage"]["minor_page_faults"]
    assert 64 * MIB // mmap.PAGESIZE <= faults < 1.2 * 64 * MIB // mmap.PAGESIZE  # type: ignore[operator]


def test_the_peak_is_the_windows_own() -> None:
    # Straight from the system: an allocator may answer with pages that this process holds already.
    with mmap.mmap(-1, 80 * MIB) as pages:
        pages.write(bytes(80 * MIB))
    with Window([ProcessMemory()], poll_seconds=0.001) as window, mmap.mmap(-1, 40 * MIB) as pages:
        for offset in range(0, len(pages), mmap.PAGESIZE):
            pages[offset] = 1
    found = window.quantities["proc"]
    rise = found["peak_bytes"] - found["begin_bytes"]  # type: ignore[operator]
    assert 39 * MIB <= rise <= 60 * MIB
    assert found["peak_resident_bytes"] >= found["peak_bytes"]  # type: ignore[operator]


def test_a_kernel_that_resets_no_peak_says_so(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/status": "VmHWM: 900 kB\nRssAnon: 100 kB\nRssShmem: 0 kB"})
    with Window([ProcessMemory(tmp_path)]) as window:
        pass
    assert "could not be reset" in str(window.quantities["proc"]["peak_resident_bytes"])


def test_allocated_bytes_are_the_allocators() -> None:
    with Window([AllocatedMemory()]) as window:
        before = memory.stats()
        tensor = torch.empty(10 * MIB // 4)
        with memory.category("gradient"):
            gradient = torch.empty(MIB // 4)
    found, after = window.quantities["allocator"], memory.stats()
    if not after.tracking:
        assert isinstance(found["allocated_bytes"], Absent)
        return
    assert found["allocated_bytes"] == after.allocated_bytes
    assert found["peak_allocated_bytes"] == after.peak_bytes
    assert before.allocated_bytes is not None
    assert found["allocated_bytes"] - before.allocated_bytes >= tensor.nbytes + gradient.nbytes  # type: ignore[operator]
    assert found["peak_gradient_bytes"] >= gradient.nbytes  # type: ignore[operator]


def test_a_busy_core_is_seen() -> None:
    with Window([Utilization()]) as window:
        busy_until = time.process_time() + 0.3
        while time.process_time() < busy_until:
            pass
    shares = window.quantities["psutil"]
    assert len(shares) == psutil.cpu_count()
    assert all(0 <= share <= 1 for share in shares.values())  # type: ignore[operator]
    assert max(shares.values()) > 0.3  # type: ignore[type-var, operator]


def test_a_count_that_runs_backwards_leaves_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    times = namedtuple("times", ["user", "idle", "iowait"])
    readings = iter([[times(1.0, 10.0, 5.0), times(1.0, 10.0, 5.0)], [times(2.0, 10.0, 4.5), times(0.9, 11.0, 5.0)]])
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: next(readings))
    meter = Utilization()
    meter.begin()
    assert meter.end() == {"core0_busy_share": 1.0, "core1_busy_share": 0.0}


def test_frequencies_are_means_of_all_looks(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu"
    write(tmp_path, {f"{cpu}/cpu{core}/cpufreq/scaling_cur_freq": 1_000_000 for core in (0, 1, 10)})
    write(tmp_path, {f"{cpu}/cpuidle/x": 0, f"{cpu}/cpu2/topology/core_id": 2})
    meter = Frequency(tmp_path)
    meter.begin()
    write(tmp_path, {f"{cpu}/cpu10/cpufreq/scaling_cur_freq": 4_000_000})
    meter.poll()
    found = meter.end()
    assert found["core0_frequency_hertz"] == 1e9
    assert found["core10_frequency_hertz"] == 3e9
    assert "there is no" in str(found["core2_frequency_hertz"])
    assert set(found) == {f"core{core}_frequency_hertz" for core in (0, 1, 2, 10)}


def test_temperatures_of_zones_and_chips(tmp_path: Path) -> None:
    write(tmp_path, {"sys/class/thermal/thermal_zone0/type": "x86_pkg_temp"})
    write(tmp_path, {"sys/class/thermal/thermal_zone0/temp": 40_000, "sys/class/thermal/thermal_zone1/temp": 30_000})
    write(tmp_path, {"sys/class/hwmon/hwmon0/name": "k10temp", "sys/class/hwmon/hwmon0/temp1_input": 45_000})
    write(tmp_path, {"sys/class/hwmon/hwmon0/temp1_label": "Tctl"})
    meter = Temperature(tmp_path)
    meter.begin()
    write(tmp_path, {"sys/class/thermal/thermal_zone0/temp": 70_000})
    found = meter.end()
    assert found["highest_celsius"] == 70
    assert found["x86_pkg_temp_mean_celsius"] == 55
    assert found["thermal_zone1_highest_celsius"] == 30
    assert found["k10temp_tctl_mean_celsius"] == 45


def test_two_zones_of_one_kind_are_both_there(tmp_path: Path) -> None:
    for number in (0, 1):
        folder = f"sys/class/thermal/thermal_zone{number}"
        write(tmp_path, {f"{folder}/type": "acpitz", f"{folder}/temp": 20_000 + 1000 * number})
    meter = Temperature(tmp_path)
    meter.begin()
    found = meter.end()
    assert (found["acpitz_mean_celsius"], found["acpitz_thermal_zone1_mean_celsius"]) == (20, 21)


def test_pressure_is_the_windows_own(tmp_path: Path) -> None:
    line = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}"
    write(tmp_path, {"proc/pressure/memory": line.format(1_000_000)})
    meter = Pressure(tmp_path)
    meter.begin()
    write(tmp_path, {"proc/pressure/memory": line.format(3_500_000)})
    found = meter.end()
    assert found["memory_stalled_seconds"] == 2.5
    assert isinstance(found["io_stalled_seconds"], Absent)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EACCES, "no permission to read {}"),
        (errno.EOPNOTSUPP, "{} cannot be read: Operation not supported"),
        (errno.ENOENT, "there is no {}"),
    ],
)
def test_pressure_that_is_closed_is_not_pressure_that_there_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    def refuse(path: Path, *args: object, **kwargs: object) -> str:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    meter = Pressure(tmp_path)
    meter.begin()
    assert str(meter.end()["io_stalled_seconds"]) == f"absent ({reason.format(tmp_path / 'proc/pressure/io')})"


def test_a_machines_memory_is_not_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_of = namedtuple("memory_of", ["total", "available"])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory_of(8 << 30, 1 << 30))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memory_bytes(tmp_path) == 8 << 30
    group = "sys/fs/cgroup/a"
    write(tmp_path, {"proc/self/cgroup": "0::/a/b", f"{group}/memory.max": 3 << 30, f"{group}/memory.current": 2 << 30})
    assert memory_bytes(tmp_path) == 3 << 30
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2 << 30, resource.RLIM_INFINITY))
    assert memory_bytes(tmp_path) == 2 << 30


def test_every_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["H100", "A10", "H100"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])
    assert describe_machine("a board").accelerator == "2 x H100, A10"


def test_every_kind_of_meter_runs_here_and_leaves_nothing_behind() -> None:
    with Window() as window:
        assert "torch_odt meters" in [thread.name for thread in threading.enumerate()]
        time.sleep(0.25)
    assert "torch_odt meters" not in [thread.name for thread in threading.enumerate()]
    record = json.loads(json.dumps(window.record()))
    assert set(record) == {meter.source for meter in find_meters()}
    for quantities in record.values():
        for name, quantity in quantities.items():
            assert isinstance(quantity, (int, float)) or set(quantity) == {"absent"}, name


def test_a_sensor_that_fails_is_not_hidden() -> None:
    class Broken:
        source = "broken"

        def begin(self) -> None:
            pass

        def poll(self) -> None:
            raise ValueError("the sensor is gone")

        def end(self) -> dict[str, Quantity]:
            return {}

    with pytest.raises(ValueError, match="the sensor is gone"), Window([Broken()], poll_seconds=0.001):
        time.sleep(0.05)


def test_a_meter_that_cannot_end_takes_nothing_from_the_others() -> None:
    class Broken:
        source = "broken"

        def begin(self) -> None:
            pass

        def poll(self) -> None:
            pass

        def end(self) -> dict[str, Quantity]:
            raise ValueError("the sensor is gone")

    window = Window([Broken(), Clock()], poll_seconds=60)
    with pytest.raises(ValueError, match="the sensor is gone"), window:
        pass
    assert "wall_seconds" in window.quantities["clock"]
    window = Window([Broken(), Clock()], poll_seconds=60)
    with pytest.raises(KeyError), window:
        raise KeyError("work")
    assert "wall_seconds" in window.quantities["clock"]


def test_the_works_own_error_comes_first_and_the_window_closes() -> None:
    window = Window([Clock()])
    with pytest.raises(KeyError), window:
        raise KeyError("work")
    assert "wall_seconds" in window.quantities["clock"]
    with pytest.raises(RuntimeError, match="opened once"):
        window.__enter__()


def test_a_gauge_of_nothing_says_why() -> None:
    gauge = Gauge()
    gauge.add(Absent("no permission"))
    assert gauge.mean == gauge.highest == Absent("no permission")
