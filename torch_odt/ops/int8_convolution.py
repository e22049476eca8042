"""Convolutions of int8 tensors, with sums that are exact.

Images and weights are in `torch.channels_last`; others are accepted and cost a copy. A linear layer is the same with
images of one pixel, see `int8_linear`. What an operator makes of its sums is in its name: nothing (int32), `_scaled`
(float32), `_quantized` (int8). The operators have no gradient of their own, because int8 tensors have none: gradients
are computed with those of `int8_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_odt.ops import int8_plain as plain
from torch_odt.ops.bits import pack_bits
from torch_odt.ops.int8_arguments import (
    WINDOWS,
    Pair,
    Quantized,
    Rounding,
    channels_last,
    empty_image,
    number_of,
    windows_of,
)
from torch_odt.ops.registration import register

IMAGE = "Tensor input, Tensor weight, Tensor? packed"


def int8_conv2d(
    input: Tensor,
    weight: Tensor,
    *,
    packed: Tensor | None = None,
    input_zero_point: int = 0,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """The exact sums of a convolution: (input - input_zero_point) * weight.

    When to choose it: where the sums themselves are wanted; otherwise let `int8_conv2d_scaled` or
    `int8_conv2d_quantized` finish them on the way, which saves four bytes an element and a pass.

    Args:
        input: int8 of shape (N, C, H, W).
        weight: int8 of shape (out_channels, C / groups, rows, columns). Sums of up to 65535 terms fit into int32
            whatever they are; longer ones may, up to 2^24 terms.
        packed: what `int8_pack_weight` made of the weight, or None to do so now.
        input_zero_point: which value of the input stands for 0, padding included; from -128 to 127.
        stride, padding, dilation, groups: as in `torch.nn.Conv2d`.

    Returns:
        int32 of shape (N, out_channels, H', W'), in torch.channels_last.

    Raises:
        RuntimeError: a shape, dtype or device is another; the message names the argument. Or a sum does not fit into
            int32.

    Example:
        >>> ones = torch.ones(1, 2, 1, 1, dtype=torch.int8)
        >>> int8_conv2d(ones, ones).item()
        2
    """
    return torch.ops.torch_odt.int8_conv2d(
        input, weight, packed, input_zero_point, windows_of(stride, padding, dilation, groups)
    )


def int8_conv2d_scaled(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    packed: Tensor | None = None,
    input_zero_point: int = 0,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """A convolution from int8 to float32: (sums + bias) * scale.

    When to choose it: where the next layer is not quantised.

    Args:
        input, weight, packed, input_zero_point, stride, padding, dilation, groups: see `int8_conv2d`.
        scale: float32, one number or one for each output channel: the input's scale times the weight's.
        bias: int32 of shape (out_channels,), in units of the sums, or None; so small that int32 holds every sum of that
            many terms with it.

    Returns:
        float32 of shape (N, out_channels, H', W'), in torch.channels_last.

    Raises:
        RuntimeError: a shape, dtype or device is another, or a scale is not finite.

    Example:
        >>> ones = torch.ones(1, 2, 1, 1, dtype=torch.int8)
        >>> int8_conv2d_scaled(ones, ones, torch.tensor([0.25])).item()
        0.5
    """
    return torch.ops.torch_odt.int8_conv2d_scaled(
        input, weight, packed, bias, scale, input_zero_point, windows_of(stride, padding, dilation, groups)
    )


def int8_conv2d_quantized(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    packed: Tensor | None = None,
    input_zero_point: int = 0,
    output_zero_point: int = 0,
    low: int = -128,
    high: int = 127,
    rounding: Rounding = "nearest",
    seed: int = 0,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Quantized:
    """A convolution from int8 to int8: (sums + bias) * scale, rounded, plus output_zero_point, clamped.

    When to choose it: between quantised layers. A clamp or ReLU behind the convolution costs nothing more: let
    `low` and `high` be its bounds.

    Args:
        input, weight, packed, input_zero_point, stride, padding, dilation, groups: see `int8_conv2d`.
        scale: float32, one number or one for each output channel: the scales of input and weight over the output's.
        bias: int32 of shape (out_channels,), in units of the sums, or None; int32 has to hold the sums with it.
        output_zero_point: which value of the output stands for 0.
        low, high: the bounds of the output, values of int8.
        rounding: "nearest" (to even), "stochastic" (up with the probability of the fraction, to a 256th; the same on
            every instruction set and number of threads) or "pseudo_stochastic" (NITI's, arXiv 2009.13108, section 3.3;
            one scale, a power of two).
        seed: of stochastic rounding: give each call its own.

    Returns:
        The output, the mask of what was not clamped, and the largest absolute value.

    Raises:
        RuntimeError: a shape, dtype, device or bound is another; the message names the argument.
        ValueError: there is no such rounding.

    Example:
        >>> ones = torch.ones(1, 2, 1, 1, dtype=torch.int8)
        >>> int8_conv2d_quantized(ones, ones, torch.tensor([0.75])).output.item()
        2
    """
    return Quantized(
        *torch.ops.torch_odt.int8_conv2d_quantized(
            input, weight, packed, bias, scale, input_zero_point, output_zero_point, low, high, number_of(rounding),
            seed, windows_of(stride, padding, dilation, groups),
        )
    )  # fmt: skip


def _output_shape(input: Tensor, weight: Tensor, windows: Sequence[int]) -> list[int]:
    name = "int8_conv2d"
    size = plain.Geometry.of(name, windows).output_size(name, input.shape[2:], weight.shape[2:])
    return [input.shape[0], weight.shape[0], *size]


def _conv2d_plain(
    input: Tensor, weight: Tensor, packed: Tensor | None, zero_point: int, windows: Sequence[int]
) -> Tensor:
    name = "int8_conv2d"
    sums = plain.forward_sums(name, input, weight, None, zero_point, plain.Geometry.of(name, windows))
    return channels_last(plain.as_int32(name, sums))


def _conv2d_fake(
    input: Tensor, weight: Tensor, packed: Tensor | None, zero_point: int, windows: Sequence[int]
) -> Tensor:
    return empty_image(_output_shape(input, weight, windows), input, torch.int32)


def _scaled_plain(
    input: Tensor,
    weight: Tensor,
    packed: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    zero_point: int,
    windows: Sequence[int],
) -> Tensor:
    name = "int8_conv2d_scaled"
    sums = plain.forward_sums(name, input, weight, bias, zero_point, plain.Geometry.of(name, windows))
    return channels_last(plain.scaled(name, sums, scale, 1))


def _scaled_fake(
    input: Tensor,
    weight: Tensor,
    packed: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    zero_point: int,
    windows: Sequence[int],
) -> Tensor:
    return empty_image(_output_shape(input, weight, windows), input, torch.float32)


def _quantized_plain(
    input: Tensor,
    weight: Tensor,
    packed: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    zero_point: int,
    output_zero_point: int,
    low: int,
    high: int,
    rounding: int,
    seed: int,
    windows: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    name = "int8_conv2d_quantized"
    if not (-128 <= low <= high <= 127 and -128 <= output_zero_point <= 127):
        raise RuntimeError(f"{name}: low, high and output_zero_point must be values of int8, and low at most high")
    geometry = plain.Geometry.of(name, windows)
    sums = plain.by_pixels(plain.forward_sums(name, input, weight, bias, zero_point, geometry))
    values = plain.scaled(name, sums, scale, 3)
    groups = 1 if plain.is_depthwise(weight.shape, geometry.groups) else geometry.groups
    width = weight.shape[0] // groups
    whole = plain.rounded(name, sums, values, scale, rounding, seed, width) + output_zero_point
    mask = pack_bits(((whole >= low) & (whole <= high)).flatten())
    return plain.as_image(whole.clamp(low, high).to(torch.int8)), mask, plain.largest_of(values)


def _quantized_fake(
    input: Tensor, weight: Tensor, packed: Tensor | None, bias: Tensor | None, scale: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    output = empty_image(_output_shape(input, weight, rest[-1]), input, torch.int8)
    mask = torch.empty((output.numel() + 7) // 8, dtype=torch.uint8, device=input.device)
    return output, mask, torch.empty(1, dtype=torch.float32, device=input.device)


register("int8_conv2d", f"({IMAGE}, int input_zero_point, {WINDOWS}) -> Tensor", _conv2d_plain, _conv2d_fake)
register(
    "int8_conv2d_scaled",
    f"({IMAGE}, Tensor? bias, Tensor scale, int input_zero_point, {WINDOWS}) -> Tensor",
    _scaled_plain,
    _scaled_fake,
)
register(
    "int8_conv2d_quantized",
    f"({IMAGE}, Tensor? bias, Tensor scale, int input_zero_point, int output_zero_point, int low, int high, "
    f"int rounding, int seed, {WINDOWS}) -> (Tensor, Tensor, Tensor)",
    _quantized_plain,
    _quantized_fake,
)
