"""Max-pooling that remembers where in its window each largest element lies: a byte each, in place of ATen's eight.

The operators have no gradient of their own: they stand in graphs that hold both passes already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_odt.ops.registration import register

MOST_WINDOW_ELEMENTS = 256
MOST_STRIDE = 1 << 30  # whose products 64 bits hold
_HOLDS_INT8 = torch.bfloat16
SCHEMAS = {
    "max_pool2d_with_offsets": (
        "(Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode) "
        "-> (Tensor, Tensor)"
    ),
    "max_pool2d_with_offsets_backward": (
        "(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, "
        "bool ceil_mode, Tensor offsets) -> Tensor"
    ),
}


def max_pool2d_with_offsets(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Takes the largest element of each window, and where in the window it lies.

    When to choose it: in place of `max_pool2d_with_indices` where the indices are for the backward pass alone. The
    output has the bits of ATen's: of equal elements the first counts, and of NaNs the last.

    Args:
        input: float32, float64, bfloat16 or int8 of shape (C, H, W) or (N, C, H, W). Not empty.
        kernel_size: rows and columns of a window; 256 elements at most.
        stride, padding, dilation, ceil_mode: as in `torch.nn.MaxPool2d`, for rows and for columns.

    Returns:
        The output; and the offsets, uint8 of the output's shape: the number of the element, counted by rows from 0,
        padding included. Both have the memory format that ATen would choose.

    Raises:
        RuntimeError: a shape or dtype is another, a window has more elements, or one lies outside of the input.

    Example:
        >>> max_pool2d_with_offsets(torch.tensor([[[1.0, 2.0], [4.0, 3.0]]]), (2, 2), (2, 2))
        (tensor([[[4.]]]), tensor([[[2]]], dtype=torch.uint8))
    """
    return torch.ops.torch_odt.max_pool2d_with_offsets(input, kernel_size, stride, padding, dilation, ceil_mode)


def max_pool2d_with_offsets_backward(
    grad_output: Tensor,
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    offsets: Tensor,
) -> Tensor:
    """The gradient of `max_pool2d_with_offsets`.

    When to choose it: in place of `max_pool2d_with_indices_backward`, whose bits it has.

    Args:
        grad_output: of the output's shape and the input's dtype; another memory format costs a copy.
        input: as it was given to `max_pool2d_with_offsets`, or any tensor like it: its data is not read.
        kernel_size, stride, padding, dilation, ceil_mode: as they were given there.
        offsets: as they were returned there.

    Returns:
        The gradient of the input, in its shape, dtype and memory format.

    Raises:
        RuntimeError: a shape, dtype or device is another, or windows of int8 overlap, whose sums it may not hold.

    Example:
        >>> output, offsets = max_pool2d_with_offsets(torch.tensor([[[1.0, 2.0], [4.0, 3.0]]]), (2, 2), (2, 2))
        >>> like = torch.empty(1, 2, 2)
        >>> max_pool2d_with_offsets_backward(output, like, (2, 2), (2, 2), (0, 0), (1, 1), False, offsets)
        tensor([[[0., 0.],
                 [4., 0.]]])
    """
    return torch.ops.torch_odt.max_pool2d_with_offsets_backward(
        grad_output, input, kernel_size, stride, padding, dilation, ceil_mode, offsets
    )


def _check(input: Tensor, *pairs: Sequence[int]) -> None:
    if input.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.int8):
        raise RuntimeError("max_pool2d_with_offsets: the input must be int8, float32, float64 or bfloat16")
    if input.dim() not in (3, 4) or not input.numel():
        raise RuntimeError("max_pool2d_with_offsets: the input must have elements and 3 or 4 dimensions")
    if any(len(pair) != 2 for pair in pairs):
        raise RuntimeError("max_pool2d_with_offsets: windows are described by two numbers, for rows and for columns")
    if pairs[0][0] * pairs[0][1] > MOST_WINDOW_ELEMENTS:
        raise RuntimeError(f"max_pool2d_with_offsets: a window has more than {MOST_WINDOW_ELEMENTS} elements")
    if max(*pairs[1], *pairs[3]) > MOST_STRIDE:
        raise RuntimeError(f"max_pool2d_with_offsets: stride and dilation must be {MOST_STRIDE} at most")


