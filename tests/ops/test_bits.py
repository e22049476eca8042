"""Booleans as bits, against numpy's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_odt.ops import bits, pack_bits, unpack_bits

PACKERS = [pack_bits, bits._pack_in_torch]
UNPACKERS = [unpack_bits, bits._unpack_in_torch]


def mask_of(count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 65, 8 * 8192 * 3 + 5])
def test_packed_as_numpy_packs(pack: Callable[..., Tensor], count: int) -> None:
    mask = mask_of(count)
    assert np.array_equal(pack(mask).numpy(), np.packbits(mask.numpy(), bitorder="little"))


@pytest.mark.parametrize("unpack", UNPACKERS)
@given(count=st.integers(0, 300), data=st.data())
def test_any_run_comes_back(unpack: Callable[..., Tensor], count: int, data: st.DataObject) -> None:
    mask = mask_of(count)
    first = data.draw(st.integers(0, count))
    length = data.draw(st.integers(0, count - first))
    assert torch.equal(unpack(pack_bits(mask), first, length), mask[first : first + length])


@pytest.mark.parametrize("unpack", UNPACKERS)
def test_threads_cut_a_long_run_anywhere(unpack: Callable[..., Tensor]) -> None:
    mask = mask_of(8 * 8192 * 3 + 5)
    assert torch.equal(unpack(pack_bits(mask), 3, len(mask) - 4), mask[3:-1])


def test_shapes_for_tracing() -> None:
    packed = pack_bits(mask_of(19))
    torch.library.opcheck(torch.ops.torch_odt.pack_bits, (mask_of(19),))
    torch.library.opcheck(torch.ops.torch_odt.unpack_bits, (packed, 2, 9))


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize(
    ("mask", "complaint"), [(torch.ones(3), "boolean"), (mask_of(16).view(4, 4).t(), "contiguous")], ids=str
)
def test_what_cannot_be_packed(pack: Callable[..., Tensor], mask: Tensor, complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        pack(mask)


@pytest.mark.parametrize("unpack", UNPACKERS)
@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, -1), (0, 25), (24, 1), (1, 2**62)])
def test_more_bits_than_there_are(unpack: Callable[..., Tensor], first: int, count: int) -> None:
    with pytest.raises(RuntimeError, match="not so many bits"):
        unpack(pack_bits(mask_of(19)), first, count)


@pytest.mark.parametrize("unpack", UNPACKERS)
def test_bits_of_another_type(unpack: Callable[..., Tensor]) -> None:
    with pytest.raises(RuntimeError, match="uint8"):
        unpack(torch.ones(3), 0, 1)
    with pytest.raises(RuntimeError, match="contiguous"):
        unpack(torch.ones(4, 2, dtype=torch.uint8).t(), 0, 1)
