"""Depthwise convolutions that this package computes: where, what of, and that steps train as plain PyTorch's do."""

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
from torch_odt.capture.direct_depthwise import FORWARD, GRAD_INPUT, GRAD_WEIGHT

pytestmark = pytest.mark.skipif(not has_kernels, reason="without compiled operators the rewrite is not made")

CHANNELS = 24


def network(kernel: int = 3, stride: int = 2, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    arguments: dict[str, object] = {"padding": kernel // 2, "groups": CHANNELS, **options}
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 1),
        nn.Conv2d(CHANNELS, CHANNELS, kernel, stride, **arguments),  # type: ignore[arg-type]
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(CHANNELS, 5),
    )


def narrow(channels: int) -> nn.Sequential:
    depthwise = nn.Conv2d(channels, channels, 3, 2, 1, groups=channels)
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5)
    return nn.Sequential(nn.Conv2d(3, channels, 1), depthwise, *pool)


def ours(found: list[str]) -> list[str]:
    return [target for target in (FORWARD, GRAD_INPUT, GRAD_WEIGHT) if target in found]


def test_each_gradient_has_an_operator() -> None:
    images = torch.randn(2, 3, 16, 16)
    found = targets(network(), images)
    assert ours(found) == [FORWARD, GRAD_INPUT, GRAD_WEIGHT]
    frozen = network()
    frozen[1].weight.requires_grad_(False)
    assert ours(targets(frozen, images)) == [FORWARD, GRAD_INPUT]
    first = network()
    first[0].requires_grad_(False)
    assert ours(targets(first, images)) == [FORWARD, GRAD_WEIGHT]


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (network(dilation=2, padding=2), 16),
        (network(groups=CHANNELS // 2), 16),
        (network().double(), 16),
        (network(kernel=9, stride=1), 16),
        (network(stride=1), 160),
        (narrow(12), 16),
        (narrow(20), 16),
    ],
    ids=["dilation", "groups", "float64", "wide", "large", "few channels", "uneven channels"],
)
def test_others_stay_as_they_are(model: nn.Module, size: int) -> None:
    images = torch.randn(1, 3, size, size, dtype=next(model.parameters()).dtype)
    assert ours(targets(model, images)) == []


def test_gradients_of_a_wide_window_alone() -> None:
    images = torch.randn(1, 3, 64, 64)
    found = targets(network(kernel=7, stride=1), images)
    assert ours(found) == [GRAD_WEIGHT] and "aten.convolution_backward.default" in found
    small = targets(network(kernel=7, stride=2), images)
    assert ours(small) == [GRAD_INPUT, GRAD_WEIGHT]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_steps_train_as_plain_pytorch_does(stride: int, kernel: int, micro_batch: int | None) -> None:
    assert_trains_as_plain_pytorch_does(network(kernel, stride), micro_batch, "direct_depthwise")


def test_it_can_be_switched_off() -> None:
    assert_can_be_switched_off(network(), "direct_depthwise")
