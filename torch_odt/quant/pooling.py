"""Pooling of int8 activations: windows keep the grid, since neither maxima nor means leave the range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_odt.ops import max_pool2d_with_offsets, max_pool2d_with_offsets_backward
from torch_odt.ops.registration import fake_of, operator_in_torch, refuse_gradient, register_gradient
from torch_odt.quant.activation import Int8Activation, empty_in_order, fake_slot, like_in_order, new_slot, zero_of


@dataclass(frozen=True)
class Pool:
    """The windows of a pool, as in `torch.nn.MaxPool2d` and `torch.nn.AvgPool2d`."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    ceil_mode: bool = False


def max_pool(input: Int8Activation, pool: Pool) -> Int8Activation:
    """The largest element of each window; a byte an output is kept for the backward pass.

    Raises:
        RuntimeError: a window has more than 256 elements.
    """
    p = pool
    window = (list(p.kernel_size), list(p.stride), list(p.padding), list(p.dilation), p.ceil_mode)
    values, slot, _ = torch.ops.torch_odt.int8_max_pool(input.values, input.slot, *window)
    return Int8Activation(values, slot, input.grid)


def average_pool(input: Int8Activation, pool: Pool, *, count_include_pad: bool = True) -> Int8Activation:
    """The mean of each window, rounded."""
    p = pool
    window = (list(p.kernel_size), list(p.stride), list(p.padding), p.ceil_mode, count_include_pad)
    values, slot = torch.ops.torch_odt.int8_average_pool(*input, *window)
    return Int8Activation(values, slot, input.grid)


def adaptive_average_pool(input: Int8Activation, output_size: Sequence[int | None]) -> Int8Activation:
    """The mean of each of so many windows, rounded; None keeps the input's size."""
    size = [have if want is None else want for want, have in zip(output_size, input.values.shape[2:], strict=True)]
    values, slot = torch.ops.torch_odt.int8_adaptive_average_pool(*input, size)
    return Int8Activation(values, slot, input.grid)


