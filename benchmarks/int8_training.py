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
| qas | `convert_` with QAS, and `train_int8_` |
| niti | `niti_` with folded BatchNorms, packed weights kept, and `NitiSGD` |

Seconds: a process for each cell, a network at a batch on a set to which torch is kept as well; all ways take turns in
it, a step each. Both clocks, the process's and the wall's, each with the least of the rounds. Bytes: a process for each
way, its highest resident size of some steps above the level with the model and its batch in memory. The ratios are of
the processor's seconds with one thread, to which other programs add little, and of the wall's with more; see PROMISES;
exits with 1 where one is not kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from frontier import describe_machine
from instruction_sets import SETS, environment_of, require_set, sets_here
from int8_training_ways import EAGER, INT8, MODELS, batch_of, make_step, network, ways_on
from process_memory import reset_high_water_mark, settle, status
from torch.profiler import ProfilerActivity, profile

MIB = 1 << 20
WARM_UP_STEPS = 3
MEMORY_STEPS = 3
FEWEST_ROUNDS = 4
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
            run_worker(f"operators of {options.profile}", cell, options)
            continue
        cell["seconds"] = json.loads(run_worker("seconds", cell, options))
        if not options.no_memory:
            ways = ways_on(cell["set"])
            cell["bytes"] = {way: json.loads(run_worker(f"bytes of {way}", cell, options)) for way in ways}
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
    parser.add_argument("--no-memory", action="store_true", help="seconds alone")
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


def run_worker(task: str, cell: Cell, options: argparse.Namespace) -> str:
    """What a process of its own prints last, kept to the cell's set; profiles go to the terminal."""
    command = [sys.executable, __file__, "--worker", task, "--sets", cell["set"], "--models", cell["model"]]
    for name, key in (("--pixels", "pixels"), ("--batches", "batch"), ("--threads", "threads")):
        command += [name, str(cell[key])]
    command += ["--seconds", str(options.seconds)]
    environment = environment_of(cell["set"], cell["threads"])
    output = None if task.startswith("operators") else subprocess.PIPE
    done = subprocess.run(command, env=environment, check=True, stdout=output, text=True)
    return done.stdout.splitlines()[-1] if done.stdout else ""


def work(options: argparse.Namespace) -> None:
    """In a process of its own: one cell, one task."""
    require_set(options.sets[0])
    torch.set_num_threads(options.threads)
    name, batch, pixels = options.models[0], options.batches[0], options.pixels[0]
    task, _, way = options.worker.partition(" of ")
    if task == "seconds":
        print(json.dumps(measured_seconds(ways_on(options.sets[0]), name, batch, pixels, options.seconds)))
    elif task == "bytes":
        print(json.dumps(measured_bytes(way, name, batch, pixels)))
    else:
        print_operators(way, name, batch, pixels)


def measured_seconds(
    ways: list[str], name: str, batch: int, pixels: int, seconds: float
) -> dict[str, dict[str, float]]:
    """The least seconds of a step by way and clock, all ways in turn."""
    images, labels = batch_of(batch, pixels)
    model = network(name, images)
    steps = {way: make_step(way, copy.deepcopy(model), images, labels) for way in ways}
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    least = {way: {"processor": float("inf"), "wall": float("inf")} for way in ways}
    rounds, began = 0, time.process_time()
    while rounds < FEWEST_ROUNDS or time.process_time() - began < seconds:
        rounds += 1
        for way, step in steps.items():
            processor, wall = time.process_time(), time.perf_counter()
            step()
            taken = {"processor": time.process_time() - processor, "wall": time.perf_counter() - wall}
            least[way] = {clock: min(least[way][clock], taken[clock]) for clock in taken}
    return least


def measured_bytes(way: str, name: str, batch: int, pixels: int) -> int:
    """What steps add to the model and its batch."""
    images, labels = batch_of(batch, pixels)
    step = make_step(way, network(name, images), images, labels)
    settle()
    level = status()["VmRSS"]
    for _ in range(WARM_UP_STEPS):
        step()
    settle()
    reset_high_water_mark()
    for _ in range(MEMORY_STEPS):
        step()
    return status()["VmHWM"] - level


def print_operators(way: str, name: str, batch: int, pixels: int) -> None:
    images, labels = batch_of(batch, pixels)
    step = make_step(way, network(name, images), images, labels)
    for _ in range(WARM_UP_STEPS):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            step()
    print(f"{name}, batch {batch}, {pixels} pixels: {way}, 5 steps")
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
        if "bytes" in cell:
            found["x fewer bytes"] = cell["bytes"][eager] / cell["bytes"][way]
        ratios[way] = found
    return ratios


def missed_in(cell: Cell) -> Iterator[str]:
    """A line for each promise that a cell does not keep."""
    promises = {"x eager": PROMISED_SPEED.get(cell["set"], 0.0), "x fewer bytes": PROMISED_BYTES}
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
    columns = ("x eager", "x folded", "x bf16", "x fewer bytes")
    if first:
        print(f"{'':40s}{'way':<21s}{'ms':>9s}{'ms, wall':>10s}{'MiB':>8s}" + "".join(f"{c:>15s}" for c in columns))
    for way, taken in cell["seconds"].items():
        line = f"{title_of(cell):40s}{way:<21s}{taken['processor'] * 1e3:9.1f}{taken['wall'] * 1e3:10.1f}"
        line += f"{cell['bytes'][way] / MIB:8.1f}" if "bytes" in cell else f"{'-':>8s}"
        found = cell["ratios"].get(way, {})
        line += "".join(f"{found[column]:15.2f}" if column in found else f"{'-':>15s}" for column in columns)
        print(line if found else line.rstrip("- "), flush=True)


def save(cells: list[Cell], options: argparse.Namespace) -> None:
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        result = {"machine": describe_machine(options), "cells": cells}
        (options.out / "int8_training.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
