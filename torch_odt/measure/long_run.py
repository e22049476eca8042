"""A long run: how hot the processors become, how fast they run, and what that does to steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_odt.measure.job import How, Job
from torch_odt.measure.meter import Absent
from torch_odt.measure.processors import Frequency, Temperature
from torch_odt.measure.record import Cell, Trace
from torch_odt.measure.window import Window
from torch_odt.memory._files import SYSTEM_ROOT

_POINTS = 240
_CLOSE_CELSIUS = 2.0


def long_run(job: Job, cell: Cell, step: Callable[[], Any], *, root: Path = SYSTEM_ROOT) -> Cell:
    """Makes steps for `how.run_seconds`, and traces temperatures, frequencies and the steps' own seconds.

    It begins when the processors are as cool as `how.start_celsius`, or after as long a time as the run's.
    """
    for _ in range(job.how.warmup_steps):
        step()
    temperature, frequency = Temperature(root), Frequency(root)
    too_hot = _cool_down(job.how, root)
    interval = job.how.run_seconds / _POINTS
    readings: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    seconds: list[float] = []
    with Window([temperature, frequency], poll_seconds=max(interval, 0.1)) as window:
        start = now = time.perf_counter()
        due = 0.0
        while now - start < job.how.run_seconds:
            begin = now
            step()
            now = time.perf_counter()
            seconds.append(now - begin)
            if now - start >= due:
                due = now - start + interval
                readings["step", cell.mode, "seconds"].append((now - start, now - begin))
                for quantity, unit, meter in (
                    ("temperature", "celsius", temperature),
                    ("frequency", "hertz", frequency),
                ):
                    for name, reading in meter.look().items():
                        if not isinstance(reading, Absent):
                            readings[quantity, name, unit].append((now - start, reading))
    traces = [
        Trace(
            quantity=quantity, label=label, unit=unit, at_seconds=[round(at, 3) for at, _ in points],
            values=[value for _, value in points],
        )
        for (quantity, label, unit), points in readings.items()
    ]  # fmt: skip
    return replace(cell, step_seconds=seconds, traces=traces, quantities=window.record(), notes=too_hot)


def start_celsius(cell: Cell) -> float | None:
    """How hot the hottest sensor was when a long run began; None where none was read."""
    return max((trace.values[0] for trace in cell.traces if trace.quantity == "temperature"), default=None)


def _cool_down(how: How, root: Path) -> list[str]:
    """Waits; what it says is a note."""
    if how.start_celsius is None:
        return []
    end = time.monotonic() + how.run_seconds
    while (now := _hottest(root)) > how.start_celsius + _CLOSE_CELSIUS:
        if time.monotonic() > end:
            return [f"it began at {now:.0f} °C, plain PyTorch's run at {how.start_celsius:.0f} °C"]
        time.sleep(min(1.0, how.run_seconds))
    return []


def _hottest(root: Path) -> float:
    temperature = Temperature(root)
    temperature.begin()
    return max((celsius for celsius in temperature.look().values() if not isinstance(celsius, Absent)), default=0.0)
