"""Masks as bits: an eighth of the bytes that torch gives to booleans."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_odt import _extensions

PACK, PACK_SCHEMA = "torch_odt::pack_bits", "(Tensor mask) -> Tensor"
UNPACK, UNPACK_SCHEMA = "torch_odt::unpack_bits", "(Tensor packed, int first, int count) -> Tensor"


def pack_bits(mask: Tensor) -> Tensor:
    """Packs booleans, eight a byte, the first in the lowest bit.

    When to choose it: for a mask that has to outlive the operator that made it, such as dropout's.

    Args:
        mask: bool, contiguous, of any shape.

    Returns:
        uint8 of shape ((elements + 7) // 8,); the bits behind the last element are 0.

    Raises:
        RuntimeError: the dtype is another, or the mask is not contiguous.

    Example:
        >>> pack_bits(torch.tensor([True, False, True]))
        tensor([5], dtype=torch.uint8)
    """
    return torch.ops.torch_odt.pack_bits(mask)


def unpack_bits(packed: Tensor, first: int, count: int) -> Tensor:
    """Unpacks `count` of the booleans that `pack_bits` packed, from the one numbered `first` on.

    Args:
        packed: uint8, contiguous.
        first: from 0; it need not be the first of a byte.
        count: at most what there is behind `first`.

    Returns:
        bool of shape (count,).

    Raises:
        RuntimeError: the dtype is another, or there are not so many bits.

    Example:
        >>> unpack_bits(torch.tensor([5], dtype=torch.uint8), 1, 2)
        tensor([False,  True])
    """
    return torch.ops.torch_odt.unpack_bits(packed, first, count)


def _weights(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _pack_in_torch(mask: Tensor) -> Tensor:
    """As the compiled operator, in plain torch."""
    if mask.dtype != torch.bool:
        raise RuntimeError("pack_bits: the mask must be boolean")
    if not mask.is_contiguous():
        raise RuntimeError("pack_bits: the mask must be contiguous")
    flat = torch.nn.functional.pad(mask.view(torch.uint8).flatten(), (0, -mask.numel() % 8))
    return (flat.view(-1, 8) * _weights(mask.device)).sum(1, dtype=torch.uint8)


def _unpack_in_torch(packed: Tensor, first: int, count: int) -> Tensor:
    """As the compiled operator, in plain torch."""
    if packed.dtype != torch.uint8:
        raise RuntimeError("unpack_bits: packed bits must be uint8")
    if not packed.is_contiguous():
        raise RuntimeError("unpack_bits: packed bits must be contiguous")
    if first < 0 or count < 0 or first + count > 8 * packed.numel():
        raise RuntimeError("unpack_bits: there are not so many bits")
    parts = packed.flatten()[first // 8 : (first + count + 7) // 8]
    bits = parts.unsqueeze(1).bitwise_and(_weights(packed.device)).ne(0).flatten()
    return bits[first % 8 : first % 8 + count].clone()


def _pack_fake(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.numel() + 7) // 8, dtype=torch.uint8)


def _unpack_fake(packed: Tensor, first: int, count: int) -> Tensor:
    return packed.new_empty(count, dtype=torch.bool)


if not _extensions.has_kernels:
    torch.library.define(PACK, PACK_SCHEMA)
    torch.library.impl(PACK, "cpu", _pack_in_torch)
    torch.library.define(UNPACK, UNPACK_SCHEMA)
    torch.library.impl(UNPACK, "cpu", _unpack_in_torch)
torch.library.register_fake(PACK, _pack_fake)
torch.library.register_fake(UNPACK, _unpack_fake)
