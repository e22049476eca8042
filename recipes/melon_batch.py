"""The largest batch in the memory that plain PyTorch needs for a small one, and what it is worth (Melon's experiment).

    python recipes/melon_batch.py                                  # MobileNetV2 on scikit-learn's digits
    python recipes/melon_batch.py --data fashion-mnist --data-dir DIR
    python recipes/melon_batch.py --epochs 0 --out melon.json      # bytes and seconds alone

Bytes are those of plain PyTorch's largest batch, as the allocator counts them above model and data. torch_odt gets them
as its budget, the libraries' own buffers included. The largest batch that fits is at least 4.3 times as large (the
paper's figure), or the recipe ends with code 1. Then both train for the same number of epochs, each with its largest
batch and a learning rate in proportion to it: BatchNorm learns from whole batches, so that no micro-batches give what a
large batch gives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader

import torch_odt as odt
from torch_odt.commands.data import ImageData, load_data
from torch_odt.commands.models import load_model
from torch_odt.commands.training import validate

TIMES_LARGER = 4.3
# By how much what a capture leaves in the process may differ from one to the next.
NOISE_BYTES = 8 << 20
SEGMENTS = 4

Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Measured:
    """Steps of one kind: the most bytes above model and batch, and samples in a second."""

    method: str
    batch_size: int
    peak_bytes: int
    samples_per_second: float


@dataclass(frozen=True)
class Learnt:
    """Accuracies on samples that were not learnt from, after the last epoch, one for each seed."""

    method: str
    batch_size: int
    learning_rate: float
    accuracies: tuple[float, ...]


class Checkpointed(nn.Module):
    """A sequence whose segments are recomputed, by PyTorch's own means."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, SEGMENTS, x, use_reentrant=False)


@dataclass
class Experiment:
    """What all parts share."""

    options: argparse.Namespace
    data: ImageData

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        size = self.data.image_size
        name = self.options.model
        return load_model(name, classes=len(self.data.classes), image_size=size, channels_last=True).train()

    def batch(self, batch_size: int) -> Batch:
        """The samples repeat where there are fewer."""
        samples = [self.data.train[index % len(self.data.train)] for index in range(batch_size)]
        images = torch.stack([image for image, _ in samples]).contiguous(memory_format=torch.channels_last)
        return images, torch.tensor([label for _, label in samples])

    def optimizer(self, model: nn.Module, learning_rate: float = 1e-3) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)

    def plain_step(self, model: nn.Module, learning_rate: float = 1e-3) -> Step:
        optimizer = self.optimizer(model, learning_rate)

        def step(images: Tensor, labels: Tensor) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

        return step

    def odt_step(self, model: nn.Module, limit_bytes: int, learning_rate: float = 1e-3) -> odt.TrainStep:
        budget = odt.Budget(limit_bytes, of="training")
        return odt.TrainStep(model, F.cross_entropy, self.optimizer(model, learning_rate), budget=budget)

    def smallest_bytes(self, batch_size: int, limit_bytes: int = 1 << 50) -> int:
        """The fewest bytes that a batch is trained in.

        Raises:
            InfeasibleBudget: those are more than the limit.
        """
        model = self.model()
        budget = odt.Budget(limit_bytes, of="training")
        optimizer = self.optimizer(model)
        plan = odt.plan(model, F.cross_entropy, self.batch(batch_size), budget=budget, optimizer=optimizer)
        assert plan.smallest_feasible_bytes is not None
        return plan.smallest_feasible_bytes

    def measure(self, method: str, model: nn.Module, step: Step, batch_size: int) -> Measured:
        images, labels = self.batch(batch_size)
        level = odt.memory.stats().allocated_bytes
        odt.memory.reset_peak()
        seconds = []
        for _ in range(1 + self.options.steps):
            begin = time.perf_counter()
            step(images, labels)
            seconds.append(time.perf_counter() - begin)
        peak = odt.memory.stats().peak_bytes
        if peak is None or level is None:
            raise SystemExit("torch_odt's allocator, which counts bytes, is not built: `torch-odt doctor` says why")
        return Measured(method, batch_size, peak - level, batch_size / statistics.median(seconds[1:]))


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    torch.set_num_threads(options.threads)
    odt.memory.install()
    data = load_data(options.data, data_dir=options.data_dir, image_size=options.image_size)
    experiment = Experiment(options, data)
    rows = compare(experiment)
    print_rows(rows)
    largest, plain = max(row.batch_size for row in rows), rows[0].batch_size
    print(f"\nlargest batch in the same bytes: {largest / plain:.1f}x plain PyTorch's (the paper: {TIMES_LARGER}x)")
    learnt = learn(experiment, rows[0], largest) if options.epochs else []
    print_learnt(learnt, options.epochs)
    if options.out is not None:
        result = {
            "model": options.model,
            "data": data.name,
            "image_size": data.image_size,
            "threads": options.threads,
            "torch": torch.__version__,
            "epochs": options.epochs,
            "steps": [asdict(row) for row in rows],
            "learnt": [asdict(each) for each in learnt],
        }
        options.out.write_text(json.dumps(result, indent=1))
    # Rows of torch_odt are bound to what the first one has taken.
    inside = all(row.peak_bytes <= rows[0].peak_bytes for row in rows if row.method == "torch_odt")
    if not inside:
        print("torch_odt took more bytes than it was given")
    return 0 if inside and largest >= TIMES_LARGER * plain else 1


