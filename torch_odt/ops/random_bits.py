"""Random masks as bits, drawn from torch's generator and faster than torch draws them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from torch_odt import _extensions
from torch_odt.ops.bits import pack_bits

DRAW, DRAW_SCHEMA = "torch_odt::draw_bits", "(Tensor(a!) generator_state, int count, float probability) -> Tensor"


def bernoulli_bits(count: int, probability: float, generator: torch.Generator | None = None) -> Tensor:
    """Draws a mask as `torch.empty(count, dtype=torch.bool).bernoulli_(probability)` does, and packs it.

    When to choose it: for a dropout mask that is kept. Its bits are torch's, and so is the generator's state
    afterwards; but the Mersenne Twister runs on vectors, and no mask of booleans exists in between. Where torch draws
    with a math library's generator, as on Intel's processors, so does this, and packs the result.

    Args:
        count: elements of the mask.
        probability: of True, between 0 and 1.
        generator: of the CPU; torch's default one if None.

    Returns:
        uint8 of shape ((count + 7) // 8,), to be unpacked with `unpack_bits`.

    Raises:
        RuntimeError: the probability is not between 0 and 1, or the count is negative.

    Example:
        >>> bernoulli_bits(3, 1.0)
        tensor([7], dtype=torch.uint8)
    """
    generator = generator or torch.default_generator
    if not draws_like_torch():
        return _draw_with(generator, count, probability)
    state = generator.get_state()
    packed = torch.ops.torch_odt.draw_bits(state, count, probability)
    generator.set_state(state)
    return packed


@functools.cache
def draws_like_torch() -> bool:
    """Whether the compiled operator draws what torch draws on this machine; told from a few thousand numbers."""
    if not _extensions.has_kernels:
        return False
    theirs = torch.Generator().manual_seed(5489)
    ours = theirs.get_state()
    for count in (1000, 1001):
        expected = _draw_with(theirs, count, 0.3)
        found = torch.ops.torch_odt.draw_bits(ours, count, 0.3)
        if not torch.equal(found, expected) or not torch.equal(ours, theirs.get_state()):
            return False
        # One word instead of two: from here on pairs lie across the twister's renewal.
        torch.empty(1).uniform_(generator=theirs)
        ours = theirs.get_state()
    return True


def _draw_with(generator: torch.Generator, count: int, probability: float) -> Tensor:
    if count < 0:
        raise RuntimeError("draw_bits: the count must not be negative")
    return pack_bits(torch.empty(count, dtype=torch.bool).bernoulli_(probability, generator=generator))


def _draw_in_torch(generator_state: Tensor, count: int, probability: float) -> Tensor:
    """As the compiled operator, in plain torch."""
    generator = torch.Generator()
    generator.set_state(generator_state)
    packed = _draw_with(generator, count, probability)
    generator_state.copy_(generator.get_state())
    return packed


def _draw_fake(generator_state: Tensor, count: int, probability: float) -> Tensor:
    return generator_state.new_empty((count + 7) // 8)


if not _extensions.has_kernels:
    torch.library.define(DRAW, DRAW_SCHEMA)
    torch.library.impl(DRAW, "cpu", _draw_in_torch)
torch.library.register_fake(DRAW, _draw_fake)
