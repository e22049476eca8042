"""The gradients of int8 convolutions, see `int8_conv2d`. `_update_weight_` takes the weight's off it, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_odt.ops import int8_plain as plain
from torch_odt.ops.int8_arguments import (
    WINDOWS,
    Pair,
    QuantizedGradient,
    Rounding,
    WeightGradient,
    channels_last,
    empty_image,
    number_of,
    pair,
    windows_of,
)
from torch_odt.ops.registration import register

ROUNDED = "int rounding, int seed"
GRADIENT = "Tensor grad_output, Tensor weight, Tensor? packed"


def int8_conv2d_grad_input(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    *,
    packed: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """The exact sums of the gradient of a convolution's input.

    When to choose it: where the sums themselves are wanted, see `int8_conv2d`.

    Args:
        grad_output: int8 of the output's shape; its zero is 0. A scale for each output channel of the weight does not
            factor out of the sums: multiply the gradient by it before it is quantised.
        weight: int8, as it was given to `int8_conv2d`.
        input_size: rows and columns of the input.
        packed: what `int8_pack_weight(..., for_grad_input=True)` made of the weight, or None to do so now.
        stride, padding, dilation, groups: as they were given to `int8_conv2d`.

    Returns:
        int32 of the input's shape, in torch.channels_last.

    Raises:
        RuntimeError: a shape, dtype or device is another; the message names the argument. Or a sum does not fit into
            int32.

    Example:
        >>> ones = torch.ones(1, 2, 1, 1, dtype=torch.int8)
        >>> int8_conv2d_grad_input(ones[:, :1], ones, (1, 1)).flatten()
        tensor([1, 1], dtype=torch.int32)
    """
    return torch.ops.torch_odt.int8_conv2d_grad_input(
        grad_output, weight, packed, pair(input_size), windows_of(stride, padding, dilation, groups)
    )


def int8_conv2d_grad_input_scaled(
    grad_output: Tensor,
    weight: Tensor,
    scale: Tensor,
    input_size: Sequence[int],
    *,
    packed: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """The gradient of a convolution's input, from int8 to float32.

    When to choose it: where what comes before is not quantised.

    Args:
        grad_output, weight, input_size, packed, stride, padding, dilation, groups: see `int8_conv2d_grad_input`.
        scale: float32 of one number.

    Returns:
        float32 of the input's shape, in torch.channels_last.

    Raises:
        RuntimeError: a shape, dtype or device is another; the message names the argument.

    Example:
        >>> ones = torch.ones(1, 2, 1, 1, dtype=torch.int8)
        >>> int8_conv2d_grad_input_scaled(ones[:, :1], ones, torch.tensor([0.5]), (1, 1)).flatten()
        tensor([0.5000, 0.5000])
    """
    return torch.ops.torch_odt.int8_conv2d_grad_input_scaled(
        grad_output, weight, packed, scale, pair(input_size), windows_of(stride, padding, dilation, groups)
    )


def int8_conv2d_grad_input_quantized(
    grad_output: Tensor,
    weight: Tensor,
    scale: Tensor,
    input_size: Sequence[int],
    *,
    packed: Tensor | None = None,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> QuantizedGradient:
    """The gradient of a convolution's input, from int8 to int8.

    When to choose it: between quantised layers.

    Args:
        grad_output, weight, input_size, packed, stride, padding, dilation, groups: see `int8_conv2d_grad_input`.
        scale: float32 of one number: the scales of grad_output and weight over that of the result.
        rounding, seed: see `int8_conv2d_quantized`.

    Returns:
        The gradient, and its largest absolute value before rounding.

    Raises:
        RuntimeError: a shape, dtype or device is another; the message names the argument.
        ValueError: there is no such rounding.

    Example:
        >>> ones = torch.ones(1, 2, 1, 1, dtype=torch.int8)
        >>> int8_conv2d_grad_input_quantized(ones[:, :1], ones, torch.tensor([3.0]), (1, 1)).gradient.flatten()
        tensor([3, 3], dtype=torch.int8)
    """
    return QuantizedGradient(
        *torch.ops.torch_odt.int8_conv2d_grad_input_quantized(
            grad_output, weight, packed, scale, number_of(rounding), seed, pair(input_size),
            windows_of(stride, padding, dilation, groups),
        )
    )  # fmt: skip


def int8_conv2d_grad_weight(
    grad_output: Tensor,
    input: Tensor,
    kernel_size: Pair,
    *,
    input_zero_point: int = 0,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> WeightGradient:
    """The exact sums of the gradients of a convolution's weight and bias.

    When to choose it: where the sums themselves are wanted, and fit into int32, as they always do over 65535 of the
    output's pixels, all samples together; otherwise `int8_conv2d_grad_weight_scaled` or `int8_conv2d_update_weight_`.

    Args:
        grad_output: int8 of the output's shape; its zero is 0.
        input, input_zero_point: as they were given to `int8_conv2d`.
        kernel_size: rows and columns of the weight.
        stride, padding, dilation, groups: as they were given to `int8_conv2d`.

    Returns:
        The weight's gradient as int32, and the bias's as int64.

    Raises:
        RuntimeError: a shape, dtype or device is another, or a sum does not fit into int32.

    Example:
        >>> ones = torch.ones(3, 1, 1, 1, dtype=torch.int8)
        >>> [gradient.item() for gradient in int8_conv2d_grad_weight(ones, ones, 1)]
        [3, 3]
    """
    return WeightGradient(
        *torch.ops.torch_odt.int8_conv2d_grad_weight(
            grad_output, input, input_zero_point, pair(kernel_size), windows_of(stride, padding, dilation, groups)
        )
    )


def int8_conv2d_grad_weight_scaled(
    grad_output: Tensor,
    input: Tensor,
    scale: Tensor,
    kernel_size: Pair,
    *,
    input_zero_point: int = 0,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> WeightGradient:
    """The gradient of a convolution's weight, from int8 to float32.

    When to choose it: for an optimizer that works in float32.

    Args:
        grad_output, input, kernel_size, input_zero_point, stride, padding, dilation, groups: see
            `int8_conv2d_grad_weight`.
        scale: float32, one number or one for each output channel: the scales of grad_output and input.

    Returns:
        The weight's gradient as float32, and the bias's as int64 sums, which the scale does not concern.

    Raises:
        RuntimeError: a shape, dtype or device is another; the message names the argument.

    Example:
        >>> ones = torch.ones(3, 1, 1, 1, dtype=torch.int8)
        >>> int8_conv2d_grad_weight_scaled(ones, ones, torch.tensor([0.5]), 1).weight.item()
        1.5
    """
    return WeightGradient(
        *torch.ops.torch_odt.int8_conv2d_grad_weight_scaled(
            grad_output, input, scale, input_zero_point, pair(kernel_size),
            windows_of(stride, padding, dilation, groups),
        )
    )  # fmt: skip


def int8_conv2d_update_weight_(
    weight: Tensor,
    grad_output: Tensor,
    input: Tensor,
    scale: Tensor,
    *,
    input_zero_point: int = 0,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Takes scale times the weight's gradient off the weight, in place: the gradient is never stored.

    When to choose it: for plain gradient descent. What packed weights were made of this one have to be made anew;
    `PackedInt8Weight` notices.

    Args:
        weight: int8 (which stays between -127 and 127) or float32, in torch.channels_last.
        grad_output, input, input_zero_point, stride, padding, dilation, groups: see `int8_conv2d_grad_weight`.
        scale: float32, one number or one for each output channel: the learning rate times the scales of grad_output and
            input, over the weight's own scale if it is int8.
        rounding, seed: see `int8_conv2d_quantized`; without effect on float32.

    Returns:
        int64 of shape (out_channels,): the output's gradient summed over all pixels, for the bias.

    Raises:
        RuntimeError: a shape, dtype, device or memory format is another; the message names the argument.
        ValueError: there is no such rounding.

    Example:
        >>> weight = torch.full((1, 1, 1, 1), 5, dtype=torch.int8)
        >>> ones = torch.ones(3, 1, 1, 1, dtype=torch.int8)
        >>> int8_conv2d_update_weight_(weight, ones, ones, torch.tensor([1.0])).item(), weight.item()
        (3, 2)
    """
    with torch.no_grad():  # a parameter may be what is updated
        of_bias: Tensor = torch.ops.torch_odt.int8_conv2d_update_weight_(
            weight, grad_output, input, scale, input_zero_point, number_of(rounding), seed,
            windows_of(stride, padding, dilation, groups),
        )  # fmt: skip
    # torch moves the version of what its own operators write to, and PackedInt8Weight and autograd go by it.
    torch.autograd.graph.increment_version(weight)
    return of_bias


