"""The int8 operators in plain torch: for installations without a compiler, and what tests compare the kernels with.

Sums are taken in float64, which holds them exactly; what becomes of them has the bits of the compiled operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_TERMS = 1 << 24  # of a sum
MOST_DEPTH = 65535  # of one that int32 holds
MOST_GEOMETRY = 1 << 30  # of strides and their kin, whose products 64 bits hold
LOW_WORD = 0xFFFFFFFF
FIRST_FACTOR, SECOND_FACTOR, GOLDEN = 0x7FEB352D, 0x846CA68B, 0x9E3779B9
HUGE = 4194304.0  # beyond it int8 is clamped whatever the rest
NEAREST, STOCHASTIC, PSEUDO_STOCHASTIC = range(3)


@dataclass(frozen=True)
class Geometry:
    """Which convolution is meant.

    Attributes:
        stride, padding, dilation: for rows and for columns.
        groups: of channels.
    """

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    @classmethod
    def of(cls, name: str, windows: Sequence[int]) -> Geometry:
        """From the argument `windows` of the operator of that name, checked."""
        if len(windows) != 7:
            raise RuntimeError(
                f"{name}: windows are seven numbers: stride, padding and dilation, for rows and for columns, and groups"
            )
        geometry = cls(windows[:2], windows[2:4], windows[4:6], windows[6])
        geometry.check(name)
        return geometry

    def check(self, name: str) -> None:
        if min(*self.stride, *self.dilation, self.groups) < 1 or min(self.padding) < 0:
            raise RuntimeError(f"{name}: stride, dilation and groups must be positive, and padding not negative")
        if max(*self.stride, *self.padding, *self.dilation) > MOST_GEOMETRY:
            raise RuntimeError(f"{name}: stride, padding and dilation must be {MOST_GEOMETRY} at most")

    def output_size(self, name: str, input_size: Sequence[int], kernel_size: Sequence[int]) -> list[int]:
        """Rows and columns of the output."""
        sizes = []
        for size, kernel, stride, pad, dilation in zip(
            input_size, kernel_size, self.stride, self.padding, self.dilation, strict=True
        ):
            reach = size + 2 * pad - dilation * (kernel - 1) - 1
            if reach < 0:
                raise RuntimeError(f"{name}: the kernel is larger than the padded input")
            sizes.append(reach // stride + 1)
        return sizes


def is_depthwise(weight_shape: Sequence[int], groups: int) -> bool:
    """Whether each channel is a group of its own, forward and backward."""
    return weight_shape[0] == groups and weight_shape[1] == 1


def check_int8(name: str, **tensors: Tensor) -> None:
    for argument, tensor in tensors.items():
        if tensor.dtype != torch.int8 or tensor.dim() != 4:
            raise RuntimeError(f"{name}: {argument} must be an int8 CPU tensor of 4 dimensions")


def check_zero_point(name: str, zero_point: int) -> None:
    if not -128 <= zero_point <= 127:
        raise RuntimeError(f"{name}: input_zero_point must be a value of int8, not {zero_point}")


def check_terms(name: str, terms: int) -> None:
    if terms > MOST_TERMS:
        raise RuntimeError(f"{name}: sums of more than {MOST_TERMS} terms are not supported")


def check_channels(name: str, weight: Tensor, channels: int, groups: int) -> None:
    if weight.shape[0] % groups or weight.shape[1] * groups != channels:
        raise RuntimeError(
            f"{name}: weight has {weight.shape[0]} x {weight.shape[1]} channels, which do not fit {channels} input "
            f"channels in {groups} groups"
        )


def check_bias(name: str, bias: Tensor | None, channels: int, terms: int) -> None:
    if bias is None:
        return
    if bias.dtype != torch.int32 or bias.shape != (channels,):
        raise RuntimeError(f"{name}: bias must be an int32 CPU tensor with one number for each output channel")
    most = 2**31 - 1 - terms * 255 * 128
    if terms <= MOST_DEPTH and channels and int(bias.abs().max()) > most:
        raise RuntimeError(f"{name}: bias must be from -{most} to {most}, so that int32 holds every sum with it")


def forward_sums(
    name: str, input: Tensor, weight: Tensor, bias: Tensor | None, zero_point: int, geometry: Geometry
) -> Tensor:
    """The output, exactly, as int64."""
    check_int8(name, input=input, weight=weight)
    check_channels(name, weight, input.shape[1], geometry.groups)
    out = geometry.output_size(name, input.shape[2:], weight.shape[2:])
    check_zero_point(name, zero_point)
    terms_each = weight.shape[1] * weight.shape[2] * weight.shape[3]
    check_terms(name, terms_each if weight.shape[0] else 0)
    check_bias(name, bias, weight.shape[0], terms_each)
    if not weight.numel():
        empty = torch.zeros(input.shape[0], weight.shape[0], *out, dtype=torch.int64)
        return empty if bias is None else empty + bias[:, None, None]
    shifted = input.double() - zero_point
    terms = None if bias is None else bias.double()
    g = geometry
    return torch.conv2d(shifted, weight.double(), terms, g.stride, g.padding, g.dilation, g.groups).long()


def _backward(grad_output: Tensor, input: Tensor, weight: Tensor, geometry: Geometry, wants_input: bool) -> Tensor:
    g = geometry
    if not weight.numel():
        return torch.zeros_like(input if wants_input else weight, dtype=torch.int64)
    found = torch.ops.aten.convolution_backward(
        grad_output.double(), input, weight, None, g.stride, g.padding, g.dilation, False, (0, 0), g.groups,
        (wants_input, not wants_input, False),
    )  # fmt: skip
    return found[0 if wants_input else 1].long()


def grad_input_sums(
    name: str, grad_output: Tensor, weight: Tensor, input_size: Sequence[int], geometry: Geometry
) -> Tensor:
    """The input's gradient, exactly, as int64."""
    check_int8(name, grad_output=grad_output, weight=weight)
    out = geometry.output_size(name, input_size, weight.shape[2:])
    if list(grad_output.shape[1:]) != [weight.shape[0], *out]:
        raise RuntimeError(f"{name}: grad_output must have the output's shape, {weight.shape[0]} x {out[0]} x {out[1]}")
    check_terms(name, weight.shape[0] // geometry.groups * weight.shape[2] * weight.shape[3])
    like = torch.empty(grad_output.shape[0], weight.shape[1] * geometry.groups, *input_size, dtype=torch.float64)
    return _backward(grad_output, like, weight.double(), geometry, True)


def grad_weight_sums(
    name: str, grad_output: Tensor, input: Tensor, zero_point: int, kernel_size: Sequence[int], geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias, exactly, as int64."""
    check_int8(name, grad_output=grad_output, input=input)
    check_zero_point(name, zero_point)
    out = geometry.output_size(name, input.shape[2:], kernel_size)
    if [grad_output.shape[0], *grad_output.shape[2:]] != [input.shape[0], *out]:
        raise RuntimeError(f"{name}: grad_output must have the output's shape")
    if input.shape[1] % geometry.groups or grad_output.shape[1] % geometry.groups:
        raise RuntimeError(f"{name}: the channels of input and grad_output must be multiples of groups")
    like = torch.empty(grad_output.shape[1], input.shape[1] // geometry.groups, *kernel_size, dtype=torch.float64)
    found = _backward(grad_output, input.double() - zero_point, like, geometry, False)
    return found, grad_output.sum((0, 2, 3), dtype=torch.int64)


def as_int32(name: str, sums: Tensor) -> Tensor:
    """The same numbers, if they fit."""
    narrow = sums.int()
    if not torch.equal(narrow.long(), sums):
        raise RuntimeError(f"{name}: a sum does not fit into int32; {name}_scaled takes sums of any size")
    return narrow


def by_pixels(image: Tensor) -> Tensor:
    """The same numbers with channels last, in which order elements are counted."""
    return image.permute(0, 2, 3, 1)


def as_image(pixels: Tensor) -> Tensor:
    """The other way round, in torch.channels_last."""
    return pixels.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


def scaled(name: str, sums: Tensor, scale: Tensor, axis: int) -> Tensor:
    """Sums times one number, or one for each index of an axis, as float32."""
    if scale.dtype != torch.float32 or scale.numel() not in (1, sums.shape[axis]) or not bool(scale.isfinite().all()):
        raise RuntimeError(f"{name}: scale must be a finite float32 tensor of one number or of one for each channel")
    shape = [1] * sums.dim()
    shape[axis] = -1
    return sums.float() * scale.reshape(shape if scale.numel() > 1 else [1] * sums.dim())


def _mixed(bits: Tensor) -> Tensor:
    bits = bits ^ (bits >> 16)
    bits = (bits * FIRST_FACTOR) & LOW_WORD
    bits = bits ^ (bits >> 15)
    bits = (bits * SECOND_FACTOR) & LOW_WORD
    return bits ^ (bits >> 16)


def _key(seed: int) -> Tensor:
    upper = _mixed(torch.tensor(GOLDEN))
    return _mixed((seed & LOW_WORD) ^ _mixed((seed >> 32 & LOW_WORD) ^ upper))


def _hashes(numbers: Tensor, seed: int) -> Tensor:
    return _mixed((numbers * GOLDEN + _key(seed)) & LOW_WORD)


def byte_draws(count: int, width: int, seed: int) -> Tensor:
    """What stochastic rounding of activations and gradients draws: a whole number below 256 for each element.

    Args:
        count: of elements, in rows one after another.
        width: of a row: the channels of a group at one pixel, or a row of a weight. Four columns share a hash: of 64,
            two neighbours and those 32 further on.
        seed: of the call.
    """
    index = torch.arange(count)
    column = index % max(width, 1)
    place = index - column + column // 64 * 16 + column % 16 // 4 * 4 + column // 16 % 2 * 2 + column % 4 // 2
    return _hashes(place, seed) >> (column % 2 * 16 + column // 32 % 2 * 8) & 0xFF


def half_draws(count: int, width: int, seed: int) -> Tensor:
    """What stochastic rounding of weights draws, finer: numbers from 0 up to but without 1, of 16 bits.

    Args:
        count, width, seed: as for `byte_draws`; two columns that are 16 apart share a hash.
    """
    index = torch.arange(count)
    column = index % max(width, 1)
    place = index - column + column // 32 * 16 + column % 16
    bits = _hashes(place, seed)
    half = torch.where(column % 32 >= 16, bits >> 16, bits & 0xFFFF)
    return half.float() * 2.0**-16


def by_chance(values: Tensor, drawn: Tensor) -> Tensor:
    """Values, float32, as whole numbers: of the nearest 256ths, up or down by what `byte_draws` drew.

    So few bits leave no bias where what they cannot tell apart is rounded to the nearest first (Fitzgibbon and Felix,
    arXiv 2504.20634).
    """
    return ((values * 256).round() + drawn).div(256).floor()


def shift_of(name: str, scale: Tensor) -> int:
    """The bits that pseudo-stochastic rounding drops."""
    fraction, exponent = torch.frexp(scale.flatten()[:1])
    shift = 1 - int(exponent)
    if scale.numel() != 1 or float(fraction) != 0.5 or not 0 <= shift <= 30:
        raise RuntimeError(f"{name}: pseudo-stochastic rounding needs one scale, a power of two from 2^-30 to 1")
    return shift


def shifted(sums: Tensor, shift: int) -> Tensor:
    """NITI (arXiv 2009.13108), section 3.3: the lower half of the bits that are lost says whether the upper rounds."""
    magnitude, half = sums.abs(), shift // 2
    lost = magnitude & ((1 << shift) - 1)
    random = (lost & ((1 << half) - 1)) << (shift - 2 * half)
    return ((magnitude >> shift) + ((lost >> half) > random)) * sums.sign()


def rounded(
    name: str,
    sums: Tensor,
    values: Tensor,
    scale: Tensor,
    rounding: int,
    seed: int,
    width: int,
    before: Tensor | None = None,
) -> Tensor:
    """Values, or what was before less them, as integers.

    Args:
        name: the operator's, for errors.
        sums: what `values` are scaled from, with channels last.
        values: float32.
        scale: as it was given.
        rounding: one of the three.
        seed, width: for stochastic rounding, see `byte_draws`.
        before: what the values are taken from, if anything: weights, see `half_draws`.
    """
    if rounding == PSEUDO_STOCHASTIC:
        steps = shifted(sums, shift_of(name, scale))
        return steps if before is None else before.long() - steps
    values = values if before is None else before.float() - values
    values = values.clamp(-HUGE, HUGE)
    if rounding == NEAREST:
        return values.round().long()
    if rounding != STOCHASTIC:
        raise RuntimeError(f"{name}: rounding must be 0 (nearest), 1 (stochastic) or 2 (pseudo-stochastic)")
    if before is not None:
        return (values + half_draws(values.numel(), width, seed).view(values.shape)).floor().long()
    return by_chance(values, byte_draws(values.numel(), width, seed).view(values.shape)).long()


def largest_of(values: Tensor) -> Tensor:
    return values.abs().amax().reshape(1) if values.numel() else torch.zeros(1, dtype=torch.float32)
