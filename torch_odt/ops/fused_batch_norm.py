"""Batch normalisation in training mode with what follows it, forward and backward: a residual that is added, and an
activation function.

The activation functions are hardswish, SiLU and those that clamp: ReLU keeps what is above 0, ReLU6 and hardtanh what
is between two bounds, and infinite bounds stand for no activation function. Without a residual nothing but the input
and the statistics has to be kept for the backward pass, which computes the activation function's input again. With one
it reads the output, which the next operator usually keeps anyway.

The operators have no gradient of their own: they stand in graphs that hold both passes already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from torch_odt.ops.batch_norm import _keeps_format, _normalize_in_torch
from torch_odt.ops.registration import register

Activation = Literal["clamp", "hardswish", "silu"]

SCHEMAS = {
    "batch_norm_act": (
        "(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, "
        "float momentum, float eps, str activation, float low, float high, Tensor? residual) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "batch_norm_act_normalize": (
        "(Tensor input, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias, "
        "str activation, float low, float high, Tensor? residual) -> Tensor"
    ),
    "batch_norm_act_backward": (
        "(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias, "
        "str activation, float low, float high, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
    ),
    "batch_norm_add_act_backward": (
        "(Tensor grad_output, Tensor output, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, "
        "float low, float high, bool[3] output_mask) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
}


def batch_norm_act(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: Activation = "clamp",
    low: float = -math.inf,
    high: float = math.inf,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalises with the batch's own statistics, adds a residual and applies an activation function: two passes over
    the input, one output.

    When to choose it: in place of `batch_norm`, an addition and an activation function of a forward pass whose backward
    pass is `batch_norm_act_backward`, or `batch_norm_add_act_backward` where there is a residual. The tensors in
    between never exist. Nothing is changed in place.

    Args:
        input: float32, float64 or bfloat16, of at least 2 dimensions; the second is the channels. Not empty.
        weight: one element a channel; float64 for a float64 input, float32 for any other. None for 1.
        bias: as `weight`; None for 0.
        running_mean: as `weight`: the exponential average of the means so far.
        running_var: as `weight`: the exponential average of the unbiased variances so far.
        momentum: the share of this batch in the new averages.
        eps: is added to the variance.
        activation: "clamp" to `[low, high]`, "hardswish" or "silu".
        low, high: the bounds of "clamp", -inf and inf for none. They are rounded to the input's dtype.
        residual: of the input's shape and dtype; another memory format costs a copy. None for nothing to add.

    Returns:
        The output, in the input's dtype; the mean and the inverse standard deviation, which the backward pass needs;
        the new running mean and variance. A dense input's memory format is the output's; it is contiguous otherwise.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> x = torch.randn(8, 3, 4, 4)
        >>> y, *_ = batch_norm_act(x, None, None, torch.zeros(3), torch.ones(3), low=0.0)
        >>> bool((y >= 0).all())
        True
    """
    return torch.ops.torch_odt.batch_norm_act(
        input, weight, bias, running_mean, running_var, momentum, eps, activation, low, high, residual
    )


def batch_norm_act_normalize(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation = "clamp",
    low: float = -math.inf,
    high: float = math.inf,
    residual: Tensor | None = None,
) -> Tensor:
    """Computes `activation((input - mean) * invstd * weight + bias + residual)` in one pass over the input.

    When to choose it: to compute the output of `batch_norm_act` again, bit for bit, without taking statistics.

    Args:
        input: float32, float64 or bfloat16, of at least 2 dimensions; the second is the channels.
        mean: one element a channel; float64 for a float64 input, float32 for any other.
        invstd: as `mean`: one over the standard deviation.
        weight: as `mean`; None for 1.
        bias: as `mean`; None for 0.
        activation, low, high, residual: as for `batch_norm_act`.

    Returns:
        A tensor of the input's shape and dtype. Dense inputs keep their memory format; from others it is contiguous.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> x = torch.randn(8, 3, 4, 4)
        >>> batch_norm_act_normalize(x, torch.zeros(3), torch.ones(3), low=0.0, high=6.0).shape
        torch.Size([8, 3, 4, 4])
    """
    return torch.ops.torch_odt.batch_norm_act_normalize(
        input, mean, invstd, weight, bias, activation, low, high, residual
    )


