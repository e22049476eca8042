"""Int8 activations side by side, on one grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_odt.quant.activation import (
    Int8Activation,
    empty_in_order,
    fake_slot,
    in_memory_order,
    on_grid,
    packed_size,
)
from torch_odt.quant.pointwise import masked, real, with_mask


def concatenate(inputs: Sequence[Int8Activation], output_grid: Tensor, dim: int) -> Int8Activation:
    """Activations side by side; each is rounded to the new grid.

    When to choose it: for `torch.cat` of branches, as in SqueezeNet and DenseNet.

    Args:
        inputs: of the same shape but along `dim`.
        output_grid: step and zero point of the result.
        dim: along which they are put.

    Raises:
        RuntimeError: the shapes do not fit.
    """
    values, slots, grids = ([each[part] for each in inputs] for part in range(3))
    joined, slot, _ = torch.ops.torch_odt.int8_concatenate(values, slots, grids, output_grid, dim)
    return Int8Activation(joined, slot, output_grid)


@torch.library.custom_op("torch_odt::int8_concatenate", mutates_args=())
def _concatenate(
    values: list[Tensor], slots: list[Tensor], grids: list[Tensor], output_grid: Tensor, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    found = [on_grid(real(one, grid), output_grid, None, None) for one, grid in zip(values, grids, strict=True)]
    whole, inside = (in_memory_order(torch.cat([each[part] for each in found], dim)) for part in range(2))
    return with_mask(whole, inside)


@_concatenate.register_fake
def _(values: list[Tensor], slots: list[Tensor], grids: Any, output_grid: Tensor, dim: int) -> tuple[Tensor, ...]:
    shape = torch.cat(values, dim).shape
    output = empty_in_order(shape, torch.int8, values[0])
    mask = values[0].new_empty(packed_size(output.numel()), dtype=torch.uint8)
    return output, fake_slot(output, shape), mask


@torch.library.custom_op("torch_odt::int8_concatenate_backward", mutates_args=())
def _backward(gradient: Tensor, mask: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    passed = masked(gradient, mask)
    return [in_memory_order(part).clone() for part in passed.split(sizes, dim)]


@_backward.register_fake
def _(gradient: Tensor, mask: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    return [empty_in_order(part.shape, gradient.dtype, gradient) for part in gradient.split(sizes, dim)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    values, _, _, _, dim = inputs
    joined, _, mask = output
    ctx.mark_non_differentiable(joined, mask)
    ctx.sizes, ctx.dim = [each.shape[dim] for each in values], dim
    ctx.save_for_backward(mask)


def _split(ctx: Any, of_values: Any, gradient: Tensor, of_mask: Any) -> tuple[Any, ...]:
    found = _backward(gradient, *ctx.saved_tensors, ctx.sizes, ctx.dim)
    nothing = [None] * len(found)
    return nothing, found, nothing, None, None


_concatenate.register_autograd(_split, setup_context=_keep)