def compare(experiment: Experiment) -> list[Measured]:
    """Plain PyTorch at its largest batch first; everything of torch_odt in the bytes of that."""
    small = experiment.options.plain_batch
    model = experiment.model()
    rows = [experiment.measure("plain PyTorch", model, experiment.plain_step(model), small)]
    limit_bytes = rows[0].peak_bytes
    largest = largest_batch(experiment, limit_bytes - NOISE_BYTES)
    for batch_size in (small, largest):
        model = experiment.model()
        rows.append(experiment.measure("torch_odt", model, experiment.odt_step(model, limit_bytes), batch_size))
    model = experiment.model()
    rows.append(experiment.measure("plain PyTorch", model, experiment.plain_step(model), largest))
    features = getattr(model, "features", None)
    if isinstance(features, nn.Sequential):
        model.features = Checkpointed(features)
        rows.append(experiment.measure("checkpoint_sequential", model, experiment.plain_step(model), largest))
    return rows


def largest_batch(experiment: Experiment, limit_bytes: int) -> int:
    """The fewest bytes grow in proportion to the batch, but for a part that is always there."""
    small = experiment.options.plain_batch
    one, two = experiment.smallest_bytes(small), experiment.smallest_bytes(2 * small)
    found = int(small * (1 + (limit_bytes - one) / max(1, two - one)))
    while found > small:
        try:
            experiment.smallest_bytes(found, limit_bytes)
            return found
        except odt.InfeasibleBudget as refusal:
            found = min(found - 1, int(found * limit_bytes / refusal.smallest_feasible_bytes))
    return small


def learn(experiment: Experiment, plain: Measured, largest: int) -> list[Learnt]:
    """Equal epochs at equal bytes, each method with its largest batch."""
    options = experiment.options

    def plain_step(model: nn.Module, rate: float) -> Step:
        return experiment.plain_step(model, rate)

    def odt_step(model: nn.Module, rate: float) -> Step:
        return experiment.odt_step(model, plain.peak_bytes, rate)

    found = []
    for method, make_step, batch_size in (
        ("plain PyTorch", plain_step, plain.batch_size),
        ("torch_odt", odt_step, largest),
    ):
        rate = options.learning_rate * batch_size / plain.batch_size
        accuracies = []
        for seed in range(options.seeds):
            model = experiment.model(seed)
            step = make_step(model, rate)
            for epoch in range(options.epochs):
                for images, labels in epoch_of(experiment.data, batch_size, seed=1000 * seed + epoch):
                    step(images, labels)
            accuracies.append(validate(model, DataLoader(experiment.data.validation, 64))[1])
        found.append(Learnt(method, batch_size, rate, tuple(accuracies)))
    return found


def epoch_of(data: ImageData, batch_size: int, seed: int) -> Iterator[Batch]:
    """All samples once, in an order of their own, but for those that fill no batch."""
    order = torch.Generator().manual_seed(seed)
    for images, labels in DataLoader(data.train, batch_size, shuffle=True, drop_last=True, generator=order):
        yield images.contiguous(memory_format=torch.channels_last), labels


def print_rows(rows: list[Measured]) -> None:
    print(f"{'':22}  {'batch':>6}  {'peak':>10}  {'samples/s':>9}")
    for row in rows:
        peak = f"{row.peak_bytes / 2**20:.1f} MiB"
        print(f"{row.method:22}  {row.batch_size:>6}  {peak:>10}  {row.samples_per_second:>9.1f}")


def print_learnt(learnt: list[Learnt], epochs: int) -> None:
    for each in learnt:
        accuracies = ", ".join(f"{accuracy:.1%}" for accuracy in each.accuracies)
        print(
            f"{each.method}, batch {each.batch_size}, learning rate {each.learning_rate:g}, {epochs} epochs: "
            f"accuracy {statistics.mean(each.accuracies):.1%} ({accuracies})"
        )


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mobilenet_v2", help="as for `torch-odt train` (mobilenet_v2)")
    parser.add_argument("--data", default="digits", help="as for `torch-odt train` (digits)")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where a named data set lies")
    parser.add_argument("--image-size", type=int, default=128, help="height and width (128)")
    parser.add_argument("--plain-batch", type=int, default=4, help="plain PyTorch's largest batch (4)")
    parser.add_argument("--steps", type=int, default=5, help="measured for each row (5)")
    parser.add_argument("--epochs", type=int, default=3, help="0 for no comparison of accuracies (3)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each method (2)")
    parser.add_argument("--learning-rate", type=float, default=0.0025, help="with plain PyTorch's batch (0.0025)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was found there as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