def _grad_input_plain(
    grad_output: Tensor, weight: Tensor, packed: Tensor | None, input_size: Sequence[int], windows: Sequence[int]
) -> Tensor:
    name = "int8_conv2d_grad_input"
    sums = plain.grad_input_sums(name, grad_output, weight, input_size, plain.Geometry.of(name, windows))
    return channels_last(plain.as_int32(name, sums))


def _input_shape(grad_output: Tensor, weight: Tensor, input_size: Sequence[int], windows: Sequence[int]) -> list[int]:
    groups = plain.Geometry.of("int8_conv2d_grad_input", windows).groups
    return [grad_output.shape[0], weight.shape[1] * groups, *input_size]


def _grad_input_fake(
    grad_output: Tensor, weight: Tensor, packed: Tensor | None, input_size: Sequence[int], windows: Sequence[int]
) -> Tensor:
    return empty_image(_input_shape(grad_output, weight, input_size, windows), grad_output, torch.int32)


def _grad_input_scaled_plain(
    grad_output: Tensor,
    weight: Tensor,
    packed: Tensor | None,
    scale: Tensor,
    input_size: Sequence[int],
    windows: Sequence[int],
) -> Tensor:
    name = "int8_conv2d_grad_input_scaled"
    sums = plain.grad_input_sums(name, grad_output, weight, input_size, plain.Geometry.of(name, windows))
    return channels_last(plain.scaled(name, sums[None], scale, 0)[0])


