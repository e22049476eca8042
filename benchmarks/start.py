"""What it takes to begin: seconds and bytes up to the end of the first step, with and without a trace.

    python benchmarks/start.py                      # MobileNetV2, 16 images of 224 x 224
    python benchmarks/start.py --repeats 1          # a look

Every start is a process of its own. What is counted are the seconds up to the end of the first step without those of
an ordinary step, and the anonymous bytes that were added when the first operator is about to run: what the step itself
plans is not among them. The model, a batch and the optimizer are made before the clock starts: each way needs them.
"Ready" is when that operator is about to run; the seconds behind it are those of operators that run for the first
time, which plain PyTorch has too. The last column is what making the optimizer has added before, to each way alike:
torch.optim imports torch's tracer. CPU seconds are those of all threads of the process, without a child's;
on a machine that is not quiet they say more.

| way | what is there already |
|---|---|
| plan file | a file that carries its graph: nothing is traced, measured or planned |
| remembered | a folder with the trace, the measurements and the plan of an earlier process |
| traced | the same without the trace, which is made in a child process |
| plain PyTorch | nothing to prepare: what it takes is what operators do when they run first |

Exits with 1 where a start from a plan file is ready later, or takes more bytes, than is promised.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("plan file", "remembered", "traced", "plain PyTorch")
PROMISED_SECONDS = 0.5
PROMISED_BYTES = 10_000_000
STEPS = 4
# Of MobileNetV2: expansion, channels, blocks, stride of the first.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def main() -> int:
    options = parse_options()
    if options.way is not None:
        print(json.dumps(start(options)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        run_worker(options, "save")
        found = {way: [run_worker(options, way) for _ in range(options.repeats)] for way in options.ways}
    return report(found)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--budget", default="400MiB", help="above the level at construction")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_worker(options: argparse.Namespace, way: str) -> dict[str, float]:
    words = ["--way", way, "--folder", options.folder, "--budget", options.budget]
    words += ["--batch-size", options.batch_size, "--image-size", options.image_size]
    outcome = subprocess.run([sys.executable, __file__, *map(str, words)], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(outcome.stdout)
    return found


def report(found: dict[str, list[dict[str, float]]]) -> int:
    heads = ("start s", "least", "most", "ready s", "CPU s", "MB", "most MB", "a step s", "optim MB")
    print(f"{'way':15s}" + "".join(f"{head:>10s}" for head in heads))
    for way, runs in found.items():
        seconds = [run["start_seconds"] for run in runs]
        cells = [statistics.median(seconds), min(seconds), max(seconds)]
        cells += [statistics.median(run[name] for run in runs) for name in ("ready_seconds", "start_cpu_seconds")]
        cells += [statistics.median(run[name] for run in runs) / 1e6 for name in ("bytes", "most_bytes")]
        cells.append(statistics.median(run["step_seconds"] for run in runs))
        cells.append(statistics.median(run["optimizer_bytes"] for run in runs) / 1e6)
        print(f"{way:15s}" + "".join(f"{cell:10.2f}" for cell in cells))
    runs = found.get("plan file", [])
    if not runs:
        return 0
    seconds_kept = statistics.median(run["ready_seconds"] for run in runs) <= PROMISED_SECONDS
    bytes_kept = statistics.median(run["bytes"] for run in runs) <= PROMISED_BYTES
    verdict = "kept" if seconds_kept and bytes_kept else "missed"
    print(f"\npromised from a plan file: ready in {PROMISED_SECONDS} s, {PROMISED_BYTES / 1e6:.0f} MB: {verdict}")
    return 0 if seconds_kept and bytes_kept else 1


def start(options: argparse.Namespace) -> dict[str, float]:
    """One start, in this process."""
    import torch
    from process_memory import Sampler, anonymous, settle

    torch.manual_seed(0)
    model = mobilenet_v2().to(memory_format=torch.channels_last)
    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (options.batch_size,))
    settle()
    before_optimizer = anonymous()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    settle()
    level = anonymous()
    sampler = Sampler(0.002)
    sampler.start()
    before_step: list[float] = []

    def note_ready() -> None:
        if not before_step:
            before_step.extend((time.perf_counter(), anonymous(), sampler.reset()))

    began, cpu_began = time.perf_counter(), time.process_time()
    step = make_step(options, model, optimizer, note_ready)
    step(images, labels)
    ready_seconds = before_step[0] - began
    first_seconds, first_cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    sampler.finish()
    if options.way == "save":
        step.plan.save(options.folder / "plan.json")
    seconds, cpu_seconds = [], []
    for _ in range(STEPS):
        began, cpu_began = time.perf_counter(), time.process_time()
        step(images, labels)
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    ordinary_seconds = statistics.median(seconds)
    return {
        "ready_seconds": ready_seconds,
        "start_seconds": first_seconds - ordinary_seconds,
        "start_cpu_seconds": first_cpu_seconds - statistics.median(cpu_seconds),
        "step_seconds": ordinary_seconds,
        "bytes": before_step[1] - level,
        "most_bytes": before_step[2] - level,
        "optimizer_bytes": level - before_optimizer,
    }


def make_step(options: argparse.Namespace, model: Any, optimizer: Any, before_step: Callable[[], None]) -> Any:
    """A step made in one of the ways, imports included; `before_step` is called when everything is ready to run."""
    import torch
    from torch.nn.functional import cross_entropy

    if options.way == "plain PyTorch":

        def plain_step(images: torch.Tensor, labels: torch.Tensor) -> None:
            before_step()
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()

        return plain_step

    import torch_odt as odt

    cache = options.folder / "cache"
    if options.way == "traced":
        shutil.rmtree(cache / "traces")
    budget = odt.Budget(options.budget, of="training")
    given = {"plan": options.folder / "plan.json"} if options.way == "plan file" else {"budget": budget, "cache": cache}
    step = odt.TrainStep(model, cross_entropy, optimizer, **given)

    from torch_odt.execute.prepared import Prepared

    run = Prepared.run

    def run_noted(*args: Any, **kwargs: Any) -> Any:
        before_step()
        return run(*args, **kwargs)

    Prepared.run = run_noted  # type: ignore[method-assign]
    return step


def mobilenet_v2() -> Any:
    """The network of Sandler et al. (2018) as in torchvision, whose import alone brings a tracer."""
    from torch import nn

    def convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[Any]:
        kernel = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
        return [kernel, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True)]

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
            super().__init__()
            hidden = inputs * expansion
            widening = convolution(inputs, hidden, 1) if expansion > 1 else []
            narrowing = convolution(hidden, outputs, 1)[:2]
            self.layers = nn.Sequential(*widening, *convolution(hidden, hidden, 3, stride, hidden), *narrowing)
            self.adds = stride == 1 and inputs == outputs

        def forward(self, x: Any) -> Any:
            return x + self.layers(x) if self.adds else self.layers(x)

    blocks, channels = [], 32
    for expansion, outputs, count, stride in STAGES:
        for number in range(count):
            blocks.append(Block(channels, outputs, stride if number == 0 else 1, expansion))
            channels = outputs
    ends = convolution(3, 32, 3, 2), convolution(320, 1280, 1)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 1000)
    return nn.Sequential(*ends[0], *blocks, *ends[1], *head)


if __name__ == "__main__":
    sys.exit(main())
