"""Octo's convolution: products of int8 in both passes, and backward operands whose ranges are clipped.

Q. Zhou et al., "Octo: INT8 Training with Loss-aware Compensation and Backward Quantization for Tiny On-device
Learning", USENIX ATC 2021. The forward pass rounds the whole ranges of input and weight. The operands of the backward
pass (input, weight, output's gradient) are clipped to a share of theirs first, which makes the steps of what is left
smaller (parameterized range clipping). What is kept between the passes is int8.

The shares are learned here from what they are for: the gradient of a share is that of half the logarithm of its
operand's squared rounding error, with the rounding treated as in learned step sizes (Esser et al., ICLR 2020, equation
3). With operand t, its rounded value v and e = v - t, and as the step and the bounds are proportional to the share:

    d(log |e|^2 / 2) / d(log share)  =  (sum of e e where t is within the bounds, of e v elsewhere) / |e|^2

It is 1 where nothing is clipped, and 0 where clipping costs as much as it gains. What a parameter gets is a hundredth
of it, between -0.01 and 0.01, so that shares follow slowly; the loss's size makes no difference to it. Of inputs and
gradients the first samples of a batch are looked at, some 65,536 elements.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_odt.ops.int8_arguments import channels_last
from torch_odt.ops.int8_convolution import int8_conv2d_scaled
from torch_odt.ops.int8_gradients import int8_conv2d_grad_input_scaled, int8_conv2d_grad_weight_scaled
from torch_odt.quant.observed_ranges import HIGH, LOW

CLIP_RATE = 0.01
SEEN_ELEMENTS = 1 << 16
OPERANDS = ("input", "weight", "gradient")
_INPUT, _WEIGHT, _GRADIENT = range(3)


@torch.library.custom_op("torch_odt::octo_conv2d", mutates_args=())
def octo_conv2d(
    input: Tensor,
    weight: Tensor,
    log_clip: Tensor,
    seed: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    keeps: bool,
    clips: bool,
    learns: bool,
    is_stochastic: bool,
    by_channel: bool,
    layer: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A convolution in int8, forward and backward.

    Args:
        input: float32 of shape (N, C, H, W).
        weight: float32 of shape (out_channels, C / groups, rows, columns).
        log_clip: float32 of shape (3,): logarithms of the shares of their ranges to which input, weight and gradient
            are clipped for the backward pass; 0 and more clip nothing. Its gradient is that of this module's docstring.
        seed: int64 of one number, for stochastic rounding of the output's gradient: give each step its own.
        stride, padding, dilation, groups: as in `torch.nn.Conv2d`.
        keeps: whether there will be a backward pass.
        clips: whether ranges are clipped; `log_clip` is taken for 0 otherwise.
        learns: whether `log_clip` gets its gradient; that is 0 otherwise, and nothing is spent on it.
        is_stochastic: whether the output's gradient is rounded stochastically, or to the nearest.
        by_channel: whether each output channel of the weight has a step of its own, or all have one.
        layer: a name for errors.

    Returns:
        The output, float32 in torch.channels_last; and what the backward pass needs: the clipped input and weight as
        int8, the steps of the weight's channels and, last, of the input, the input's zero, and gradients of two shares.

    Raises:
        RuntimeError: a tensor is not float32, or holds numbers that are not finite; the layer is named.

    Example:
        >>> weight = torch.tensor([[[[1.0]], [[0.5]]]], requires_grad=True)
        >>> one, seed = torch.zeros(3), torch.tensor(1)
        >>> windows, how = ([1, 1], [0, 0], [1, 1], 1), (True, False, False, True, True, "first")
        >>> output = octo_conv2d(torch.ones(1, 2, 1, 1), weight, one, seed, *windows, *how)[0]
        >>> output.sum().backward()
        >>> round(output.item(), 1), weight.grad.flatten()
        (1.5, tensor([1., 1.]))
    """
    low, high = _bounds(input, layer, "input")
    largest = _largest_of_channels(weight, by_channel, layer)
    step, zero = _affine(low, high)
    steps = largest / HIGH
    image, kernel = _rounded(input, step, zero, least=LOW), _rounded(weight, _by_channel(steps, weight))
    output = int8_conv2d_scaled(
        image, kernel, step * steps, input_zero_point=zero, stride=stride, padding=padding, dilation=dilation,
        groups=groups,
    )  # fmt: skip
    gradients = torch.zeros(2)
    if not keeps:
        nothing = input.new_empty(0, dtype=torch.int8)
        return output, nothing, nothing.clone(), input.new_empty(0), torch.empty(0, dtype=torch.int64), gradients
    # Not where a share is below 1: what is allocated must not depend on numbers, because a plan counts on it.
    if clips:
        shares = log_clip.exp().clamp(max=1)
        low, high, steps = low * shares[_INPUT], high * shares[_INPUT], steps * shares[_WEIGHT]
        step, zero = _affine(low, high)
        image, kernel = _rounded(input, step, zero, least=LOW), _rounded(weight, _by_channel(steps, weight))
    if learns:
        bound = _by_channel(steps * HIGH, weight)
        seen = _first(input)
        of_input = _clip_gradient(seen, (_first(image).float() - zero).mul_(step), (seen >= low) & (seen <= high))
        of_weight = _clip_gradient(weight, kernel.float() * _by_channel(steps, weight), weight.abs() <= bound)
        gradients = torch.stack([of_input, of_weight])
    return output, image, kernel, torch.cat([steps, step]), torch.tensor([zero]), gradients


