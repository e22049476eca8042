"""Lite residual modules: small branches at half the resolution that learn beside a frozen one.

H. Cai et al., "TinyTL: Reduce Memory, Not Parameters for Efficient On-Device Learning", NeurIPS 2020, section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, fx, nn

from torch_odt.adapt.group_norm import group_count
from torch_odt.adapt.weight_standardization import StandardizedConv2d


@dataclass(frozen=True)
class LiteShape:
    """What a lite residual module has to fit: the shapes of a block's input and output, without the batch.

    Attributes:
        in_channels, in_size: channels of the block's input, its height and width.
        out_channels, out_size: the same of its output.
    """

    in_channels: int
    in_size: tuple[int, int]
    out_channels: int
    out_size: tuple[int, int]


class LiteResidual(nn.Module):
    """Average pool 2x2, k x k convolution in two groups, norm, ReLU, 1x1 convolution, norm.

    The last norm's weight starts at 0, so that a module that was just made adds nothing. Where the pooled input is
    smaller than the kernel, the kernel is as large as fits; where it is one pixel, the pool is a global average, the
    kernel 1x1, and the result the same at every pixel. Norms are GroupNorms, in groups of at most 8 channels: a new
    BatchNorm has no statistics to be frozen at.

    Args:
        shape: of the block beside which it runs.
        kernel_size: k, odd.
        expand: channels between the convolutions, as a multiple of the input's; rounded to a multiple of 8.
        weight_standardization: of both convolutions.

    Example:
        >>> import torch
        >>> lite = LiteResidual(LiteShape(16, (28, 28), 24, (14, 14)))
        >>> tuple(lite(torch.randn(2, 16, 28, 28)).shape)
        (2, 24, 7, 7)
        >>> lite.conv.kernel_size
        (5, 5)
    """

    def __init__(
        self, shape: LiteShape, *, kernel_size: int = 5, expand: float = 1.0, weight_standardization: bool = False
    ) -> None:
        super().__init__()
        pooled = min(shape.in_size) // 2
        whole = pooled <= 1
        kernel = 1 if whole else _fitting_kernel(kernel_size, pooled)
        stride = (1, 1) if whole else _stride(shape)
        middle = max(8, int(shape.in_channels * expand + 4) // 8 * 8)
        groups = math.gcd(2, shape.in_channels)
        conv = StandardizedConv2d if weight_standardization else nn.Conv2d
        self.pool = nn.AdaptiveAvgPool2d(1) if whole else nn.AvgPool2d(2)
        self.conv = conv(shape.in_channels, middle, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm = nn.GroupNorm(group_count(middle), middle)
        self.relu = nn.ReLU()
        self.pointwise = conv(middle, shape.out_channels, 1, bias=False)
        self.last_norm = nn.GroupNorm(group_count(shape.out_channels), shape.out_channels)
        nn.init.zeros_(self.last_norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        try:
            pooled = self.pool(x)
        except RuntimeError as error:
            raise ValueError(
                f"an input of {tuple(x.shape)} is too small for this lite residual module: give the input_size= of the "
                "images that the model will see"
            ) from error
        return self.last_norm(self.pointwise(self.relu(self.norm(self.conv(pooled)))))


class LiteBranch(nn.Sequential):
    """A sequence of layers, and a lite residual module beside it whose result is added.

    The layers keep the names that they had in the sequence whose place it takes; the module is called `lite`.

    Args:
        layers: the sequence, another module (which is then called "main"), or None for one that changes nothing.
        lite: what runs beside it.
    """

    lite: LiteResidual

    def __init__(self, layers: nn.Module | None, lite: LiteResidual) -> None:
        super().__init__()
        if isinstance(layers, nn.Sequential):
            for name, layer in layers.named_children():
                self.add_module(name, layer)
        elif layers is not None:
            self.add_module("main", layers)
        self.add_module("lite", lite)

    def __getitem__(self, index: slice | int) -> nn.Module:  # type: ignore[override]
        # A slice is one of the layers, as of the sequence that there was.
        layers = [layer for name, layer in self.named_children() if name != "lite"]
        return nn.Sequential(*layers[index]) if isinstance(index, slice) else layers[index]

    def forward(self, x: Tensor) -> Tensor:
        main = x
        for name, layer in self.named_children():
            if name != "lite":
                main = layer(main)
        return add_enlarged(main, self.lite(x))


def add_enlarged(main: Tensor, lite: Tensor) -> Tensor:
    """The sum of two batches of images, of which the second is enlarged to the size of the first."""
    if lite.shape[-2:] == (1, 1):
        return main + lite
    return main + F.interpolate(lite, size=main.shape[-2:], mode="bilinear", align_corners=False)


# For torch.fx, which cannot follow what depends on sizes.
fx.wrap("add_enlarged")


def _fitting_kernel(kernel_size: int, size: int) -> int:
    while kernel_size > size:
        kernel_size -= 2
    return kernel_size


def _stride(shape: LiteShape) -> tuple[int, int]:
    (height, width), (out_height, out_width) = shape.in_size, shape.out_size
    return max(1, round(height / out_height)), max(1, round(width / out_width))
