"""A convolution in NITI's arithmetic and its gradients: the operators behind `NitiConv2d` and `NitiLinear`, compiled.

`niti_layer` and `niti_layer_backward` are functions: what they make of the state of rescaling is a result. The backward
operator gives the new state of its own rescalings as a "gradient" of the old one, and the weight's gradient as the
integers that are to be taken off; `NitiSGD` applies both. So a step may be captured, its operators recomputed and its
tensors moved, as any other's. `niti_layer_take_off_` takes the weight's gradient off the weight itself, in a loop whose
optimizer wants it so; see `in_backward.py`.

`niti_layer` packs the weight for each call. Those of `niti_packed` keep what was packed, and call these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_odt.capture.fused_updates import FusedUpdate, register_fused_update
from torch_odt.capture.parameter_updates import NITI
from torch_odt.ops import int8_take_off_
from torch_odt.ops.int8_arguments import ROUNDINGS, WINDOWS, number_of
from torch_odt.ops.int8_plain import Geometry
from torch_odt.ops.registration import register, register_gradient
from torch_odt.quant.in_backward import accumulates, is_same_memory
from torch_odt.quant.niti_convolution import convolve, pass_back
from torch_odt.quant.niti_numbers import as_int8
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

WEIGHT, STATE = 4, 6  # among what is kept, see `Kept`
FOR_WEIGHT = 12  # among the arguments of `niti_layer_backward`


def niti_layer(
    input: Tensor, exponent: Tensor | None, tensors: tuple[Any, ...], how: How, windows: Sequence[int]
) -> Convolved:
    """A convolution of mantissas, or of float32 that is quantised first.

    Args:
        input: mantissas as `CARRIER`, or float32, of shape (N, C, H, W).
        exponent: float32 of shape (1,); None for float32.
        tensors: weight and bias as mantissas in `CARRIER`, each with its exponent, float32 of shape (1,); the state of
            the output's rescaling, float64 of shape (WIDTH,), and of those of the input's and the weight's gradient, of
            shape (2, WIDTH); and what is left of a weight's gradient in bits, int64 of shape (1,).
        how: without `packs`.
        windows: stride, padding, dilation and groups, see `windows_of`.

    Raises:
        RuntimeError: a number of a float32 input is not finite, or a tensor is of another shape or dtype.
    """
    return Convolved(
        *torch.ops.torch_odt.niti_layer.default(
            input, exponent, *tensors, how.to_float, how.relu, how.ceiling, number_of(how.rounding), how.part_bytes,
            how.training, None, windows,
        )
    )  # fmt: skip


def _layer(
    input: Tensor,
    exponent: Tensor | None,
    weight: Tensor,
    weight_exponent: Tensor,
    bias: Tensor | None,
    bias_exponent: Tensor | None,
    state: Tensor,
    backward_state: Tensor,
    gradient_bits: Tensor,
    to_float: bool,
    relu: bool,
    ceiling: float | None,
    rounding: int,
    part_bytes: int,
    training: bool,
    packed: Tensor | None,
    windows: Sequence[int],
) -> tuple[Tensor, ...]:
    how = How(to_float, relu, ceiling, ROUNDINGS[rounding], part_bytes, training=training)
    tensors = (weight, weight_exponent, bias, bias_exponent, state)
    return convolve(input, exponent, *tensors, how, packed, Geometry.of("niti_layer", windows))


def _layer_fake(input: Tensor, exponent: Tensor | None, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    state, to_float, windows = rest[3], rest[6], rest[13]
    return empty_results(input, exponent is None, weight, state, to_float, Geometry.of("niti_layer", windows))


def _backward(
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
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
    ceiling: float | None,
    rounding: int,
    part_bytes: int,
    training: bool,
    packed: Tensor | None,
    windows: Sequence[int],
) -> tuple[Tensor, ...]:
    kept = Kept(output, output_exponent, image, image_exponent, weight, weight_exponent, state, gradient_bits)
    how = How(ceiling=ceiling, rounding=ROUNDINGS[rounding], part_bytes=part_bytes, training=training)
    wanted = (for_input, for_weight, for_bias)
    return pass_back(
        gradient, gradient_exponent, kept, input_is_float, wanted, how, packed, Geometry.of("niti_layer", windows)
    )


def _backward_fake(gradient: Tensor, gradient_exponent: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return empty_gradients(Kept(*rest[:8]), rest[8], rest[9:12])


def take_off_(
    gradient: Tensor,
    gradient_exponent: Tensor | None,
    kept: Sequence[Tensor | None],
    input_is_float: bool,
    for_input: bool,
    for_bias: bool,
    how: Sequence[Any],
    packed: Tensor | None,
    windows: Sequence[int],
) -> PassedBack:
    """`niti_layer_backward`, whose weight's gradient is taken off the weight, in channels_last, and not returned.

    Args:
        gradient, gradient_exponent: as that takes them.
        kept: what the forward pass has kept, see `Kept`.
        input_is_float, for_input, for_bias: which gradients are wanted.
        how: ceiling, rounding, bytes of a part, and whether scales are looked at.
        packed: the weight for the input's gradient, or None.
        windows: see `windows_of`.
    """
    of_input, exponent, bias, state, changed = torch.ops.torch_odt.niti_layer_take_off_.default(
        gradient, gradient_exponent, *kept, input_is_float, for_input, for_bias, *how, packed, windows
    )
    # What did not change needs no new packing.
    if changed:
        torch.autograd.graph.increment_version(kept[WEIGHT])  # type: ignore[arg-type]
    return PassedBack(of_input, exponent, gradient.new_empty(0), bias, state)


def _take_off(
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
    for_input: bool,
    for_bias: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    found = PassedBack(
        *_backward(
            gradient, gradient_exponent, output, output_exponent, image, image_exponent, weight, weight_exponent, state,
            gradient_bits, input_is_float, for_input, True, for_bias, *rest,
        )
    )  # fmt: skip
    changed = int8_take_off_(as_int8(weight), as_int8(found.weight))
    return found.input, found.exponent, found.bias, found.state, torch.tensor([changed])


def _take_off_fake(
    gradient: Tensor, gradient_exponent: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    input_is_float, for_input, for_bias = rest[8:11]
    found = empty_gradients(Kept(*rest[:8]), input_is_float, (for_input, False, for_bias))
    return (
        found.input,
        found.exponent,
        found.bias,
        found.state,
        torch.empty(1, dtype=torch.bool, device=gradient.device),
    )


def pass_back_and_take_off(*arguments: Any) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
    """`niti_layer_backward` of its arguments, but for the weight's gradient, which is taken off the weight."""
    gradient, exponent, *kept, input_is_float, for_input = arguments[:FOR_WEIGHT]
    for_bias, *how, packed, windows = arguments[FOR_WEIGHT + 1 :]
    found = take_off_(gradient, exponent, kept, input_is_float, for_input, for_bias, how, packed, windows)
    return found.input, found.exponent, None, found.bias, found.state


