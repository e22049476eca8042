"""A max-pool behind an int8 layer, as a part of the layer's operators, in plain torch.

What is larger than the pooled output is not kept: of each pooled element the operators note where in its window it
lies, as a byte, and behind all bytes whether it was clamped, as a bit. Its gradient is rounded to int8 before it is
spread over windows, a quarter of the work where these are two by two. Windows must not overlap: int8 does not hold
sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_odt.ops import max_pool2d_with_offsets, max_pool2d_with_offsets_backward, unpack_bits
from torch_odt.ops.int8_plain import MOST_GEOMETRY
from torch_odt.ops.masked import pack_in_order
from torch_odt.ops.max_pool import MOST_WINDOW_ELEMENTS
from torch_odt.quant.activation import empty_in_order, in_memory_order, packed_size
from torch_odt.quant.pooling import Pool

# As the pool's operators take it: kernel size, stride, padding, dilation, and whether sizes are rounded up.
Arguments = tuple[list[int], list[int], list[int], list[int], bool]
OF_CONVOLUTION = 7  # numbers of the operators' `windows`; behind them may stand those of a pool


def can_be_of_a_layer(pool: Pool) -> bool:
    """Whether a layer's operators can do it."""
    (rows, columns), (down, right) = pool.kernel_size, pool.stride
    return pool.dilation == (1, 1) and rows <= down and columns <= right and rows * columns <= MOST_WINDOW_ELEMENTS


def numbers_of(pool: Pool) -> tuple[int, ...]:
    """What stands behind the numbers of a convolution."""
    return (*pool.kernel_size, *pool.stride, *pool.padding, int(pool.ceil_mode))


def parts_of(windows: Sequence[int]) -> tuple[Sequence[int], Arguments | None]:
    """The argument `windows` of a layer's operators: of the convolution alone, and the pool behind it, if any."""
    of_convolution, n = windows[:OF_CONVOLUTION], windows[OF_CONVOLUTION:]
    if len(of_convolution) < OF_CONVOLUTION or len(n) not in (0, 7):
        raise RuntimeError("int8_layer: windows are seven numbers of a convolution, and of a pool seven more")
    if not n:
        return of_convolution, None
    if min(n[:4]) < 1:
        raise RuntimeError("int8_layer: kernel size and stride of a pool must be positive")
    if max(n[:6]) > MOST_GEOMETRY:
        raise RuntimeError(f"int8_layer: windows of a pool must be {MOST_GEOMETRY} at most")
    if n[0] * n[1] > MOST_WINDOW_ELEMENTS:
        raise RuntimeError(f"int8_layer: a window has more than {MOST_WINDOW_ELEMENTS} elements")
    if n[0] > n[2] or n[1] > n[3]:
        raise RuntimeError("int8_layer: windows of the pool behind a layer must not overlap")
    return of_convolution, (list(n[:2]), list(n[2:4]), list(n[4:6]), [1, 1], bool(n[6]))


def pooled_size(shape: Sequence[int], pool: Arguments) -> torch.Size:
    """The shape of a layer's output behind the pool, by that before it."""
    _require_images(shape)
    pooled: Tensor = torch.ops.aten.max_pool2d_with_indices(torch.empty(shape, device="meta"), *pool)[0]
    return pooled.shape


def noted_size(elements: Any) -> Any:
    """The bytes that are noted of so many pooled elements."""
    return elements + packed_size(elements)


def pooled(output: Tensor, mask: Tensor, pool: Arguments) -> tuple[Tensor, Tensor]:
    """A layer's output behind the pool, and what is noted of it.

    Args:
        mask: bits of the output's elements before the pool, in the order of memory.
    """
    _require_images(output.shape)
    images, channels, _, columns = output.shape
    kernel, stride, padding, *_ = pool
    if not output.numel():
        size = pooled_size(output.shape, pool)
        return empty_in_order(size, torch.int8, output), torch.empty(0, dtype=torch.uint8)
    largest, offsets = max_pool2d_with_offsets(output, *pool)
    top = (torch.arange(largest.shape[2]) * stride[0] - padding[0]).view(-1, 1)
    left = torch.arange(largest.shape[3]) * stride[1] - padding[1]
    pixels = (top + offsets // kernel[1]) * columns + left + offsets % kernel[1]
    of_channels = unpack_bits(mask, 0, output.numel()).view(images, -1, channels).transpose(1, 2)
    inside = of_channels.gather(2, pixels.flatten(2)).view(pixels.shape)
    by_memory = in_memory_order(offsets).permute(0, 2, 3, 1).flatten()
    # A tensor of one channel or pixel passes for one in any order.
    dense = empty_in_order(largest.shape, torch.int8, output).copy_(largest)
    return dense, torch.cat([by_memory, pack_in_order(in_memory_order(inside), True)])


def spread_of(
    gradient: Tensor, noted: Tensor | None, pool: Arguments, shape: Sequence[int]
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The mask of a gradient behind the pool, and what makes it one before the pool once it is int8.

    Args:
        noted: as `pooled` returned it.
        shape: of the output before the pool.
    """
    _require_images(shape)
    elements = gradient.numel()
    if noted is None:
        raise RuntimeError("int8_layer: a layer that is pooled needs its mask")
    if gradient.dim() != 4 or gradient.shape[0] != shape[0]:
        raise RuntimeError("int8_layer: only images are pooled, and gradient and input_shape must be of as many")
    if list(gradient.shape[2:]) != list(pooled_size(shape, pool)[2:]):
        raise RuntimeError("int8_layer: gradient must have the pooled output's shape")
    if noted.numel() != noted_size(elements):
        raise RuntimeError("int8_layer: mask must have a byte and a bit for each element that was pooled")
    images, channels, rows, columns = gradient.shape
    offsets = noted[:elements].view(images, rows, columns, channels).permute(0, 3, 1, 2)

    def spread(rounded: Tensor) -> Tensor:
        like = torch.empty(tuple(shape), dtype=torch.int8, memory_format=torch.channels_last)
        if not rounded.numel():
            return like
        return max_pool2d_with_offsets_backward(rounded, like, *pool, offsets)

    return noted[elements:], spread


def _require_images(shape: Sequence[int]) -> None:
    if len(shape) != 4:
        raise RuntimeError("int8_layer: only images are pooled")