def batch_norm_act_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation = "clamp",
    low: float = -math.inf,
    high: float = math.inf,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `batch_norm_act` without a residual, from its input and the statistics that it returned.

    When to choose it: in place of the activation function's backward operator and `native_batch_norm_backward`. At a
    bound of a clamp and beyond it the gradient is 0, as it is there; where the forward pass met a NaN it is passed on.

    Args:
        grad_output: of the input's shape and dtype; another memory format costs a copy.
        input: as it was given to `batch_norm_act`.
        mean, invstd: as `batch_norm_act` returned them.
        weight, bias, activation, low, high: as they were given to `batch_norm_act`.
        output_mask: which results are wanted.

    Returns:
        The gradients of the input, the weight and the bias. One that is not wanted has no elements.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> x = torch.randn(8, 3, 4, 4)
        >>> y, mean, invstd, *_ = batch_norm_act(x, None, None, torch.zeros(3), torch.ones(3), low=0.0)
        >>> batch_norm_act_backward(torch.ones_like(y), x, mean, invstd, low=0.0)[0].shape
        torch.Size([8, 3, 4, 4])
    """
    return torch.ops.torch_odt.batch_norm_act_backward(
        grad_output, input, mean, invstd, weight, bias, activation, low, high, output_mask
    )


def batch_norm_add_act_backward(
    grad_output: Tensor,
    output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `batch_norm_act` with a residual and a clamp, from its output, its input and the statistics.

    When to choose it: in place of `threshold_backward` or `hardtanh_backward`, whose result is the residual's gradient,
    and `native_batch_norm_backward` behind it. At a bound and beyond it the gradient is 0; where the output is a NaN it
    is passed on.

    Args:
        grad_output: of the input's shape and dtype; another memory format costs a copy.
        output: as `batch_norm_act` returned it; another memory format than the input's costs a copy.
        input: as it was given to `batch_norm_act`.
        mean, invstd: as `batch_norm_act` returned them.
        weight, low, high: as they were given to `batch_norm_act`.
        output_mask: which of the first three results are wanted.

    Returns:
        The gradients of the input, the weight and the bias, and of the residual. One that is not wanted has no
        elements; the residual's is always there.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> x, r = torch.randn(8, 3, 4, 4), torch.randn(8, 3, 4, 4)
        >>> y, mean, invstd, *_ = batch_norm_act(x, None, None, torch.zeros(3), torch.ones(3), low=0.0, residual=r)
        >>> *_, grad_r = batch_norm_add_act_backward(torch.ones_like(y), y, x, mean, invstd, low=0.0)
        >>> torch.equal(grad_r, (y > 0).float())
        True
    """
    return torch.ops.torch_odt.batch_norm_add_act_backward(
        grad_output, output, input, mean, invstd, weight, low, high, output_mask
    )


def _parameter_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _dense(input: Tensor) -> Tensor:
    return input if _keeps_format(input) else input.contiguous()


