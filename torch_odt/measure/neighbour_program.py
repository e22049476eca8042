"""A program that knows nothing of the training: `python neighbour_program.py SECONDS`, started by neighbour.py.

It imports nothing of this package, whose import takes longer than a short run. It says "ready" when it has imported
what it needs, begins when it is sent a line, and ends as soon as its standard input is closed, as by the end of the
process that started it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

REQUESTS_PER_SECOND = 20
_COPY_BYTES = 64 << 20
_SHARES = {"processor": 0.3, "memory": 0.3, "requests": 0.4}


def run_neighbour(seconds: float) -> dict[str, int | float]:
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


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def main() -> None:
    """Wait for the word to begin, and print what was found."""
    print("ready", flush=True)
    if os.read(sys.stdin.fileno(), 1) != b"\n":
        return
    threading.Thread(target=_end_with_input, daemon=True).start()
    print(json.dumps(run_neighbour(float(sys.argv[1]))), flush=True)
    # Without what Python does at its end, during which steps would be counted.
    os._exit(0)


if __name__ == "__main__":
    main()
