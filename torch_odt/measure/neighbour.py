"""What training does to another program: its processor speed, its memory's bandwidth and the latency of its requests.

As Chen et al., section 4.7, with a program of our own in the place of a benchmark application (neighbour_program.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_odt.measure.job import Job
from torch_odt.measure.record import Cell, Number

_PROGRAM = Path(__file__).with_name("neighbour_program.py")


def beside_neighbour(job: Job, cell: Cell, step_of: Callable[[], Callable[[], Any]]) -> Cell:
    """Trains while a neighbour runs for `how.run_seconds`, in the way that the factor "training" names.

    "none" lets the neighbour run alone, "foreground" trains as ever, "background" by `torch_odt.runtime.Background`.
    """
    from torch_odt.runtime.background import Background

    how = str(cell.factors["training"])
    if how == "none":
        with _Neighbour.waiting(job.how.run_seconds) as neighbour:
            neighbour.begin()
            return replace(cell, results=neighbour.results())
    step = step_of()
    for _ in range(job.how.warmup_steps):
        step()
    notes: list[str] = []
    # Started first: a process takes the priority, the scheduling and the cores of the one that starts it.
    with _Neighbour.waiting(job.how.run_seconds) as neighbour:
        if how == "background":
            with Background(threads=cell.threads).applied() as background:
                seconds = _train(step, neighbour, before=background.before_step, after=background.after_step)
                notes.extend(background.notes)
        else:
            seconds = _train(step, neighbour)
        return replace(cell, step_seconds=seconds, results=neighbour.results(), notes=notes)


def _train(
    step: Callable[[], Any],
    neighbour: _Neighbour,
    *,
    before: Callable[[], Any] = lambda: None,
    after: Callable[[], Any] = lambda: None,
) -> list[float]:
    neighbour.begin()
    seconds = []
    while neighbour.runs:
        begin = time.perf_counter()
        before()
        step()
        after()
        seconds.append(time.perf_counter() - begin)
    return seconds


class _Neighbour:
    """The other program, which waits for the word to begin."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def waiting(cls, run_seconds: float) -> Iterator[_Neighbour]:
        """Has imported what it needs, and does nothing yet; it is gone after the block."""
        # -P: its folder holds files of this package, which would hide Python's own.
        command = [sys.executable, "-P", str(_PROGRAM), str(run_seconds)]
        # One core's worth: that it has threads of its own is not what is measured.
        alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **alone}
        ) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline().strip() != "ready":
                    raise RuntimeError(f"the neighbour ended with exit code {process.wait()} before it began")
                yield cls(process)
            finally:
                process.kill()
                process.wait()

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def begin(self) -> None:
        """It runs from now on. Its input stays open: when that is closed it ends, however this process ended."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def results(self) -> dict[str, Number]:
        """What it found, when it has ended."""
        assert self._process.stdout is not None
        text = self._process.stdout.read()
        if self._process.wait() != 0:
            raise RuntimeError(f"the neighbour ended with exit code {self._process.returncode}")
        return dict(json.loads(text))
