"""A whole training step in int8 beside float32: seconds and bytes of MobileNetV2, ResNet-18 and VGG-11.

    python benchmarks/int8_training.py --out results       # batches of 8 and 16 at 96 and 224 pixels; an hour or so
    python benchmarks/int8_training.py --quick             # batch 8 at 96 pixels without VGG-11, in a minute or two
    python benchmarks/int8_training.py --quick --models resnet18 --profile qas    # the operators of int8's step

Each way trains the same network with its own kind of SGD, without momentum:

| way | what it is |
|---|---|
| eager | float32; contiguous and channels_last are both timed, the faster one counts |
| folded | the same with BatchNorms folded into the layers before them, as `convert_` does it; channels_last |
| bf16 | `eager` in channels_last under autocast (`--bf16`) |
| qas | `convert_` with QAS, and `train_int8_` |
| niti | `niti_` with folded BatchNorms, packed weights kept, and `NitiSGD` |

Seconds: all ways of a cell are in one process and take turns, a step each; the least of many rounds. With one thread
they are the processor's, which other programs add little to; with more the wall's. Bytes: a process for each way, its
highest resident size of some steps above the level with the model and its batch in memory.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from frontier import describe_machine
from process_memory import reset_high_water_mark, settle, status
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from torch.profiler import ProfilerActivity, profile

MODELS = ("mobilenet_v2", "resnet18", "vgg11")
CLASSES = 10
MIB = 1 << 20
WARM_UP_STEPS = 3
MEMORY_STEPS = 3

Step = Callable[[], None]


def main() -> None:
    options = parsed()
    torch.set_num_threads(options.threads)
    if options.memory_of is not None:
        print(measured_bytes(options.memory_of, options.models[0], options.batches[0], options.pixels[0]))
        return
    ways = ["eager contiguous", "eager channels_last", "folded", *(["bf16"] if options.bf16 else []), "qas", "niti"]
    cells = []
    for name in options.models:
        for pixels in options.pixels:
            for batch in options.batches:
                if options.profile:
                    print_operators(options.profile, name, batch, pixels)
                    continue
                seconds = measured_seconds(ways, name, batch, pixels, options.seconds)
                bytes_ = {} if options.no_memory else {way: in_a_process(way, name, batch, pixels) for way in ways}
                cells.append({"model": name, "batch": batch, "pixels": pixels, "seconds": seconds, "bytes": bytes_})
                print_cell(cells[-1], first=len(cells) == 1)
                # After each cell: what interrupts a later one takes nothing away.
                save(cells, options)


def save(cells: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        report = {"machine": describe_machine(), "threads": options.threads, "cells": cells}
        (options.out / "int8_training.json").write_text(json.dumps(report, indent=1) + "\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--pixels", type=int, nargs="+", default=[96, 224])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20, help="of rounds, for each cell")
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast as well")
    parser.add_argument("--no-memory", action="store_true", help="seconds alone")
    parser.add_argument(
        "--profile", metavar="WAY", help="print the operators of a way's step, and measure nothing else"
    )
    parser.add_argument("--quick", action="store_true", help="one cell each of MobileNetV2 and ResNet-18")
    parser.add_argument("--out", type=Path, help="a folder for int8_training.json")
    parser.add_argument("--memory-of", metavar="WAY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.batches, options.pixels, options.seconds = [8], [96], 12
        options.models = [name for name in options.models if name != "vgg11"]
    return options


def network(name: str, images: Tensor) -> nn.Module:
    """A network from seed 0 whose BatchNorms have seen the batch, so that they can be folded."""
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.5
    with torch.no_grad():
        for _ in range(4):
            model(images)
    return model.train()


def batch_of(batch: int, pixels: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, pixels, pixels, generator=generator)
    return images, torch.randint(CLASSES, (batch,), generator=generator)


def make_step(way: str, model: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """A training step; the model is used up."""
    loss_fn: Callable[..., Tensor] = F.cross_entropy
    if way != "eager contiguous":
        images = images.contiguous(memory_format=torch.channels_last)
    if way in ("eager channels_last", "bf16"):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if way == "folded":
        model = fuse(model.eval()).train().to(memory_format=torch.channels_last)
    optimizer: torch.optim.Optimizer
    if way == "qas":
        from torch_odt.quant import convert_, train_int8_

        convert_(model.eval(), [images], qas=True)
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.001)
        train_int8_(model, optimizer)
    elif way == "niti":
        from torch_odt.quant import NitiSGD, PackedWeights, niti_, niti_cross_entropy

        training = niti_(model, batch_norm="fold", gradient_bits=1, packs=PackedWeights())
        optimizer, loss_fn, packs = NitiSGD(model, lr=0.001), niti_cross_entropy, training.packs
    else:
        optimizer, packs = torch.optim.SGD(model.parameters(), lr=0.001), None

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16"):
            loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()

    # The operators know packed weights by number alone.
    step.packs = packs if way == "niti" else None  # type: ignore[attr-defined]
    return step


def measured_seconds(ways: list[str], name: str, batch: int, pixels: int, seconds: float) -> dict[str, float]:
    """The least seconds of a step, all ways in turn."""
    images, labels = batch_of(batch, pixels)
    model = network(name, images)
    steps = {way: make_step(way, copy.deepcopy(model), images, labels) for way in ways}
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    least = dict.fromkeys(ways, float("inf"))
    began = clock()
    while clock() - began < seconds:
        for way, step in steps.items():
            start = clock()
            step()
            least[way] = min(least[way], clock() - start)
    return least


def measured_bytes(way: str, name: str, batch: int, pixels: int) -> int:
    """In a process of its own: what steps add to the model and its batch."""
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


def in_a_process(way: str, name: str, batch: int, pixels: int) -> int:
    command = [sys.executable, __file__, "--memory-of", way, "--models", name, "--batches", str(batch)]
    command += ["--pixels", str(pixels), "--threads", str(torch.get_num_threads())]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


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


def print_cell(cell: dict[str, Any], *, first: bool) -> None:
    """Milliseconds, and how many times eager's and folded float32's; MiB, and how many times fewer than eager's."""
    seconds, bytes_ = cell["seconds"], cell["bytes"]
    fastest = min((way for way in seconds if way.startswith("eager")), key=lambda way: seconds[way])
    if first:
        print(f"{'':28s}{'way':<21s}{'ms':>8s}{'x eager':>9s}{'x folded':>9s}{'MiB':>8s}{'x fewer':>9s}")
    for way, taken in seconds.items():
        where = f"{cell['model']} b{cell['batch']} @{cell['pixels']}"
        line = f"{where:28s}{way:<21s}{taken * 1e3:8.1f}{seconds[fastest] / taken:9.2f}{seconds['folded'] / taken:9.2f}"
        if bytes_:
            line += f"{bytes_[way] / MIB:8.1f}{bytes_[fastest] / bytes_[way]:9.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
