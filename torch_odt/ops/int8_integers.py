"""Integers between the kernels of NITI's arithmetic: int32 sums that become int8, and int8 that is taken off int8."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_odt.ops import int8_plain as plain
from torch_odt.ops.int8_arguments import Rounding, number_of
from torch_odt.ops.registration import register

MOST = 127
MOST_SHIFT = 30


def int8_shift_sums(sums: Tensor, shift: int, rounding: Rounding = "pseudo_stochastic") -> Tensor:
    """sums * 2**-shift, rounded as the kernels do, and clamped to -127 and 127.

    When to choose it: where sums had to be looked at before it was known how many bits are to go.

    Args:
        sums: int32 of any shape.
        shift: from 0 to 30.
        rounding: "nearest" (to even, of the sum as float32) or "pseudo_stochastic", see `int8_conv2d_quantized`.

    Returns:
        int8 of the sums' shape, in torch.channels_last where they are.

    Raises:
        RuntimeError: the dtype or the device is another, or the shift or the rounding is none of these.

    Example:
        >>> int8_shift_sums(torch.tensor([5, -7, 800], dtype=torch.int32), 2, "nearest")
        tensor([  1,  -2, 127], dtype=torch.int8)
    """
    return torch.ops.torch_odt.int8_shift_sums(sums, shift, number_of(rounding))


def int8_keep_between(values: Tensor, others: Tensor, low: int, high: int = 128) -> Tensor:
    """Values where low < others < high, and 0 elsewhere.

    When to choose it: in the backward pass of a clamp, whose output is at hand.

    Args:
        values, others: int8 of the same shape.
        low, high: bounds that do not pass; 128 for no upper one.

    Returns:
        int8 of their shape, laid out as `values`.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> int8_keep_between(torch.tensor([3, -3], dtype=torch.int8), torch.tensor([0, 5], dtype=torch.int8), 0)
        tensor([ 0, -3], dtype=torch.int8)
    """
    return torch.ops.torch_odt.int8_keep_between(values, others, low, high)


def int8_take_off_(weight: Tensor, steps: Tensor) -> bool:
    """weight - steps, clamped to -127 and 127, in place.

    When to choose it: to update int8 weights by int8 gradients.

    Args:
        weight: int8, contiguous or in torch.channels_last.
        steps: int8 of its shape.

    Returns:
        Whether a step is not 0. Otherwise the weight has not been touched, and what was packed of it is still good.

    Raises:
        RuntimeError: a shape, dtype or layout is another.

    Example:
        >>> weight = torch.tensor([1, -100], dtype=torch.int8)
        >>> int8_take_off_(weight, torch.tensor([2, 100], dtype=torch.int8)), weight
        (True, tensor([  -1, -127], dtype=torch.int8))
    """
    changed = bool(torch.ops.torch_odt.int8_take_off_(weight, steps))
    if changed:
        # By it autograd and packed weights know of changes; operators do not move it.
        torch.autograd.graph.increment_version(weight)
    return changed


def _shift_plain(sums: Tensor, shift: int, rounding: int) -> Tensor:
    name = "int8_shift_sums"
    if sums.dtype != torch.int32:
        raise RuntimeError(f"{name}: sums must be an int32 CPU tensor")
    if not 0 <= shift <= MOST_SHIFT:
        raise RuntimeError(f"{name}: shift must be from 0 to {MOST_SHIFT}")
    if rounding not in (plain.NEAREST, plain.PSEUDO_STOCHASTIC):
        raise RuntimeError(f"{name}: rounding must be 0 (nearest) or 2 (pseudo-stochastic)")
    whole = (sums.float() * 2.0**-shift).round() if rounding == plain.NEAREST else plain.shifted(sums.long(), shift)
    return _dense(whole.clamp(-MOST, MOST).to(torch.int8))


def _dense(tensor: Tensor) -> Tensor:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor if last else tensor.contiguous()


def _check_shapes(name: str, one: Tensor, other: Tensor) -> None:
    if one.dtype != torch.int8 or other.dtype != torch.int8 or one.shape != other.shape:
        raise RuntimeError(f"{name}: both must be int8 CPU tensors of the same shape")


def _keep_plain(values: Tensor, others: Tensor, low: int, high: int) -> Tensor:
    _check_shapes("int8_keep_between", values, others)
    # Bounds may lie beyond int8, to which torch would wrap them around.
    wide = others.long()
    return _dense(values) * ((wide > low) & (wide < high))


def _take_off_plain(weight: Tensor, steps: Tensor) -> Tensor:
    name = "int8_take_off_"
    _check_shapes(name, weight, steps)
    if _dense(weight) is not weight and not weight.is_contiguous():
        raise RuntimeError(f"{name}: weight must be contiguous, or in torch.channels_last")
    changed = steps.any()
    if changed:
        weight.copy_(weight.to(torch.int16).sub_(steps).clamp_(-MOST, MOST))
    return changed.reshape(1)


register(
    "int8_shift_sums",
    "(Tensor sums, int shift, int rounding) -> Tensor",
    _shift_plain,
    lambda sums, shift, rounding: _dense(sums).to(torch.int8),
)
register(
    "int8_keep_between",
    "(Tensor values, Tensor others, int low, int high) -> Tensor",
    _keep_plain,
    lambda values, others, low, high: torch.empty_like(_dense(values)),
)
register(
    "int8_take_off_",
    "(Tensor(a!) weight, Tensor steps) -> Tensor",
    _take_off_plain,
    lambda weight, steps: weight.new_empty(1, dtype=torch.bool),
)
