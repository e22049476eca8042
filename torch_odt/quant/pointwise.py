"""What int8 networks do element by element: to int8 and back, sums, products, clamps and tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_odt.ops.masked import clamp_with_mask_backward, pack_in_order
from torch_odt.ops.registration import (
    fake_of,
    operator_in_torch,
    refuse_gradient,
    register,
    register_gradient,
)
from torch_odt.quant.activation import (
    GRADIENT,
    LEAST,
    Int8Activation,
    bounds,
    fake_slot,
    in_memory_order,
    like_in_order,
    new_slot,
    on_grid,
    packed_size,
    step_of,
    zero_of,
)


def quantize(input: Tensor, grid: Tensor) -> Int8Activation:
    """Numbers rounded to a grid.

    When to choose it: where the int8 part of a network begins.

    Args:
        input: float32 of any shape.
        grid: float32 of shape (2,), step and zero point.

    Returns:
        The int8 activation; its gradient goes to the input where nothing was clamped (straight through).

    Raises:
        RuntimeError: the input is not float32, or holds NaN.
    """
    values, slot, _ = torch.ops.torch_odt.int8_quantize(input, grid)
    return Int8Activation(values, slot, grid)


def dequantize(input: Int8Activation) -> Tensor:
    """The real numbers, as float32.

    When to choose it: where the int8 part of a network ends.
    """
    output: Tensor = torch.ops.torch_odt.int8_dequantize(input.values, input.slot, input.grid)
    return output


def add(
    left: Int8Activation,
    right: Int8Activation,
    output_grid: Tensor,
    *,
    low: float | None = None,
    high: float | None = None,
) -> Int8Activation:
    """The sum of two activations of the same shape, on a grid of its own, with the clamp behind it.

    When to choose it: for residual connections.

    Args:
        output_grid: step and zero point of the sum.
        low, high: bounds of the sum as real numbers; None for those of int8.

    Raises:
        RuntimeError: the shapes differ.
    """
    values, slot, _ = torch.ops.torch_odt.int8_add(*left, *right, output_grid, low, high)
    return Int8Activation(values, slot, output_grid)


def multiply(left: Int8Activation, right: Int8Activation, output_grid: Tensor) -> Int8Activation:
    """The product of two activations, on a grid of its own.

    When to choose it: for squeeze and excitation.

    Args:
        left: the larger one.
        right: of the same shape, or of one that is broadcast to it.
        output_grid: step and zero point of the product.

    Raises:
        RuntimeError: the right one does not broadcast to the left one's shape.
    """
    values, slot, _ = torch.ops.torch_odt.int8_multiply(*left, *right, output_grid)
    return Int8Activation(values, slot, output_grid)


def clamp(input: Int8Activation, low: float | None, high: float | None) -> Int8Activation:
    """An activation clamped on its own grid: ReLU, ReLU6 and their kind.

    When to choose it: where no layer stands before the clamp that could do it on the way.

    Args:
        low, high: bounds as real numbers, or None.
    """
    values, slot, _ = torch.ops.torch_odt.int8_clamp(*input, low, high)
    return Int8Activation(values, slot, input.grid)


def look_up(input: Int8Activation, table: Tensor, slopes: Tensor, output_grid: Tensor) -> Int8Activation:
    """Any function of one number, by a table of its 256 values.

    When to choose it: for SiLU, hardswish, sigmoid and the like.

    Args:
        table: int8 of shape (256,): the output's value for each of the input's, from -128.
        slopes: float32 of shape (256,): the derivative there; 0 where the output is clamped.
        output_grid: step and zero point of the output.
    """
    values, slot = torch.ops.torch_odt.int8_look_up(input.values, input.slot, table, slopes)
    return Int8Activation(values, slot, output_grid)


def drop(input: Int8Activation, probability: float, training: bool) -> Int8Activation:
    """Dropout: zeros in int8, and a larger step for what stays.

    When to choose it: in place of `torch.nn.functional.dropout`, whose random numbers it draws.
    """
    if not training or probability == 0:
        return input
    kept = torch.nn.functional.dropout(torch.ones_like(input.values, dtype=torch.float32), probability)
    values, slot = torch.ops.torch_odt.int8_drop(*input, kept)
    factor = 1 / (1 - probability) if probability < 1 else 1.0
    return Int8Activation(values, slot, torch.stack([input.grid[0] * factor, input.grid[1]]))


def with_mask(whole: Tensor, inside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What operators return: values, their slot, and booleans as bits."""
    return whole, new_slot(whole.shape), pack_in_order(inside, inside.dim() == 4)


