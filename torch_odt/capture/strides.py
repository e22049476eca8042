"""What strides say about where the elements of a tensor lie; those of dimensions of size 1 say nothing.

Everything here takes shapes and strides as a graph has them, without a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_CHANNELS_LAST = (0, 2, 3, 1)


def same_layout(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether both strides put each element of a tensor of this shape at the same place."""
    return all(size <= 1 or a == b for size, a, b in zip(shape, one, other, strict=True))


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their memory in the order of the axes, as `Tensor.is_contiguous()` says."""
    return math.prod(shape) == 0 or _fills(shape, stride, range(len(shape)))


def is_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their memory, images by pixels: `is_contiguous(memory_format=torch.channels_last)`."""
    return len(shape) == 4 and (math.prod(shape) == 0 or _fills(shape, stride, _CHANNELS_LAST))


def counts_as_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether operators take the strides for channels_last; those of a slice of such a tensor are taken so, too."""
    if len(shape) != 4 or 0 in shape:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        step = stride[dim]
        if step < max(least, 1) or (dim == 0 and least == stride[1]):
            return False
        least = step * shape[dim]
    return True


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def channels_last_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor of images in channels_last."""
    _, channels, height, width = shape
    return height * width * channels, 1, width * channels, channels


def _fills(shape: Sequence[int], stride: Sequence[int], axes: Iterable[int]) -> bool:
    """Whether the elements fill their memory in this order of the axes, the outermost first."""
    expected = 1
    for axis in reversed(tuple(axes)):
        if shape[axis] != 1 and stride[axis] != expected:
            return False
        expected *= shape[axis]
    return True
