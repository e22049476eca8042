"""How few bytes activations take with micro-batches alone, with recomputation alone, and with both (SAGE's hybrid).

    python recipes/sage_hybrid.py                       # ResNet-50, 32 images of 224 x 224, planned and executed
    python recipes/sage_hybrid.py --no-execute          # planned only
    python recipes/sage_hybrid.py --image-size 64 --batch-size 8 --out sage.json

Activation bytes are what a step holds beside weights, gradients, the optimizer's state and the batch: activations and
what operators need while they run. BatchNorm is in evaluation mode: its statistics couple the samples of a batch, and
micro-batches of it in training mode are another training. The paper's figures are an activation minimum 50 % below
accumulation alone and 76 % below checkpointing alone; the recipe ends with code 1 where one of them is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

import torch_odt as odt

ROOMY = odt.Budget(1 << 50, of="training")
# Weights in another layout make some convolutions faster and are held beside the weights: bytes come first here.
DISABLED = ("choose_layouts",)
BELOW_ACCUMULATION = 0.50
BELOW_RECOMPUTATION = 0.76
MEASURED_STEPS = 3


@dataclass(frozen=True)
class Row:
    """One micro-batch size: everything kept, and the fewest bytes."""

    micro_batch: int
    kept_bytes: int
    kept_seconds: float
    least_bytes: int
    least_seconds: float


@dataclass(frozen=True)
class Minima:
    """Activation bytes of each half alone, of both together, and of plain PyTorch's micro-batches of one."""

    accumulation_bytes: int
    recomputation_bytes: int
    hybrid_bytes: int
    eager_accumulation_bytes: int | None

    @property
    def below_accumulation(self) -> float:
        return 1 - self.hybrid_bytes / self.accumulation_bytes

    @property
    def below_recomputation(self) -> float:
        return 1 - self.hybrid_bytes / self.recomputation_bytes

    @property
    def is_as_published(self) -> bool:
        return self.below_accumulation >= BELOW_ACCUMULATION and self.below_recomputation >= BELOW_RECOMPUTATION

    @property
    def below_eager_accumulation(self) -> float | None:
        return self.eager_accumulation_bytes and 1 - self.hybrid_bytes / self.eager_accumulation_bytes


@dataclass
class Task:
    """A model, its loss and a batch."""

    model: nn.Module
    batch: tuple[torch.Tensor, torch.Tensor]
    loss_fn: nn.Module

    def plan(self, budget: odt.Budget, micro_batch: int) -> odt.Plan:
        return self._plan(budget, micro_batch, None)

    def smallest_bytes(self, micro_batch: int, optimizer: torch.optim.Optimizer) -> int:
        """Above the idle process, gradients and the optimizer's state included."""
        found = self._plan(ROOMY, micro_batch, optimizer).smallest_feasible_bytes
        assert found is not None
        return found

    def _plan(self, budget: odt.Budget, micro_batch: int, optimizer: torch.optim.Optimizer | None) -> odt.Plan:
        return odt.plan(
            self.model,
            self.loss_fn,
            self.batch,
            budget=budget,
            optimizer=optimizer,
            micro_batch=micro_batch,
            disable_rewrites=DISABLED,
        )


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    torch.set_num_threads(options.threads)
    task = make_task(options.model, options.batch_size, options.image_size)
    rows = [row for size in sizes(options.batch_size) if (row := plan_size(task, size)) is not None]
    print_rows(rows)
    minima = Minima(
        accumulation_bytes=min(row.kept_bytes for row in rows),
        recomputation_bytes=rows[0].least_bytes,
        hybrid_bytes=min(row.least_bytes for row in rows),
        eager_accumulation_bytes=eager_bytes(task),
    )
    print_minima(minima)
    result: dict[str, Any] = {
        "model": options.model,
        "batch_size": options.batch_size,
        "image_size": options.image_size,
        "threads": options.threads,
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
        "minima": asdict(minima),
    }
    if options.execute:
        result["executed"] = execute(task, min(rows, key=lambda row: row.least_bytes))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))
    meets = minima.is_as_published
    measured_bytes = result.get("executed", {}).get("activation_bytes")
    if measured_bytes is not None:
        # The smallest budget that is named leaves a little more than the smallest plan takes.
        meets = meets and replace(minima, hybrid_bytes=measured_bytes).is_as_published
    return 0 if meets else 1


