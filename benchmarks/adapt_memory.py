"""What it takes to adapt MobileNetV2 to other classes: plain PyTorch beside torch_odt, for the methods of `odt.adapt`.

    python benchmarks/adapt_memory.py
    python benchmarks/adapt_memory.py --methods full bias --batch 16 --out adapt.json

Each row is a process of its own. Bytes are the most that it held in the steps behind two that warm up, above the level
before the model was made: weights, gradients, the optimizer's state, activations, buffers of libraries, the plan; in
brackets with the first two, in which torch_odt measures operators. Seconds are the median of these steps. Micro-batches
are off, unless `--micro-batch` says how many samples run at once: a plain loop then accumulates gradients (where
BatchNorm follows the batch, that is another computation). Adam keeps two moments of what trains.

LoRA is peft's (`--methods LoRA ...`, where it is installed), of rank 8 at the pointwise convolutions; in torch_odt
BatchNorm is frozen behind it, as for the other methods.

In the rows of plain PyTorch the network is what torchvision made it, BatchNorm follows the batch, and what does not
train has `requires_grad=False`. PyTorch has no lite residual modules: in their rows the model that `tinytl_` has made
runs in a plain loop.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frontier import describe_machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

METHODS = ("full", "norm+last", "last", "bias", "lite", "lite+bias", "lite+bias, 8 bits")
LORA = "LoRA"
CLASSES = 10
MIB = 2**20


def main() -> int:
    arguments = parse()
    if arguments.worker:
        print(json.dumps(measure(arguments)))
        return 0
    rows = []
    for way in ("plain", "torch_odt"):
        for method in arguments.methods:
            rows.append(run(way, method, arguments))
            print(line(rows[-1], rows[0]), flush=True)
    if arguments.out:
        result = {"machine": describe_machine(arguments), "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=(*METHODS, LORA), default=METHODS)
    parser.add_argument("--model", default="mobilenet_v2", help="of torchvision")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("WAY", "METHOD"), help=argparse.SUPPRESS)
    return parser.parse_args()


def run(way: str, method: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A row, measured in a process of its own."""
    options = [f"--{name}={getattr(arguments, name)}" for name in ("model", "batch", "size", "steps", "threads")]
    if arguments.micro_batch is not None:
        options.append(f"--micro-batch={arguments.micro_batch}")
    command = [sys.executable, __file__, "--worker", way, method, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def line(row: dict[str, Any], first: dict[str, Any]) -> str:
    """For people, beside the first row."""
    less, faster = first["peak_bytes"] / row["peak_bytes"], first["step_seconds"] / row["step_seconds"]
    return (
        f"{row['way']:<10} {row['method']:<18} {row['peak_bytes'] / MIB:7.1f} MiB "
        f"({row['peak_with_beginning_bytes'] / MIB:6.1f})  {less:5.1f}x less"
        f"  {row['step_seconds']:6.3f} s  {faster:5.2f}x faster"
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps in this process."""
    import torch
    import torchvision
    from process_memory import Sampler, anonymous, settle

    import torch_odt as odt
    from recipes.common.transfer_ways import Way, adapt, select

    way, method = arguments.worker
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size)
    x, y = images.contiguous(memory_format=torch.channels_last), torch.randint(CLASSES, (arguments.batch,))
    del images
    # What the first operators of a process leave behind is not the model's.
    torch.nn.functional.conv2d(x[:1], torch.randn(8, 3, 3, 3, requires_grad=True)).sum().backward()
    settle()
    idle = anonymous()
    model = torchvision.models.get_model(arguments.model, weights=None).to(memory_format=torch.channels_last)
    # Full fine-tuning trains BatchNorm with the statistics of the batch on both sides, as everybody does it.
    if method == "full" or (way == "plain" and not method.startswith("lite")):
        parameters = select(model, method, CLASSES)
    elif method == LORA:
        parameters = adapt(model, Way("LoRA"), CLASSES, arguments.size)
    else:
        mode: Any = method.split(",")[0]
        bits: Any = 8 if method.endswith("8 bits") else 32
        adaptation = odt.adapt.tinytl_(model, mode=mode, classes=CLASSES, weight_bits=bits, input_size=arguments.size)
        parameters = adaptation.parameters()
    model.train()
    optimizer = torch.optim.Adam(parameters, lr=1e-4)
    step: Callable[[torch.Tensor, torch.Tensor], Any]
    if way == "plain":
        step = plain_step(model, optimizer, arguments.micro_batch or arguments.batch)
    else:
        micro_batch = arguments.micro_batch
        if micro_batch is None and method != "full":
            micro_batch = arguments.batch
        budget = odt.Budget("8GiB", of="training")
        step = odt.TrainStep(
            model, torch.nn.functional.cross_entropy, optimizer, budget=budget, cache=False, micro_batch=micro_batch
        )
    sampler = Sampler()
    sampler.start()
    seconds = []
    beginning_bytes = 0
    for number in range(2 + arguments.steps):
        if number == 2:
            beginning_bytes = sampler.reset()
        begin = time.perf_counter()
        step(x, y)
        seconds.append(time.perf_counter() - begin)
    peak_bytes = sampler.finish()
    return {
        "way": way,
        "method": method,
        "peak_bytes": peak_bytes - idle,
        "peak_with_beginning_bytes": max(peak_bytes, beginning_bytes) - idle,
        "step_seconds": statistics.median(seconds[2:]),
        "trained_parameters": sum(parameter.numel() for parameter in parameters),
        "torch": torch.__version__,
    }


def plain_step(model: Any, optimizer: Any, samples: int) -> Callable[[Any, Any], None]:
    """A step of plain PyTorch, in micro-batches of so many samples."""
    from torch.nn.functional import cross_entropy

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        for part, target in zip(x.split(samples), y.split(samples), strict=True):
            (cross_entropy(model(part), target) * (len(part) / len(x))).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    sys.exit(main())
