"""The loop: epochs of batches through a step, a validation after each, and what was seen on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from torch_odt.commands.gauge import MemoryGauge
from torch_odt.commands.progress import Progress
from torch_odt.commands.table import format_bytes
from torch_odt.errors import InfeasibleBudget
from torch_odt.runtime.budget import Budget, parse_bytes

Batch = tuple[torch.Tensor, torch.Tensor]
_SMOOTHING = 0.9
_OWN_BYTES = 8 << 20


class Step(Protocol):
    """One training step: `torch_odt.TrainStep`, or plain PyTorch in its shape."""

    def with_outputs(self, *args: Any) -> tuple[torch.Tensor, Any]: ...


class PlainStep:
    """What everybody writes without torch_odt: forward, backward, optimizer."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._optimizer = optimizer

    def with_outputs(self, *args: Any) -> tuple[torch.Tensor, Any]:
        *inputs, target = args
        self._optimizer.zero_grad()
        outputs = self._model(*inputs)
        loss = self._loss_fn(outputs, target)
        loss.backward()
        self._optimizer.step()
        return loss.detach(), outputs.detach()


@dataclass
class Record:
    """What a run has seen.

    Attributes:
        losses: of every step.
        accuracies: on the batch of every step.
        seconds: of every step, without the loading of its batch.
    """

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def step_seconds(self) -> float | None:
        """A typical step; the first ones, which capture and warm up, do not count where there are others."""
        return median(self.seconds[2:] or self.seconds) if self.seconds else None


@contextmanager
def beside_loop(budget: Budget) -> Iterator[Budget]:
    """What a budget for training leaves for the steps: batches and progress bar of the loop are not theirs to plan.

    A refusal inside speaks of the budget as it was given.
    """
    if budget.of == "process" or budget.share is not None:
        yield budget
        return
    amount_bytes = parse_bytes(budget.amount)
    try:
        yield Budget(max(amount_bytes - _OWN_BYTES, amount_bytes // 2, 1), of="training")
    except InfeasibleBudget as refusal:
        needed = refusal.smallest_feasible_bytes + _OWN_BYTES
        detail = f"{format_bytes(_OWN_BYTES)} of it are for the loop's own batches and progress bar"
        raise InfeasibleBudget(str(budget), needed, refusal.hints, detail) from refusal


def run_steps(
    step: Step,
    batches: Iterable[Batch],
    *,
    steps: int,
    record: Record,
    memory_text: Callable[[], str],
    label: str,
    done: int = 0,
    quiet: bool = False,
    announce: Callable[[], str] | None = None,
    before_step: Callable[[], None] | None = None,
    step_done: Callable[[], None] | None = None,
) -> None:
    """Train on at most `steps` batches; every step adds to `record` and moves the progress display on.

    Args:
        memory_text: says how the memory stands.
        done: steps that were made before, as far as the progress display goes.
        announce: what to say after the first step.
        before_step: called before each step.
        step_done: called after each step.
    """
    smooth_loss = smooth_accuracy = None
    with Progress(label, done + steps, done=done, quiet=quiet) as progress:
        for images, labels in islice(batches, steps):
            if before_step is not None:
                before_step()
            begin = time.perf_counter()
            loss, scores = step.with_outputs(images, labels)
            record.seconds.append(time.perf_counter() - begin)
            record.losses.append(loss.item())
            record.accuracies.append(_accuracy(scores, labels))
            smooth_loss = _smooth(smooth_loss, record.losses[-1])
            smooth_accuracy = _smooth(smooth_accuracy, record.accuracies[-1])
            progress.advance(f"loss {smooth_loss:.3f}, accuracy {smooth_accuracy:4.0%}, {memory_text()}")
            if announce is not None:
                progress.say(announce())
                announce = None
            if step_done is not None:
                step_done()


def validate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    count: int = 0,
    quiet: bool = True,
    batch_done: Callable[[], None] | None = None,
) -> tuple[float, float]:
    """Mean loss and accuracy over other samples; the model's mode is as before afterwards.

    Args:
        count: how many batches there are, to show progress by.
        quiet: show none.
        batch_done: called after each batch.
    """
    was_training = model.training
    model.eval()
    loss_sum, right, seen = 0.0, 0, 0
    try:
        with torch.no_grad(), Progress("validation", count, quiet=quiet) as progress:
            for images, labels in batches:
                scores = model(images)
                loss_sum += F.cross_entropy(scores, labels, reduction="sum").item()
                right += int((scores.argmax(1) == labels).sum())
                seen += len(labels)
                progress.advance(f"accuracy {right / seen:4.0%}")
                if batch_done is not None:
                    batch_done()
    finally:
        model.train(was_training)
    return (loss_sum / seen, right / seen) if seen else (float("nan"), float("nan"))


def laid_out(batches: Iterable[Batch], channels_last: bool) -> Iterator[Batch]:
    """The same batches in the memory layout that the model has."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    for images, labels in batches:
        yield images.contiguous(memory_format=layout), labels


def memory_against(gauge: MemoryGauge, budget_bytes: int | None, *, above_bytes: int = 0) -> str:
    """Memory now and at its peak, above a level, against a budget in the same terms."""
    now, peak = gauge.now_bytes - above_bytes, gauge.peak_bytes - above_bytes
    text = f"memory {format_bytes(now)}, peak {format_bytes(peak)}"
    return text if budget_bytes is None else f"{text} of {format_bytes(budget_bytes)}"


def _accuracy(scores: torch.Tensor, labels: torch.Tensor) -> float:
    return (scores.argmax(1) == labels).float().mean().item()


def _smooth(average: float | None, value: float) -> float:
    return value if average is None else _SMOOTHING * average + (1 - _SMOOTHING) * value
