"""ProxylessNAS-Mobile is the published network: its parameters, multiplications, shapes and shortcuts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipes.common.proxyless_mobile import ProxylessMobile, scaled


def test_the_published_size() -> None:
    """Its published weights have 4.08 M; its authors count 320 M multiplications ("Once-for-All", ICLR 2020)."""
    model = ProxylessMobile()
    assert sum(p.numel() for p in model.parameters()) == 4_080_512
    assert _multiplications(model, 224) == pytest.approx(320e6, rel=0.005)
    assert sum(block.adds for block in model.blocks) == 13


def test_a_narrow_one_is_near_the_published() -> None:
    """MCUNet's table of networks has width 0.3 at 176 pixels with 0.75 M parameters and 38.3 M multiplications.

    Which way its channels were rounded is not published: there is room for 6 %.
    """
    model = ProxylessMobile(width=0.3)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(0.75e6, rel=0.06)
    assert _multiplications(model, 176) == pytest.approx(38.3e6, rel=0.06)


@pytest.mark.parametrize(("channels", "width", "expected"), [(32, 1.0, 32), (32, 0.3, 16), (192, 0.3, 56), (8, 0.1, 8)])
def test_channels_are_multiples_of_8(channels: int, width: float, expected: int) -> None:
    assert scaled(channels, width) == expected


def test_scores_and_strides() -> None:
    model = ProxylessMobile(3, width=0.1).eval()
    x = torch.randn(2, 3, 64, 64)
    assert model(x).shape == (2, 3)
    assert model.blocks(model.stem(x)).shape[2:] == (2, 2)


def _multiplications(model: ProxylessMobile, size: int) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.empty(1, 3, size, size))
    return counter.get_total_flops() / 2
