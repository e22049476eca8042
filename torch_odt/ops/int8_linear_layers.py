"""Linear layers of int8 tensors and their gradients: the convolutions of `int8_conv2d`, of images of one pixel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_odt.ops import int8_convolution as conv
from torch_odt.ops import int8_gradients as gradients
from torch_odt.ops.int8_arguments import Quantized, QuantizedGradient, Rounding, WeightGradient


def int8_linear(input: Tensor, weight: Tensor, *, packed: Tensor | None = None, input_zero_point: int = 0) -> Tensor:
    """The exact sums of a linear layer: (input - input_zero_point) @ weight.T.

    When to choose it: where the sums themselves are wanted, see `int8_conv2d`.

    Args:
        input: int8 of shape (..., in_features).
        weight: int8 of shape (out_features, in_features).
        packed: what `int8_pack_weight(weight[:, :, None, None])` made of it, or None to do so now.
        input_zero_point: which value of the input stands for 0.

    Returns:
        int32 of shape (..., out_features).

    Raises:
        RuntimeError: a shape, dtype or device is another; the message names the argument.

    Example:
        >>> int8_linear(torch.tensor([[1, 2]], dtype=torch.int8), torch.tensor([[3, 4]], dtype=torch.int8))
        tensor([[11]], dtype=torch.int32)
    """
    output = conv.int8_conv2d(_image(input), _kernel(weight), packed=packed, input_zero_point=input_zero_point)
    return _rows(output, input.shape[:-1])


def int8_linear_scaled(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    packed: Tensor | None = None,
    input_zero_point: int = 0,
) -> Tensor:
    """A linear layer from int8 to float32: (sums + bias) * scale.

    When to choose it: where the next layer is not quantised.

    Args:
        input, weight, packed, input_zero_point: see `int8_linear`.
        scale, bias: see `int8_conv2d_scaled`.

    Returns:
        float32 of shape (..., out_features).

    Raises:
        RuntimeError: a shape, dtype or device is another; the message names the argument.

    Example:
        >>> row = torch.tensor([[1, 2]], dtype=torch.int8)
        >>> int8_linear_scaled(row, row, torch.tensor([0.5]))
        tensor([[2.5000]])
    """
    output = conv.int8_conv2d_scaled(
        _image(input), _kernel(weight), scale, bias, packed=packed, input_zero_point=input_zero_point
    )
    return _rows(output, input.shape[:-1])


def int8_linear_quantized(
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
) -> Quantized:
    """A linear layer from int8 to int8.

    When to choose it: between quantised layers.

    Args:
        input, weight, packed, input_zero_point: see `int8_linear`.
        scale, bias, output_zero_point, low, high, rounding, seed: see `int8_conv2d_quantized`.

    Returns:
        The output, the mask of what was not clamped, and the largest absolute value, see `Quantized`.

    Raises:
        RuntimeError: a shape, dtype, device or bound is another; the message names the argument.
        ValueError: there is no such rounding.

    Example:
        >>> row = torch.tensor([[1, 2]], dtype=torch.int8)
        >>> int8_linear_quantized(row, row, torch.tensor([0.5])).output
        tensor([[2]], dtype=torch.int8)
    """
    found = conv.int8_conv2d_quantized(
        _image(input), _kernel(weight), scale, bias, packed=packed, input_zero_point=input_zero_point,
        output_zero_point=output_zero_point, low=low, high=high, rounding=rounding, seed=seed,
    )  # fmt: skip
    return found._replace(output=_rows(found.output, input.shape[:-1]))


def int8_linear_grad_input(grad_output: Tensor, weight: Tensor, *, packed: Tensor | None = None) -> Tensor:
    """The exact sums of the gradient of a linear layer's input: grad_output @ weight.

    When to choose it: where the sums themselves are wanted, see `int8_conv2d`.

    Args:
        grad_output: int8 of shape (..., out_features).
        weight: int8 of shape (out_features, in_features).
        packed: what `int8_pack_weight(weight[:, :, None, None], for_grad_input=True)` made of it, or None.

    Returns:
        int32 of shape (..., in_features).

    Raises:
        RuntimeError: a shape, dtype or device is another; the message names the argument.

    Example:
        >>> int8_linear_grad_input(torch.tensor([[2]], dtype=torch.int8), torch.tensor([[3, 4]], dtype=torch.int8))
        tensor([[6, 8]], dtype=torch.int32)
    """
    found = gradients.int8_conv2d_grad_input(_image(grad_output, "grad_output"), _kernel(weight), (1, 1), packed=packed)
    return _rows(found, grad_output.shape[:-1])


def int8_linear_grad_input_scaled(
    grad_output: Tensor, weight: Tensor, scale: Tensor, *, packed: Tensor | None = None
) -> Tensor:
    """The gradient of a linear layer's input, from int8 to float32.

    When to choose it: where what comes before is not quantised.

    Args:
        grad_output, weight, packed: see `int8_linear_grad_input`.
        scale: float32 of one number.

    Returns:
        float32 of shape (..., in_features).

    Raises:
        RuntimeError: a shape, dtype or device is another; the message names the argument.

    Example:
        >>> row = torch.tensor([[3, 4]], dtype=torch.int8)
        >>> int8_linear_grad_input_scaled(torch.tensor([[2]], dtype=torch.int8), row, torch.tensor([0.5]))
        tensor([[3., 4.]])
    """
    found = gradients.int8_conv2d_grad_input_scaled(
        _image(grad_output, "grad_output"), _kernel(weight), scale, (1, 1), packed=packed
    )
    return _rows(found, grad_output.shape[:-1])


def int8_linear_grad_input_quantized(
    grad_output: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    packed: Tensor | None = None,
    rounding: Rounding = "stochastic",
    seed: int = 0,
) -> QuantizedGradient:
    """The gradient of a linear layer's input, from int8 to int8.

    When to choose it: between quantised layers.

    Args:
        grad_output, weight, packed: see `int8_linear_grad_input`.
        scale, rounding, seed: see `int8_conv2d_grad_input_quantized`.

    Returns:
        The gradient, and its largest absolute value before rounding.

    Raises:
        RuntimeError: a shape, dtype or device is another; the message names the argument.
        ValueError: there is no such rounding.

    Example:
        >>> row = torch.tensor([[3, 4]], dtype=torch.int8)
        >>> int8_linear_grad_input_quantized(torch.tensor([[2]], dtype=torch.int8), row, torch.tensor([1.0])).gradient
        tensor([[6, 8]], dtype=torch.int8)
    """
    found = gradients.int8_conv2d_grad_input_quantized(
        _image(grad_output, "grad_output"), _kernel(weight), scale, (1, 1), packed=packed, rounding=rounding, seed=seed
    )
    return found._replace(gradient=_rows(found.gradient, grad_output.shape[:-1]))


def int8_linear_grad_weight(grad_output: Tensor, input: Tensor, *, input_zero_point: int = 0) -> WeightGradient:
    """The exact sums of the gradients of a linear layer's weight and bias: grad_output.T @ (input - input_zero_point).

    When to choose it: where the sums themselves are wanted, see `int8_conv2d_grad_weight`.

    Args:
        grad_output: int8 of shape (..., out_features).
        input, input_zero_point: as they were given to `int8_linear`.

    Returns:
        The weight's gradient as int32 of shape (out_features, in_features), and the bias's as int64.

    Raises:
        RuntimeError: a shape, dtype or device is another; the message names the argument.

    Example:
        >>> row = torch.tensor([[3, 4]], dtype=torch.int8)
        >>> int8_linear_grad_weight(torch.tensor([[2]], dtype=torch.int8), row).weight
        tensor([[6, 8]], dtype=torch.int32)
    """
    found = gradients.int8_conv2d_grad_weight(
        _image(grad_output, "grad_output"), _image(input), 1, input_zero_point=input_zero_point
    )
    return found._replace(weight=found.weight.flatten(1))


def int8_linear_grad_weight_scaled(
    grad_output: Tensor, input: Tensor, scale: Tensor, *, input_zero_point: int = 0
) -> WeightGradient:
    """The gradient of a linear layer's weight, from int8 to float32.

    When to choose it: for an optimizer that works in float32.

    Args:
        grad_output, input, input_zero_point: see `int8_linear_grad_weight`.
        scale: float32, one number or one for each output feature.

    Returns:
        The weight's gradient as float32, and the bias's as int64 sums, which the scale does not concern.

    Raises:
        RuntimeError: a shape, dtype or device is another; the message names the argument.

    Example:
        >>> row = torch.tensor([[3, 4]], dtype=torch.int8)
        >>> int8_linear_grad_weight_scaled(torch.tensor([[2]], dtype=torch.int8), row, torch.tensor([0.5])).weight
        tensor([[3., 4.]])
    """
    found = gradients.int8_conv2d_grad_weight_scaled(
        _image(grad_output, "grad_output"), _image(input), scale, 1, input_zero_point=input_zero_point
    )
    return found._replace(weight=found.weight.flatten(1))


def int8_linear_update_weight_(
    weight: Tensor,
    grad_output: Tensor,
    input: Tensor,
    scale: Tensor,
    *,
    input_zero_point: int = 0,
    rounding: Rounding = "stochastic",
    seed: int = 0,
) -> Tensor:
    """Takes scale times the weight's gradient off the weight, in place: the gradient is never stored.

    When to choose it: for plain gradient descent; of a large layer and few rows, where writing the gradient is most of
    the work.

    Args:
        weight: int8 or float32 of shape (out_features, in_features), contiguous.
        grad_output, input, input_zero_point: see `int8_linear_grad_weight`.
        scale, rounding, seed: see `int8_conv2d_update_weight_`.

    Returns:
        int64 of shape (out_features,): the output's gradient summed over all rows, for the bias.

    Raises:
        RuntimeError: a shape, dtype, device or layout is another; the message names the argument.
        ValueError: there is no such rounding.

    Example:
        >>> weight = torch.zeros(1, 2)
        >>> row = torch.tensor([[3, 4]], dtype=torch.int8)
        >>> _ = int8_linear_update_weight_(weight, torch.tensor([[2]], dtype=torch.int8), row, torch.tensor([0.5]))
        >>> weight
        tensor([[-3., -4.]])
    """
    if not weight.is_contiguous():
        raise RuntimeError("int8_linear_update_weight_: weight is updated in place, and must be contiguous")
    return gradients.int8_conv2d_update_weight_(
        _kernel(weight), _image(grad_output, "grad_output"), _image(input), scale, input_zero_point=input_zero_point,
        rounding=rounding, seed=seed,
    )  # fmt: skip


def _image(rows: Tensor, argument: str = "input") -> Tensor:
    """Rows as images of one pixel."""
    _check_int8(rows, argument)
    if not rows.dim():
        raise RuntimeError(f"int8_linear: {argument} must have a dimension for its features")
    return rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1], 1, 1)


def _kernel(weight: Tensor) -> Tensor:
    if weight.dim() != 2:
        raise RuntimeError("int8_linear: weight must have 2 dimensions, out_features x in_features")
    return weight[:, :, None, None]


def _check_int8(tensor: Tensor, argument: str) -> None:
    if tensor.dtype != torch.int8:
        raise RuntimeError(f"int8_linear: {argument} must be int8, not {tensor.dtype}")


def _rows(image: Tensor, shape: Sequence[int]) -> Tensor:
    return image.reshape(*shape, image.shape[1])
