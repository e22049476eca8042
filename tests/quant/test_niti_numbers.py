"""The arithmetic against whole numbers of any size, exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_odt.quant.niti_numbers import (
    added,
    bits_of,
    cross_entropy_gradient,
    dequantized,
    quantized,
    rescaled,
    shift_rounded,
)

whole = st.integers(-(1 << 30), 1 << 30)


def pseudo_stochastic(number: int, shift: int) -> int:
    """NITI, section 3.3, in Python's integers."""
    magnitude, half = abs(number), shift // 2
    lost = magnitude % (1 << shift)
    high, low = lost >> half, lost % (1 << half)
    if shift % 2:
        low *= 2
    found = (magnitude >> shift) + (high > low)
    return found if number >= 0 else -found


@given(st.lists(whole, min_size=1, max_size=20), st.integers(0, 30))
def test_shifts_drop_the_bits_that_they_say(numbers: list[int], shift: int) -> None:
    found = shift_rounded(torch.tensor(numbers), shift)
    assert found.tolist() == [pseudo_stochastic(number, shift) for number in numbers]
    narrow = shift_rounded(torch.tensor(numbers, dtype=torch.int32), shift)
    assert narrow.dtype == torch.int32 and narrow.tolist() == found.tolist()


@given(st.lists(st.integers(-(1 << 23), 1 << 23), min_size=1, max_size=20), st.integers(0, 20))
def test_nearest_is_to_even(numbers: list[int], shift: int) -> None:
    found = shift_rounded(torch.tensor(numbers), shift, "nearest")
    assert found.tolist() == [round(number / (1 << shift)) for number in numbers]


@pytest.mark.parametrize("shift", [4, 7, 12])
def test_pseudo_stochastic_rounding_is_unbiased(shift: int) -> None:
    """Over all numbers that share their upper bits, the mean error is below a part in the 2**(shift // 2) of a step."""
    numbers = torch.arange(5 << shift, 6 << shift)
    mean = float(shift_rounded(numbers, shift).double().mean() - numbers.double().mean() / (1 << shift))
    assert abs(mean) <= 2.0 ** -(shift // 2)
    down = float((numbers >> shift).double().mean() - numbers.double().mean() / (1 << shift))
    assert abs(down) > 0.45
    opposite = shift_rounded(-numbers, shift)
    assert torch.equal(opposite, -shift_rounded(numbers, shift))


@given(whole)
def test_bits_are_those_of_the_integer(number: int) -> None:
    assert bits_of(float(abs(number))) == (abs(number)).bit_length()


@given(st.lists(whole, min_size=1, max_size=30), st.integers(1, 7))
def test_rescaling_keeps_so_many_bits(numbers: list[int], bits: int) -> None:
    mantissas, shift = rescaled(torch.tensor(numbers), "pseudo_stochastic", bits)
    most = max(abs(number) for number in numbers)
    assert shift == max(0, most.bit_length() - bits)
    expected = [max(-127, min(127, pseudo_stochastic(number, shift))) for number in numbers]
    assert mantissas.tolist() == expected
    assert max(map(abs, mantissas.tolist())) <= 1 << bits


@given(st.lists(st.integers(-127, 127), min_size=1, max_size=30), st.integers(-100, 60))
def test_what_has_the_form_already_comes_back(numbers: list[int], exponent: int) -> None:
    values = dequantized(torch.tensor(numbers, dtype=torch.int8), exponent)
    for rounding in ("nearest", "pseudo_stochastic"):
        mantissas, found = quantized(values, rounding)  # type: ignore[arg-type]
        assert torch.equal(dequantized(mantissas, found), values)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=30))
def test_floats_are_off_by_half_a_step(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    mantissas, exponent = quantized(values)
    most = float(values.abs().max())
    if most == 0:
        assert not mantissas.any() and exponent == 0
        return
    assert exponent == math.frexp(most)[1] - 7
    steps = values.double() * 2.0**-exponent
    assert torch.equal(mantissas.double(), steps.round().clamp(-127, 127))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="the batch holds numbers that are not finite"):
        quantized(torch.tensor([1.0, bad]), name="the batch")


@given(
    st.lists(st.tuples(st.integers(-127, 127), st.integers(-127, 127)), min_size=1, max_size=20),
    st.integers(-20, 20),
    st.integers(-20, 20),
)
def test_sums_of_two_scales(pairs: list[tuple[int, int]], first_exponent: int, second_exponent: int) -> None:
    first, second = (torch.tensor(numbers, dtype=torch.int8) for numbers in zip(*pairs, strict=True))
    total = added(first, first_exponent, second, second_exponent, "nearest")
    exact = first.double() * 2.0**first_exponent + second.double() * 2.0**second_exponent
    step = 2.0 ** float(total.exponent)
    # Beyond sixteen bits the finer one is rounded to the coarser one's scale first.
    tolerance = 0.5 * step + (step if abs(first_exponent - second_exponent) > 16 else 0)
    found = total.mantissas.double() * step
    is_cut = total.mantissas.abs() == 127
    assert bool(((found - exact).abs() <= torch.where(is_cut, step, tolerance)).all())


@pytest.mark.parametrize("exponent", [-30, -9, -7, -6, -4, -2, 0, 2, 30])
def test_the_integer_cross_entropy_follows_the_real_one(exponent: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-127, 128, (16, 10), dtype=torch.int8, generator=generator)
    target = torch.randint(0, 10, (16,), generator=generator)
    gradient, gradient_exponent = cross_entropy_gradient(logits, exponent, target)
    assert gradient_exponent == -11
    real = (logits.double() * 2.0**exponent).requires_grad_()
    torch.nn.functional.cross_entropy(real, target, reduction="sum").backward()
    assert real.grad is not None
    found = gradient.double() * 2.0**-7
    assert float((found - real.grad).abs().max()) < 0.06
    assert bool((gradient.gather(1, target[:, None]) <= 0).all())


def test_the_gradient_of_a_batch_that_is_no_power_of_two() -> None:
    gradient, exponent = cross_entropy_gradient(torch.zeros(5, 4, dtype=torch.int8), 0, torch.tensor([0, 1, 2, 3, 0]))
    assert exponent == -10
    assert gradient[0].tolist() == [-96, 32, 32, 32]
