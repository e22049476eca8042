"""What training takes is measured in another process, and is at least what must be there."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

from recipes.common.process_bytes import Training, training_bytes


def one_wide_layer(way: str) -> Training:
    """64 MiB of weights, and as much of gradients."""
    layer = nn.Linear(4096, 4096, bias=False)
    optimizer = torch.optim.SGD(layer.parameters())
    x = torch.randn(2, 4096)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(layer(x), y).backward()
        optimizer.step()

    return Training(step, optimizer, (x, x))


def test_weights_and_gradients_are_counted() -> None:
    taken = training_bytes(one_wide_layer, "plain")
    assert taken.plan_bytes is None
    assert taken.trained_parameters == 4096 * 4096
    assert 2 * 64 * 2**20 <= taken.process_bytes < 2.2 * 64 * 2**20