def _grad_input_scaled_fake(
    grad_output: Tensor,
    weight: Tensor,
    packed: Tensor | None,
    scale: Tensor,
    input_size: Sequence[int],
    windows: Sequence[int],
) -> Tensor:
    return empty_image(_input_shape(grad_output, weight, input_size, windows), grad_output, torch.float32)


def grad_input_quantized_plain(
    grad_output: Tensor,
    weight: Tensor,
    packed: Tensor | None,
    scale: Tensor,
    rounding: int,
    seed: int,
    input_size: Sequence[int],
    windows: Sequence[int],
) -> tuple[Tensor, Tensor]:
    name = "int8_conv2d_grad_input_quantized"
    geometry = plain.Geometry.of(name, windows)
    sums = plain.by_pixels(plain.grad_input_sums(name, grad_output, weight, input_size, geometry))
    values = plain.scaled(name, sums[None], scale, 0)[0]
    width = geometry.groups if plain.is_depthwise(weight.shape, geometry.groups) else weight.shape[1]
    whole = plain.rounded(name, sums, values, scale, rounding, seed, width)
    return plain.as_image(whole.clamp(-128, 127).to(torch.int8)), plain.largest_of(values)


def grad_input_quantized_fake(
    grad_output: Tensor,
    weight: Tensor,
    packed: Tensor | None,
    scale: Tensor,
    rounding: int,
    seed: int,
    input_size: Sequence[int],
    windows: Sequence[int],
) -> tuple[Tensor, Tensor]:
    gradient = empty_image(_input_shape(grad_output, weight, input_size, windows), grad_output, torch.int8)
    return gradient, torch.empty(1, dtype=torch.float32, device=weight.device)


def _grad_weight_plain(
    grad_output: Tensor, input: Tensor, zero_point: int, kernel_size: Sequence[int], windows: Sequence[int]
) -> tuple[Tensor, Tensor]:
    name = "int8_conv2d_grad_weight"
    geometry = plain.Geometry.of(name, windows)
    weight, bias = plain.grad_weight_sums(name, grad_output, input, zero_point, kernel_size, geometry)
    return channels_last(plain.as_int32(name, weight)), bias


