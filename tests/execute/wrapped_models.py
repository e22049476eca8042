"""Small models of every awkward kind, and steps of a wrapped model beside steps of a plain copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from awkward import Clamp
from torch import nn
from torch.nn import functional as F

from torch_odt import Budget
from torch_odt.capture.rewrite import inexact_rewrites
from torch_odt.execute.wrap import session_of, wrap
from torch_odt.execute.wrap_plan import StepPlan


def training(amount: str | int) -> Budget:
    return Budget(amount, of="training")


def wrapped(model: nn.Module, budget: Budget | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A wrapped model, whose every bit is plain PyTorch's, and a plain copy of it."""
    reference = copy.deepcopy(model)
    usual = {"budget": budget or training("1GiB"), "disable_rewrites": inexact_rewrites()}
    return wrap(model, **usual | options), reference


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU6(inplace=True),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


class DictOutput(Conv):
    def forward(self, x: torch.Tensor) -> Any:
        features = self.features(x)
        return {"logits": self.head(features.mean((2, 3))), "parts": [features, None, 3]}


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 12, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(F.gelu(self.block(x)))


class GraphBreak(Conv):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = x * 2 if x.sum() > 0 else x.flip(0)
        return self.head(torch.sin(x).mean((2, 3)))


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Clamp.apply(self.linear(x))


class ReturnsWhatItKeeps(nn.Module):
    """Results that are needed in the backward pass, views of each other, and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.sigmoid(self.linear(x))
        return hidden, hidden[:, :2], hidden * 2, x


class Counting(nn.Module):
    counter: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        return self.linear(x) * self.counter


def images(batch: int, size: int = 16) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def rows(batch: int) -> torch.Tensor:
    return torch.randn(batch, 6)


def sequences(batch: int) -> torch.Tensor:
    return torch.randn(batch, 7, 6)


def tokens(batch: int) -> torch.Tensor:
    return torch.randint(0, 30, (batch, 9))


def frozen_conv() -> nn.Module:
    model = Conv()
    model.features[0].requires_grad_(False)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "conv": (Conv, images),
    "dict output": (DictOutput, images),
    "lstm": (Lstm, sequences),
    "tied weights": (TiedLanguageModel, tokens),
    "used twice": (UsedTwice, rows),
    "graph break": (GraphBreak, images),
    "custom function": (CustomFunction, rows),
    "returns what it keeps": (ReturnsWhatItKeeps, rows),
    "counting": (Counting, rows),
    "frozen": (frozen_conv, images),
}


def loss_of(outputs: Any) -> torch.Tensor:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    total = leaves[0].sum() * 0
    for weight, leaf in enumerate(leaves, 1):
        total = total + weight * leaf.square().mean()
    return total


def step(model: nn.Module, x: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward; the loss and the state of the random number generator afterwards."""
    torch.manual_seed(seed)
    loss = loss_of(model(x))
    loss.backward()
    return loss.detach(), torch.get_rng_state()


def assert_same(model: nn.Module, reference: nn.Module, tolerance: float = 0.0) -> None:
    for (name, ours), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (plain.grad is None), name
        if plain.grad is not None:
            torch.testing.assert_close(ours.grad, plain.grad, rtol=tolerance, atol=tolerance, msg=name)
    assert list(model.state_dict()) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=tolerance, atol=tolerance, msg=name)


def planned_step(model: nn.Module) -> StepPlan:
    step = session_of(model).ledger.step
    assert step is not None
    return step


def predicted_bytes(model: nn.Module) -> int:
    return planned_step(model).peak_bytes


def graph_count(model: nn.Module) -> int:
    return len(planned_step(model).executors)