def _fake_with_mask(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values = like_in_order(like, torch.int8)
    return values, fake_slot(like, like.shape), like.new_empty(packed_size(like.numel()), dtype=torch.uint8)


def masked(gradient: Tensor, mask: Tensor) -> Tensor:
    """A gradient, 0 where the bit is not set."""
    return clamp_with_mask_backward(in_memory_order(gradient), mask, gradient.dim() == 4)


def real(values: Tensor, grid: Tensor) -> Tensor:
    """The real numbers of a grid."""
    return values.to(torch.float32, copy=True).sub_(zero_of(grid)).mul_(step_of(grid))


def _quantize(input: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if input.dtype != torch.float32:
        raise RuntimeError(f"int8_quantize: the input must be float32, not {input.dtype}")
    if bool(input.isnan().any()):
        raise RuntimeError("int8_quantize: the input holds NaN")
    return with_mask(*on_grid(in_memory_order(input), grid, None, None))


def _quantize_fake(input: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_with_mask(input)


def _keep_mask(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    values, _, mask = output
    ctx.mark_non_differentiable(values, mask)
    ctx.inputs = len(inputs)
    ctx.save_for_backward(mask)


def _quantize_backward(ctx: Any, of_values: Any, gradient: Tensor, of_mask: Any) -> tuple[Any, ...]:
    return masked(gradient, *ctx.saved_tensors).float(), None


register("int8_quantize", "(Tensor input, Tensor grid) -> (Tensor, Tensor, Tensor)", _quantize, _quantize_fake)
register_gradient("int8_quantize", _keep_mask, _quantize_backward)


@operator_in_torch("int8_dequantize")
def _dequantize(values: Tensor, slot: Tensor, grid: Tensor) -> Tensor:
    return real(values, grid)


@fake_of("int8_dequantize")
def _(values: Tensor, slot: Tensor, grid: Tensor) -> Tensor:
    return torch.empty_like(values, dtype=torch.float32)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.inputs = len(inputs)


def _dequantize_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return None, gradient.to(GRADIENT), None


register_gradient("int8_dequantize", _keep_nothing, _dequantize_backward)


def _add(
    left: Tensor,
    left_slot: Tensor,
    left_grid: Tensor,
    right: Tensor,
    right_slot: Tensor,
    right_grid: Tensor,
    output_grid: Tensor,
    low: float | None,
    high: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if left.shape != right.shape:
        raise RuntimeError(f"int8_add: the shapes {tuple(left.shape)} and {tuple(right.shape)} differ")
    total = in_memory_order(real(left, left_grid).add_(real(right, right_grid)))
    return with_mask(*on_grid(total, output_grid, low, high))


def _add_fake(left: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_with_mask(left)


def _add_backward(ctx: Any, of_values: Any, gradient: Tensor, of_mask: Any) -> tuple[Any, ...]:
    found = masked(gradient, *ctx.saved_tensors)
    return None, found, None, None, found, *[None] * (ctx.inputs - 5)


register(
    "int8_add",
    "(Tensor left, Tensor left_slot, Tensor left_grid, Tensor right, Tensor right_slot, Tensor right_grid, "
    "Tensor output_grid, float? low, float? high) -> (Tensor, Tensor, Tensor)",
    _add,
    _add_fake,
)
register_gradient("int8_add", _keep_mask, _add_backward)


@operator_in_torch("int8_multiply")
def _multiply(
    left: Tensor,
    left_slot: Tensor,
    left_grid: Tensor,
    right: Tensor,
    right_slot: Tensor,
    right_grid: Tensor,
    output_grid: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    product = real(left, left_grid).mul(real(right, right_grid))
    if product.shape != left.shape:
        raise RuntimeError(f"int8_multiply: the shape {tuple(right.shape)} does not broadcast to {tuple(left.shape)}")
    return with_mask(*on_grid(product, output_grid, None, None))


@fake_of("int8_multiply")
def _(left: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_with_mask(left)


@operator_in_torch("int8_multiply_backward")
def _multiplied_back(
    gradient: Tensor, mask: Tensor, left: Tensor, left_grid: Tensor, right: Tensor, right_grid: Tensor
) -> tuple[Tensor, Tensor]:
    passed = masked(gradient, mask)
    of_right = (passed * real(left, left_grid)).sum_to_size(right.shape)
    return (passed * real(right, right_grid)).to(GRADIENT), in_memory_order(of_right.to(GRADIENT))


@fake_of("int8_multiply_backward")
def _(
    gradient: Tensor, mask: Tensor, left: Tensor, left_grid: Tensor, right: Tensor, right_grid: Tensor
) -> tuple[Tensor, Tensor]:
    return like_in_order(left, GRADIENT), like_in_order(right, GRADIENT)


refuse_gradient("int8_multiply_backward")


def _keep_factors(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    left, _, left_grid, right, _, right_grid, _ = inputs
    values, _, mask = output
    ctx.mark_non_differentiable(values, mask)
    ctx.save_for_backward(mask, left, left_grid, right, right_grid)


def _multiply_backward(ctx: Any, of_values: Any, gradient: Tensor, of_mask: Any) -> tuple[Any, ...]:
    of_left, of_right = _multiplied_back(gradient, *ctx.saved_tensors)
    return None, of_left, None, None, of_right, None, None


register_gradient("int8_multiply", _keep_factors, _multiply_backward)


@operator_in_torch("int8_clamp")
def _clamp(
    values: Tensor, slot: Tensor, grid: Tensor, low: float | None, high: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    least, most = bounds(grid, low, high)
    return with_mask(values.clamp(least, most), (values >= least) & (values <= most))


@fake_of("int8_clamp")
def _(values: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_with_mask(values)


def _clamp_backward(ctx: Any, of_values: Any, gradient: Tensor, of_mask: Any) -> tuple[Any, ...]:
    return None, masked(gradient, *ctx.saved_tensors), None, None, None


register_gradient("int8_clamp", _keep_mask, _clamp_backward)


@operator_in_torch("int8_look_up")
def _look_up(values: Tensor, slot: Tensor, table: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    return _entries(table, values), new_slot(values.shape)


def _entries(table: Tensor, values: Tensor) -> Tensor:
    return table[values.int() - LEAST]


@fake_of("int8_look_up")
def _(values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(values), fake_slot(values, values.shape)


@operator_in_torch("int8_look_up_backward")
def _looked_up_back(gradient: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
    return _entries(slopes, values).mul_(gradient).to(GRADIENT)


@fake_of("int8_look_up_backward")
def _(gradient: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
    return torch.empty_like(values, dtype=GRADIENT)


refuse_gradient("int8_look_up_backward")


def _keep_values(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    values, _, _, slopes = inputs
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(values, slopes)


def _look_up_backward(ctx: Any, of_values: Any, gradient: Tensor) -> tuple[Any, ...]:
    return None, _looked_up_back(gradient, *ctx.saved_tensors), None, None


register_gradient("int8_look_up", _keep_values, _look_up_backward)


@operator_in_torch("int8_drop")
def _drop(values: Tensor, slot: Tensor, grid: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    return in_memory_order(torch.where(kept > 0, values, zero_of(grid))), new_slot(values.shape)


@fake_of("int8_drop")
def _(values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return like_in_order(values, torch.int8), fake_slot(values, values.shape)


def _keep_kept(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(inputs[3])


def _drop_backward(ctx: Any, of_values: Any, gradient: Tensor) -> tuple[Any, ...]:
    return None, (gradient * ctx.saved_tensors[0]).to(GRADIENT), None, None


register_gradient("int8_drop", _keep_kept, _drop_backward)