@operator_in_torch("int8_max_pool")
def _max_pool(
    values: Tensor,
    slot: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    output, offsets = max_pool2d_with_offsets(values, kernel_size, stride, padding, dilation, ceil_mode)
    return output, new_slot(output.shape), offsets


@fake_of("int8_max_pool")
def _(values: Tensor, slot: Tensor, *window: Any) -> tuple[Tensor, Tensor, Tensor]:
    output, _ = torch.ops.aten.max_pool2d_with_indices(values, *window)
    return output, fake_slot(values, output.shape), torch.empty_like(output, dtype=torch.uint8)


@operator_in_torch("int8_max_pool_backward")
def _max_pool_backward(
    gradient: Tensor,
    offsets: Tensor,
    input_shape: list[int],
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> Tensor:
    like = torch.empty(input_shape, dtype=gradient.dtype, memory_format=torch.channels_last)
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    return max_pool2d_with_offsets_backward(gradient, like, kernel_size, stride, padding, dilation, ceil_mode, offsets)


@fake_of("int8_max_pool_backward")
def _(gradient: Tensor, offsets: Tensor, input_shape: list[int], *window: Any) -> Tensor:
    return empty_in_order(input_shape, gradient.dtype, gradient)


refuse_gradient("int8_max_pool_backward")


def _keep_offsets(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    values, _, offsets = output
    ctx.mark_non_differentiable(values, offsets)
    ctx.save_for_backward(offsets)
    ctx.shape, ctx.window = list(inputs[0].shape), inputs[2:]


def _max_gradient(ctx: Any, of_values: Any, gradient: Tensor, of_offsets: Any) -> tuple[Any, ...]:
    found = _max_pool_backward(gradient, *ctx.saved_tensors, ctx.shape, *ctx.window)
    return None, found, *[None] * len(ctx.window)


register_gradient("int8_max_pool", _keep_offsets, _max_gradient)


@operator_in_torch("int8_average_pool")
def _average_pool(
    values: Tensor,
    slot: Tensor,
    grid: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
) -> tuple[Tensor, Tensor]:
    zero = zero_of(grid)
    means = torch.nn.functional.avg_pool2d(
        values.to(torch.float32, copy=True).sub_(zero), kernel_size, stride, padding, ceil_mode, count_include_pad
    )
    return means.round_().add_(zero).to(torch.int8), new_slot(means.shape)


@fake_of("int8_average_pool")
def _(
    values: Tensor,
    slot: Tensor,
    grid: Tensor,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count: bool,
) -> tuple[Tensor, Tensor]:
    like = values.new_empty(values.shape, dtype=torch.float32)
    output = torch.nn.functional.avg_pool2d(like, kernel_size, stride, padding, ceil_mode, count)
    return like_in_order(output, torch.int8), fake_slot(values, output.shape)


@operator_in_torch("int8_average_pool_backward")
def _average_pool_backward(
    gradient: Tensor,
    input_shape: list[int],
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
) -> Tensor:
    like = _input_of(gradient, input_shape)
    # Windows that overlap are added up, which bfloat16 has too few digits for.
    found = torch.ops.aten.avg_pool2d_backward(
        gradient.float(), like, kernel_size, stride, padding, ceil_mode, count_include_pad, None
    )
    return found.to(gradient.dtype, memory_format=torch.channels_last)


@fake_of("int8_average_pool_backward")
def _(gradient: Tensor, input_shape: list[int], *window: Any) -> Tensor:
    return empty_in_order(input_shape, gradient.dtype, gradient)


refuse_gradient("int8_average_pool_backward")


def _keep_window(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[0])
    ctx.shape, ctx.window = list(inputs[0].shape), inputs[3:]


def _average_gradient(ctx: Any, of_values: Any, gradient: Tensor) -> tuple[Any, ...]:
    found = _average_pool_backward(gradient, ctx.shape, *ctx.window)
    return None, found, *[None] * (1 + len(ctx.window))


register_gradient("int8_average_pool", _keep_window, _average_gradient)


def _input_of(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty float32 tensor of the input's shape.

    Torch's own kernels do not look whether a gradient has as many images.
    """
    is_of_it = gradient.dim() == len(shape) == 4 and list(gradient.shape[:2]) == list(shape[:2])
    if not is_of_it or (0 in shape and gradient.numel() > 0):
        raise RuntimeError(f"a gradient of {list(gradient.shape)} is none of a pool of {list(shape)}")
    return torch.empty(shape, memory_format=torch.channels_last)


def _is_global(input_shape: Sequence[int], output_size: Sequence[int]) -> bool:
    """Whether a pool takes all pixels of an image, of which there are some."""
    return tuple(output_size) == (1, 1) and min(input_shape) > 0


@operator_in_torch("int8_adaptive_average_pool")
def _adaptive(values: Tensor, slot: Tensor, grid: Tensor, output_size: list[int]) -> tuple[Tensor, Tensor]:
    zero = zero_of(grid)
    if _is_global(values.shape, output_size):
        # The sums are whole numbers; what pools windows goes through them one after another.
        pixels = values.shape[2] * values.shape[3]
        means = values.float().sum((2, 3), keepdim=True).sub_(zero * pixels).div_(pixels)
    else:
        steps = values.to(torch.float32, copy=True).sub_(zero)
        means = torch.nn.functional.adaptive_avg_pool2d(steps, (output_size[0], output_size[1]))
    whole = means.round_().add_(zero).to(torch.int8)
    return whole.contiguous(memory_format=torch.channels_last), new_slot(means.shape)


@fake_of("int8_adaptive_average_pool")
def _(values: Tensor, slot: Tensor, grid: Tensor, output_size: list[int]) -> tuple[Tensor, Tensor]:
    output = empty_in_order((*values.shape[:2], *output_size), torch.int8, values)
    return output, fake_slot(values, output.shape)


@operator_in_torch("int8_adaptive_average_pool_backward")
def _adaptive_backward(gradient: Tensor, input_shape: list[int]) -> Tensor:
    like = _input_of(gradient, input_shape)
    found = torch.ops.aten._adaptive_avg_pool2d_backward(gradient.float(), like)
    return found.to(gradient.dtype, memory_format=torch.channels_last)


@fake_of("int8_adaptive_average_pool_backward")
def _(gradient: Tensor, input_shape: list[int]) -> Tensor:
    return empty_in_order(input_shape, gradient.dtype, gradient)


refuse_gradient("int8_adaptive_average_pool_backward")


def _adaptive_gradient(ctx: Any, of_values: Any, gradient: Tensor) -> tuple[Any, ...]:
    if _is_global(ctx.shape, gradient.shape[2:]):
        # The same for all pixels of an image: layers read it as it is, and it takes the memory of one pixel.
        return None, (gradient / math.prod(ctx.shape[2:])).expand(ctx.shape), None, None
    return None, _adaptive_backward(gradient, ctx.shape), None, None


register_gradient("int8_adaptive_average_pool", _keep_window, _adaptive_gradient)
