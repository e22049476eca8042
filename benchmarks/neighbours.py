"""Training beside other programs: what they cost it, and what it costs them.

    python benchmarks/neighbours.py --out results           # on a machine with nothing else to do
    python benchmarks/neighbours.py --rounds 2              # a look

Every way is a process of its own that trains a MobileNetV2 (8 images of 160 x 160), and makes steps when it is told to.

| way | what it is |
|---|---|
| plain | plain PyTorch with torch's defaults |
| shared | `TrainStep(background=Background(nice=0, ...))`: a limited count of spins, threads chosen on its own steps |
| background | `TrainStep(background=True)` |
| loop | the loop of plain PyTorch inside `Background(nice=0, ...).applied()`: what the threads alone are worth |

The first table is seconds of a step, alone and beside a process for each core that keeps it busy. Alone, all ways take
turns of some steps; a ratio is of two turns that are neighbours. The second table is what work in the foreground takes
beside each way, over what they took alone just before: a loop, copies of memory, and short requests of about 2 ms of
work that come every 20 ms (the median and the 99th of 100). Medians over the rounds, with the smallest and the largest.
Exits with 1 where a promise is missed.
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

WAYS = ("plain", "shared", "background", "loop")
BESIDE = ("plain", "shared", "background")
STEPS_OF_A_TURN = 6
SETTLE_SECONDS = 6.0
FOREGROUND_SECONDS = 2.0
REQUESTS = 100
REQUEST_SECONDS = 0.02
REQUEST_COUNTS = 40_000
PROMISED_BESIDE = 2.5
PROMISED_QUIET = 1.05
PROMISED_FOREGROUND = 1.05
Spread = tuple[float, float, float]
"""Of some rounds: the median, the smallest and the largest."""


def main() -> int:
    options = parse_options()
    if options.way is not None:
        train(options.way)
    with ExitStack() as stack:
        trainers = {way: stack.enter_context(trainer(way)) for way in WAYS}
        for ask in trainers.values():
            ask("for", SETTLE_SECONDS)
        found = {"steps": steps_of(trainers, options.rounds)}
        print_table("seconds of a step", found["steps"], ".3f")
        for way in BESIDE:
            trainers[way]("for", SETTLE_SECONDS)
        found["foreground"] = {way: foreground_beside(trainers[way], options.rounds) for way in BESIDE}
        print_table("time taken in the foreground, of alone", found["foreground"], ".2f")
    is_kept = report_promises(found)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "neighbours.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if is_kept else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of each measurement (default: 7)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write neighbours.json there")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def train(way: str) -> None:
    """Make steps as told, a line for each turn; ends with its input."""
    step = make_step(way)
    for line in sys.stdin:
        kind, amount = line.split()
        seconds: list[float] = []
        end = time.perf_counter() + float(amount)
        while len(seconds) < int(float(amount)) if kind == "steps" else time.perf_counter() < end:
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        print(json.dumps(seconds), flush=True)
    sys.exit(0)


def make_step(way: str) -> Callable[[], object]:
    import torch
    from start import mobilenet_v2
    from torch.nn.functional import cross_entropy

    import torch_odt as odt
    from torch_odt.runtime import Background

    torch.manual_seed(0)
    model = mobilenet_v2().to(memory_format=torch.channels_last)
    images = torch.randn(8, 3, 160, 160).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def plain() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    if way == "plain":
        return plain
    shared = Background(nice=0, scheduling="normal", idle_storage=False, duty=1)
    if way == "loop":
        run = ExitStack().enter_context(shared.applied())

        def in_background() -> None:
            run.before_step()
            plain()
            run.after_step()

        return in_background
    background = True if way == "background" else shared
    step = odt.TrainStep(model, cross_entropy, optimizer, budget="4GiB", background=background)
    return lambda: step(images, labels)


@contextmanager
def trainer(way: str) -> Iterator[Asked]:
    """A process that makes steps when asked to."""
    from torch_odt.runtime.wait_policy import SPIN_COUNT

    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    if way != "plain":
        environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    words = [sys.executable, __file__, "--way", way]
    with subprocess.Popen(words, env=environment, stdin=-1, stdout=-1, text=True) as process:
        try:
            yield Asked(process)
        finally:
            process.kill()


class Asked:
    """Asks a trainer for a turn, or begins one and waits for its end later."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __call__(self, kind: str, amount: float) -> list[float]:
        self.begin(kind, amount)
        return self.end()

    def begin(self, kind: str, amount: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{kind} {amount}\n")
        self.process.stdin.flush()

    def end(self) -> list[float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"a trainer has ended with {self.process.wait()}"
        return list(json.loads(line))


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


def steps_of(trainers: dict[str, Asked], rounds: int) -> dict[str, dict[str, Spread]]:
    """Alone, in turns; then each beside busy cores."""
    turns: dict[str, list[float]] = {way: [] for way in trainers}
    for _ in range(rounds):
        for way, ask in trainers.items():
            turns[way].append(statistics.median(ask("steps", STEPS_OF_A_TURN)))
    found = {}
    for way, ask in trainers.items():
        with busy_cores():
            ask("for", SETTLE_SECONDS)
            busy = [statistics.median(ask("steps", STEPS_OF_A_TURN)) for _ in range(rounds)]
        ratios = [own / plain for own, plain in zip(turns[way], turns["plain"], strict=True)]
        quiet = statistics.median(turns[way])
        found[way] = {
            "quiet, s": spread(turns[way]),
            "of plain": spread(ratios),
            "beside busy cores, s": spread(busy),
            "of quiet": spread([seconds / quiet for seconds in busy]),
        }
    return found


def foreground_beside(ask: Asked, rounds: int) -> dict[str, Spread]:
    """What a program in the foreground takes beside a trainer, over what it takes alone."""
    ratios: dict[str, list[float]] = {}
    for _ in range(rounds):
        alone = foreground()
        ask.begin("for", 3 * FOREGROUND_SECONDS + REQUESTS * REQUEST_SECONDS)
        beside = foreground()
        ask.end()
        for name, seconds in beside.items():
            ratios.setdefault(name, []).append(seconds / alone[name])
    return {name: spread(found) for name, found in ratios.items()}


def foreground() -> dict[str, float]:
    """Seconds of each piece of work."""
    requests = [request() for _ in range(REQUESTS)]
    return {
        "loop": _seconds_each(lambda: _count(100_000)),
        "copies": _seconds_each(_copies()),
        "request p50": statistics.median(requests),
        "request p99": sorted(requests)[int(0.99 * REQUESTS) - 1],
    }


def request() -> float:
    time.sleep(REQUEST_SECONDS)
    began = time.perf_counter()
    _count(REQUEST_COUNTS)
    return time.perf_counter() - began


def spread(values: list[float]) -> Spread:
    return statistics.median(values), min(values), max(values)


def print_table(title: str, rows: dict[str, dict[str, Spread]], form: str) -> None:
    heads = list(next(iter(rows.values())))
    print(f"{title:36s}" + "".join(f"{head:>24s}" for head in heads))
    for way, row in rows.items():
        cells = [f"{row[head][0]:{form}} ({row[head][1]:{form}}..{row[head][2]:{form}})" for head in heads]
        print(f"{way:36s}" + "".join(f"{cell:>24s}" for cell in cells))
    print(flush=True)


def report_promises(found: dict[str, dict[str, dict[str, Spread]]]) -> bool:
    """Whether all is kept."""
    shared, slowest = found["steps"]["shared"], max(row[0] for row in found["foreground"]["background"].values())
    promises = (
        ("shared, quiet, of plain", shared["of plain"][0], PROMISED_QUIET),
        ("shared, beside busy cores, of quiet", shared["of quiet"][0], PROMISED_BESIDE),
        ("the foreground beside background=True, at the worst", slowest, PROMISED_FOREGROUND),
    )
    for text, ratio, promised in promises:
        print(f"{'kept' if ratio <= promised else 'MISSED'}: {text}: {ratio:.2f} (promised: {promised})")
    return all(ratio <= promised for _, ratio, promised in promises)


def _seconds_each(work: Callable[[], object]) -> float:
    began, times = time.perf_counter(), 0
    while time.perf_counter() - began < FOREGROUND_SECONDS:
        work()
        times += 1
    return (time.perf_counter() - began) / times


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
