"""To int8 with stochastic rounding: gradients in two passes over memory, and weights after an update."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_odt.ops import int8_plain as plain
from torch_odt.ops.bits import unpack_bits
from torch_odt.ops.registration import register

MOST = 127.0
GRADIENT_NOT_FINITE = "int8_layer: a gradient times the weight's steps is not finite: the loss has diverged"
LEAST_STEP = 2.0**-118  # 256 over it is finite
MOST_FACTOR = torch.finfo(torch.float32).max / 256
ROWS_OF_SUM = 256
SEED_FACTOR = 0x9E3779B97F4A7C15
NOT_FINITE = (
    "an update of int8 weights is not finite: the loss has diverged; lower the learning rate. Layers that were updated "
    "before this one stay so"
)


class Int8Gradient(NamedTuple):
    """The gradient of a layer's output in int8, as the gradients of its input and weight take it.

    Attributes:
        for_input: int8 in torch.channels_last, of the gradient times the weight's steps; empty if not asked for.
        for_weight: int8 in torch.channels_last, each channel with a step of its own; empty if not asked for.
        input_step: float32 of shape (1,): the step of `for_input`.
        weight_steps: float32 of shape (channels,): the steps of `for_weight`.
        sums: float32 of shape (channels,): of the gradient over all pixels, not rounded.
    """

    for_input: Tensor
    for_weight: Tensor
    input_step: Tensor
    weight_steps: Tensor
    sums: Tensor


def int8_quantize_gradient(
    gradient: Tensor, mask: Tensor | None = None, *, weight_scale: Tensor | None = None, for_weight: bool = True
) -> Int8Gradient:
    """Rounds the gradient of a layer's output to int8, twice, and sums it up.

    When to choose it: in the backward pass of an int8 layer whose gradients arrive as floats. Rounding is stochastic:
    up with the probability of the fraction, to a 256th. The draws depend on the largest values of the channels, and so
    does their seed: the same gradient is rounded the same way again.

    Args:
        gradient: float32 or bfloat16 of shape (N, channels, H, W), best in torch.channels_last; another layout costs a
            copy.
        mask: a bit for each element in the order of torch.channels_last: where it is not set, the gradient counts as 0.
        weight_scale: float32 of shape (channels,): the steps of the weight, which the gradient is multiplied by for the
            input's. None leaves `for_input` out.
        for_weight: False leaves `for_weight` out.

    Returns:
        Both, their steps, and the sums.

    Raises:
        RuntimeError: a shape, dtype or device is another, or the gradient is not finite where the mask is set.

    Example:
        >>> found = int8_quantize_gradient(torch.tensor([254.0, -127.0]).view(1, 2, 1, 1))
        >>> found.for_weight.flatten(), found.weight_steps
        (tensor([ 127, -127], dtype=torch.int8), tensor([2., 1.]))
    """
    return Int8Gradient(*torch.ops.torch_odt.int8_quantize_gradient(gradient, mask, weight_scale, for_weight))


def int8_store_rounded_(weight: Tensor, steps: Tensor, rounding: Tensor, saturated: Tensor) -> None:
    """Writes numbers of steps to an int8 weight, rounded stochastically and clamped to -127 and 127.

    When to choose it: after an optimizer has changed a float32 copy of the weight.

    Args:
        weight: int8 of two dimensions, contiguous, or of four in torch.channels_last.
        steps: float32 of its shape.
        rounding: int64 of shape (2,): a seed, and how many updates there were, which the draws depend on; one is added.
        saturated: int64 of one number: how many weights were clamped so far; these are added.

    Raises:
        RuntimeError: a shape, dtype or layout is another, or a number is not finite; everything is then as it was.

    Example:
        >>> weight, rounding, saturated = torch.zeros(1, 2, dtype=torch.int8), torch.tensor([7, 0]), torch.tensor(0)
        >>> int8_store_rounded_(weight, torch.tensor([[3.0, 300.0]]), rounding, saturated)
        >>> weight, rounding, saturated
        (tensor([[  3, 127]], dtype=torch.int8), tensor([7, 1]), tensor(1))
    """
    torch.ops.torch_odt.int8_store_rounded_(weight, steps, rounding, saturated)
    # By it autograd and packed weights know of changes; operators do not move it.
    torch.autograd.graph.increment_version([weight, rounding, saturated])


def _seed_of(numbers: Tensor) -> int:
    seed = 0
    for bits in numbers.view(torch.int32).tolist():
        seed = _mixed(((seed + plain.GOLDEN) & plain.LOW_WORD) ^ (bits & plain.LOW_WORD))
    return seed


def _mixed(bits: int) -> int:
    bits ^= bits >> 16
    bits = bits * plain.FIRST_FACTOR & plain.LOW_WORD
    bits ^= bits >> 15
    bits = bits * plain.SECOND_FACTOR & plain.LOW_WORD
    return bits ^ bits >> 16


def _sums(rows: Tensor) -> Tensor:
    """Of each column, in the order of the kernels: runs of rows in float32, then these in float64."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for run in rows.split(ROWS_OF_SUM):
        sum_ = torch.zeros(rows.shape[1])
        for row in run:
            sum_ += row
        total += sum_
    return total.float()


def _steps(largest: Tensor) -> Tensor:
    steps = largest / MOST
    return torch.where(steps >= LEAST_STEP, steps, 1.0)


