"""Arguments for the tests of batch normalisation: shapes, layouts, types, and tensors that fit together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SHAPES = [
    (8, 24, 14, 14),
    (4, 7, 5, 3),
    (16, 32),
    (3, 1030, 5, 4),
    (64, 1),
    (3, 5, 17),
    (2, 3, 4, 5, 6),
    (32, 16, 1, 1),
    (1, 64, 9, 9),
    (2, 1, 40, 40),
    (16, 33, 7, 7),
    (70, 96, 28, 28),
]
Act = tuple[str, float, float]
NONE: Act = ("clamp", -math.inf, math.inf)
RELU: Act = ("clamp", 0.0, math.inf)
RELU6: Act = ("clamp", 0.0, 6.0)
NARROW: Act = ("clamp", -0.3, 0.7)
CLAMPS = [NONE, RELU, RELU6, NARROW]
HARDSWISH: Act = ("hardswish", -math.inf, math.inf)
SILU: Act = ("silu", -math.inf, math.inf)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
MOMENTUM, EPS = 0.1, 1e-5


def channels_innermost(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def every_other_sample(x: Tensor) -> Tensor:
    return torch.cat([x, x])[::2]


Layout = Callable[[Tensor], Tensor]
LAYOUTS: list[Layout] = [torch.Tensor.contiguous, channels_innermost, every_other_sample]


@dataclass
class Case:
    """Arguments of a forward and a backward pass."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    grad: Tensor

    @property
    def doubled(self) -> Case:
        def wide(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.double()

        return Case(*(wide(tensor) for tensor in vars(self).values()))


def make_case(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, layout: Layout = torch.Tensor.contiguous, affine=True
) -> Case:
    torch.manual_seed(0)
    channels, wide = shape[1], torch.float64 if dtype == torch.float64 else torch.float32
    x = layout((torch.randn(shape, dtype=wide) * 3 + 1).to(dtype))
    weight, bias = (
        (torch.rand(channels, dtype=wide) + 0.5, torch.randn(channels, dtype=wide)) if affine else (None,) * 2
    )
    running = torch.randn(channels, dtype=wide), torch.rand(channels, dtype=wide)
    return Case(x, weight, bias, *running, layout(torch.randn(shape, dtype=wide).to(dtype)))


def assert_as_accurate(ours: Tensor, theirs: Tensor, exact: Tensor, rounding: float = 1e-6) -> None:
    distance, usual = (float((tensor.double() - exact).norm()) for tensor in (ours, theirs))
    assert distance <= 2 * usual + rounding * float(exact.norm())
