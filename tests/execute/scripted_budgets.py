"""A small training whose budget changes by a script, and what plain PyTorch makes of the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.capture.rewrite import inexact_rewrites
from torch_odt.runtime import Controller, Reading
from torch_odt.runtime.budget import Allotment
from torch_odt.runtime.growth import Need

BATCH = 16


class Scripted(Controller):
    """Allowed is so much above the level: first at the beginning, then step by step; the last one for ever.

    How fast steps happen to run does not decide when it grows: to hold more takes no time, and predictions stand.
    """

    def __init__(self, *growth: int, **options: Any) -> None:
        super().__init__(self, **options)
        self.growth = list(growth)

    def allowed_bytes(self, reading: Reading, level_bytes: int) -> int:
        return level_bytes + self.growth[0]

    def before_step(self, level_bytes: int, need: Need | None) -> Allotment:
        if len(self.growth) > 1:
            del self.growth[0]
        return super().before_step(level_bytes, need and replace(need, seconds_per_byte=0.0, measured_slowdown=None))


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(7):
        layers += [nn.BatchNorm2d(16), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 4))


def make_batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        yield torch.randn(BATCH, 3, 64, 64, generator=generator), torch.randint(4, (BATCH,), generator=generator)


def plainly(model: nn.Module, count: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(3)
    losses = []
    for inputs, targets in make_batches(count):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_step(model: nn.Module, budget: Any, cache: Path, **options: Any) -> odt.TrainStep:
    """A step whose results are plain PyTorch's, bit for bit, whatever is planned."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    exact: dict[str, Any] = {"disable_rewrites": inexact_rewrites(), "micro_batch": BATCH}
    return odt.TrainStep(model, F.cross_entropy, optimizer, budget=budget, cache=cache, **(exact | options))


def train(step: odt.TrainStep, count: int) -> list[float]:
    """The losses of so many calls."""
    torch.manual_seed(3)
    return [step(*batch).item() for batch in make_batches(count)]
