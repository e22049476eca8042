"""A small network that has everything a step may change, and all of that as it is at one moment."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.capture.rewrite import inexact_rewrites
from torch_odt.memory import stats
from torch_odt.memory._tracking import current_category

Batch = tuple[Tensor, Tensor]
PLENTY = odt.Budget("2GiB", of="training")


class Net(nn.Module):
    """Convolutions, BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2)]
        self.features = nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Restless(Net):
    """It cannot be captured: it counts, remembers, draws from other generators and rebinds a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.seen: list[float] = []
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(random.random() + float(np.random.random()))
        self.mean = self.mean * 0.9 + x.detach().mean()
        return super().forward(x) * (1 + 0.01 * self.seen[-1])


def batches(count: int = 4, size: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, 3, 12, 12, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def make_step(model: nn.Module, **options: Any) -> odt.TrainStep:
    """A step whose bits do not depend on its plan."""
    optimizer = options.pop("optimizer", None) or adam(model)
    usual = {"budget": PLENTY, "disable_rewrites": inexact_rewrites(), "transactional": True}
    return odt.TrainStep(model, F.cross_entropy, optimizer, **usual | options)


@dataclass(frozen=True)
class Everything:
    """All that a call may change, outside of torch's allocator.

    Attributes:
        tensors: contents by name.
        gradients: the identities of `.grad`.
        rest: plain attributes, optimizer entries, counters and random generators, in words.
    """

    tensors: dict[str, bytes]
    gradients: dict[str, int]
    rest: str

    @classmethod
    def of(cls, step: odt.TrainStep) -> Everything:
        model, optimizer = step.model, step.optimizer
        tensors = {name: _bytes(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        tensors |= {f"{name}.grad": _bytes(gradient) for name, gradient in gradients.items()}
        names = {id(p): name for name, p in model.named_parameters()}
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():
                content = _bytes(value) if isinstance(value, Tensor) else repr(value).encode()
                tensors[f"{names[id(parameter)]}/{key}"] = content
        plain = [
            (key, value)
            for module in model.modules()
            for key, value in vars(module).items()
            if isinstance(value, (int, float, list)) and key != "training"
        ]
        group = (step._group.calls, step._group.samples)
        generators = (random.getstate(), str(np.random.get_state()), _bytes(torch.get_rng_state()))
        modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), current_category())
        return cls(tensors, {n: id(g) for n, g in gradients.items()}, repr((plain, group, generators, modes)))

    def difference(self, other: Everything) -> list[str]:
        """What is not bit for bit the same."""
        names = self.tensors.keys() | other.tensors.keys()
        different = sorted(n for n in names if self.tensors.get(n) != other.tensors.get(n))
        return [*different, *(["plain state or generators"] if self.rest != other.rest else [])]


class Rewindable:
    """Takes a step back to how it was when this was made, as often as wanted."""

    def __init__(self, step: odt.TrainStep) -> None:
        self._step = step
        self._model = {name: tensor.detach().clone() for name, tensor in step.model.state_dict().items()}
        self._state = {
            parameter: {key: value.clone() for key, value in entries.items()}
            for parameter, entries in step.optimizer.state.items()
        }
        self._random = torch.get_rng_state()

    def rewind(self) -> None:
        self._step.model.load_state_dict(self._model)
        if not self._state:
            self._step.optimizer.state.clear()
            # Its next step makes its state, as its first one did.
            self._step._request.scratch_allowed = False
        for parameter, entries in self._state.items():
            for key, value in entries.items():
                self._step.optimizer.state[parameter][key].copy_(value)
        torch.set_rng_state(self._random)


def allocations(step: odt.TrainStep, batch: Batch) -> int:
    """How many a call makes."""
    before = stats().allocation_count
    step(*batch)
    after = stats().allocation_count
    assert before is not None and after is not None
    return after - before


def places(count: int, wanted: int) -> list[int]:
    """So many of the numbers below `count`, spread evenly."""
    return sorted({round(position) for position in np.linspace(0, count - 1, wanted)})


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()
