"""A convolution whose input and output are mantissas, and its gradients, as one compiled operator for each pass.

They are `niti_conv2d` and its gradients without float32 on either side and without packed weights that are kept, bit
for bit, and leave out the Python between its kernels, which takes longer than those of a small layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_odt.ops.int8_arguments import number_of
from torch_odt.ops.int8_plain import Geometry
from torch_odt.ops.registration import register, register_gradient
from torch_odt.quant.niti_convolution import convolve, pass_back
from torch_odt.quant.niti_numbers import CARRIER, Scaled
from torch_odt.quant.niti_passes import ROUNDINGS, How, Kept, PassedBack, empty_gradients, empty_image, gradients_of

_NAME_OF_CODE = {number_of(name): name for name in ROUNDINGS}


def niti_layer(x: Scaled, tensors: tuple[Any, ...], how: How, windows: tuple[Any, ...]) -> tuple[Scaled, Tensor]:
    """A convolution of mantissas to mantissas.

    Args:
        x: of shape (N, C, H, W).
        tensors: weight, its exponent, bias, its exponent, the states of the rescaling of the output and of those of the
            gradients, and `gradient_bits`; see `niti_conv2d`.
        how: without `to_float` and `packs`.
        windows: stride, padding, dilation and groups.

    Returns:
        The output, and the state of its rescaling after this batch.
    """
    output, exponent, state = torch.ops.torch_odt.niti_layer.default(
        *x, *tensors, how.relu, how.ceiling, number_of(how.rounding), how.part_bytes, how.training, *windows
    )
    return Scaled(output, exponent), state


def _layer(
    input: Tensor,
    exponent: Tensor,
    weight: Tensor,
    weight_exponent: Tensor,
    bias: Tensor | None,
    bias_exponent: Tensor | None,
    state: Tensor,
    backward_state: Tensor,
    gradient_bits: Tensor,
    relu: bool,
    ceiling: float | None,
    rounding: int,
    part_bytes: int,
    training: bool,
    *windows: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    how = How(
        relu=relu, ceiling=ceiling, rounding=_NAME_OF_CODE[rounding], part_bytes=part_bytes, training=training
    )  # fmt: skip
    made = convolve(
        input, exponent, weight, weight_exponent, bias, bias_exponent, state, how, Geometry(*windows)
    )  # fmt: skip
    return made.output, made.exponent, made.state


def _layer_fake(input: Tensor, exponent: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    state, windows = rest[3], rest[11:]
    size = Geometry(*windows).output_size("niti_layer", input.shape[2:], weight.shape[2:])
    output = empty_image([input.shape[0], weight.shape[0], *size], CARRIER, input)
    return output, torch.empty(1, device=input.device), torch.empty_like(state)


def _backward(
    gradient: Tensor,
    gradient_exponent: Tensor,
    output: Tensor | None,
    output_exponent: Tensor | None,
    image: Tensor,
    image_exponent: Tensor,
    weight: Tensor,
    weight_exponent: Tensor,
    state: Tensor,
    gradient_bits: Tensor,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
    ceiling: float | None,
    rounding: int,
    part_bytes: int,
    training: bool,
    *windows: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kept = Kept(output, output_exponent, image, image_exponent, weight, weight_exponent, state, gradient_bits)
    how = How(ceiling=ceiling, rounding=_NAME_OF_CODE[rounding], part_bytes=part_bytes, training=training)
    wanted = (for_input, for_weight, for_bias)
    return pass_back(gradient, gradient_exponent, kept, False, wanted, how, Geometry(*windows))


def _backward_fake(
    gradient: Tensor, gradient_exponent: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return empty_gradients(Kept(*rest[:8]), False, rest[8:11])


def _keep(ctx: Any, inputs: tuple[Any, ...], made: tuple[Tensor, ...]) -> None:
    (
        input, exponent, weight, weight_exponent, _, _, _, backward_state, bits, relu, *rest
    ) = inputs  # fmt: skip
    output, output_exponent, state = made
    of_relu = (output, output_exponent) if relu else (None, None)
    ctx.save_for_backward(*of_relu, input, exponent, weight, weight_exponent, backward_state, bits)
    ctx.rest = rest
    ctx.mark_non_differentiable(state)


def _gradients(ctx: Any, gradient: Tensor, exponent: Tensor, _: Any) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    wanted = (needs[0], needs[2], needs[4])
    found = torch.ops.torch_odt.niti_layer_backward.default(gradient, exponent, *ctx.saved_tensors, *wanted, *ctx.rest)
    return gradients_of(PassedBack(*found), wanted, False, needs[7], len(needs))


WINDOWS = "int[] stride, int[] padding, int[] dilation, int groups"
register(
    "niti_layer",
    "(Tensor input, Tensor exponent, Tensor weight, Tensor weight_exponent, Tensor? bias, Tensor? bias_exponent, "
    "Tensor state, Tensor backward_state, Tensor gradient_bits, bool relu, float? ceiling, int rounding, "
    f"int part_bytes, bool training, {WINDOWS}) -> (Tensor, Tensor, Tensor)",
    _layer,
    _layer_fake,
)
register(
    "niti_layer_backward",
    "(Tensor gradient, Tensor gradient_exponent, Tensor? output, Tensor? output_exponent, Tensor image, "
    "Tensor image_exponent, Tensor weight, Tensor weight_exponent, Tensor state, Tensor gradient_bits, bool for_input, "
    f"bool for_weight, bool for_bias, float? ceiling, int rounding, int part_bytes, bool training, {WINDOWS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
register_gradient("niti_layer", _keep, _gradients)
