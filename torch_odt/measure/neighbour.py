"""What training does to another program: its processor speed, its memory's bandwidth and the latency of its requests.

As Chen et al., section 4.7, with a program of our own in the place of a benchmark application. The neighbour runs in a
process that knows nothing of the training: `python -m torch_odt.measure.neighbour SECONDS`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from torch_odt.measure.job import Job
from torch_odt.measure.record import Cell, Number

REQUESTS_PER_SECOND = 20
_COPY_BYTES = 64 << 20
_SHARES = {"processor": 0.3, "memory": 0.3, "requests": 0.4}


def beside_neighbour(job: Job, cell: Cell, step_of: Callable[[], Callable[[], Any]]) -> Cell:
    """Trains while a neighbour runs for `how.run_seconds`, in the way that the factor "training" names.

    "none" lets the neighbour run alone, "foreground" trains as ever, "background" by `torch_odt.runtime.Background`.
    """
    from torch_odt.runtime.background import Background

    how = str(cell.factors["training"])
    if how == "none":
        return replace(cell, results=_ended(_started(job.how.run_seconds)))
    step = step_of()
    for _ in range(job.how.warmup_steps):
        step()
    if how == "background":
        with Background(threads=cell.threads).applied() as background:
            seconds, results = _train(
                step, job.how.run_seconds, before=background.before_step, after=background.after_step
            )
            notes = list(background.notes)
    else:
        seconds, results = _train(step, job.how.run_seconds)
        notes = []
    return replace(cell, step_seconds=seconds, results=results, notes=notes)


def _train(
    step: Callable[[], Any],
    run_seconds: float,
    *,
    before: Callable[[], Any] = lambda: None,
    after: Callable[[], Any] = lambda: None,
) -> tuple[list[float], dict[str, Number]]:
    neighbour = _started(run_seconds)
    seconds = []
    try:
        while neighbour.poll() is None:
            begin = time.perf_counter()
            before()
            step()
            after()
            seconds.append(time.perf_counter() - begin)
        return seconds, _ended(neighbour)
    finally:
        if neighbour.poll() is None:
            neighbour.kill()
            neighbour.wait()


def _started(run_seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "torch_odt.measure.neighbour", str(run_seconds)]
    # One core's worth: that it has threads of its own is not what is measured.
    alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **alone})


def _ended(neighbour: subprocess.Popen[str]) -> dict[str, Number]:
    text, _ = neighbour.communicate()
    if neighbour.returncode != 0:
        raise RuntimeError(f"the neighbour ended with exit code {neighbour.returncode}")
    return dict(json.loads(text))


def run_neighbour(seconds: float) -> dict[str, Number]:
    """Computes, copies and answers requests, one after the other, each for a share of the seconds.

    Returns:
        Operations of the processor and bytes copied in a second, and the latency of requests, which come evenly and
        wait for each other: the median and the 99th percentile.
    """
    random = np.random.default_rng(0)
    matrix = random.standard_normal((96, 96), dtype=np.float32)
    operations = _repeat(lambda: matrix @ matrix, seconds * _SHARES["processor"]) * 2 * 96**3
    source = random.integers(0, 255, _COPY_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    copied = _repeat(lambda: np.copyto(target, source), seconds * _SHARES["memory"]) * 2 * _COPY_BYTES
    latencies = _answer(matrix, seconds * _SHARES["requests"])
    return {
        "processor_operations_per_second": operations,
        "memory_bytes_per_second": copied,
        "p50_seconds": float(np.percentile(latencies, 50)),
        "p99_seconds": float(np.percentile(latencies, 99)),
        "requests": len(latencies),
    }


def _repeat(work: Callable[[], Any], seconds: float) -> float:
    """How often a second."""
    work()
    count, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        work()
        count += 1
    return count / passed


def _answer(matrix: np.ndarray, seconds: float) -> list[float]:
    begin = time.perf_counter()
    latencies = []
    for number in range(max(1, int(seconds * REQUESTS_PER_SECOND))):
        due = begin + number / REQUESTS_PER_SECOND
        time.sleep(max(0.0, due - time.perf_counter()))
        for _ in range(20):
            matrix = np.tanh(matrix @ matrix)
        # From the moment at which it came: what waits behind another one waits, too.
        latencies.append(time.perf_counter() - due)
    return latencies


if __name__ == "__main__":
    print(json.dumps(run_neighbour(float(sys.argv[1]))))
