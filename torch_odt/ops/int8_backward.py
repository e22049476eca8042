"""All gradients of an int8 convolution by one operator, as torch's own convolution_backward has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_odt.ops import int8_plain as plain
from torch_odt.ops.int8_arguments import WINDOWS, ConvolutionGradients, Pair, Rounding, number_of, windows_of
from torch_odt.ops.int8_gradients import (
    ROUNDED,
    grad_input_quantized_fake,
    grad_input_quantized_plain,
    grad_weight_scaled_fake,
    grad_weight_scaled_plain,
)
from torch_odt.ops.registration import register


def int8_conv2d_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    grad_input_scale: Tensor,
    grad_weight_scale: Tensor,
    *,
    packed: Tensor | None = None,
    input_zero_point: int = 0,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> ConvolutionGradients:
    """The gradients of a convolution's input in int8, and of its weight and bias.

    When to choose it: in place of `int8_conv2d_grad_input_quantized` and `int8_conv2d_grad_weight_scaled` where both
    are wanted from the same grad_output. It makes what they make, with one call less.

    Args:
        grad_output: int8 of the output's shape, whose zero is 0.
        input: int8 of shape (batch, channels, rows, columns), whose zero is `input_zero_point`.
        weight: int8, as it was given to `int8_conv2d`.
        grad_input_scale: float32 of one number: the scales of grad_output and weight over that of the input's gradient.
        grad_weight_scale: float32 of one number, or of one for each output channel.
        packed: what `int8_pack_weight(..., for_grad_input=True)` made of the weight, or None to do so now.
        input_zero_point: from -128 to 127.
        rounding, seed: of the input's gradient, see `int8_conv2d_quantized`.
        stride, padding, dilation, groups: as they were given to `int8_conv2d`.

    Returns:
        The input's gradient, its largest absolute value before rounding, the weight's gradient in float32, and the
        exact sums of the bias's in int64.

    Raises:
        RuntimeError: a shape, dtype or device is another; the message names the argument.
        ValueError: there is no such rounding.

    Example:
        >>> ones, half = torch.ones(1, 1, 1, 1, dtype=torch.int8), torch.tensor([0.5])
        >>> found = int8_conv2d_backward(ones * 4, ones, ones * 3, half, half)
        >>> found.input.item(), found.weight.item(), found.bias.item()
        (6, 2.0, 4)
    """
    return ConvolutionGradients(
        *torch.ops.torch_odt.int8_conv2d_backward(
            grad_output,
            input,
            weight,
            packed,
            grad_input_scale,
            grad_weight_scale,
            input_zero_point,
            number_of(rounding),
            seed,
            windows_of(stride, padding, dilation, groups),
        )
    )


def _backward_with(of_input: Any, of_weight: Any) -> Any:
    def backward(
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor,
        packed: Tensor | None,
        grad_input_scale: Tensor,
        grad_weight_scale: Tensor,
        zero_point: int,
        rounding: int,
        seed: int,
        windows: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        groups = plain.Geometry.of("int8_conv2d_backward", windows).groups
        if input.dim() != 4 or weight.dim() != 4:
            raise RuntimeError("int8_conv2d_backward: input and weight must have 4 dimensions")
        if input.shape[1] != weight.shape[1] * groups:
            raise RuntimeError("int8_conv2d_backward: input must have as many channels as weight has, times groups")
        size, kernel = list(input.shape[2:]), list(weight.shape[2:])
        return (
            *of_input(grad_output, weight, packed, grad_input_scale, rounding, seed, size, windows),
            *of_weight(grad_output, input, grad_weight_scale, zero_point, kernel, windows),
        )

    return backward


backward_plain = _backward_with(grad_input_quantized_plain, grad_weight_scaled_plain)

register(
    "int8_conv2d_backward",
    "(Tensor grad_output, Tensor input, Tensor weight, Tensor? packed, Tensor grad_input_scale, "
    f"Tensor grad_weight_scale, int input_zero_point, {ROUNDED}, {WINDOWS}) -> (Tensor, Tensor, Tensor, Tensor)",
    backward_plain,
    _backward_with(grad_input_quantized_fake, grad_weight_scaled_fake),
)
