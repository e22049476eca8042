"""Tensors that have a shape and an address but no memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch

from torch_odt import _extensions

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def _reserved_bytes(nbytes: int) -> torch.Tensor:
    """A byte tensor over address space that nobody has touched."""
    if _extensions.memory_module is not None:
        buffer = (ctypes.c_char * nbytes).from_address(_extensions.memory_module.phantom(nbytes))
        return torch.frombuffer(buffer, dtype=torch.uint8)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def phantom_tensor(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose data must never be read or written, and which therefore costs no memory.

    When to choose it: as the argument of an operator that looks at the shape, strides and type of that argument alone,
    such as the input of `convolution_backward` when only the gradient of the input is wanted. An expanded one-element
    tensor does not do there: operators make it contiguous, and thereby real.

    Args:
        shape: as the tensor that it stands for.
        stride: as the tensor that it stands for, in elements.
        dtype: any dtype.

    Returns:
        A tensor over reserved address space. With the extension, touching its data ends the process with a segmentation
        fault; without, it reads as zeros and slowly becomes real.

    Raises:
        ValueError: shape and stride differ in length, or one of them is negative.

    Example:
        >>> phantom_tensor((8, 3, 224, 224), (150528, 50176, 224, 1), torch.float32).shape
        torch.Size([8, 3, 224, 224])
    """
    if len(shape) != len(stride):
        raise ValueError(f"shape {tuple(shape)} and stride {tuple(stride)} differ in length")
    if any(n < 0 for n in (*shape, *stride)):
        raise ValueError(f"shape {tuple(shape)} and stride {tuple(stride)} must not be negative")
    empty = torch.empty(0, dtype=dtype)
    if 0 in shape:
        return empty.as_strided(shape, stride)
    elements = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    storage = _reserved_bytes(elements * dtype.itemsize).untyped_storage()
    return empty.set_(storage, 0, tuple(shape), tuple(stride))