def _rounded(rows: Tensor, factors: Tensor, draws: Tensor) -> Tensor:
    whole = plain.by_chance(rows * factors.clamp(-MOST_FACTOR, MOST_FACTOR), draws)
    return whole.clamp_(-MOST, MOST).to(torch.int8)


def _quantize_plain(
    gradient: Tensor, mask: Tensor | None, weight_scale: Tensor | None, for_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    name = "int8_quantize_gradient"
    if gradient.dtype not in (torch.float32, torch.bfloat16) or gradient.dim() != 4:
        raise RuntimeError(f"{name}: gradient must be a float32 or bfloat16 CPU tensor of 4 dimensions")
    channels = gradient.shape[1]
    if mask is not None and (mask.dtype != torch.uint8 or mask.shape != ((gradient.numel() + 7) // 8,)):
        raise RuntimeError(f"{name}: mask must be contiguous uint8, with a bit for each element")
    if weight_scale is not None and (weight_scale.dtype != torch.float32 or weight_scale.shape != (channels,)):
        raise RuntimeError(f"{name}: weight_scale must be float32, with one number for each channel")
    pixels = plain.by_pixels(gradient).float().contiguous()
    rows = pixels.view(-1, channels) if pixels.numel() else pixels.new_zeros(0, channels)
    if mask is not None:
        rows = torch.where(unpack_bits(mask, 0, rows.numel()).view(rows.shape), rows, 0.0)
    largest = rows.abs().amax(0) if len(rows) else rows.new_zeros(channels)
    if not bool(largest.isfinite().all()):
        raise RuntimeError("int8_layer: a gradient is not finite: the loss has diverged, or it overflows")
    draws = plain.byte_draws(rows.numel(), channels, _seed_of(largest)).view(rows.shape)
    steps, input_step = _steps(largest), torch.ones(1)
    of_input = of_weight = torch.empty(0, dtype=torch.int8)
    if weight_scale is not None:
        most = (largest * weight_scale).abs().amax().reshape(1) if channels else torch.zeros(1)
        if not bool(most.isfinite()):
            raise RuntimeError(GRADIENT_NOT_FINITE)
        input_step = _steps(most)
        of_input = plain.as_image(_rounded(rows, weight_scale / input_step, draws).view(pixels.shape))
    if for_weight:
        of_weight = plain.as_image(_rounded(rows, 1 / steps, draws).view(pixels.shape))
    return of_input, of_weight.clone(), input_step, steps, _sums(rows)


def _quantize_fake(
    gradient: Tensor, mask: Tensor | None, weight_scale: Tensor | None, for_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_input, of_weight = (
        torch.empty_like(gradient, dtype=torch.int8, memory_format=torch.channels_last)
        if wanted
        else gradient.new_empty(0, dtype=torch.int8)
        for wanted in (weight_scale is not None, for_weight)
    )
    steps = gradient.new_empty(gradient.shape[1], dtype=torch.float32)
    return of_input, of_weight, steps.new_empty(1), steps, torch.empty_like(steps)


def require_update(
    name: str, weight: Tensor, floats: Tensor, argument: str, rounding: Tensor, saturated: Tensor
) -> None:
    """What compiled operators check of an update in place."""
    for counter, tensor, count in (("rounding", rounding, 2), ("saturated", saturated, 1)):
        if tensor.dtype != torch.int64 or tensor.numel() != count or not tensor.is_contiguous():
            raise RuntimeError(f"{name}: {counter} must be a contiguous int64 CPU tensor of {count} numbers")
    if weight.dtype != torch.int8 or floats.dtype != torch.float32 or weight.dim() not in (2, 4):
        raise RuntimeError(f"{name}: weight must be int8 and {argument} float32, CPU tensors of 2 or of 4 dimensions")
    if weight.shape != floats.shape:
        raise RuntimeError(f"{name}: weight and {argument} must be of the same shape")
    order = torch.channels_last if weight.dim() == 4 else torch.contiguous_format
    if not weight.is_contiguous(memory_format=order):
        raise RuntimeError(
            f"{name}: weight is updated in place, and must be contiguous, with 4 dimensions in "
            "memory_format=torch.channels_last"
        )


def store_plain(weight: Tensor, steps: Tensor, rounding: Tensor, saturated: Tensor) -> None:
    """`int8_store_rounded_` in plain torch."""
    require_update("int8_store_rounded_", weight, steps, "steps", rounding, saturated)
    if not bool(steps.isfinite().all()):
        raise RuntimeError(NOT_FINITE)
    ordered = plain.by_pixels(steps) if weight.dim() == 4 else steps
    width = weight[0].numel() if len(weight) else 0
    seed, updates = rounding.tolist()
    draws = plain.half_draws(weight.numel(), width, (seed * SEED_FACTOR + updates) % (1 << 64)).view(ordered.shape)
    whole = (ordered + draws).floor_()
    rounded = whole.clamp(-MOST, MOST)
    weight.copy_(rounded.permute(0, 3, 1, 2) if weight.dim() == 4 else rounded)
    rounding[1] += 1
    saturated += (whole != rounded).sum()


register(
    "int8_quantize_gradient",
    "(Tensor gradient, Tensor? mask, Tensor? weight_scale, bool for_weight) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize_plain,
    _quantize_fake,
)
register(
    "int8_store_rounded_",
    "(Tensor(a!) weight, Tensor steps, Tensor(b!) rounding, Tensor(c!) saturated) -> ()",
    store_plain,
    lambda weight, steps, rounding, saturated: None,
)