def make_task(name: str, batch_size: int, image_size: int) -> Task:
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=10)
    batch = torch.randn(batch_size, 3, image_size, image_size), torch.randint(10, (batch_size,))
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        # Without statistics of their own, new weights let the activations grow from layer to layer.
        model(batch[0][:4])
    for norm in norms:
        norm.eval()
    return Task(model, batch, nn.CrossEntropyLoss())


def sizes(batch_size: int) -> list[int]:
    """The whole batch, and halves of it down to one sample."""
    found = [batch_size]
    while found[-1] > 1:
        found.append((found[-1] + 1) // 2)
    return found


def plan_size(task: Task, micro_batch: int) -> Row | None:
    """None, with a line that says why, where the batch cannot be cut so."""
    try:
        kept = task.plan(ROOMY, micro_batch)
    except odt.CaptureError as reason:
        print(f"no micro-batches of {micro_batch}: {reason}")
        return None
    assert kept.smallest_feasible_bytes is not None
    least = task.plan(odt.Budget(kept.smallest_feasible_bytes, of="training"), micro_batch)
    return Row(micro_batch, kept.arena_bytes, kept.step_seconds, least.arena_bytes, least.step_seconds)


def eager_bytes(task: Task) -> int | None:
    """What plain PyTorch takes beside gradients for one sample at a time; None where nothing counts."""
    images, labels = task.batch
    for _ in range(2):
        odt.memory.reset_peak()
        level = odt.memory.stats().allocated_bytes
        task.loss_fn(task.model(images[:1]), labels[:1]).backward()
    # In the second pass gradients exist already, as in all but the first micro-batch.
    peak = odt.memory.stats().peak_bytes
    task.model.zero_grad()
    return None if peak is None or level is None else peak - level


def execute(task: Task, row: Row) -> dict[str, Any]:
    """Steps in the smallest budget of a micro-batch size, measured."""
    optimizer = torch.optim.SGD(task.model.parameters(), lr=1e-3, momentum=0.9)
    budget_bytes = task.smallest_bytes(row.micro_batch, optimizer)
    step = odt.TrainStep(
        task.model,
        task.loss_fn,
        optimizer,
        budget=odt.Budget(budget_bytes, of="training"),
        micro_batch=row.micro_batch,
        disable_rewrites=DISABLED,
    )
    level = odt.memory.stats().allocated_bytes
    seconds = []
    for _ in range(1 + MEASURED_STEPS):
        odt.memory.reset_peak()
        begin = time.perf_counter()
        step(*task.batch)
        seconds.append(time.perf_counter() - begin)
    peak = odt.memory.stats().peak_bytes
    # Gradients and momentum.
    apart = 2 * sum(p.numel() * p.element_size() for p in task.model.parameters())
    measured = {
        "micro_batch": row.micro_batch,
        "budget_bytes": budget_bytes,
        "activation_bytes": None if peak is None or level is None else peak - level - apart,
        "predicted_seconds": step.plan.step_seconds,
        "step_seconds": statistics.median(seconds[1:]),
    }
    print(
        f"\nexecuted in {mib(budget_bytes)} above the idle process, gradients and momentum included: "
        f"activations {mib(measured['activation_bytes'])}, {measured['step_seconds']:.2f} s per step "
        f"({measured['predicted_seconds']:.2f} s predicted)"
    )
    return measured


def print_rows(rows: list[Row]) -> None:
    print(f"\n{'micro-batch':>11}  {'kept':>10}  {'step':>8}  {'fewest':>10}  {'step':>8}")
    for row in rows:
        print(
            f"{row.micro_batch:>11}  {mib(row.kept_bytes):>10}  {row.kept_seconds:>6.2f} s  "
            f"{mib(row.least_bytes):>10}  {row.least_seconds:>6.2f} s"
        )


def print_minima(minima: Minima) -> None:
    print(f"\nhybrid: {mib(minima.hybrid_bytes)} of activations")
    for name, nbytes, below, target in (
        ("accumulation alone", minima.accumulation_bytes, minima.below_accumulation, BELOW_ACCUMULATION),
        ("recomputation alone", minima.recomputation_bytes, minima.below_recomputation, BELOW_RECOMPUTATION),
        ("plain PyTorch, one sample at a time", minima.eager_accumulation_bytes, minima.below_eager_accumulation, None),
    ):
        goal = "" if target is None else f" (the paper: {target:.0%})"
        print(f"{name}: {mib(nbytes)}" + ("" if below is None else f"; the hybrid is {below:.0%} below it{goal}"))


def mib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 2**20:.1f} MiB"


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="one of torchvision's classifiers (resnet50)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--execute", action=argparse.BooleanOptionalAction, default=True, help="train steps within the fewest bytes"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was found there as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