def may_take_off(ctx: Any, kept: Sequence[Tensor]) -> bool:
    """Whether the backward pass is to change the weight that it has kept; asked once for each pass.

    Raises:
        RuntimeError: there is a gradient already.
    """
    weight = kept[WEIGHT]
    for leaf in (weight, kept[STATE]):
        if leaf.is_leaf and leaf.grad is not None and accumulates(leaf):
            raise RuntimeError(
                "gradients in NITI's arithmetic cannot be added up: call optimizer.step() and "
                "optimizer.zero_grad(set_to_none=True) between two backward passes"
            )
    parameter = None if ctx.use is None else ctx.use.update()
    # Stored gradients are taken off weights in any order of memory.
    return (
        parameter is not None
        and is_same_memory(weight, parameter)
        and weight.is_contiguous(memory_format=torch.channels_last)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], made: tuple[Tensor, ...]) -> None:
    to_float, relu, *ctx.how, _, ctx.windows = inputs[9:]
    keep_for_backward(ctx, inputs, Convolved(*made), to_float, relu)


def _gradients(ctx: Any, gradient: Tensor, exponent: Tensor | None, *_: Any) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    wanted = (needs[0], needs[2], needs[4])
    exponent = None if ctx.to_float else exponent
    kept = ctx.saved_tensors
    if may_take_off(ctx, kept):
        wanted = (needs[0], False, needs[4])
        found = take_off_(gradient, exponent, kept, ctx.input_is_float, needs[0], needs[4], ctx.how, None, ctx.windows)
    else:
        found = PassedBack(
            *torch.ops.torch_odt.niti_layer_backward.default(
                gradient, exponent, *kept, ctx.input_is_float, *wanted, *ctx.how, None, ctx.windows
            )
        )
    return gradients_of(found, wanted, ctx.input_is_float, needs[7], len(needs))


register(
    "niti_layer",
    "(Tensor input, Tensor? exponent, Tensor weight, Tensor weight_exponent, Tensor? bias, Tensor? bias_exponent, "
    "Tensor state, Tensor backward_state, Tensor gradient_bits, bool to_float, bool relu, float? ceiling, "
    f"int rounding, int part_bytes, bool training, Tensor? packed, {WINDOWS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _layer,
    _layer_fake,
)
register(
    "niti_layer_backward",
    "(Tensor gradient, Tensor? gradient_exponent, Tensor? output, Tensor? output_exponent, Tensor image, "
    "Tensor image_exponent, Tensor weight, Tensor weight_exponent, Tensor state, Tensor gradient_bits, "
    "bool input_is_float, bool for_input, bool for_weight, bool for_bias, float? ceiling, int rounding, "
    f"int part_bytes, bool training, Tensor? packed, {WINDOWS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
register(
    "niti_layer_take_off_",
    "(Tensor gradient, Tensor? gradient_exponent, Tensor? output, Tensor? output_exponent, Tensor image, "
    "Tensor image_exponent, Tensor(a!) weight, Tensor weight_exponent, Tensor state, Tensor gradient_bits, "
    "bool input_is_float, bool for_input, bool for_bias, float? ceiling, int rounding, int part_bytes, bool training, "
    f"Tensor? packed, {WINDOWS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _take_off,
    _take_off_fake,
)
register_fused_update(
    NITI,
    "torch_odt.niti_layer_backward.default",
    FusedUpdate(gradient=2, weight=2 + WEIGHT, measured=pass_back_and_take_off, in_memory_order=True),
)
register_gradient("niti_layer", _keep, _gradients)
