"""The experiments beside steps: the largest batch, long runs, neighbours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sensors import write
from torch import nn
from torch.nn import functional as F

from torch_odt import memory
from torch_odt.capture.child import run_in_child
from torch_odt.measure import largest_batch as largest_batch_module
from torch_odt.measure import long_run as long_run_module
from torch_odt.measure import neighbour as neighbour_module
from torch_odt.measure import neighbour_program
from torch_odt.measure.flops import count_flops
from torch_odt.measure.job import How, Job
from torch_odt.measure.largest_batch import Tried, _try_plain, search, tried_or_refused
from torch_odt.measure.long_run import long_run, start_celsius
from torch_odt.measure.neighbour import beside_neighbour
from torch_odt.measure.neighbour_program import run_neighbour
from torch_odt.measure.record import Cell
from torch_odt.measure.steps import Work

CELL = Cell(suite="ubiquitous", model="net", batch_size=4, mode="training", engine="torch", threads=1)


@given(fixed=st.integers(0, 500), each=st.integers(1, 90), bend=st.integers(0, 40), limit=st.integers(1, 20_000))
def test_the_largest_batch_is_found(fixed: int, each: int, bend: int, limit: int) -> None:
    def needed(samples: int) -> int:
        return fixed + each * samples + bend * (samples // 3)

    tried: list[int] = []

    def fits(samples: int) -> Tried:
        tried.append(samples)
        return Tried(needed(samples), needed(samples) <= limit)

    found = search(fits, limit_bytes=limit, least=2)
    assert len(tried) == len(set(tried)) <= 12
    if found == 0:
        assert needed(2) > limit
        return
    assert needed(found) <= limit
    # A sixteenth more than what was found, and one, does not fit; unless all that were tried fit.
    if max(tried) > found:
        assert needed(found + max(1, found // 16)) > limit


def test_a_search_ends_when_its_time_is_over() -> None:
    tried: list[int] = []

    def fits(samples: int) -> Tried:
        tried.append(samples)
        return Tried(samples, True)

    assert search(fits, limit_bytes=1 << 30, least=2, is_over=lambda: len(tried) == 3) == tried[-1]
    assert len(tried) == 3


def test_a_batch_that_does_not_fit_is_no_error() -> None:
    memory.install()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work_of(samples: int) -> Work:
        return Work(model, F.cross_entropy, optimizer, (torch.zeros(samples, 3, 32, 32), torch.zeros(samples).long()))

    assert _try_plain(work_of(2), 64 << 20).fits
    # Other tests' memory may come and go: only what the allocator refuses is certain.
    if memory.is_tracking():
        assert not tried_or_refused(lambda: _try_plain(work_of(64), 1 << 20), 1 << 20).fits


@pytest.mark.parametrize("engine", ["torch", "torch_odt"])
def test_a_search_goes_on_behind_a_batch_that_there_is_no_memory_for(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt(samples: int, limit_bytes: int) -> Tried:
        if samples > 5:
            raise torch.OutOfMemoryError("the cap is reached")
        return Tried(10 * samples, True)

    monkeypatch.setattr(largest_batch_module, "_try_planned" if engine == "torch_odt" else "_try_plain", attempt)
    cell = replace(CELL, engine=engine, experiment="largest batch")
    found = largest_batch_module.largest_batch(Job(cell, How(budget_bytes=1000)), cell, lambda samples: samples)  # type: ignore[arg-type, return-value]
    assert found.outcome == "ok" and found.results["largest_batch"] == 5


def test_where_no_batch_fits_it_is_said_what_the_smallest_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest_batch_module, "_try_plain", lambda samples, limit_bytes: Tried(7 << 20, False))
    cell = replace(CELL, experiment="largest batch")
    job = Job(cell, How(budget_bytes=4 << 20))
    found = largest_batch_module.largest_batch(job, cell, lambda samples: samples)  # type: ignore[arg-type, return-value]
    assert found.results["largest_batch"] == 0
    assert "4.0 MiB are too little for 2 samples, which take 7.0 MiB or more" in found.notes


def test_a_long_run_traces_what_there_is(tmp_path: Path) -> None:
    write(tmp_path, {"sys/class/thermal/thermal_zone0/type": "cpu", "sys/class/thermal/thermal_zone0/temp": 41_000})
    job = Job(CELL, How(run_seconds=0.2, warmup_steps=1))
    cell = long_run(job, CELL, lambda: time.sleep(0.005), root=tmp_path)
    traces = {trace.quantity: trace for trace in cell.traces}
    assert set(traces) == {"step", "temperature"}
    assert set(traces["temperature"].values) == {41.0}
    assert list(traces["temperature"].at_seconds) == sorted(traces["temperature"].at_seconds)
    assert traces["temperature"].unit == "celsius" and len(cell.step_seconds) >= 2
    assert not cell.notes and "no processor in" in cell.quantities["cpufreq"]["frequency_hertz"]["absent"]  # type: ignore[index]


def test_a_long_run_waits_until_the_processors_are_as_cool_as_before_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone = "sys/class/thermal/thermal_zone0"
    write(tmp_path, {f"{zone}/type": "cpu", f"{zone}/temp": 70_000})
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        write(tmp_path, {f"{zone}/temp": 70_000 - 10_000 * len(waited)})

    monkeypatch.setattr(long_run_module.time, "sleep", sleep)
    job = Job(CELL, How(run_seconds=0.1, warmup_steps=0, start_celsius=49.0))
    cell = long_run(job, CELL, lambda: None, root=tmp_path)
    assert len(waited) == 2 and start_celsius(cell) == 50.0
    assert not any("began at" in note for note in cell.notes)


def test_a_long_run_does_not_wait_for_ever(tmp_path: Path) -> None:
    zone = "sys/class/thermal/thermal_zone0"
    write(tmp_path, {f"{zone}/type": "cpu", f"{zone}/temp": 70_000})
    cell = long_run(
        Job(CELL, How(run_seconds=0.1, warmup_steps=0, start_celsius=40.0)), CELL, lambda: None, root=tmp_path
    )
    assert cell.notes[0] == "it began at 70 °C, plain PyTorch's run at 40 °C"
    assert start_celsius(replace(cell, traces=())) is None


def test_a_neighbour_tells_its_speed() -> None:
    results = run_neighbour(0.3)
    assert set(results) == {
        "processor_operations_per_second", "memory_bytes_per_second", "p50_seconds", "p99_seconds", "requests",
    }  # fmt: skip
    assert all(value > 0 for value in results.values())
    assert results["p50_seconds"] <= results["p99_seconds"]


@pytest.mark.parametrize("how", ["none", "foreground"])
def test_training_beside_a_neighbour(how: str) -> None:
    cell = replace(CELL, experiment="neighbour", factors={"training": how})
    found = beside_neighbour(Job(cell, How(run_seconds=0.2)), cell, lambda: lambda: time.sleep(0.01))
    assert found.results["requests"] >= 1
    assert bool(found.step_seconds) == (how == "foreground")


def test_a_neighbour_does_not_give_way_where_the_training_does() -> None:
    cell = replace(CELL, experiment="neighbour", factors={"training": "background"})

    def priorities() -> tuple[int, set[tuple[int, int]], int]:
        before, seen = os.getpriority(os.PRIO_PROCESS, 0), set()

        def step() -> None:
            (neighbour,) = psutil.Process().children()
            seen.add((os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PROCESS, neighbour.pid)))
            time.sleep(0.01)

        found = beside_neighbour(Job(cell, How(run_seconds=0.2, warmup_steps=0)), cell, lambda: step)
        return before, seen, len(found.step_seconds)

    # In a child, for a priority rises again only with privileges.
    before, seen, steps = run_in_child(priorities)
    assert seen == {(max(before, 10), before)} and steps >= 1


def test_a_neighbour_imports_nothing_of_this_package() -> None:
    script = "import runpy, sys; runpy.run_path(sys.argv[1]); print({'torch', 'torch_odt'} & set(sys.modules))"
    command = [sys.executable, "-P", "-c", script, neighbour_program.__file__]
    assert subprocess.check_output(command, text=True) == "set()\n"


def test_no_step_counts_before_the_neighbour_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported, program = tmp_path / "imported", tmp_path / "slow_to_start.py"
    program.write_text(
        f"import pathlib, sys, time\ntime.sleep(0.2)\npathlib.Path({str(imported)!r}).touch()\n"
        "print('ready', flush=True)\nsys.stdin.readline()\ntime.sleep(0.1)\nprint('{}')"
    )
    monkeypatch.setattr(neighbour_module, "_PROGRAM", program)
    was_ready: list[bool] = []

    def step() -> None:
        was_ready.append(imported.exists())
        time.sleep(0.01)

    cell = replace(CELL, experiment="neighbour", factors={"training": "foreground"})
    beside_neighbour(Job(cell, How(warmup_steps=0)), cell, lambda: step)
    assert was_ready and all(was_ready)


def test_a_neighbour_ends_with_the_process_that_started_it() -> None:
    script = (
        "import os, signal, subprocess, sys\n"
        "neighbour = subprocess.Popen([sys.executable, '-P', sys.argv[1], '600'], stdin=subprocess.PIPE)\n"
        "neighbour.stdin.write(b'\\n'); neighbour.stdin.flush()\n"
        "sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-P", "-c", script, neighbour_program.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.stdin.write("end\n")
        parent.stdin.flush()
        # The neighbour holds the other end of its output for as long as it lives.
        assert parent.stdout.read() == ""
    assert parent.returncode == -signal.SIGKILL


def test_operations_of_grouped_convolutions_gradients() -> None:
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    forward = 2 * 2 * 36 * 8 * 9
    assert count_flops(lambda: depthwise(x)) == forward
    assert count_flops(lambda: depthwise(x).sum().backward()) == 3 * forward
    # The gradient of an input that needs none is not computed.
    assert count_flops(lambda: depthwise(x.detach()).sum().backward()) == 2 * forward
