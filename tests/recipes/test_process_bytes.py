"""What training takes is measured in another process, and is at least what must be there."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from recipes.common import process_bytes
from recipes.common.process_bytes import Training, TrainingBytes, training_bytes


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
    # The level may hold something that is given back later.
    assert (2 * 64 - 1) * 2**20 <= taken.process_bytes < 2.2 * 64 * 2**20


def test_a_peak_between_looks_is_seen() -> None:
    # What other tests have left in malloc's heap would be measured as well.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        taken = pool.apply(measured_with_hardly_a_look)
    if taken.is_sampled:
        pytest.skip("this kernel keeps no mark of a window's own")
    assert 63 * 2**20 <= taken.process_bytes < 80 * 2**20


def measured_with_hardly_a_look() -> TrainingBytes:
    process_bytes.POLL_SECONDS = 60.0
    return process_bytes._measured(one_passing_tensor, ())


def one_passing_tensor() -> Training:
    """64 MiB that are freed before the step ends."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    return Training(lambda: torch.ones(16 * 2**20).sum(), optimizer)
