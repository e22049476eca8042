"""When a scale is looked at."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_odt.quant.rescaling import WIDTH, Rescaling


def run(rescaling: Rescaling, exponents: list[int], clipped: set[int] | None = None) -> tuple[Rescaling, list[int]]:
    """Batches with the exponents that a check would find; returns which batches looked."""
    looked = []
    for batch, exponent in enumerate(exponents):
        if rescaling.is_due:
            looked.append(batch)
            rescaling = rescaling.after_check(exponent)
        else:
            rescaling = rescaling.after_batch(was_clipped=batch in (clipped or set()))
    return rescaling, looked


def test_the_period_doubles_while_the_scale_holds() -> None:
    rescaling, looked = run(Rescaling(longest_period=8), [3] * 40)
    assert looked == [0, 1, 3, 7, 15, 23, 31, 39]
    assert (rescaling.period, rescaling.batches, rescaling.checks, rescaling.changes) == (8, 40, 8, 0)


def test_a_change_brings_it_back_to_every_batch() -> None:
    rescaling, looked = run(Rescaling(longest_period=8), [3] * 7 + [4] * 13)
    assert looked == [0, 1, 3, 7, 8, 10, 14]
    assert (rescaling.exponent, rescaling.changes) == (4, 1)


def test_clipping_brings_it_back_to_every_batch() -> None:
    rescaling, looked = run(Rescaling(longest_period=8), [3] * 12, clipped={5})
    assert looked == [0, 1, 3, 6, 8]
    assert rescaling.clipped_batches == 1


def test_a_period_of_one_looks_at_every_batch() -> None:
    assert run(Rescaling(longest_period=1), [3] * 5)[1] == [0, 1, 2, 3, 4]


def test_zeros_teach_nothing() -> None:
    rescaling = Rescaling().after_check(0, is_zero=True)
    assert not rescaling.is_known and rescaling.is_due and rescaling.checks == 1
    held = Rescaling().after_check(5)
    assert held.after_check(0, is_zero=True).exponent == 5


def test_the_shift_follows_the_held_exponent() -> None:
    held = Rescaling().after_check(-3)
    assert [held.shift(exponent) for exponent in (-10, -3, 0, -60)] == [7, 0, 0, 30]
    assert Rescaling().shift(-10) == 0


def test_slack_keeps_a_scale_that_could_be_finer_by_a_bit() -> None:
    for slack, expected in ((0, 4), (1, 5)):
        held = Rescaling(slack_bits=slack).after_check(0)
        assert held.fitting_shift(largest=2.0**11 - 1, bits=7, sums_exponent=-5) == expected
        assert held.fitting_shift(largest=2.0**12, bits=7, sums_exponent=-5) == 6
        assert held.fitting_shift(largest=0, bits=7, sums_exponent=-5) == 5


@given(st.integers(1, 99), st.integers(0, 3), st.lists(st.integers(-40, 40), max_size=20))
def test_the_state_is_a_row_of_numbers(longest: int, slack: int, exponents: list[int]) -> None:
    rescaling, _ = run(Rescaling(longest, slack), exponents)
    row = rescaling.row()
    assert row.shape == (WIDTH,) and row.dtype == torch.float64
    assert Rescaling.of(row) == rescaling