def _rounded(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    return torch.tensor(low, dtype=dtype).item(), torch.tensor(high, dtype=dtype).item()


def _normalize_act_in_torch(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    low: float,
    high: float,
    residual: Tensor | None,
) -> Tensor:
    """As the compiled operator, in plain torch."""
    if input.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise RuntimeError("batch_norm_act: the input must be float32, float64 or bfloat16")
    wanted = _parameter_dtype(input)
    output = _normalize_in_torch(_dense(input).to(wanted), mean, invstd, weight, bias)
    if residual is not None:
        _check_alike("batch_norm_act", "residual", residual, input)
        output = output.add_(residual)
    if activation == "clamp":
        output = output.clamp(*_rounded(low, high, input.dtype))
    else:
        output = _smooth(activation, "")(output)
    return output.to(input.dtype)


def _smooth(activation: str, suffix: str) -> Callable[..., Tensor]:
    """ATen's operator for an activation function that is no clamp; with the suffix "_backward", for its gradient."""
    if activation not in ("hardswish", "silu"):
        raise RuntimeError(f"batch_norm_act{suffix}: there is no activation function {activation}")
    operator: Callable[..., Tensor] = getattr(torch.ops.aten, activation + suffix)
    return operator


def _act_in_torch(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    activation: str,
    low: float,
    high: float,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the compiled operator, in plain torch."""
    if input.dim() < 2 or not input.numel():
        raise RuntimeError("batch_norm_act: the input must have elements and at least 2 dimensions")
    for parameter in (weight, bias, running_mean, running_var):
        if parameter is not None and (parameter.shape, parameter.dtype) != (input.shape[1:2], _parameter_dtype(input)):
            raise RuntimeError("batch_norm_act: parameters must have one element a channel and the input's precision")
    wide = _dense(input).to(_parameter_dtype(input))
    _, mean, invstd, *running = torch.ops.aten._native_batch_norm_legit_functional(
        wide, weight, bias, running_mean, running_var, True, momentum, eps
    )
    output = _normalize_act_in_torch(input, mean, invstd, weight, bias, activation, low, high, residual)
    return output, mean, invstd, running[0], running[1]


def _backward_in_torch(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    low: float,
    high: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """As the compiled operator, in plain torch."""
    _check_alike("batch_norm_act_backward", "grad_output", grad_output, input)
    if activation == "clamp":
        output = _normalize_in_torch(_dense(input), mean, invstd, weight, bias)
        passed = _clamp_backward(grad_output, output, low, high)
    else:
        wanted = _parameter_dtype(input)
        output = _normalize_in_torch(_dense(input).to(wanted), mean, invstd, weight, bias)
        passed = _smooth(activation, "_backward")(grad_output.to(wanted), output)
    return _normalize_backward(passed, input, mean, invstd, weight, output_mask)


def _add_backward_in_torch(
    grad_output: Tensor,
    output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    low: float,
    high: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the compiled operator, in plain torch."""
    _check_alike("batch_norm_add_act_backward", "grad_output", grad_output, input)
    _check_alike("batch_norm_add_act_backward", "output", output, input)
    passed = _empty_dense(input).copy_(_clamp_backward(grad_output, output, low, high))
    return (*_normalize_backward(passed, input, mean, invstd, weight, output_mask), passed)


def _clamp_backward(grad: Tensor, output: Tensor, low: float, high: float) -> Tensor:
    """The gradient at a clamp; `output` is the clamp's input or its output, which is the same to it."""
    low, high = _rounded(low, high, output.dtype)
    if low != -math.inf:
        grad = grad.masked_fill(output <= low, 0)
    if high != math.inf:
        grad = grad.masked_fill(output >= high, 0)
    return grad


def _normalize_backward(
    grad: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    source, wanted = _dense(input), _parameter_dtype(input)
    gradients = torch.ops.aten.native_batch_norm_backward(
        grad.to(wanted), source.to(wanted), weight, None, None, mean, invstd, True, 0.0, list(output_mask)
    )
    grad_input = torch.empty_like(source).copy_(gradients[0]) if output_mask[0] else source.new_empty(0)
    grad_weight, grad_bias = (
        gradient if wants else mean.new_empty(0) for gradient, wants in zip(gradients[1:], output_mask[1:], strict=True)
    )
    return grad_input, grad_weight, grad_bias


def _check_alike(operator: str, name: str, tensor: Tensor, input: Tensor) -> None:
    if not input.numel():
        raise RuntimeError(f"{operator}: the input must have elements")
    if (tensor.shape, tensor.dtype) != (input.shape, input.dtype):
        raise RuntimeError(f"{operator}: {name} must have the input's shape and dtype")


def _empty_dense(input: Tensor) -> Tensor:
    if _keeps_format(input):
        return torch.empty_like(input)
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _empty_channels(input: Tensor) -> Tensor:
    return input.new_empty(input.shape[1], dtype=_parameter_dtype(input))


def _fake_act(input: Tensor, *_: Tensor | float | str | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mean, invstd, running_mean, running_var = (_empty_channels(input) for _ in range(4))
    return _empty_dense(input), mean, invstd, running_mean, running_var


def _fake_normalize(input: Tensor, *_: Tensor | float | str | None) -> Tensor:
    return _empty_dense(input)


def _fake_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    low: float,
    high: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradients(input, mean, output_mask)


def _fake_add_backward(
    grad_output: Tensor,
    output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    low: float,
    high: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*_fake_gradients(input, mean, output_mask), _empty_dense(input))


def _fake_gradients(input: Tensor, mean: Tensor, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _empty_dense(input) if output_mask[0] else input.new_empty(0),
        _empty_channels(input) if output_mask[1] else mean.new_empty(0),
        _empty_channels(input) if output_mask[2] else mean.new_empty(0),
    )


for _name, _in_torch, _fake in (
    ("batch_norm_act", _act_in_torch, _fake_act),
    ("batch_norm_act_normalize", _normalize_act_in_torch, _fake_normalize),
    ("batch_norm_act_backward", _backward_in_torch, _fake_backward),
    ("batch_norm_add_act_backward", _add_backward_in_torch, _fake_add_backward),
):
    register(_name, SCHEMAS[_name], _in_torch, _fake)
