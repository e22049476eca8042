"""The monitor's readings: what the system says, and nothing where it says nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from control_group import ControlGroup

from torch_odt.memory import available, process_bytes
from torch_odt.runtime.monitor import Monitor, Pressure, Reading, read_system

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def numbers_of(path: str) -> dict[str, int]:
    """What a file of /proc says, in bytes."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_reading_is_what_proc_says() -> None:
    """Between two looks at the files nothing is allocated but what a reading takes; others may, in the meantime."""
    held = bytearray(64 * MIB)
    before, machine_before = numbers_of("/proc/self/status"), numbers_of("/proc/meminfo")
    reading = read_system()
    after, machine_after = numbers_of("/proc/self/status"), numbers_of("/proc/meminfo")
    assert len(held) == 64 * MIB <= reading.process_bytes
    assert reading.resident_bytes is not None
    assert_between(reading.resident_bytes, before["VmRSS"], after["VmRSS"], slack=MIB)
    anonymous = [status["RssAnon"] + status["RssShmem"] for status in (before, after)]
    assert_between(reading.process_bytes, *anonymous, slack=MIB)
    assert reading.total_bytes == machine_after["MemTotal"]
    available_bytes = [machine["MemAvailable"] for machine in (machine_before, machine_after)]
    assert_between(reading.limits["system"], *available_bytes, slack=64 * MIB)
    swapped = [machine["SwapTotal"] - machine["SwapFree"] for machine in (machine_before, machine_after)]
    if machine_after["SwapTotal"]:
        assert reading.swap_used_bytes is not None
        assert_between(reading.swap_used_bytes, *swapped, slack=MIB)
    else:
        assert reading.swap_used_bytes is None


def assert_between(found: int, one: int, other: int, *, slack: int) -> None:
    assert min(one, other) - slack <= found <= max(one, other) + slack


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    try:
        made = ControlGroup()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield made
    made.close()


@pytest.mark.cgroup
def test_a_reading_is_what_a_real_control_group_says(group: ControlGroup) -> None:
    """A child takes 64 MiB; a child of its own wants more than the group may have, and is ended."""
    group.limit(160 * MIB)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, str(Path(__file__).with_name("group_worker.py")), str(group.path)]
    with subprocess.Popen(line, stdin=-1, stdout=-1, text=True, env=environment) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        told = []
        for _ in range(3):
            document = json.loads(worker.stdout.readline())
            told.append(document["control_group"])
            assert document["control_group"]["folder"] == str(group.path)
            assert document["control_group"]["limit_bytes"] == 160 * MIB
            assert abs(document["control_group"]["used_bytes"] - group.used_bytes()) <= 2 * MIB
            assert document["control_group"]["events"] == group.events()
            worker.stdin.write("\n")
            worker.stdin.flush()
    assert worker.returncode == 0
    began, took, pressed = told
    assert abs(took["used_bytes"] - began["used_bytes"] - 64 * MIB) <= MIB
    assert began["events"] == took["events"], "nothing has been refused yet"
    assert pressed["events"]["oom_kill"] == 1


def test_a_reading_agrees_with_the_system() -> None:
    reading = read_system()
    assert abs(reading.process_bytes - process_bytes()) < 16 * MIB
    assert abs(reading.available_bytes - available()) < 1 << 30
    assert reading.available_bytes == min(reading.limits.values())
    assert reading.total_bytes == psutil.virtual_memory().total
    assert set(reading.pressure) <= {path.name for path in Path("/proc/pressure").glob("*")}


def test_what_is_absent_is_absent(tmp_path: Path) -> None:
    reading = read_system(root=tmp_path)
    assert reading.control_group is None and reading.pressure == {}
    assert set(reading.limits) == {"system"}


def test_pressure(tmp_path: Path) -> None:
    memory = "some avg10=1.50 avg60=0.10 avg300=0.00 total=2500000\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=7\n"
    write(tmp_path / "proc/pressure/memory", memory)
    write(tmp_path / "proc/pressure/cpu", "some avg10=50.00 avg60=0.00 avg300=0.00 total=9\n")
    write(tmp_path / "proc/pressure/io", "some avg10=what\n")
    assert read_system(root=tmp_path).pressure == {
        "memory": Pressure(0.015, 0.0025, 2.5),
        "cpu": Pressure(0.5, None, 9e-6),
    }


