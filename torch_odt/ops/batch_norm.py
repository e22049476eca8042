"""Batch normalisation with statistics that are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_odt import _extensions

NAME = "torch_odt::batch_norm_normalize"
SCHEMA = "(Tensor input, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias) -> Tensor"


def batch_norm_normalize(
    input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Computes `(input - mean) * invstd * weight + bias` for each channel, in one pass over the input.

    When to choose it: to compute the output of a batch normalisation again from its input and the statistics that its
    forward pass saved. It does not take statistics, so it does not update running ones.

    Args:
        input: float32, float64 or bfloat16, of at least 2 dimensions; the second is the channels.
        mean: one element a channel; float64 for a float64 input, float32 for any other.
        invstd: as `mean`: one over the standard deviation.
        weight: as `mean`; None for 1.
        bias: as `mean`; None for 0.

    Returns:
        A tensor of the input's shape and dtype. Dense inputs keep their memory format; from others it is contiguous.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> x = torch.randn(8, 3, 4, 4)
        >>> batch_norm_normalize(x, x.mean((0, 2, 3)), 1 / x.std((0, 2, 3))).shape
        torch.Size([8, 3, 4, 4])
    """
    return torch.ops.torch_odt.batch_norm_normalize(input, mean, invstd, weight, bias)


def _like_channel(parameter: Tensor, input: Tensor) -> Tensor:
    return parameter.view(1, -1, *(1 for _ in range(input.dim() - 2)))


def _keeps_format(input: Tensor) -> bool:
    return input.is_contiguous() or input.movedim(1, -1).is_contiguous()


def _normalize_in_torch(
    input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """As the compiled operator, in plain torch."""
    wanted = torch.float64 if input.dtype == torch.float64 else torch.float32
    if input.dim() < 2 or input.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise RuntimeError("batch_norm_normalize: the input must be floating and have at least 2 dimensions")
    for parameter in (mean, invstd, weight, bias):
        if parameter is not None and (parameter.shape != input.shape[1:2] or parameter.dtype != wanted):
            raise RuntimeError(f"batch_norm_normalize: parameters must be {wanted} with one element a channel")
    scale = invstd if weight is None else invstd * weight
    # One rounding, as the multiply-add of ATen's kernel has: products of two floats are exact in float64.
    product = mean.to(torch.float64) * scale.to(torch.float64)
    shift = ((0 if bias is None else bias.to(torch.float64)) - product).to(wanted)
    # In evaluation mode with mean 0 and variance 1 the kernel computes input * scale + shift, as in training mode.
    ones, zeros = torch.ones_like(mean), torch.zeros_like(mean)
    source = input if _keeps_format(input) else input.contiguous()
    output = torch.native_batch_norm(source, scale, shift, zeros, ones, False, 0.0, 0.0)[0]
    return output if output.stride() == source.stride() else torch.empty_like(source).copy_(output)


def _fake(input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if _keeps_format(input):
        return torch.empty_like(input)
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, mean, invstd, weight, _ = inputs
    ctx.save_for_backward(input, mean, invstd, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, mean, invstd, weight = ctx.saved_tensors
    channel_axes = [axis for axis in range(input.dim()) if axis != 1]
    scale = invstd if weight is None else invstd * weight
    wide_grad = grad.to(mean.dtype)
    grad_bias = wide_grad.sum(channel_axes)
    # Not in-place and out of differentiable operators, so that it has a derivative of its own.
    centred = input.to(mean.dtype) - _like_channel(mean, input)
    grad_scale = (wide_grad * centred).sum(channel_axes)
    return (
        (wide_grad * _like_channel(scale, input)).to(input.dtype) if ctx.needs_input_grad[0] else None,
        -grad_bias * scale if ctx.needs_input_grad[1] else None,
        (grad_scale if weight is None else grad_scale * weight) if ctx.needs_input_grad[2] else None,
        grad_scale * invstd if ctx.needs_input_grad[3] else None,
        grad_bias if ctx.needs_input_grad[4] else None,
    )


if not _extensions.has_kernels:
    torch.library.define(NAME, SCHEMA)
    torch.library.impl(NAME, "cpu", _normalize_in_torch)
torch.library.register_fake(NAME, _fake)
torch.library.register_autograd(NAME, _backward, setup_context=_save_for_backward)