def _weight_gradient_fake(
    grad_output: Tensor, input: Tensor, kernel_size: Sequence[int], windows: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    groups = plain.Geometry.of("int8_conv2d_grad_weight", windows).groups
    weight = empty_image([grad_output.shape[1], input.shape[1] // groups, *kernel_size], input, dtype)
    return weight, torch.empty(grad_output.shape[1], dtype=torch.int64, device=input.device)


def _grad_weight_fake(
    grad_output: Tensor, input: Tensor, zero_point: int, kernel_size: Sequence[int], windows: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return _weight_gradient_fake(grad_output, input, kernel_size, windows, torch.int32)


def grad_weight_scaled_plain(
    grad_output: Tensor,
    input: Tensor,
    scale: Tensor,
    zero_point: int,
    kernel_size: Sequence[int],
    windows: Sequence[int],
) -> tuple[Tensor, Tensor]:
    name = "int8_conv2d_grad_weight_scaled"
    geometry = plain.Geometry.of(name, windows)
    weight, bias = plain.grad_weight_sums(name, grad_output, input, zero_point, kernel_size, geometry)
    return channels_last(plain.scaled(name, weight, scale, 0)), bias


def grad_weight_scaled_fake(
    grad_output: Tensor,
    input: Tensor,
    scale: Tensor,
    zero_point: int,
    kernel_size: Sequence[int],
    windows: Sequence[int],
) -> tuple[Tensor, Tensor]:
    return _weight_gradient_fake(grad_output, input, kernel_size, windows, torch.float32)


def _update_weight_plain(
    weight: Tensor,
    grad_output: Tensor,
    input: Tensor,
    scale: Tensor,
    zero_point: int,
    rounding: int,
    seed: int,
    windows: Sequence[int],
) -> Tensor:
    name = "int8_conv2d_update_weight_"
    if weight.dtype not in (torch.int8, torch.float32) or weight.dim() != 4:
        raise RuntimeError(f"{name}: weight must be an int8 or float32 CPU tensor of 4 dimensions")
    if not weight.is_contiguous(memory_format=torch.channels_last):
        raise RuntimeError(f"{name}: weight must be contiguous in memory_format=torch.channels_last")
    geometry = plain.Geometry.of(name, windows)
    sums, bias = plain.grad_weight_sums(name, grad_output, input, zero_point, weight.shape[2:], geometry)
    if sums.shape != weight.shape:
        raise RuntimeError(f"{name}: weight must have the shape {' x '.join(map(str, sums.shape))}")
    if weight.dtype == torch.float32:
        weight.sub_(plain.scaled(name, sums, scale, 0))
        return bias
    sums = plain.by_pixels(sums)
    values = plain.scaled(name, sums, scale, 0)
    width = weight[0].numel()
    whole = plain.rounded(name, sums, values, scale, rounding, seed, width, plain.by_pixels(weight))
    weight.copy_(plain.as_image(whole.clamp(-127, 127)))
    return bias


def _update_weight_fake(weight: Tensor, grad_output: Tensor, *rest: object) -> Tensor:
    return torch.empty(grad_output.shape[1], dtype=torch.int64, device=weight.device)


register(
    "int8_conv2d_grad_input",
    f"({GRADIENT}, int[2] input_size, {WINDOWS}) -> Tensor",
    _grad_input_plain,
    _grad_input_fake,
)
register(
    "int8_conv2d_grad_input_scaled",
    f"({GRADIENT}, Tensor scale, int[2] input_size, {WINDOWS}) -> Tensor",
    _grad_input_scaled_plain,
    _grad_input_scaled_fake,
)
register(
    "int8_conv2d_grad_input_quantized",
    f"({GRADIENT}, Tensor scale, {ROUNDED}, int[2] input_size, {WINDOWS}) -> (Tensor, Tensor)",
    grad_input_quantized_plain,
    grad_input_quantized_fake,
)
register(
    "int8_conv2d_grad_weight",
    f"(Tensor grad_output, Tensor input, int input_zero_point, int[2] kernel_size, {WINDOWS}) -> (Tensor, Tensor)",
    _grad_weight_plain,
    _grad_weight_fake,
)
register(
    "int8_conv2d_grad_weight_scaled",
    f"(Tensor grad_output, Tensor input, Tensor scale, int input_zero_point, int[2] kernel_size, {WINDOWS}) "
    "-> (Tensor, Tensor)",
    grad_weight_scaled_plain,
    grad_weight_scaled_fake,
)
register(
    "int8_conv2d_update_weight_",
    "(Tensor(a!) weight, Tensor grad_output, Tensor input, Tensor scale, int input_zero_point, "
    f"{ROUNDED}, {WINDOWS}) -> Tensor",
    _update_weight_plain,
    _update_weight_fake,
)
