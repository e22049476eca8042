"""NITI's convolutions with kept packed weights: operators that look those up and call the ones of `niti_integers`.

An operator takes tensors and numbers: it knows a `PackedWeights` by its number, so that a captured step finds what is
kept when it runs, not what was when it was captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_odt.ops.int8_arguments import number_of
from torch_odt.ops.int8_plain import Geometry
from torch_odt.ops.registration import register_gradient
from torch_odt.quant.niti_integers import WEIGHT, may_take_off, take_off_
from torch_odt.quant.niti_passes import (
    Convolved,
    How,
    Kept,
    PassedBack,
    empty_gradients,
    empty_results,
    gradients_of,
    keep_for_backward,
)
from torch_odt.quant.packed_weights import packs_of


@torch.library.custom_op("torch_odt::niti_packed_layer", mutates_args=())
def niti_packed_layer(
    input: Tensor,
    exponent: Tensor | None,
    weight: Tensor,
    weight_exponent: Tensor,
    bias: Tensor | None,
    bias_exponent: Tensor | None,
    state: Tensor,
    backward_state: Tensor,
    gradient_bits: Tensor,
    how: list[int],
    ceiling: float | None,
    windows: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`niti_layer` with the weight packed as it was in the last call, where it has not changed since.

    Args:
        input to gradient_bits: see `niti_layer`.
        how, ceiling: see `How`.
        windows: see `windows_of`.

    Raises:
        RuntimeError: as `niti_layer`.
    """
    manner = How.of(how, ceiling)
    packed = packs_of(manner.packs).packed(weight, windows, for_grad_input=False)
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = torch.ops.torch_odt.niti_layer.default(
        input, exponent, weight, weight_exponent, bias, bias_exponent, state, backward_state, gradient_bits,
        manner.to_float, manner.relu, ceiling, number_of(manner.rounding), manner.part_bytes, manner.training, packed,
        windows,
    )  # fmt: skip
    return found


@niti_packed_layer.register_fake
def _(
    input: Tensor, exponent: Tensor | None, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    state, how, ceiling, windows = rest[3], *rest[6:]
    geometry = Geometry.of("niti_packed_layer", windows)
    return empty_results(input, exponent is None, weight, state, How.of(how, ceiling).to_float, geometry)


@torch.library.custom_op("torch_odt::niti_packed_layer_backward", mutates_args=())
def niti_packed_layer_backward(
    gradient: Tensor,
    gradient_exponent: Tensor | None,
    output: Tensor | None,
    output_exponent: Tensor | None,
    image: Tensor,
    image_exponent: Tensor,
    weight: Tensor,
    weight_exponent: Tensor,
    state: Tensor,
    gradient_bits: Tensor,
    input_is_float: bool,
    wanted: list[bool],
    how: list[int],
    ceiling: float | None,
    windows: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `niti_packed_layer`, see `PassedBack`.

    Args:
        gradient, gradient_exponent: mantissas and theirs, or float32 and None.
        output to gradient_bits: see `Kept`.
        input_is_float: the input's gradient is to be float32.
        wanted: whether the gradients of input, weight and bias are.
        how, ceiling: see `How`.
        windows: see `windows_of`.

    Raises:
        RuntimeError: a number of a float32 gradient is not finite.
    """
    manner = How.of(how, ceiling)
    packed = packs_of(manner.packs).packed(weight, windows, for_grad_input=True) if wanted[0] else None
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = torch.ops.torch_odt.niti_layer_backward.default(
        gradient, gradient_exponent, output, output_exponent, image, image_exponent, weight, weight_exponent, state,
        gradient_bits, input_is_float, *wanted, ceiling, number_of(manner.rounding), manner.part_bytes, manner.training,
        packed, windows,
    )  # fmt: skip
    return found


@niti_packed_layer_backward.register_fake
def _(gradient: Tensor, gradient_exponent: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return empty_gradients(Kept(*rest[:8]), rest[8], rest[9])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.rest = inputs[9:]
    manner = How.of(*inputs[9:11])
    keep_for_backward(ctx, inputs, Convolved(*output), manner.to_float, manner.relu)


def _gradients(ctx: Any, gradient: Tensor, exponent: Tensor | None, *_: Any) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[2], needs[4]]
    exponent = None if ctx.to_float else exponent
    kept = ctx.saved_tensors
    if may_take_off(ctx, kept):
        wanted = [needs[0], False, needs[4]]
        numbers, ceiling, windows = ctx.rest
        how = How.of(numbers, ceiling)
        packed = packs_of(how.packs).packed(kept[WEIGHT], windows, for_grad_input=True) if needs[0] else None
        found = take_off_(
            gradient, exponent, kept, ctx.input_is_float, needs[0], needs[4],
            (ceiling, number_of(how.rounding), how.part_bytes, how.training), packed, windows,
        )  # fmt: skip
    else:
        found = PassedBack(
            *niti_packed_layer_backward(gradient, exponent, *kept, ctx.input_is_float, wanted, *ctx.rest)
        )
    return gradients_of(found, wanted, ctx.input_is_float, needs[7], len(needs))


register_gradient("niti_packed_layer", _keep, _gradients)
