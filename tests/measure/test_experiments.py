"""The experiments beside steps: the largest batch, long runs, neighbours."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sensors import write
from torch import nn
from torch.nn import functional as F

from torch_odt import memory
from torch_odt.measure.flops import count_flops
from torch_odt.measure.job import How, Job
from torch_odt.measure.largest_batch import Tried, _try_plain, search
from torch_odt.measure.long_run import long_run
from torch_odt.measure.neighbour import beside_neighbour, run_neighbour
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
        assert not _try_plain(work_of(64), 1 << 20).fits


def test_a_long_run_traces_what_there_is(tmp_path: Path) -> None:
    write(tmp_path, {"sys/class/thermal/thermal_zone0/type": "cpu", "sys/class/thermal/thermal_zone0/temp": 41_000})
    job = Job(CELL, How(run_seconds=0.2, warmup_steps=1))
    cell = long_run(job, CELL, lambda: time.sleep(0.005), root=tmp_path)
    traces = {trace.quantity: trace for trace in cell.traces}
    assert set(traces) == {"step", "temperature"}
    assert set(traces["temperature"].values) == {41.0}
    assert list(traces["temperature"].at_seconds) == sorted(traces["temperature"].at_seconds)
    assert traces["temperature"].unit == "celsius" and len(cell.step_seconds) >= 2
    (note,) = cell.notes
    assert note.startswith("frequency is absent: there are no processors in")


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


def test_operations_of_grouped_convolutions_gradients() -> None:
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    forward = 2 * 2 * 36 * 8 * 9
    assert count_flops(lambda: depthwise(x)) == forward
    assert count_flops(lambda: depthwise(x).sum().backward()) == 3 * forward
    # The gradient of an input that needs none is not computed.
    assert count_flops(lambda: depthwise(x.detach()).sum().backward()) == 2 * forward
