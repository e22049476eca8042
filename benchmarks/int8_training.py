"""A whole training step in int8 beside float32 and bf16: seconds and bytes, for each instruction set.

    python benchmarks/int8_training.py --out results       # batches of 8 and 16 at 96 and 224 pixels; hours
    python benchmarks/int8_training.py --quick             # batch 8 at 96 pixels without VGG-11, some minutes
    python benchmarks/int8_training.py --quick --models resnet18 --profile qas    # the operators of int8's step

Each way trains the same network with its own kind of SGD, without momentum:

| way | what it is |
|---|---|
| eager | float32; contiguous and channels_last are both timed, the faster one counts |
| folded | the same with BatchNorms folded into the layers before them, as `convert_` does it; channels_last |
| bf16 | `eager` in channels_last under autocast; with AMX |
| qas | `convert_` with QAS, and `train_int8_`, each layer updated in the backward pass |
| niti | `niti_` with folded BatchNorms, and `NitiSGD`, each layer updated in the backward pass |
| qas planned, niti planned | the same by `TrainStep`, with more memory than it needs |

A cell is a network at a batch on a set, to which torch is kept as well. In it each way has a process of its own, so
that none works with the free memory that another one left. Bytes: its highest resident size of some steps above the
level with the model and its batches in memory, with glibc's defaults, which keep much of what was freed, and in a
second process with a malloc that gives it back (`memory.tune_malloc`). Seconds: the processes take turns of some steps,
on the process's clock and the wall's; of each the median of the turns' means, since some steps of `niti_` look at
scales and others do not. The ratios are of the process's with one thread, to which other programs add little, and of
the wall's with more; see PROMISED_SPEED and its kin; exits with 1 where one is not kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from frontier import describe_machine
from instruction_sets import SETS, environment_of, require_set, sets_here
from int8_training_ways import EAGER, INT8, MODELS, Step, batches_of, make_step, network, ways_on
from process_memory import reset_high_water_mark, settle, status
from torch.profiler import ProfilerActivity, profile

from torch_odt import memory

MIB = 1 << 20
WARM_UP_STEPS = 3
INT8_WARM_UP_STEPS = 10  # scales are looked at in each of the first ones
MEMORY_STEPS = 3
TURN_SECONDS = 0.4
FEWEST_STEPS = 2  # of a turn that count
FEWEST_ROUNDS = 3
# Eager's seconds over int8's by set, bf16's over int8's, and eager's bytes over int8's: in every cell.
PROMISED_SPEED = {"avx512_vnni": 3.0, "amx": 5.0}
PROMISED_OVER_BF16 = 1.0
PROMISED_BYTES = 4.0

Cell = dict[str, Any]


def main() -> int:
    options = parsed()
    if options.worker is not None:
        work(options)
        return 0
    cells: list[Cell] = []
    for cell in cells_of(options):
        if options.profile is not None:
            with Worker(cell, f"operators of {options.profile}") as worker:
                print(worker.rest())
            continue
        cell |= measured(cell, options.seconds)
        cell["ratios"] = ratios_of(cell)
        print_cell(cell, first=not cells)
        cells.append(cell)
        # After each cell: what interrupts a later one takes nothing away.
        save(cells, options)
    missed = [line for cell in cells for line in missed_in(cell)]
    print("\n".join(missed))
    return 1 if missed else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, help="default: AVX512-VNNI and AMX where the processor has them"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--pixels", type=int, nargs="+", default=[96, 224])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40, help="of rounds, for each cell")
    parser.add_argument(
        "--profile", metavar="WAY", help="print the operators of a way's step, and measure nothing else"
    )
    parser.add_argument("--quick", action="store_true", help="one cell each of MobileNetV2 and ResNet-18")
    parser.add_argument("--out", type=Path, help="a folder for int8_training.json")
    parser.add_argument("--worker", metavar="TASK", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.batches, options.pixels, options.seconds = [8], [96], min(options.seconds, 15)
        options.models = [name for name in options.models if name != "vgg11"]
    if options.sets is None:
        options.sets = [name for name in sets_here() if name in PROMISED_SPEED] or sets_here()[-1:]
    return options


def cells_of(options: argparse.Namespace) -> Iterator[Cell]:
    for used in options.sets:
        for name in options.models:
            for pixels in options.pixels:
                for batch in options.batches:
                    yield {"set": used, "threads": options.threads, "model": name, "pixels": pixels, "batch": batch}


class Worker:
    """A process that is kept to a cell's set.

    Args:
        cell: what it works on.
        task: what it does, `TASK of WAY`.
    """

    def __init__(self, cell: Cell, task: str) -> None:
        command = [sys.executable, __file__, "--worker", task, "--sets", cell["set"], "--models", cell["model"]]
        for name, key in (("--pixels", "pixels"), ("--batches", "batch"), ("--threads", "threads")):
            command += [name, str(cell[key])]
        environment = environment_of(cell["set"], cell["threads"])
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        if self._process.wait():
            raise SystemExit(f"a worker ended with {self._process.returncode}")

    def answer(self) -> Any:
        """What it says next."""
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise SystemExit(f"a worker ended with {self._process.wait()}")
        return json.loads(line)

    def turn(self) -> dict[str, float]:
        """The seconds of a step in a turn, by clock."""
        print(file=self._process.stdin, flush=True)
        found: dict[str, float] = self.answer()
        return found

    def rest(self) -> str:
        """What it says until it ends."""
        return self._process.stdout.read()  # type: ignore[union-attr]


def measured(cell: Cell, seconds: float) -> Cell:
    """Bytes of a step by way, and its seconds by way and clock."""
    bytes_: dict[str, int] = {}
    tuned: dict[str, int] = {}
    turns: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for way in ways_on(cell["set"]):
            with Worker(cell, f"tuned of {way}") as worker:
                tuned[way] = worker.answer()
            workers[way] = stack.enter_context(Worker(cell, f"steps of {way}"))
            # One after another: the next one starts when this one waits.
            bytes_[way] = workers[way].answer()
        rounds, began = 0, time.perf_counter()
        while rounds < FEWEST_ROUNDS or time.perf_counter() - began < seconds:
            rounds += 1
            for way, worker in workers.items():
                turns.setdefault(way, []).append(worker.turn())
    taken = {way: {clock: median(turn[clock] for turn in of) for clock in of[0]} for way, of in turns.items()}
    return {"seconds": taken, "bytes": bytes_, "tuned bytes": tuned}


def work(options: argparse.Namespace) -> None:
    """In a process of its own: one way of one cell."""
    require_set(options.sets[0])
    torch.set_num_threads(options.threads)
    task, _, way = options.worker.partition(" of ")
    if task == "tuned" and not memory.tune_malloc():
        raise SystemExit("the C library is not glibc, or torch_odt has no compiled parts")
    batches = batches_of(options.batches[0], options.pixels[0])
    images = batches[0][0]
    step = make_step(way, network(options.models[0], images), batches)
    settle()
    level = status()["VmRSS"]
    for _ in range(INT8_WARM_UP_STEPS if way in INT8 else WARM_UP_STEPS):
        step()
    if task == "operators":
        print_operators(step, f"{options.models[0]}, {tuple(images.shape)}: {way}")
        return
    print(json.dumps(bytes_above(level, step)), flush=True)
    # Each line asks for a turn.
    for _ in sys.stdin:
        print(json.dumps(mean_of_turn(step)), flush=True)


def bytes_above(level: int, step: Step) -> int:
    """What steps add to the model and its batch."""
    settle()
    reset_high_water_mark()
    for _ in range(MEMORY_STEPS):
        step()
    return status()["VmHWM"] - level


def mean_of_turn(step: Step) -> dict[str, float]:
    step()  # finds the caches full of others' numbers
    steps, processor, wall = 0, time.process_time(), time.perf_counter()
    while steps < FEWEST_STEPS or time.perf_counter() - wall < TURN_SECONDS:
        steps += 1
        step()
    return {"processor": (time.process_time() - processor) / steps, "wall": (time.perf_counter() - wall) / steps}


def print_operators(step: Step, title: str) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            step()
    print(f"{title}, 5 steps")
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=50))


def ratios_of(cell: Cell) -> dict[str, dict[str, float]]:
    """For each way of int8: how many times as fast as the others, and how many times fewer bytes than eager."""
    clock = "processor" if cell["threads"] == 1 else "wall"
    seconds = {way: taken[clock] for way, taken in cell["seconds"].items()}
    eager = min(EAGER, key=lambda way: seconds[way])
    ratios = {}
    for way in INT8:
        found = {"x eager": seconds[eager] / seconds[way], "x folded": seconds["folded"] / seconds[way]}
        if "bf16" in seconds:
            found["x bf16"] = seconds["bf16"] / seconds[way]
        for key in ("bytes", "tuned bytes"):
            found[f"x fewer {key}"] = cell[key][eager] / cell[key][way]
        ratios[way] = found
    return ratios


def missed_in(cell: Cell) -> Iterator[str]:
    """A line for each promise that a cell does not keep."""
    promises = {
        "x eager": PROMISED_SPEED.get(cell["set"], 0.0),
        "x fewer bytes": PROMISED_BYTES,
        "x fewer tuned bytes": PROMISED_BYTES,
    }
    if cell["set"] == "amx":
        promises["x bf16"] = PROMISED_OVER_BF16
    for way, found in cell["ratios"].items():
        for key, promised in promises.items():
            if found.get(key, promised) < promised:
                yield f"MISSED: {title_of(cell)}, {way}: {found[key]:.2f} {key}, promised {promised}"


def title_of(cell: Cell) -> str:
    return f"{cell['set']}, {cell['model']} b{cell['batch']} @{cell['pixels']}"


def print_cell(cell: Cell, *, first: bool) -> None:
    """Milliseconds of both clocks, MiB, and int8's ratios."""
    columns = ("x eager", "x folded", "x bf16", "x fewer bytes", "x fewer tuned bytes")
    if first:
        print(
            f"{'':40s}{'way':<21s}{'ms':>9s}{'ms, wall':>10s}{'MiB':>8s}{'tuned':>8s}"
            + "".join(f"{c:>21s}" for c in columns)
        )
    for way, taken in cell["seconds"].items():
        line = f"{title_of(cell):40s}{way:<21s}{taken['processor'] * 1e3:9.1f}{taken['wall'] * 1e3:10.1f}"
        line += f"{cell['bytes'][way] / MIB:8.1f}{cell['tuned bytes'][way] / MIB:8.1f}"
        found = cell["ratios"].get(way, {})
        if found:
            line += "".join(f"{found[column]:21.2f}" if column in found else f"{'-':>21s}" for column in columns)
        print(line, flush=True)


def save(cells: list[Cell], options: argparse.Namespace) -> None:
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        result = {"machine": describe_machine(options), "cells": cells}
        (options.out / "int8_training.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
