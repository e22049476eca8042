"""What int8 layers hand to each other: int8 values, and a place for their gradient that takes no memory.

Integers have no gradient in autograd. So a bfloat16 tensor goes along with them, of their shape and of one element in
memory, which nobody reads: its *slot*. The gradient that autograd delivers to it is bfloat16, and that of the real
numbers that the integers stand for. A layer rounds it to int8 before it computes with it, in no more than 255 steps:
beside that, bfloat16 gives up little, a 512th of each element, for half the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST, MOST = -128, 127
WEIGHT_MOST = 127
GRADIENT = torch.bfloat16  # of slots


class Int8Activation(NamedTuple):
    """Numbers in int8, as they go from one int8 layer to the next.

    Attributes:
        values: int8; four dimensions are in torch.channels_last.
        slot: bfloat16 of their shape and one element in memory, NaN: where their gradient goes.
        grid: float32 of shape (2,): the step s and the zero point z; the real numbers are s * (values - z).

    Example:
        >>> from torch_odt.quant.pointwise import quantize
        >>> activation = quantize(torch.tensor([0.0, 0.5, 9.0]), torch.tensor([0.25, 0.0]))
        >>> activation.values, activation.dequantize()
        (tensor([ 0,  2, 36], dtype=torch.int8), tensor([0.0000, 0.5000, 9.0000]))
    """

    values: Tensor
    slot: Tensor
    grid: Tensor

    def dequantize(self) -> Tensor:
        """The real numbers, float32 and without a gradient, to look at in a hook."""
        return (self.values - self.grid[1]) * self.grid[0]

    def __repr__(self) -> str:
        return f"Int8Activation(shape={tuple(self.values.shape)}, grid={self.grid})"


def new_slot(shape: Sequence[int]) -> Tensor:
    """A slot for values of a shape. It holds NaN, so that whatever computes with it by mistake shows."""
    return torch.full((1,), float("nan"), dtype=GRADIENT).expand(*shape)


def by_rows(weight: Tensor) -> Tensor:
    """A weight with its dimensions in the order of memory: input channels last."""
    return weight.permute(0, 2, 3, 1) if weight.dim() == 4 else weight


def weight_of(rows: Tensor) -> Tensor:
    """The other way round."""
    return rows.permute(0, 3, 1, 2) if rows.dim() == 4 else rows


def by_channel(numbers: Tensor, weight: Tensor) -> Tensor:
    """One number for each output channel, as a weight is multiplied by them."""
    return numbers.view(-1, *[1] * (weight.dim() - 1))


def new_weight_slot(weight: Tensor) -> Tensor:
    """A slot for a weight, float32 as its gradient is.

    It is of the shape of `by_rows`: autograd hands contiguous gradients on, and copies others.
    """
    return torch.full((1,), float("nan")).expand(by_rows(weight).shape)


def fake_slot(like: Tensor, shape: Sequence[int]) -> Tensor:
    """As `new_slot`, for tracing."""
    return like.new_empty(1, dtype=GRADIENT).expand(*shape)


def step_of(grid: Tensor) -> Tensor:
    """The step of a grid, of shape (1,)."""
    return grid[:1]


def zero_of(grid: Tensor) -> int:
    """The zero point of a grid; reads it."""
    return int(grid[1])


def on_grid(real: Tensor, grid: Tensor, low: float | None, high: float | None) -> tuple[Tensor, Tensor]:
    """Real numbers rounded to a grid, and where they were not clamped.

    Args:
        low, high: bounds as real numbers, beside those of int8; None for none.

    Returns:
        int8, and booleans, both laid out as `real`.
    """
    whole = real.div(step_of(grid)).round_().add_(zero_of(grid))
    least, most = bounds(grid, low, high)
    inside = (whole >= least) & (whole <= most)
    return whole.clamp_(least, most).to(torch.int8), inside


def bounds(grid: Tensor, low: float | None, high: float | None) -> tuple[int, int]:
    """Bounds in real numbers as values of int8."""
    step, zero = float(grid[0]), zero_of(grid)
    least = LEAST if low is None else max(LEAST, min(MOST, round(low / step) + zero))
    most = MOST if high is None else max(least, min(MOST, round(high / step) + zero))
    return least, most


def in_memory_order(tensor: Tensor) -> Tensor:
    """Images in torch.channels_last, everything else contiguous."""
    return tensor.contiguous(memory_format=order_of(tensor))


def order_of(tensor: Tensor) -> torch.memory_format:
    return torch.channels_last if tensor.dim() == 4 else torch.contiguous_format


def empty_in_order(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """An empty tensor, laid out as `in_memory_order` lays it out; for tracing."""
    order = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=order)


def like_in_order(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `empty_in_order`, of a tensor's shape."""
    return empty_in_order(tensor.shape, dtype, tensor)


def packed_size(elements: Any) -> Any:
    """The bytes of a mask of so many bits."""
    return (elements + 7) // 8


def require_activation(value: object, layer: str) -> Int8Activation:
    """The value, if it comes from an int8 layer.

    Raises:
        TypeError: it is a tensor or something else.
    """
    if not isinstance(value, Int8Activation):
        raise TypeError(
            f"{layer} takes what another int8 layer gives, not a {type(value).__name__}: call the converted model as a "
            "whole, which quantizes its input"
        )
    return value
