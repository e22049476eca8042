"""Pointwise convolutions that this package computes: where, what of, and that steps train as plain PyTorch's do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.capture.direct_convolutions import (
    assert_can_be_switched_off,
    assert_trains_as_plain_pytorch_does,
    targets,
)
from torch_odt._extensions import has_kernels
from torch_odt.capture.direct_pointwise import FORWARD, GRAD_INPUT, GRAD_WEIGHT

pytestmark = pytest.mark.skipif(not has_kernels, reason="without compiled operators the rewrite is not made")

CHANNELS = 24


def network(outputs: int = 40, inputs: int = CHANNELS, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, inputs, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, **{"kernel_size": 1, **options}),  # type: ignore[arg-type]
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(outputs, 5),
    )


def ours(found: list[str]) -> list[str]:
    return [target for target in (FORWARD, GRAD_INPUT, GRAD_WEIGHT) if target in found]


def test_each_gradient_has_an_operator() -> None:
    images = torch.randn(2, 3, 16, 16)
    found = targets(network(), images)
    assert ours(found) == [FORWARD, GRAD_INPUT, GRAD_WEIGHT]
    frozen = network()
    frozen[2].weight.requires_grad_(False)
    assert ours(targets(frozen, images)) == [FORWARD, GRAD_INPUT]
    first = network()
    first[0].requires_grad_(False)
    assert ours(targets(first, images)) == [FORWARD, GRAD_WEIGHT]


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (network(stride=2), 16),
        (network(padding=1), 16),
        (network(kernel_size=2), 16),
        (network(groups=2), 16),
        (network().double(), 16),
        (network(outputs=12), 16),
        (network(inputs=20), 16),
        (network(outputs=512, inputs=512), 18),
    ],
    ids=["stride", "padding", "window", "groups", "float64", "uneven outputs", "uneven inputs", "large"],
)
def test_others_stay_as_they_are(model: nn.Module, size: int) -> None:
    images = torch.randn(1, 3, size, size, dtype=next(model.parameters()).dtype)
    assert ours(targets(model, images)) == []


def test_one_of_the_most_products_is_taken() -> None:
    assert len(ours(targets(network(outputs=512, inputs=512), torch.randn(1, 3, 16, 16)))) == 3


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_steps_train_as_plain_pytorch_does(bias: bool, micro_batch: int | None) -> None:
    assert_trains_as_plain_pytorch_does(network(bias=bias), micro_batch, "direct_pointwise")


def test_it_can_be_switched_off() -> None:
    assert_can_be_switched_off(network(), "direct_pointwise")