def _corners(like: Tensor, stride: Sequence[int], padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The rows and the columns at which the windows of an output begin."""
    height, width = like.shape[-2:]
    rows = torch.arange(height, device=like.device) * stride[0] - padding[0]
    columns = torch.arange(width, device=like.device) * stride[1] - padding[1]
    return rows.unsqueeze(1), columns


def _leave(corners: Tensor, dilation: int, size: int) -> bool:
    """Whether a window that begins at one of these corners has no element inside."""
    return bool((corners.remainder(dilation).where(corners < 0, corners) >= size).any())


def _pool_in_torch(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:
    """As the compiled operator, in plain torch."""
    _check(input, kernel_size, stride, padding, dilation)
    if input.dtype == torch.int8:
        output, offsets = _pool_in_torch(input.to(_HOLDS_INT8), kernel_size, stride, padding, dilation, ceil_mode)
        return output.to(torch.int8), offsets
    output, indices = torch.ops.aten.max_pool2d_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode)
    rows, columns = _corners(output, stride, padding)
    height, width = input.shape[-2:]
    if _leave(rows, dilation[0], height) or _leave(columns, dilation[1], width):
        raise RuntimeError("max_pool2d_with_offsets: a window lies outside of the input")
    row = indices.div(width, rounding_mode="floor").sub_(rows).div_(dilation[0], rounding_mode="floor")
    column = indices.remainder(width).sub_(columns).div_(dilation[1], rounding_mode="floor")
    return output, row.mul_(kernel_size[1]).add_(column).to(torch.uint8)


def _backward_in_torch(
    grad_output: Tensor,
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    offsets: Tensor,
) -> Tensor:
    """As the compiled operator, in plain torch."""
    _check(input, kernel_size, stride, padding, dilation)
    if offsets.dtype != torch.uint8:
        raise RuntimeError("max_pool2d_with_offsets_backward: offsets must be uint8")
    if input.dtype == torch.int8:
        reach = [(size - 1) * apart + 1 for size, apart in zip(kernel_size, dilation, strict=True)]
        if any(length > step for length, step in zip(reach, stride, strict=True)):
            name = "max_pool2d_with_offsets_backward"
            raise RuntimeError(f"{name}: of windows that overlap, int8 does not hold the sums of gradients")
        gradient, like = grad_output.to(_HOLDS_INT8), torch.empty_like(input, dtype=_HOLDS_INT8)
        window = (kernel_size, stride, padding, dilation, ceil_mode, offsets)
        return _backward_in_torch(gradient, like, *window).to(torch.int8)
    rows, columns = _corners(offsets, stride, padding)
    wide = offsets.long()
    row = wide.div(kernel_size[1], rounding_mode="floor").mul_(dilation[0]).add_(rows)
    column = wide.remainder(kernel_size[1]).mul_(dilation[1]).add_(columns)
    indices = row.mul_(input.shape[-1]).add_(column)
    # Offsets that no forward pass has made, as where operators are measured on any numbers, may point elsewhere, and
    # ATen's operator would write there.
    outside = (indices < 0) | (indices >= input.shape[-2] * input.shape[-1])
    if outside.any():
        grad_output, indices = grad_output.masked_fill(outside, 0), indices.masked_fill(outside, 0)
    return torch.ops.aten.max_pool2d_with_indices_backward(
        grad_output, input, kernel_size, stride, padding, dilation, ceil_mode, indices
    )


def _pool_fake(input: Tensor, *window: Sequence[int] | bool) -> tuple[Tensor, Tensor]:
    output, _ = torch.ops.aten.max_pool2d_with_indices(input, *window)
    return output, torch.empty_like(output, dtype=torch.uint8)


def _backward_fake(grad_output: Tensor, input: Tensor, *window: Any) -> Tensor:
    return torch.empty_like(input, memory_format=torch._prims_common.suggest_memory_format(input))


register("max_pool2d_with_offsets", SCHEMAS["max_pool2d_with_offsets"], _pool_in_torch, _pool_fake)
register(
    "max_pool2d_with_offsets_backward", SCHEMAS["max_pool2d_with_offsets_backward"], _backward_in_torch, _backward_fake
)