def test_the_tightest_group_of_version_2(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/outer/inner\n")
    outer, inner = tmp_path / "sys/fs/cgroup/outer", tmp_path / "sys/fs/cgroup/outer/inner"
    write(inner / "memory.max", "max\n")
    write(inner / "memory.high", "max\n")
    write(inner / "memory.current", f"{50 * MIB}\n")
    write(outer / "memory.max", f"{400 * MIB}\n")
    write(outer / "memory.high", f"{300 * MIB}\n")
    write(outer / "memory.current", f"{200 * MIB}\n")
    write(outer / "memory.stat", f"anon 1\ninactive_file {20 * MIB}\n")
    write(outer / "memory.events", "low 0\nhigh 3\nmax 2\noom 1\noom_kill 0\n")
    write(outer / "memory.pressure", "some avg10=10.00 avg60=0.00 avg300=0.00 total=0\n")
    reading = read_system(root=tmp_path)
    group = reading.control_group
    assert group is not None and group.folder == outer
    assert (group.limit_bytes, group.used_bytes) == (300 * MIB, 180 * MIB)
    assert group.events == {"low": 0, "high": 3, "max": 2, "oom": 1, "oom_kill": 0}
    assert group.pressure == {"memory": Pressure(0.1, None, 0.0)}
    assert reading.limits["cgroup_v2"] == 120 * MIB


def test_the_tightest_group_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:memory:/box\n0::/\n")
    box = tmp_path / "sys/fs/cgroup/memory/box"
    write(box / "memory.limit_in_bytes", f"{300 * MIB}\n")
    write(box / "memory.usage_in_bytes", f"{250 * MIB}\n")
    write(box / "memory.stat", f"total_inactive_file {30 * MIB}\n")
    write(box / "memory.failcnt", "12\n")
    write(box / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{900 * MIB}\n")
    group = read_system(root=tmp_path).control_group
    assert group is not None and group.folder == box
    assert (group.limit_bytes, group.used_bytes) == (300 * MIB, 220 * MIB)
    assert group.events == {"failcnt": 12, "oom_kill": 1} and group.pressure == {}


def reading_number(number: int) -> Reading:
    return Reading(float(number), number, number, {"system": number}, 1 << 30)


def test_the_monitor_reads_again_and_again() -> None:
    asked = threading.Semaphore(0)
    seen: list[int] = []

    def read() -> Reading:
        asked.release()
        return reading_number(len(seen))

    monitor = Monitor(0.001, read=read, on_reading=lambda reading: seen.append(reading.process_bytes))
    with monitor:
        for _ in range(5):
            assert asked.acquire(timeout=10)
        assert monitor.latest.process_bytes >= 3
    count = len(seen)
    time.sleep(0.02)
    assert len(seen) == count, "it has stopped"
    assert seen == list(range(count))
    assert monitor.latest.process_bytes == count, "a fresh reading"


def test_starting_and_stopping_twice_is_harmless() -> None:
    monitor = Monitor(60.0)
    monitor.start()
    before = threading.active_count()
    monitor.start()
    assert threading.active_count() == before
    monitor.stop()
    monitor.stop()
    assert threading.active_count() == before - 1


def test_an_error_in_the_thread_is_not_lost() -> None:
    failed = threading.Event()

    def fail(reading: Reading) -> None:
        if threading.current_thread() is not threading.main_thread():
            failed.set()
            raise OSError("no more readings")

    with Monitor(0.001, read=lambda: reading_number(1), on_reading=fail) as monitor:
        assert failed.wait(10)
        monitor._thread.join(10)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="has stopped") as raised:
            _ = monitor.latest
    assert isinstance(raised.value.__cause__, OSError)
    with pytest.raises(RuntimeError, match="has stopped"):
        _ = monitor.latest


def test_a_monitor_that_has_stopped_reads_again_after_start() -> None:
    answers: list[Reading | Exception] = [reading_number(1), OSError("once")]

    def read() -> Reading:
        answer = answers.pop(0) if answers else reading_number(2)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monitor = Monitor(0.001, read=read)
    monitor.start()
    assert monitor._thread is not None
    monitor._thread.join(10)
    with pytest.raises(RuntimeError, match="has stopped"):
        _ = monitor.latest
    monitor.start()
    assert monitor.latest.process_bytes == 2 and monitor._thread.is_alive()
    monitor.stop()
    assert monitor.latest.process_bytes == 2


def test_no_time_between_readings_is_refused() -> None:
    with pytest.raises(ValueError, match="interval_seconds"):
        Monitor(0.0)
