"""A small training whose budget changes by a script, and what plain PyTorch makes of the same."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_odt.runtime import Reading

BATCH = 16


class Scripted:
    """A policy that allows so much above the level, step by step; the last one for ever."""

    def __init__(self, *growth: int) -> None:
        self.growth = list(growth)

    def allowed_bytes(self, reading: Reading, level_bytes: int) -> int:
        growth = self.growth.pop(0) if len(self.growth) > 1 else self.growth[0]
        return level_bytes + growth


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
