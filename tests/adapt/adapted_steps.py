"""Adapted models trained by both: `TrainStep` and a plain loop over a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.adapt.step_bytes import step_bytes

Loss = Callable[..., Tensor]
Batch = tuple[Any, Any]


@dataclass(frozen=True)
class Both:
    """The same model after the same batches.

    Attributes:
        ours: trained by `TrainStep`.
        plain: trained by plain PyTorch.
        start: before the first batch.
    """

    ours: nn.Module
    plain: nn.Module
    start: nn.Module


def train_both(
    model: nn.Module, batches: list[tuple[Any, Any]], loss_fn: Loss = F.cross_entropy, **options: Any
) -> Both:
    """One step of SGD for each batch, of the parameters that train; dropout draws the same."""
    start, plain = copy.deepcopy(model), copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        step = odt.TrainStep(model, loss_fn, _sgd(model), budget=odt.Budget("2GiB", of="training"), **options)
        for x, y in batches:
            step(x, y)
        torch.manual_seed(5)
        optimizer = _sgd(plain)
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(plain(x), y).backward()
            optimizer.step()
    return Both(model, plain, start)


def assert_trained_alike(both: Both, rtol: float = 1e-3) -> None:
    """What trains has moved, by the same in both; everything else has every bit that it had.

    Args:
        rtol: how far a tensor may be from plain PyTorch's, in parts of how far that has moved.
    """
    start, plain = both.start.state_dict(), both.plain.state_dict()
    trained = {name for name, parameter in both.ours.named_parameters() if parameter.requires_grad}
    assert trained
    moved = 0
    for name, ours in both.ours.state_dict().items():
        if name not in trained:
            torch.testing.assert_close(ours, plain[name], rtol=1e-5, atol=1e-6, msg=name)
            continue
        distance = float((plain[name] - start[name]).norm())
        moved += distance > 0
        assert float((ours - plain[name]).norm()) <= rtol * distance + 1e-6, name
    assert moved > len(trained) / 2


def peak_bytes(model: nn.Module, batch: Batch, loss_fn: Loss = F.cross_entropy) -> int:
    """What a step's own tensors take at most, by the simulator, where nothing is computed twice."""
    return step_bytes(model, loss_fn, batch, optimizer=_sgd(model))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
