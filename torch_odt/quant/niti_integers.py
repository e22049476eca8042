"""A convolution in NITI's arithmetic and its gradients, as one compiled operator for each pass.

They are `niti_conv2d` and its gradients, bit for bit, but keep no packed weights, and leave out the Python between the
kernels, which takes longer than those of a small layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_odt.ops.int8_arguments import ROUNDINGS, WINDOWS, number_of, windows_of
from torch_odt.ops.int8_plain import Geometry
from torch_odt.ops.registration import register, register_gradient
from torch_odt.quant.niti_convolution import convolve, pass_back
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


def niti_layer(
    input: Tensor, exponent: Tensor | None, tensors: tuple[Any, ...], how: How, windows: tuple[Any, ...]
) -> Convolved:
    """A convolution of mantissas, or of float32 that is quantised first.

    Args:
        input, exponent: of shape (N, C, H, W); see `niti_conv2d`.
        tensors: weight, its exponent, bias, its exponent, the states of the rescaling of the output and of those of the
            gradients, and `gradient_bits`; see there.
        how: without `packs`.
        windows: stride, padding, dilation and groups.

    Raises:
        RuntimeError: a number of a float32 input is not finite, or a tensor is of another shape or dtype.
    """
    return Convolved(
        *torch.ops.torch_odt.niti_layer.default(
            input, exponent, *tensors, how.to_float, how.relu, how.ceiling, number_of(how.rounding), how.part_bytes,
            how.training, windows_of(*windows),
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
    windows: Sequence[int],
) -> tuple[Tensor, ...]:
    how = How(to_float, relu, ceiling, ROUNDINGS[rounding], part_bytes, training=training)
    return convolve(input, exponent, weight, weight_exponent, bias, bias_exponent, state, how, Geometry.of(windows))


def _layer_fake(input: Tensor, exponent: Tensor | None, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    state, to_float, windows = rest[3], rest[6], rest[12]
    return empty_results(input, exponent is None, weight, state, to_float, Geometry.of(windows))


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
    windows: Sequence[int],
) -> tuple[Tensor, ...]:
    kept = Kept(output, output_exponent, image, image_exponent, weight, weight_exponent, state, gradient_bits)
    how = How(ceiling=ceiling, rounding=ROUNDINGS[rounding], part_bytes=part_bytes, training=training)
    wanted = (for_input, for_weight, for_bias)
    return pass_back(gradient, gradient_exponent, kept, input_is_float, wanted, how, Geometry.of(windows))


def _backward_fake(gradient: Tensor, gradient_exponent: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return empty_gradients(Kept(*rest[:8]), rest[8], rest[9:12])


def _keep(ctx: Any, inputs: tuple[Any, ...], made: tuple[Tensor, ...]) -> None:
    to_float, relu, *ctx.rest = inputs[9:]
    keep_for_backward(ctx, inputs, Convolved(*made), to_float, relu)


def _gradients(ctx: Any, gradient: Tensor, exponent: Tensor | None, *_: Any) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    wanted = (needs[0], needs[2], needs[4])
    found = torch.ops.torch_odt.niti_layer_backward.default(
        gradient, None if ctx.to_float else exponent, *ctx.saved_tensors, ctx.input_is_float, *wanted, *ctx.rest
    )
    return gradients_of(PassedBack(*found), wanted, ctx.input_is_float, needs[7], len(needs))


register(
    "niti_layer",
    "(Tensor input, Tensor? exponent, Tensor weight, Tensor weight_exponent, Tensor? bias, Tensor? bias_exponent, "
    "Tensor state, Tensor backward_state, Tensor gradient_bits, bool to_float, bool relu, float? ceiling, "
    f"int rounding, int part_bytes, bool training, {WINDOWS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _layer,
    _layer_fake,
)
register(
    "niti_layer_backward",
    "(Tensor gradient, Tensor? gradient_exponent, Tensor? output, Tensor? output_exponent, Tensor image, "
    "Tensor image_exponent, Tensor weight, Tensor weight_exponent, Tensor state, Tensor gradient_bits, "
    "bool input_is_float, bool for_input, bool for_weight, bool for_bias, float? ceiling, int rounding, "
    f"int part_bytes, bool training, {WINDOWS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
register_gradient("niti_layer", _keep, _gradients)
