"""What the int8 operators take and give back, in a form that is good to write and to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic", "pseudo_stochastic"]
Pair = int | Sequence[int]
# How operators declare what windows_of() returns.
WINDOWS = "int[] windows"
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic", "pseudo_stochastic")


class Quantized(NamedTuple):
    """An int8 tensor with what was noted on the way.

    Attributes:
        output: int8.
        mask: uint8 of one bit an element, in the order of memory: set where nothing was clamped. See `unpack_bits`.
        largest: float32 of shape (1,): the largest absolute value before rounding, in steps of the output. What the
            next step's scale can be chosen by.
    """

    output: Tensor
    mask: Tensor
    largest: Tensor


class QuantizedGradient(NamedTuple):
    """An int8 gradient with its largest absolute value before rounding.

    Attributes:
        gradient: int8.
        largest: float32 of shape (1,), in steps of the gradient.
    """

    gradient: Tensor
    largest: Tensor


class WeightGradient(NamedTuple):
    """The gradients of a weight and of its bias.

    Attributes:
        weight: of the weight's shape, in torch.channels_last.
        bias: int64 of shape (out_channels,): the output's gradient summed over all pixels, not scaled.
    """

    weight: Tensor
    bias: Tensor


class ConvolutionGradients(NamedTuple):
    """The gradients of a convolution's input, weight and bias.

    Attributes:
        input: int8 of the input's shape, in torch.channels_last.
        largest: float32 of shape (1,): the largest absolute value of the input's gradient before rounding.
        weight: float32 of the weight's shape, in torch.channels_last.
        bias: int64 of shape (out_channels,): the output's gradient summed over all pixels, not scaled.
    """

    input: Tensor
    largest: Tensor
    weight: Tensor
    bias: Tensor


def pair(value: Pair) -> tuple[int, int]:
    """A number for rows and for columns.

    Raises:
        ValueError: it is neither a whole number nor two of them.
    """
    if isinstance(value, int):
        return value, value
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(
            f"{value!r}: a stride, padding, dilation or size is one whole number, or two: rows and columns"
        )
    return value[0], value[1]


def number_of(rounding: Rounding) -> int:
    """How the operators call a rounding."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding is {rounding!r}; choose one of {', '.join(ROUNDINGS)}")
    return ROUNDINGS.index(rounding)


def windows_of(stride: Pair, padding: Pair, dilation: Pair, groups: int) -> tuple[int, ...]:
    """The operators' argument of that name: seven numbers in one list, because each list costs a call microseconds."""
    return (*pair(stride), *pair(padding), *pair(dilation), groups)


def empty_image(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """As the operators give their results back."""
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def channels_last(image: Tensor) -> Tensor:
    return image.contiguous(memory_format=torch.channels_last)
