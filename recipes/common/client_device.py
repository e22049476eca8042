"""A client of a federation on this machine: its samples, and a device of its memory that trains what it is sent."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torch_odt as odt
from recipes.common.spoken_digits import Samples
from torch_odt.adapt import Blockwise, MaskedCrossEntropy

Batch = tuple[Tensor, Tensor]
State = dict[str, Any]


@dataclass(frozen=True)
class Client:
    """Someone with samples and some memory.

    Attributes:
        classes: those that it has samples of.
        size: of its memory; 0 is the largest.
    """

    name: str
    samples: Samples
    classes: tuple[int, ...]
    size: int


class Device:
    """A client's model and the steps that train it in its memory; clients of one size take turns on it.

    Attributes:
        model: what is trained.
        planned_bytes: what the largest of its steps takes by its plan, the inputs of a block included.
        peak_bytes: the most that torch has allocated while training, above what the model and the samples take.
        alone_bytes: the same of the largest step by itself, with its inputs.
    """

    def __init__(
        self, model: nn.Module, sample: Batch, memory_bytes: int, *, classes: int, planner: str, cache: Path
    ) -> None:
        self.model = model.train()
        self.heads: list[nn.Module] = []
        self.peak_bytes = self.alone_bytes = self.planned_bytes = 0
        self._memory_bytes = memory_bytes
        self._loss = MaskedCrossEntropy(range(classes), of=classes)
        self._sample = sample
        self._options: dict[str, Any] = {"planner": planner, "cache": cache}
        self._steps: list[tuple[odt.TrainStep, Callable[[Tensor], Tensor]]] = []

    def in_one_piece(self) -> Device:
        """All of the model trains at once."""
        self._add(self.model, lambda x: x, odt.Budget(self._memory_bytes, of="training"), 0)
        return self

    def in_blocks(self, blocks: Blockwise) -> Device:
        """Its blocks train in turn; heads of inner blocks stay with the client that has trained them."""
        for stage in blocks:
            self._add(stage.module, stage.inputs, stage.budget, self._memory_bytes - int(stage.budget.amount))
        self.heads = [stage.module[-1] for stage in blocks.stages[:-1]]
        return self

    def train(self, state: State, client: Client, learning_rate: float, epochs: int) -> State:
        """What a client sends back: the model after local training from a state."""
        self.model.load_state_dict(state)
        self._loss.absent.copy_(torch.tensor([each not in client.classes for each in range(len(self._loss.absent))]))
        with _allocated() as allocated:
            for step, inputs in self._steps:
                step.optimizer.param_groups[0]["lr"] = learning_rate
                for _ in range(epochs):
                    for x, y in _batches(client.samples.train, len(self._sample[0])):
                        step(inputs(x), y)
                step.release()
        self.peak_bytes = max(self.peak_bytes, allocated.bytes)
        return copied(self.model)

    def _add(
        self, module: nn.Module, inputs: Callable[[Tensor], Tensor], budget: odt.Budget, beside_bytes: int
    ) -> None:
        optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=0.0)
        step = odt.TrainStep(module, self._loss, optimizer, budget=budget, **self._options)
        x, y = self._sample
        given = inputs(x)
        step(given, y)
        step.release()
        with _allocated() as allocated:
            step(given, y)
            step.release()
        self.alone_bytes = max(self.alone_bytes, allocated.bytes + (0 if given is x else given.nbytes))
        self.planned_bytes = max(self.planned_bytes, step.plan.peak_bytes + beside_bytes)
        self._steps.append((step, inputs))


def copied(model: nn.Module) -> State:
    """Its state_dict, which later training leaves as it is."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _batches(samples: tuple[Tensor, Tensor], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All of one size, so that one plan serves: what is left over waits for the next epoch, too few are repeated."""
    images, labels = samples
    order = torch.randperm(len(images))
    order = order.repeat(math.ceil(size / len(order)))
    for indices in order.split(size):
        if len(indices) == size:
            yield images[indices], labels[indices]


@dataclass
class _Allocated:
    bytes: int = 0


@contextmanager
def _allocated() -> Iterator[_Allocated]:
    """The most that torch has allocated in a `with` block, above what there was."""
    gc.collect()
    before = odt.memory.stats().allocated_bytes
    odt.memory.reset_peak()
    found = _Allocated()
    yield found
    peak = odt.memory.stats().peak_bytes
    if before is None or peak is None:
        raise SystemExit("torch_odt's allocator, which counts bytes, is not built: `torch-odt doctor` says why")
    found.bytes = peak - before
