"""Batch normalisation in training mode with an activation function behind it, forward and backward.

The activation functions are those that clamp: ReLU keeps what is above 0, ReLU6 and hardtanh what is between two
bounds, and infinite bounds stand for no activation function. Nothing but the input and the statistics has to be kept
for the backward pass, which computes the clamp's mask again.

The operators have no gradient of their own: they stand in graphs that hold both passes already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_odt import _extensions
from torch_odt.ops.batch_norm import _keeps_format, _normalize_in_torch

SCHEMAS = {
    "batch_norm_act": (
        "(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, "
        "float momentum, float eps, float low, float high) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "batch_norm_act_normalize": (
        "(Tensor input, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias, float low, float high) -> Tensor"
    ),
    "batch_norm_act_backward": (
        "(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias, "
        "float low, float high, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
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
    low: float = -math.inf,
    high: float = math.inf,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalises with the batch's own statistics and clamps to `[low, high]`: two passes over the input, one output.

    When to choose it: in place of `batch_norm` and `relu` or `hardtanh` of a forward pass whose backward pass is
    `batch_norm_act_backward`. The normalised tensor in between never exists. Nothing is changed in place.

    Args:
        input: float32, float64 or bfloat16, of at least 2 dimensions; the second is the channels. Not empty.
        weight: one element a channel; float64 for a float64 input, float32 for any other. None for 1.
        bias: as `weight`; None for 0.
        running_mean: as `weight`: the exponential average of the means so far.
        running_var: as `weight`: the exponential average of the unbiased variances so far.
        momentum: the share of this batch in the new averages.
        eps: is added to the variance.
        low, high: the bounds, -inf and inf for none. They are rounded to the input's dtype.

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
    return torch.ops.torch_odt.batch_norm_act(input, weight, bias, running_mean, running_var, momentum, eps, low, high)


def batch_norm_act_normalize(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    low: float = -math.inf,
    high: float = math.inf,
) -> Tensor:
    """Computes `(input - mean) * invstd * weight + bias`, clamped to `[low, high]`, in one pass over the input.

    When to choose it: to compute the output of `batch_norm_act` again, bit for bit, without taking statistics.

    Args:
        input: float32, float64 or bfloat16, of at least 2 dimensions; the second is the channels.
        mean: one element a channel; float64 for a float64 input, float32 for any other.
        invstd: as `mean`: one over the standard deviation.
        weight: as `mean`; None for 1.
        bias: as `mean`; None for 0.
        low, high: the bounds, -inf and inf for none. They are rounded to the input's dtype.

    Returns:
        A tensor of the input's shape and dtype. Dense inputs keep their memory format; from others it is contiguous.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> x = torch.randn(8, 3, 4, 4)
        >>> batch_norm_act_normalize(x, torch.zeros(3), torch.ones(3), low=0.0, high=6.0).shape
        torch.Size([8, 3, 4, 4])
    """
    return torch.ops.torch_odt.batch_norm_act_normalize(input, mean, invstd, weight, bias, low, high)


def batch_norm_act_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `batch_norm_act`, from its input and the statistics that it returned.

    When to choose it: in place of `threshold_backward` or `hardtanh_backward` and `native_batch_norm_backward`. At a
    bound and beyond it the gradient is 0, as it is there; where the forward pass met a NaN it is passed on.

    Args:
        grad_output: of the input's shape and dtype; another memory format costs a copy.
        input: as it was given to `batch_norm_act`.
        mean, invstd: as `batch_norm_act` returned them.
        weight, bias, low, high: as they were given to `batch_norm_act`.
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
        grad_output, input, mean, invstd, weight, bias, low, high, output_mask
    )


def _parameter_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _dense(input: Tensor) -> Tensor:
    return input if _keeps_format(input) else input.contiguous()


def _rounded(bound: float, dtype: torch.dtype) -> float:
    return torch.tensor(bound, dtype=dtype).item()


def _normalize_act_in_torch(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    low: float,
    high: float,
) -> Tensor:
    """As the compiled operator, in plain torch."""
    output = _normalize_in_torch(input, mean, invstd, weight, bias)
    return output.clamp(_rounded(low, input.dtype), _rounded(high, input.dtype))


def _act_in_torch(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    low: float,
    high: float,
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
    output = _normalize_act_in_torch(input, mean, invstd, weight, bias, low, high)
    return output, mean, invstd, running[0], running[1]


def _backward_in_torch(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    low: float,
    high: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """As the compiled operator, in plain torch."""
    if not input.numel() or (grad_output.shape, grad_output.dtype) != (input.shape, input.dtype):
        raise RuntimeError("batch_norm_act_backward: the input and its gradient must fit and have elements")
    source, wanted = _dense(input), _parameter_dtype(input)
    output = _normalize_in_torch(source, mean, invstd, weight, bias)
    passed = grad_output
    if low != -math.inf:
        passed = passed.masked_fill(output <= _rounded(low, input.dtype), 0)
    if high != math.inf:
        passed = passed.masked_fill(output >= _rounded(high, input.dtype), 0)
    gradients = torch.ops.aten.native_batch_norm_backward(
        passed.to(wanted), source.to(wanted), weight, None, None, mean, invstd, True, 0.0, list(output_mask)
    )
    grad_input = torch.empty_like(source).copy_(gradients[0]) if output_mask[0] else source.new_empty(0)
    grad_weight, grad_bias = (
        gradient if wants else mean.new_empty(0) for gradient, wants in zip(gradients[1:], output_mask[1:], strict=True)
    )
    return grad_input, grad_weight, grad_bias


def _empty_dense(input: Tensor) -> Tensor:
    if _keeps_format(input):
        return torch.empty_like(input)
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _empty_channels(input: Tensor) -> Tensor:
    return input.new_empty(input.shape[1], dtype=_parameter_dtype(input))


def _fake_act(input: Tensor, *_: Tensor | float | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mean, invstd, running_mean, running_var = (_empty_channels(input) for _ in range(4))
    return _empty_dense(input), mean, invstd, running_mean, running_var


def _fake_normalize(input: Tensor, *_: Tensor | float | None) -> Tensor:
    return _empty_dense(input)


def _fake_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    low: float,
    high: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _empty_dense(input) if output_mask[0] else input.new_empty(0),
        _empty_channels(input) if output_mask[1] else mean.new_empty(0),
        _empty_channels(input) if output_mask[2] else mean.new_empty(0),
    )


def _register(name: str, in_torch: Callable[..., Any], fake: Callable[..., Any]) -> None:
    if not _extensions.has_kernels:
        torch.library.define(f"torch_odt::{name}", SCHEMAS[name])
        torch.library.impl(f"torch_odt::{name}", "cpu", in_torch)
    torch.library.register_fake(f"torch_odt::{name}", fake)


_register("batch_norm_act", _act_in_torch, _fake_act)
_register("batch_norm_act_normalize", _normalize_act_in_torch, _fake_normalize)
_register("batch_norm_act_backward", _backward_in_torch, _fake_backward)
