"""Shifts of sums, clamps' gradients and updates in int8: the compiled operators against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_odt.ops import int8_integers, int8_keep_between, int8_shift_sums, int8_take_off_

odt = torch.ops.torch_odt
SHAPES = [(0,), (5,), (130,), (3, 4, 5, 6), (64, 3, 3, 3), (70, 1000)]
BOUNDS = [(0, 128), (0, 50), (-1000, 20), (3, 3), (-128, 127), (0, 1 << 40), (127, 500)]


def sums_of(shape: tuple[int, ...], most: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most, shape, generator=draw).to(torch.int32)


def bytes_of(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def layouts(tensor: Tensor) -> list[Tensor]:
    last = [tensor.contiguous(memory_format=torch.channels_last)] if tensor.dim() == 4 else []
    return [tensor, *last]


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride() and ours.dtype == theirs.dtype


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rounding", [0, 2])
def test_a_shift_has_the_bits_of_plain_torch(shape: tuple[int, ...], rounding: int, threads: int) -> None:
    for most in (100, 70000, (1 << 31) - 1):
        for sums in layouts(sums_of(shape, most)):
            for shift in (0, 1, 5, 11, 17, 30):
                found = odt.int8_shift_sums(sums, shift, rounding)
                assert_same(found, int8_integers._shift_plain(sums, shift, rounding))


@given(sums=st.lists(st.integers(-(1 << 31) + 1, (1 << 31) - 1), max_size=40), shift=st.integers(0, 30))
def test_any_sums(sums: list[int], shift: int) -> None:
    given_sums = torch.tensor(sums, dtype=torch.int32)
    for rounding in (0, 2):
        found = odt.int8_shift_sums(given_sums, shift, rounding)
        assert_same(found, int8_integers._shift_plain(given_sums, shift, rounding))


def test_a_shift_is_within_a_step_of_the_truth() -> None:
    sums = sums_of((5000,), 100 << 9)
    away = (int8_shift_sums(sums, 9).double() - sums.double() / 512).abs()
    assert float(away.max()) < 1
    assert float((int8_shift_sums(sums, 9, "nearest").double() - sums.double() / 512).abs().max()) <= 0.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_lies_between_bounds_is_kept(shape: tuple[int, ...], threads: int) -> None:
    for values in layouts(bytes_of(shape, 1)):
        others = bytes_of(shape, 2)
        for low, high in BOUNDS:
            found = int8_keep_between(values, others, low, high)
            assert_same(found, int8_integers._keep_plain(values, others, low, high))
            wide = others.long()
            assert torch.equal(found, values * ((wide > low) & (wide < high)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_are_taken_off(shape: tuple[int, ...]) -> None:
    for weight in layouts(bytes_of(shape, 1).clamp(min=-127)):
        steps, before = bytes_of(shape, 2), weight.clone()
        plain, version = weight.clone(), weight._version
        changed = int8_take_off_(weight, steps)
        assert changed == bool(int8_integers._take_off_plain(plain, steps)) == bool(steps.any())
        assert torch.equal(weight, plain) and (weight._version > version) == changed
        assert torch.equal(weight.int(), (before.int() - steps).clamp(-127, 127))


def test_a_weight_stays_where_no_step_is_taken() -> None:
    weight = torch.full((3,), -128, dtype=torch.int8)
    version = weight._version
    assert not int8_take_off_(weight, torch.zeros(3, dtype=torch.int8))
    assert weight.tolist() == [-128] * 3 and weight._version == version


def test_bad_input_is_named() -> None:
    values = bytes_of((2, 3), 1)
    for shift_sums in (odt.int8_shift_sums, int8_integers._shift_plain):
        with pytest.raises(RuntimeError, match="must be an int32"):
            shift_sums(values.long(), 1, 0)
        with pytest.raises(RuntimeError, match="from 0 to 30"):
            shift_sums(values.int(), 31, 0)
        with pytest.raises(RuntimeError, match="rounding must be"):
            shift_sums(values.int(), 1, 1)
    for take_off in (odt.int8_take_off_, int8_integers._take_off_plain):
        with pytest.raises(RuntimeError, match="same shape"):
            take_off(values, values[1:])
        with pytest.raises(RuntimeError, match="must be contiguous"):
            take_off(values.t(), values.t())
    for keep in (odt.int8_keep_between, int8_integers._keep_plain):
        with pytest.raises(RuntimeError, match="same shape"):
            keep(values, values.int(), 0, 1)


def test_they_are_registered_as_torch_wants_it() -> None:
    values = bytes_of((2, 3, 4, 4), 1)
    torch.library.opcheck(odt.int8_shift_sums.default, (values.int(), 3, 2))
    torch.library.opcheck(odt.int8_keep_between.default, (values, values, 0, 128))
    torch.library.opcheck(odt.int8_take_off_.default, (values, values))
