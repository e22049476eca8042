"""One side of the demo, in a process of its own: `python -m torch_odt.commands.demo_worker '{...}'`.

Both sides, plain PyTorch and torch_odt, run the same code here but for the step. The result goes to standard output as
JSON, progress to standard error.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import torch_odt as odt
from torch_odt.commands.data import ImageData, load_digits
from torch_odt.commands.errors import UserError
from torch_odt.commands.gauge import MemoryGauge
from torch_odt.commands.models import load_model
from torch_odt.commands.training import (
    Batch,
    PlainStep,
    Record,
    beside_loop,
    laid_out,
    memory_against,
    run_steps,
    validate,
)

SMALL_BATCH = 16


@dataclass(frozen=True)
class Job:
    """What a worker is to do.

    Attributes:
        budget_bytes: bytes above the idle process; None for plain PyTorch.
    """

    model: str
    batch_size: int
    image_size: int
    steps: int
    learning_rate: float
    seed: int
    quiet: bool
    budget_bytes: int | None = None
    label: str = ""


@dataclass
class Result:
    """What a worker saw.

    Attributes:
        peak_bytes: the most that the process held above the idle level, capture and planning included.
        family_peak_bytes: the same together with its child processes (the capture runs in one for a moment).
        step_seconds: of a typical step.
        first_seconds: of the first step, which for torch_odt captures, measures and plans.
        losses, accuracies: of every step.
        validation_accuracy: on digits that were not learnt from.
        plan, plan_text: what was planned.
        error: what the user can put right, if that is how it ended.
        refusal: what an `InfeasibleBudget` is made of, when the budget was too small.
    """

    idle_bytes: int = 0
    peak_bytes: int = 0
    family_peak_bytes: int = 0
    step_seconds: float | None = None
    first_seconds: float | None = None
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    validation_accuracy: float | None = None
    plan: dict[str, Any] | None = None
    plan_text: str = ""
    error: str = ""
    refusal: list[Any] = field(default_factory=list)


def work(job: Job) -> Result:
    """Train as the job says."""
    torch.manual_seed(job.seed)
    model = load_model(job.model, classes=10, image_size=job.image_size, channels_last=True)
    data = load_digits(job.image_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=0.9)
    record = Record()
    batches = _endless(data, job)
    # The idle process of both sides has a batch in memory; nobody else holds on to it.
    batches = itertools.chain([next(batches)], batches)
    with MemoryGauge() as gauge, ExitStack() as stack:
        step: PlainStep | odt.TrainStep
        if job.budget_bytes is None:
            step = PlainStep(model, F.cross_entropy, optimizer)
        else:
            budget = stack.enter_context(beside_loop(odt.Budget(job.budget_bytes, of="training")))
            step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=budget)
        run_steps(
            step,
            batches,
            steps=job.steps,
            record=record,
            memory_text=lambda: memory_against(gauge, job.budget_bytes, above_bytes=gauge.base_bytes),
            label=job.label,
            quiet=job.quiet,
        )
    result = Result(
        idle_bytes=gauge.base_bytes,
        peak_bytes=gauge.peak_bytes - gauge.base_bytes,
        family_peak_bytes=gauge.family_peak_bytes - gauge.base_bytes,
        step_seconds=record.step_seconds,
        first_seconds=record.seconds[0],
        losses=record.losses,
        accuracies=record.accuracies,
    )
    if not isinstance(step, PlainStep):
        result.plan, result.plan_text = step.plan.to_dict(), str(step.plan)
        held_out = laid_out(DataLoader(data.validation, batch_size=SMALL_BATCH), channels_last=True)
        _, result.validation_accuracy = validate(model, held_out)
    return result


def _endless(data: ImageData, job: Job) -> Iterator[Batch]:
    """Batches in an order that the seed decides, as many as are asked for."""
    order = torch.Generator().manual_seed(job.seed)
    loader = DataLoader(data.train, batch_size=job.batch_size, shuffle=True, drop_last=True, generator=order)
    return itertools.chain.from_iterable(laid_out(loader, channels_last=True) for _ in itertools.count())


def main() -> int:
    """Do the job in the first argument."""
    from torch_odt.errors import InfeasibleBudget

    try:
        result = work(Job(**json.loads(sys.argv[1])))
    except UserError as error:
        result = Result(error=str(error))
    except InfeasibleBudget as error:
        result = Result(refusal=list(error.__reduce__()[1]))
    except Exception:
        traceback.print_exc()
        return 1
    print(json.dumps(dataclasses.asdict(result), default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
