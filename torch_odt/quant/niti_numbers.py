"""NITI's numbers: mantissas of eight bits with one power of two for a whole tensor, and what is computed with them.

M. Wang et al., "NITI: Training Integer Neural Networks Using Integer-only Arithmetic", IEEE TPDS 2022
(arXiv 2009.13108). Three things are otherwise than there:

- a number of bits is that of the integer itself, floor(log2) + 1, not ceil(log2): where the largest value is a power of
  two, one more bit is dropped, and nothing has to be clipped;
- a shift by one bit drops one bit;
- the exponential of the integer cross-entropy has eight bits behind the point.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_odt.ops import int8_shift_sums
from torch_odt.ops.int8_arguments import Rounding

# Autograd differentiates floats alone. Mantissas are int8; between operators they travel as floats of eight bits, whose
# value nobody reads.
CARRIER = torch.float8_e5m2
MOST = 127
BITS = 7  # of a mantissa's magnitude
LARGEST_SHIFT = 30  # of what the kernels drop
EXTRA_BITS = 14  # of a float that is rounded pseudo-stochastically: seven are compared with seven

LOG2_E = 47274  # times 2^-15
FRACTION_BITS = 8
RANGE_BITS = 10  # exponentials below 2^-10 of the largest are 0
PROBABILITY_BITS = 11
SMALL_LOGITS = -7  # exponents up to this one: all logits are below 1 in magnitude
LEAST_EXPONENT = -24  # a smaller one is taken for this: the logits are equal then


class Scaled(NamedTuple):
    """A tensor of mantissas * 2**exponent, as it travels between layers.

    Attributes:
        mantissas: int8, seen as `CARRIER`, so that autograd takes it: its gradient is the gradient's mantissas.
        exponent: float32 of shape (1,), a whole number; its gradient is the gradient's exponent.
    """

    mantissas: Tensor
    exponent: Tensor


def as_int8(carrier: Tensor) -> Tensor:
    """The same bytes as integers."""
    return carrier.view(torch.int8)


def as_carrier(mantissas: Tensor) -> Tensor:
    """The same bytes in the form that autograd takes."""
    return mantissas.view(CARRIER)


def bits_of(largest: float) -> int:
    """How many bits an integer of this magnitude has; 0 has none.

    Example:
        >>> [bits_of(number) for number in (0, 1, 127, 128)]
        [0, 1, 7, 8]
    """
    return max(0, math.frexp(largest)[1]) if largest else 0


def largest_of(values: Tensor, name: str = "a tensor") -> float:
    """The largest absolute value, in one pass; 0 where there is none.

    Raises:
        ValueError: a value is not finite.
    """
    if not values.numel():
        return 0.0
    # In the order of memory, of which torch would make a copy first.
    in_order = values.permute(0, 2, 3, 1) if values.dim() == 4 and not values.is_contiguous() else values
    least, most = torch.aminmax(in_order)
    largest = max(-float(least), float(most))
    if not (math.isfinite(largest) and math.isfinite(float(least))):
        raise ValueError(
            f"{name} holds numbers that are not finite, which have no mantissas in 8 bits: lower the learning rate of "
            "what trains in float32, or look at the batch"
        )
    return largest


def shift_rounded(sums: Tensor, shift: int, rounding: Rounding = "pseudo_stochastic") -> Tensor:
    """Integers without their last bits, rounded: sums * 2**-shift, with the bits of the kernels.

    Pseudo-stochastic (NITI, section 3.3): the bits that are lost are split into halves, and the result is rounded away
    from zero where the upper half is larger than the lower one, which stands for a random number.

    Args:
        sums: int32 or int64.
        shift: so many bits, 0 or more.
        rounding: "nearest" (to even) or "pseudo_stochastic".

    Returns:
        Integers of the same dtype.

    Example:
        >>> shift_rounded(torch.tensor([5, -7, 8]), 2, "nearest")
        tensor([ 1, -2,  2])
    """
    if rounding == "nearest":
        return (sums.float() * 2.0**-shift).round().to(sums.dtype)
    magnitude, half = sums.abs(), shift // 2
    lost = magnitude & ((1 << shift) - 1)
    random = (lost & ((1 << half) - 1)) << (shift - 2 * half)
    return ((magnitude >> shift) + ((lost >> half) > random)) * sums.sign()


def clipped(whole: Tensor) -> Tensor:
    """Whole numbers as mantissas."""
    return whole.clamp(-MOST, MOST).to(torch.int8)


def shifted(sums: Tensor, shift: int, rounding: Rounding = "pseudo_stochastic") -> Tensor:
    """Integers as mantissas, without so many of their last bits; of int32 in one pass. See `shift_rounded`."""
    if sums.dtype == torch.int32:
        return int8_shift_sums(sums, shift, rounding)
    return clipped(shift_rounded(sums, shift, rounding))


def rescaled(sums: Tensor, rounding: Rounding, bits: int = BITS) -> tuple[Tensor, int]:
    """Integers as mantissas of so many bits, and by how many they were shifted.

    Args:
        sums: int32 or int64.
        rounding: see `shift_rounded`.
        bits: of the largest magnitude.

    Example:
        >>> rescaled(torch.tensor([1000, -3]), "nearest")
        (tensor([125,   0], dtype=torch.int8), 3)
    """
    shift = fitting_shift(sums, bits)
    return shifted(sums, shift, rounding), shift


def fitting_shift(sums: Tensor, bits: int = BITS) -> int:
    """How many bits are to be dropped so that so many are left of the largest magnitude."""
    return max(0, bits_of(largest_of(sums)) - bits)


def quantized(
    values: Tensor, rounding: Rounding = "nearest", name: str = "a tensor", *, spare_bits: int = 0
) -> tuple[Tensor, int]:
    """Floats as mantissas and an exponent; what already is of that form comes back exactly.

    Args:
        values: float32.
        rounding: "nearest" or "pseudo_stochastic"; that takes the fourteen bits behind the point for the dropped ones.
        name: for errors.
        spare_bits: that even the largest leaves free.

    Raises:
        ValueError: a number is not finite.

    Example:
        >>> quantized(torch.tensor([1.0, -0.5]))
        (tensor([ 64, -32], dtype=torch.int8), -6)
    """
    largest = largest_of(values, name)
    exponent = math.frexp(largest)[1] - BITS + spare_bits if largest else 0
    # Two factors: one alone may leave the range of float32.
    half = exponent // 2
    steps = values * 2.0**-half
    if rounding == "nearest":
        whole = steps.mul_(2.0 ** (half - exponent)).round_()
        return whole.clamp_(-MOST, MOST).to(torch.int8), exponent
    fine = steps.mul_(2.0 ** (half - exponent + EXTRA_BITS)).round_().to(torch.int32)
    return shifted(fine, EXTRA_BITS, rounding), exponent


def dequantized(mantissas: Tensor, exponent: float) -> Tensor:
    """Mantissas and their exponent as float32, exactly."""
    return mantissas.float().mul_(2.0**exponent)


def added(first: Tensor, first_exponent: int, second: Tensor, second_exponent: int, rounding: Rounding) -> Scaled:
    """The sum of two tensors of different scales: brought to the finer one, added in 32 bits and rescaled.

    Args:
        first, second: int8.
        first_exponent, second_exponent: theirs.
        rounding: of what does not fit into eight bits.

    Returns:
        Mantissas as int8, and the exponent as a tensor.

    Example:
        >>> total = added(torch.tensor([3], dtype=torch.int8), 1, torch.tensor([1], dtype=torch.int8), 0, "nearest")
        >>> total.mantissas.item(), total.exponent.item()
        (7, 0.0)
    """
    coarse, fine, apart = first, second, first_exponent - second_exponent
    if apart < 0:
        coarse, fine, apart = second, first, -apart
    exponent = min(first_exponent, second_exponent)
    # Beyond 16 bits the finer one is below a thousandth of the coarser one's last bit.
    too_many = max(0, apart - 16)
    addend = shift_rounded(fine.int(), min(too_many, LARGEST_SHIFT), "nearest") if too_many else fine
    mantissas, shift = rescaled((coarse.int() << (apart - too_many)) + addend, rounding)
    return Scaled(mantissas, torch.tensor([float(exponent + too_many + shift)]))


def cross_entropy_gradient(logits: Tensor, exponent: int, target: Tensor) -> tuple[Tensor, int]:
    """The gradient of the mean cross-entropy, in integers (NITI, section 3.4).

    Args:
        logits: int8 of shape (N, classes).
        exponent: of the logits.
        target: int64 of shape (N,): the classes.

    Returns:
        Mantissas, int8 of the logits' shape, and their exponent. The mean over a batch is one over the next power of
        two.

    Example:
        >>> cross_entropy_gradient(torch.zeros(1, 2, dtype=torch.int8), 0, torch.tensor([1]))
        (tensor([[ 64, -64]], dtype=torch.int8), -7)
    """
    wide = logits.long()
    # Both are computed, so that plans have room for what is allocated whichever is taken.
    small, others = _small_exponentials(wide, exponent), _exponentials(wide, exponent)
    weights = small if exponent <= SMALL_LOGITS else others
    shares = (weights << PROBABILITY_BITS) // weights.sum(1, keepdim=True)
    at_target = target.unsqueeze(1)
    shares.scatter_add_(1, at_target, -shares.sum(1, keepdim=True))
    mantissas = clipped(shift_rounded(shares, PROBABILITY_BITS - BITS))
    return mantissas, -BITS - (len(logits) - 1).bit_length()


def _exponentials(logits: Tensor, exponent: int) -> Tensor:
    """e**x, relative to the largest, in base 2: the fraction is taken linearly."""
    powers = logits * LOG2_E
    shift = 15 - FRACTION_BITS - exponent
    powers = powers >> min(shift, 63) if shift >= 0 else powers << min(-shift, 24)
    powers = (powers - powers.amax(1, keepdim=True) + (RANGE_BITS << FRACTION_BITS)).clamp_(min=0)
    one = 1 << FRACTION_BITS
    return ((one + powers % one) << (powers >> FRACTION_BITS)) - one


def _small_exponentials(logits: Tensor, exponent: int) -> Tensor:
    """e**x as 1 + x + x**2 / 2, times 2**(1 - 2 * exponent), of small logits."""
    exponent = min(max(exponent, LEAST_EXPONENT), SMALL_LOGITS)
    return (1 << (1 - 2 * exponent)) + (logits << (1 - exponent)) + logits * logits