@octo_conv2d.register_fake
def _(
    input: Tensor, weight: Tensor, log_clip: Tensor, seed: Tensor, stride: Any, padding: Any, dilation: Any,
    groups: int, keeps: bool, *_: Any,
) -> Any:  # fmt: skip
    output = channels_last(torch.conv2d(input, weight, None, stride, padding, dilation, groups))
    image, kernel = (
        torch.empty_like(each, dtype=torch.int8, memory_format=torch.channels_last)
        if keeps
        else each.new_empty(0, dtype=torch.int8)
        for each in (input, weight)
    )
    steps = input.new_empty(weight.shape[0] + 1 if keeps else 0)
    return output, image, kernel, steps, seed.new_empty(1 if keeps else 0), input.new_empty(2)


@torch.library.custom_op("torch_odt::octo_conv2d_backward", mutates_args=())
def octo_conv2d_backward(
    gradient: Tensor,
    image: Tensor,
    kernel: Tensor,
    steps: Tensor,
    zero: Tensor,
    log_clip: Tensor,
    seed: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    wants_input: bool,
    wants_weight: bool,
    clips: bool,
    learns: bool,
    is_stochastic: bool,
    layer: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weight and the gradient's share; the first two are empty where they are not wanted.

    The output's gradient is multiplied by the steps of the weight's channels before it is rounded, because these do not
    factor out of the sums over channels that the input's gradient is.
    """
    if gradient.dtype != torch.float32:
        raise RuntimeError(f"{layer}: the gradient of the output is {gradient.dtype}; it must be float32")
    steps, input_step = steps[:-1], steps[-1:]
    scaled = gradient * steps[:, None, None]
    largest = scaled.abs().amax() if scaled.numel() else scaled.new_zeros(())
    if not bool(largest.isfinite()):
        raise RuntimeError(f"{layer}: the gradient of its output is not finite; training has diverged behind it")
    bound = largest * log_clip[_GRADIENT].exp().clamp(max=1) if clips else largest
    step = torch.where(bound > 0, bound / HIGH, 1.0).reshape(1)
    draws = int(seed) if is_stochastic else None
    quantized = _rounded(scaled, step, seed=draws)
    windows: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    of_input = of_weight = None
    if wants_input:
        of_input = int8_conv2d_grad_input_scaled(quantized, kernel, step, image.shape[2:], **windows)
    if wants_weight:
        scale = step * input_step / steps
        of_weight, _ = int8_conv2d_grad_weight_scaled(
            quantized, image, scale, kernel.shape[2:], input_zero_point=int(zero), **windows
        )
    of_share = gradient.new_zeros(1)
    if learns:
        seen = _first(scaled)
        of_share[0] = _clip_gradient(seen, _rounded(seen, step).float().mul_(step), seen.abs() <= bound)
    nothing = gradient.new_empty(0)
    return (
        nothing if of_input is None else of_input,
        nothing.clone() if of_weight is None else of_weight,
        of_share,
    )


@octo_conv2d_backward.register_fake
def _(
    gradient: Tensor, image: Tensor, kernel: Tensor, steps: Tensor, zero: Tensor, log_clip: Tensor, seed: Tensor,
    stride: Any, padding: Any, dilation: Any, groups: int, wants_input: bool, wants_weight: bool, *_: Any,
) -> Any:  # fmt: skip
    of_input, of_weight = (
        torch.empty_like(each, dtype=torch.float32, memory_format=torch.channels_last)
        if wanted
        else gradient.new_empty(0)
        for each, wanted in ((image, wants_input), (kernel, wants_weight))
    )
    return of_input, of_weight, gradient.new_empty(1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, log_clip, seed, *windows, keeps, clips, learns, is_stochastic, _, layer = inputs
    ctx.save_for_backward(*output[1:], log_clip, seed)
    ctx.mark_non_differentiable(*output[1:])
    ctx.windows, ctx.keeps, ctx.how = windows, keeps, (clips, learns, is_stochastic, layer)


def _gradients(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    if not ctx.keeps:
        raise RuntimeError(f"{ctx.how[-1]} kept nothing for a backward pass: call octo_conv2d with keeps=True")
    image, kernel, steps, zero, of_operands, log_clip, seed = ctx.saved_tensors
    wants_input, wants_weight, wants_clip = ctx.needs_input_grad[:3]
    of_input, of_weight, of_share = octo_conv2d_backward(
        gradient, image, kernel, steps, zero, log_clip, seed, *ctx.windows, wants_input, wants_weight, *ctx.how
    )
    return (
        of_input if wants_input else None,
        of_weight if wants_weight else None,
        torch.cat([of_operands, of_share]) if wants_clip else None,
        *[None] * 11,
    )


octo_conv2d.register_autograd(_gradients, setup_context=_keep)


def _bounds(values: Tensor, layer: str, what: str) -> tuple[Tensor, Tensor]:
    """The least and the greatest value, 0 within."""
    if values.dtype != torch.float32:
        raise RuntimeError(f"{layer}: its {what} is {values.dtype}; int8 training takes float32, without autocast")
    if not values.numel():
        return values.new_zeros(1), values.new_zeros(1)
    low, high = values.aminmax()
    if not bool(low.isfinite() & high.isfinite()):
        raise RuntimeError(f"{layer}: its {what} holds numbers that are not finite; training has diverged before it")
    return low.clamp(max=0).reshape(1), high.clamp(min=0).reshape(1)


def _largest_of_channels(weight: Tensor, by_channel: bool, layer: str) -> Tensor:
    """Of each output channel, its largest absolute value; one that is 0 throughout has that of the largest other.

    Where steps are not by channel, each has that of the largest.
    """
    low, high = _bounds(weight, layer, "weight")
    most = torch.maximum(-low, high)
    largest = weight.abs().flatten(1).amax(1) if by_channel else most.repeat(weight.shape[0])
    return torch.where(largest > 0, largest, torch.where(most > 0, most, 1.0))


def _affine(low: Tensor, high: Tensor) -> tuple[Tensor, int]:
    """The size of a step of int8, of shape (1,), and the value that stands for 0."""
    width = high - low
    step = torch.where(width > 0, width / (HIGH - LOW), 1.0)
    return step, int((LOW - low / step).round().clamp(LOW, HIGH))


def _by_channel(steps: Tensor, weight: Tensor) -> Tensor:
    return steps.reshape(-1, *(1 for _ in weight.shape[1:]))


def _rounded(values: Tensor, step: Tensor, zero: int = 0, *, least: int = -HIGH, seed: int | None = None) -> Tensor:
    """As int8 from `least` up; with a seed, rounded up with the probability of the fraction."""
    whole = values.div(step)
    if seed is None:
        whole = whole.round_()
    else:
        whole = whole.add_(torch.rand(values.shape, generator=torch.Generator().manual_seed(seed))).floor_()
    whole = whole.add_(zero).clamp_(least, HIGH)
    return whole.to(torch.int8, memory_format=torch.channels_last)


def _first(values: Tensor) -> Tensor:
    """The first samples."""
    return values[: max(1, SEEN_ELEMENTS // max(1, math.prod(values.shape[1:])))]


def _clip_gradient(values: Tensor, rounded: Tensor, within: Tensor) -> Tensor:
    """Of the logarithm of the share, see this module's docstring."""
    error = rounded - values
    square = error.square().sum()
    gain = torch.where(within, error, rounded).mul_(error).sum()
    return CLIP_RATE * torch.where(square > 0, gain / square, 0.0).clamp(-1, 1)
