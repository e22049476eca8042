"""A convolution of float tensors that is computed in int8 in both passes: what the operators are for, in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_odt.ops.int8_arguments import Pair, pair
from torch_odt.ops.int8_convolution import int8_conv2d_scaled
from torch_odt.ops.int8_gradients import int8_conv2d_grad_input_scaled, int8_conv2d_grad_weight_scaled

MOST = 127.0


def int8_training_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    *,
    seed: int = 0,
) -> Tensor:
    """A convolution whose products are int8 times int8, forward and backward; it keeps int8 for the backward pass.

    When to choose it: to train a layer in a quarter of its activations' bytes, and in less time where the processor has
    dot products of bytes and the layer is large; a small one takes longer than in float32, because tensors are rounded
    in Python. `odt.quant.convert_` and `odt.quant.niti_` round in their kernels. The result is not that of float32:
    each tensor is rounded to 255 steps between its largest absolute value and that with a minus sign; the output's
    gradient is rounded stochastically, so that it is right on average.

    Args:
        input: float32 of shape (N, C, H, W).
        weight: float32 of shape (out_channels, C / groups, rows, columns).
        bias: float32 of shape (out_channels,), or None; added in float32.
        stride, padding, dilation, groups: as in `torch.nn.Conv2d`, in numbers.
        seed: of the gradient's rounding: give each step its own.

    Returns:
        float32 of shape (N, out_channels, H', W'), in torch.channels_last, with a gradient.

    Raises:
        RuntimeError: a shape, dtype or device is another, or a number is not finite.

    Example:
        >>> weight = torch.tensor([[[[1.0]], [[0.5]]]], requires_grad=True)
        >>> output = int8_training_conv2d(torch.ones(1, 2, 1, 1), weight)
        >>> output.backward()
        >>> round(output.item(), 1), weight.grad.flatten()
        (1.5, tensor([1., 1.]))
    """
    if input.dim() != 4 or weight.dim() != 4:
        raise RuntimeError(
            f"int8_training_conv2d: input and weight must have 4 dimensions, not {input.dim()} and {weight.dim()}"
        )
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != weight.shape[:1]):
        raise RuntimeError(
            f"int8_training_conv2d: bias must be float32 of shape ({weight.shape[0]},), not {bias.dtype} of shape "
            f"{tuple(bias.shape)}"
        )
    output: Tensor = _forward(input, weight, pair(stride), pair(padding), pair(dilation), groups, seed)[0]
    return output if bias is None else output + bias[:, None, None]


def _steps(values: Tensor) -> Tensor:
    """The size of a step, of shape (1,)."""
    if values.dtype != torch.float32:
        raise RuntimeError(f"int8_training_conv2d: tensors must be float32, not {values.dtype}")
    values = values.detach()
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    if not bool(largest.isfinite()):
        raise RuntimeError("int8_training_conv2d: a tensor holds numbers that are not finite")
    return torch.where(largest > 0, largest / MOST, 1.0).reshape(1)


def _quantized(values: Tensor, step: Tensor) -> Tensor:
    whole = values.div(step).round_().clamp_(-MOST, MOST)
    return whole.to(torch.int8, memory_format=torch.channels_last)


def _stochastically_quantized(values: Tensor, step: Tensor, seed: int) -> Tensor:
    draws = torch.rand(values.shape, generator=torch.Generator().manual_seed(seed))
    whole = values.div(step).add_(draws).floor_().clamp_(-MOST, MOST)
    return whole.to(torch.int8, memory_format=torch.channels_last)


@torch.library.custom_op("torch_odt::int8_training_conv2d", mutates_args=())
def _forward(
    input: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps = torch.cat([_steps(input), _steps(weight)])
    image, kernel = _quantized(input, steps[:1]), _quantized(weight, steps[1:])
    output = int8_conv2d_scaled(
        image, kernel, steps[:1] * steps[1:], stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    return output, image, kernel, steps


@_forward.register_fake
def _(input: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int, seed: int) -> Any:
    output = torch.conv2d(input, weight, None, stride, padding, dilation, groups)
    image, kernel = (torch.empty_like(t, dtype=torch.int8, memory_format=torch.channels_last) for t in (input, weight))
    return output.contiguous(memory_format=torch.channels_last), image, kernel, input.new_empty(2)


@torch.library.custom_op("torch_odt::int8_training_conv2d_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    image: Tensor,
    kernel: Tensor,
    steps: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    step = _steps(gradient)
    quantized = _stochastically_quantized(gradient, step, seed)
    windows: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    of_input = int8_conv2d_grad_input_scaled(quantized, kernel, step * steps[1:], image.shape[2:], **windows)
    of_weight, _ = int8_conv2d_grad_weight_scaled(quantized, image, step * steps[:1], kernel.shape[2:], **windows)
    return of_input, of_weight


@_backward.register_fake
def _(gradient: Tensor, image: Tensor, kernel: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    of_input, of_weight = (
        torch.empty_like(t, dtype=torch.float32, memory_format=torch.channels_last) for t in (image, kernel)
    )
    return of_input, of_weight


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.arguments = inputs[2:]


def _gradients(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    of_input, of_weight = _backward(gradient, *ctx.saved_tensors, *ctx.arguments)
    return of_input, of_weight, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)
