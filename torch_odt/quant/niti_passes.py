"""What the operators of NITI's convolutions take, keep for the backward pass and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_odt.ops.int8_arguments import ROUNDINGS as ALL_ROUNDINGS
from torch_odt.ops.int8_arguments import Rounding, number_of
from torch_odt.ops.int8_plain import Geometry
from torch_odt.quant.in_backward import use_of
from torch_odt.quant.niti_numbers import CARRIER, MOST

ROUNDINGS: tuple[Rounding, ...] = ("nearest", "pseudo_stochastic")


@dataclass(frozen=True)
class How:
    """How a layer computes, beside its windows.

    Attributes:
        to_float: the output is float32, not rescaled.
        relu: the output is clamped at 0.
        ceiling: and at this, with `relu`; None sets no bound.
        rounding: of activations and gradients.
        part_bytes: what a part of a batch may take, see `parts_of`; 0 does not split.
        packs: the number of a `PackedWeights`; 0 packs for each call.
        training: whether scales are looked at.
    """

    to_float: bool = False
    relu: bool = False
    ceiling: float | None = None
    rounding: Rounding = "pseudo_stochastic"
    part_bytes: int = 0
    packs: int = 0
    training: bool = True

    def numbers(self) -> list[int]:
        """As an operator takes it, the ceiling aside."""
        return [self.to_float, self.relu, number_of(self.rounding), self.part_bytes, self.packs, self.training]

    @classmethod
    def of(cls, numbers: list[int], ceiling: float | None) -> How:
        to_float, relu, rounding, part_bytes, packs, training = numbers
        return cls(bool(to_float), bool(relu), ceiling, ALL_ROUNDINGS[rounding], part_bytes, packs, bool(training))

    def passes_below(self, exponent: float) -> int:
        """Mantissas with that exponent are below this where the ceiling stops nothing; those pass the gradient, too."""
        return MOST + 1 if self.ceiling is None else min(MOST + 1, int(self.ceiling * 2.0**-exponent))

    def most(self, exponent: float) -> int:
        """The largest mantissa with that exponent."""
        return min(MOST, self.passes_below(exponent))


class Convolved(NamedTuple):
    """What the forward operator returns.

    Attributes:
        output: mantissas, or float32.
        exponent: of the output; without a meaning where that is float32.
        kept: the input's mantissas where it was float32, and empty otherwise.
        kept_exponent: theirs.
        state: of the output's rescaling, after this batch.
    """

    output: Tensor
    exponent: Tensor
    kept: Tensor
    kept_exponent: Tensor
    state: Tensor


@dataclass(frozen=True)
class Kept:
    """What the forward pass has kept for the backward pass.

    Attributes:
        output, output_exponent: of a layer that ends in a ReLU, None otherwise.
        image, image_exponent: the input's mantissas, and theirs.
        weight, weight_exponent, state, gradient_bits: as they were given.
    """

    output: Tensor | None
    output_exponent: Tensor | None
    image: Tensor
    image_exponent: Tensor
    weight: Tensor
    weight_exponent: Tensor
    state: Tensor
    gradient_bits: Tensor


class PassedBack(NamedTuple):
    """What the backward operator returns; what is not wanted is empty.

    Attributes:
        input, exponent: the input's gradient; without an exponent where it is float32.
        weight, bias: mantissas of `gradient_bits` bits, to be taken off.
        state: of the rescalings of the input's and the weight's gradient, after this batch.
    """

    input: Tensor
    exponent: Tensor
    weight: Tensor
    bias: Tensor
    state: Tensor


def empty_image(shape: Any, dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def empty_results(
    input: Tensor, input_is_float: bool, weight: Tensor, state: Tensor, to_float: bool, geometry: Geometry
) -> Convolved:
    """What a forward operator returns, without data."""
    size = geometry.output_size("niti_layer", input.shape[2:], weight.shape[2:])
    output = empty_image([input.shape[0], weight.shape[0], *size], torch.float32 if to_float else CARRIER, input)
    one = torch.empty(1, device=input.device)
    if input_is_float:
        kept, kept_exponent = empty_image(input.shape, CARRIER, input), torch.empty_like(one)
    else:
        kept = torch.empty(0, dtype=CARRIER, device=input.device)
        kept_exponent = torch.empty(0, device=input.device)
    return Convolved(output, one, kept, kept_exponent, torch.empty_like(state))


def empty_gradients(kept: Kept, input_is_float: bool, wanted: Sequence[bool]) -> PassedBack:
    """What `pass_back` returns, without data."""
    image, weight = kept.image, kept.weight
    nothing = torch.empty(0, dtype=CARRIER, device=image.device)
    of_input, exponent = nothing, torch.empty(0, device=image.device)
    if wanted[0]:
        of_input = empty_image(image.shape, torch.float32 if input_is_float else CARRIER, image)
        exponent = exponent if input_is_float else torch.empty(1, device=image.device)
    of_weight = empty_image(weight.shape, CARRIER, weight) if wanted[1] else torch.empty_like(nothing)
    bias = torch.empty(weight.shape[0], dtype=CARRIER, device=image.device) if wanted[2] else torch.empty_like(nothing)
    return PassedBack(of_input, exponent, of_weight, bias, torch.empty_like(kept.state))


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], made: Convolved, to_float: bool, relu: bool) -> None:
    """What autograd keeps of a forward operator's first nine arguments, which all have, and of its results."""
    input, exponent, weight, weight_exponent, _, _, _, backward_state, bits = inputs[:9]
    ctx.to_float, ctx.input_is_float = to_float, exponent is None
    ctx.use = use_of(weight) if ctx.needs_input_grad[2] else None
    image, image_exponent = (made.kept, made.kept_exponent) if exponent is None else (input, exponent)
    of_relu = (made.output, made.exponent) if relu else (None, None)
    ctx.save_for_backward(*of_relu, image, image_exponent, weight, weight_exponent, backward_state, bits)
    ctx.mark_non_differentiable(made.kept, made.kept_exponent, made.state)
    if to_float:
        ctx.mark_non_differentiable(made.exponent)


def gradients_of(
    found: PassedBack, wanted: Sequence[bool], input_is_float: bool, wants_state: bool, count: int
) -> tuple[Any, ...]:
    """The gradients of a forward operator's arguments, of which there are so many."""
    of_arguments = (
        found.input if wanted[0] else None,
        found.exponent if wanted[0] and not input_is_float else None,
        found.weight if wanted[1] else None,
        None,
        found.bias if wanted[2] else None,
        None,
        None,
        found.state if wants_state else None,
    )
    return (*of_arguments, *[None] * (count - len(of_arguments)))
