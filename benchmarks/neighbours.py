"""Training beside other programs: what they cost it, and what it costs them.

    python benchmarks/neighbours.py --out results           # on a machine with nothing else to do
    python benchmarks/neighbours.py --seconds 5             # a look

Every configuration is a process of its own that trains a MobileNetV2 (8 images of 160 x 160).

| way | what it is |
|---|---|
| plain | plain PyTorch with torch's defaults |
| shared | `Background(nice=0)`: a limited count of spins, threads chosen while it trains, the same priority as others |
| background | `Background()`: the same at a lower priority |

The first table is seconds of a step, alone and beside a process for each core that keeps it busy. The second one is
what a program in the foreground gets done alone and beside each way: a loop (counts a second), copies of memory (GB/s),
and short requests of about 2 ms of work that come every 20 ms (milliseconds to the answer: median and 99th of 100).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

WAYS = ("plain", "shared", "background")
SETTLE_SECONDS = 6.0
PROMISED_BESIDE = 2.5
PROMISED_QUIET = 1.05
REQUEST_SECONDS = 0.02
REQUEST_COUNTS = 40_000


def main() -> int:
    options = parse_options()
    if options.way is not None:
        train(options.way)
    found = {"steps": {way: steps_of(way, options.seconds) for way in WAYS}}
    print(table("seconds of a step", found["steps"], 3), flush=True)
    found["foreground"] = {"alone": foreground(options.seconds)} | {way: beside(way, options.seconds) for way in WAYS}
    print(table("in the foreground", found["foreground"], 2))
    report_promises(found["steps"])
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "neighbours.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each cell (default: 20)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write neighbours.json there")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def train(way: str) -> None:
    """Train until killed; prints the seconds of each step."""
    import torch
    from start import mobilenet_v2
    from torch.nn.functional import cross_entropy

    from torch_odt.runtime import Background

    torch.manual_seed(0)
    model = mobilenet_v2().to(memory_format=torch.channels_last)
    images = torch.randn(8, 3, 160, 160).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shared = Background(nice=0, scheduling="normal", idle_storage=False)
    options = {"plain": None, "shared": shared, "background": Background()}[way]
    with ExitStack() as stack:
        background = None if options is None else stack.enter_context(options.applied())
        while True:
            if background is not None:
                background.before_step()
            began = time.perf_counter()
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            seconds = time.perf_counter() - began
            print(seconds, flush=True)
            if background is not None:
                background.after_step(seconds)


@contextmanager
def training(way: str) -> Iterator[list[float]]:
    """A process that trains; what is handed over holds its steps' seconds when it has ended."""
    from torch_odt.runtime.wait_policy import SPIN_COUNT

    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    if way != "plain":
        environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    words = [sys.executable, __file__, "--way", way]
    seconds: list[float] = []
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield seconds
        finally:
            process.kill()
            seconds += [float(line) for line in process.stdout if line.endswith("\n")]


@contextmanager
def busy_cores() -> Iterator[None]:
    """A process for each core that never sleeps."""
    # It ends by itself when this process is killed.
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    processes = [subprocess.Popen([sys.executable, "-c", loop]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def steps_of(way: str, seconds: float) -> dict[str, float]:
    """Of the second half of the time: the first one is for the choice of threads."""
    with training(way) as quiet:
        time.sleep(SETTLE_SECONDS + seconds)
    with busy_cores(), training(way) as busy:
        time.sleep(SETTLE_SECONDS + seconds)
    return {"quiet": _late_median(quiet), "beside busy cores": _late_median(busy)}


def beside(way: str, seconds: float) -> dict[str, float]:
    with training(way):
        time.sleep(SETTLE_SECONDS)
        return foreground(seconds)


def foreground(seconds: float) -> dict[str, float]:
    requests = [request() for _ in range(100)]
    return {
        "loop, 1e6/s": _rate(lambda: _count(100_000), seconds / 2) * 0.1,
        "copies, GB/s": _rate(_copies(), seconds / 2) * 0.067,
        "request p50, ms": 1e3 * statistics.median(requests),
        "request p99, ms": 1e3 * sorted(requests)[98],
    }


def request() -> float:
    time.sleep(REQUEST_SECONDS)
    began = time.perf_counter()
    _count(REQUEST_COUNTS)
    return time.perf_counter() - began


def table(title: str, rows: dict[str, dict[str, float]], digits: int) -> str:
    heads = list(next(iter(rows.values())))
    lines = [f"{title:20s}" + "".join(f"{head:>20s}" for head in heads)]
    lines += [f"{way:20s}" + "".join(f"{row[head]:20.{digits}f}" for head in heads) for way, row in rows.items()]
    return "\n".join(lines) + "\n"


def report_promises(steps: dict[str, dict[str, float]]) -> None:
    shared, plain = steps["shared"], steps["plain"]
    quiet, busy = shared["quiet"] / plain["quiet"], shared["beside busy cores"] / shared["quiet"]
    print(f"shared, quiet, against plain: {quiet:.2f} (promised: {PROMISED_QUIET})")
    print(f"shared, beside busy cores, against quiet: {busy:.2f} (promised: {PROMISED_BESIDE})")


def _late_median(seconds: list[float]) -> float:
    return statistics.median(seconds[len(seconds) // 2 :]) if seconds else float("nan")


def _rate(work: Callable[[], object], seconds: float) -> float:
    began, times = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        work()
        times += 1
    return times / (time.perf_counter() - began)


def _count(number: int) -> None:
    while number:
        number -= 1


def _copies() -> Callable[[], None]:
    source, target = bytearray(32 << 20), bytearray(32 << 20)
    view = memoryview(target)

    def copy() -> None:
        view[:] = source

    return copy


if __name__ == "__main__":
    sys.exit(main())
