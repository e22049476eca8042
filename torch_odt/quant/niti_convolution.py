"""A convolution in NITI's arithmetic, forward and backward, in plain torch around the int8 operators.

This is what the operators of `niti_integers` compute where they are not compiled, and what tests compare those with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_odt import ops
from torch_odt.ops.int8_arguments import Rounding, WeightGradient
from torch_odt.ops.int8_plain import Geometry
from torch_odt.quant.batch_splitting import MOST_PIXELS, joined, parts_of
from torch_odt.quant.niti_numbers import (
    BITS,
    CARRIER,
    LARGEST_SHIFT,
    MOST,
    as_carrier,
    as_int8,
    largest_of,
    quantized,
    rescaled,
    shifted,
)
from torch_odt.quant.niti_passes import Convolved, How, Kept, PassedBack
from torch_odt.quant.rescaling import Rescaling

MOST_BIAS = float(1 << LARGEST_SHIFT)


@dataclass(frozen=True)
class _Attempt:
    """Mantissas for a shift, and the largest magnitude of what was shifted."""

    mantissas: Tensor
    largest: float


class _Kernels:
    """The int8 kernels of one layer over the parts of its batch."""

    def __init__(
        self, weight: Tensor, packed: Tensor | None, geometry: Geometry, how: How, sample_bytes: int, batch: int
    ) -> None:
        self.weight, self.packed, self.how = as_int8(weight), packed, how
        self.windows: dict[str, Any] = vars(geometry)
        self.parts = parts_of(batch, sample_bytes, weight.nbytes, how.part_bytes)
        self._batch = batch

    def output(self, image: Tensor, bias: Tensor | None, sums_exponent: int, shift: int) -> _Attempt:
        scale = torch.tensor([2.0**-shift])
        low, high = (0, self.how.most(sums_exponent + shift)) if self.how.relu else (-MOST, MOST)
        found = [
            ops.int8_conv2d_quantized(
                image[part], self.weight, scale, bias, packed=self.packed, low=low, high=high,
                rounding=self.how.rounding, **self.windows,
            )
            for part in self.parts
        ]  # fmt: skip
        largest = max(float(each.largest) for each in found)
        return _Attempt(joined([each.output for each in found]), largest * 2.0**shift)

    def float_output(self, image: Tensor, bias: Tensor | None, exponent: int) -> Tensor:
        scale = torch.tensor([2.0**exponent])
        return joined(
            [
                ops.int8_conv2d_scaled(image[part], self.weight, scale, bias, packed=self.packed, **self.windows)
                for part in self.parts
            ]
        )

    def input_gradient(self, gradient: Tensor, size: list[int], shift: int) -> _Attempt:
        scale = torch.tensor([2.0**-shift])
        found = [
            ops.int8_conv2d_grad_input_quantized(
                gradient[part], self.weight, scale, size, packed=self.packed, rounding=self.how.rounding, **self.windows
            )
            for part in self.parts
        ]
        largest = max(float(each.largest) for each in found)
        mantissas = joined([each.gradient for each in found])
        return _Attempt(mantissas.clamp_(min=-MOST) if largest > MOST else mantissas, largest * 2.0**shift)

    def float_input_gradient(self, gradient: Tensor, size: list[int], exponent: int) -> Tensor:
        scale = torch.tensor([2.0**exponent])
        return joined(
            [
                ops.int8_conv2d_grad_input_scaled(
                    gradient[part], self.weight, scale, size, packed=self.packed, **self.windows
                )
                for part in self.parts
            ]
        )

    def weight_sums(self, gradient: Tensor, image: Tensor) -> WeightGradient:
        """The exact sums of the gradients: the weight's are int32 or, of several parts, int64."""
        pixels = gradient.shape[2] * gradient.shape[3]
        fitting = max(1, MOST_PIXELS // max(pixels, 1))
        parts = [
            slice(start, min(start + fitting, part.stop))
            for part in self.parts
            for start in range(part.start, max(part.stop, part.start + 1), fitting)
        ]
        size = self.weight.shape[2:]
        sums = [ops.int8_conv2d_grad_weight(gradient[part], image[part], tuple(size), **self.windows) for part in parts]
        if len(sums) == 1:
            return sums[0]
        weight, bias = sums[0].weight.long(), sums[0].bias
        for each in sums[1:]:
            weight += each.weight
            bias += each.bias
        return WeightGradient(weight, bias)

    def weight_step(self, gradient: Tensor, image: Tensor, shift: int) -> WeightGradient:
        """The weight's gradient as mantissas, and the bias's sums; in one piece, the weight's are never stored."""
        pixels = gradient.shape[2] * gradient.shape[3]
        # A sample is never cut: what rounds its sums adds up in 64 bits where it has to.
        if len(self.parts) > 1 or (self._batch > 1 and self._batch * pixels > MOST_PIXELS):
            sums = self.weight_sums(gradient, image)
            return sums._replace(weight=shifted(sums.weight, shift, self.how.rounding))
        less = torch.zeros_like(self.weight, memory_format=torch.channels_last)
        of_bias = ops.int8_conv2d_update_weight_(
            less, gradient, image, torch.tensor([2.0**-shift]), rounding=self.how.rounding, **self.windows
        )
        return WeightGradient(less.neg_(), of_bias)


def _settled(
    state: Rescaling, exponent: int, attempt: Callable[[int], _Attempt], training: bool
) -> tuple[Tensor, int, Rescaling]:
    """Sums of an exponent as mantissas, at the scale that is held or that a check finds."""
    shift = state.shift(exponent)
    found = attempt(shift)
    if not (state.is_due if training else not state.is_known):
        was_clipped = found.largest * 2.0**-shift >= MOST + 1
        return found.mantissas, exponent + shift, state.after_batch(was_clipped=was_clipped) if training else state
    fitting = state.fitting_shift(found.largest, BITS, exponent)
    mantissas = found.mantissas if fitting == shift else attempt(fitting).mantissas
    after = state.after_check(exponent + fitting, is_zero=not found.largest) if training else state
    return mantissas, exponent + fitting, after


def _bias_sums(bias: Tensor | None, bias_exponent: Tensor | None, exponent: int) -> Tensor | None:
    """A bias in units of the sums."""
    if bias is None or bias_exponent is None:
        return None
    units = as_int8(bias).double() * 2.0 ** (int(bias_exponent) - exponent)
    return units.round_().clamp_(-MOST_BIAS, MOST_BIAS).to(torch.int32)


def _sample_bytes(image: Tensor, output_pixels: int, channels: int, to_float: bool) -> int:
    return image[0].numel() + output_pixels * channels * (4 if to_float else 1) if len(image) else 0


def _quantized(values: Tensor, rounding: Rounding, name: str) -> tuple[Tensor, int]:
    """As `quantized`; what training has brought about is no wrong argument."""
    try:
        return quantized(values, rounding, name)
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def convolve(
    input: Tensor,
    exponent: Tensor | None,
    weight: Tensor,
    weight_exponent: Tensor,
    bias: Tensor | None,
    bias_exponent: Tensor | None,
    state: Tensor,
    how: How,
    packed: Tensor | None,
    geometry: Geometry,
) -> Convolved:
    """What `niti_layer` computes; `packed` is the weight's for this pass, or None."""
    if exponent is None:
        image, input_exponent = _quantized(input, "nearest", "the input of a convolution")
        image = image.contiguous(memory_format=torch.channels_last)
        kept, kept_exponent = as_carrier(image), torch.tensor([float(input_exponent)])
    else:
        image, input_exponent = as_int8(input), int(exponent)
        kept, kept_exponent = torch.empty(0, dtype=CARRIER), torch.empty(0)
    rows, columns = geometry.output_size("niti_layer", image.shape[2:], weight.shape[2:])
    sample_bytes = _sample_bytes(image, rows * columns, weight.shape[0], how.to_float)
    kernels = _Kernels(weight, packed, geometry, how, sample_bytes, len(image))
    sums_exponent = input_exponent + int(weight_exponent)
    added = _bias_sums(bias, bias_exponent, sums_exponent)
    if how.to_float:
        output = kernels.float_output(image, added, sums_exponent)
        return Convolved(output, torch.zeros(1), kept, kept_exponent, state.clone())
    mantissas, found, after = _settled(
        Rescaling.of(state),
        sums_exponent,
        lambda shift: kernels.output(image, added, sums_exponent, shift),
        how.training,
    )
    return Convolved(as_carrier(mantissas), torch.tensor([float(found)]), kept, kept_exponent, after.row())


def pass_back(
    gradient: Tensor,
    gradient_exponent: Tensor | None,
    kept: Kept,
    input_is_float: bool,
    wanted: Sequence[bool],
    how: How,
    packed: Tensor | None,
    geometry: Geometry,
) -> PassedBack:
    """What `niti_layer_backward` computes; `packed` is the weight's for the input's gradient, or None."""
    if gradient_exponent is None:
        steps, exponent = _quantized(gradient, how.rounding, "the gradient of a convolution's output")
    else:
        steps, exponent = as_int8(gradient), int(gradient_exponent)
    steps = steps.contiguous(memory_format=torch.channels_last)
    if kept.output is not None and kept.output_exponent is not None:
        most = how.passes_below(float(kept.output_exponent))
        steps = ops.int8_keep_between(steps, as_int8(kept.output), 0, most)
    pixels, weight = as_int8(kept.image), kept.weight
    sample_bytes = _sample_bytes(pixels, steps.shape[2] * steps.shape[3], weight.shape[0], input_is_float)
    kernels = _Kernels(weight, packed, geometry, how, sample_bytes, len(pixels))
    of_input, of_weight = (Rescaling.of(row) for row in kept.state)
    size = list(pixels.shape[2:])
    input_gradient, input_exponent = torch.empty(0, dtype=CARRIER), torch.empty(0)
    sums_exponent = exponent + int(kept.weight_exponent)
    if wanted[0] and input_is_float:
        input_gradient = kernels.float_input_gradient(steps, size, sums_exponent)
    elif wanted[0]:
        mantissas, found, of_input = _settled(
            of_input, sums_exponent, lambda shift: kernels.input_gradient(steps, size, shift), how.training
        )
        input_gradient, input_exponent = as_carrier(mantissas), torch.tensor([float(found)])
    weight_gradient, bias_gradient = (torch.empty(0, dtype=CARRIER) for _ in range(2))
    bits = int(kept.gradient_bits)
    if wanted[1]:
        found_gradient, of_weight = _weight_gradient(
            kernels, steps, pixels, of_weight, exponent + int(kept.image_exponent), bits
        )
        weight_gradient, bias_sums = as_carrier(found_gradient.weight), found_gradient.bias
    elif wanted[2]:
        bias_sums = steps.sum((0, 2, 3), dtype=torch.int64)
    if wanted[2]:
        bias_gradient = as_carrier(rescaled(bias_sums, how.rounding, bits)[0])
    state = torch.stack([of_input.row(), of_weight.row()])
    return PassedBack(input_gradient, input_exponent, weight_gradient, bias_gradient, state)


def _weight_gradient(
    kernels: _Kernels, steps: Tensor, pixels: Tensor, state: Rescaling, exponent: int, bits: int
) -> tuple[WeightGradient, Rescaling]:
    """Mantissas of so many bits; where the scale is not looked at, what is beyond them is clipped."""
    if state.is_due:
        sums = kernels.weight_sums(steps, pixels)
        largest = largest_of(sums.weight)
        if sums.weight.dtype == torch.int32:
            # As the kernels tell it, which round such sums and never store them.
            largest = float(torch.tensor(largest, dtype=torch.float32))
        shift = state.fitting_shift(largest, bits, exponent)
        mantissas = shifted(sums.weight, shift, kernels.how.rounding)
        return sums._replace(weight=mantissas), state.after_check(exponent + shift, is_zero=not largest)
    found = kernels.weight_step(steps, pixels, state.shift(exponent))
    most = 1 << max(bits, 0)
    was_clipped = largest_of(found.weight) > most
    if was_clipped:
        found.weight.clamp_(-most, most)
    return found, state.after_batch(was_clipped=was_clipped)
