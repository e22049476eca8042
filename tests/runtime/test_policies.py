"""What policies say by a reading."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from readings import MIB, reading

import torch_odt as odt
from torch_odt.runtime import ControlGroupHeadroom, Fixed, ShareOfAvailable, Smallest
from torch_odt.runtime.policies import policy_of

LEVEL = 80 * MIB


def test_fixed() -> None:
    assert Fixed("300MiB").allowed_bytes(reading(), LEVEL) == 300 * MIB
    assert Fixed(odt.Budget("300MiB", of="training")).allowed_bytes(reading(), LEVEL) == 380 * MIB
    with pytest.raises(ValueError, match="use ShareOfAvailable"):
        Fixed("80%")


@given(own=st.integers(0, 400), share=st.floats(0.1, 1.0))
def test_what_training_holds_itself_does_not_change_its_share(own: int, share: float) -> None:
    now = reading(process=80 + own, available=500 - own)
    assert ShareOfAvailable(share).allowed_bytes(now, LEVEL) == LEVEL + int(share * 500 * MIB)


def test_reserve_and_floor() -> None:
    assert ShareOfAvailable(1.0, reserve="100MiB").allowed_bytes(reading(80, 500), LEVEL) == 480 * MIB
    assert ShareOfAvailable(1.0, reserve="600MiB").allowed_bytes(reading(80, 500), LEVEL) == LEVEL
    assert ShareOfAvailable(0.5, floor="400MiB").allowed_bytes(reading(80, 500), LEVEL) == 480 * MIB


def test_the_headroom_of_a_control_group() -> None:
    policy = ControlGroupHeadroom(reserve="16MiB", floor="10MiB")
    assert policy.allowed_bytes(reading(), LEVEL) is None
    assert policy.allowed_bytes(reading(process=100, group=(400, 250)), LEVEL) == (100 + 150 - 16) * MIB
    assert policy.allowed_bytes(reading(process=100, group=(400, 399)), LEVEL) == 90 * MIB


def test_the_smallest_of_several() -> None:
    policy = Smallest("1GiB", ControlGroupHeadroom(), lambda _: 200 * MIB)
    assert policy.allowed_bytes(reading(), LEVEL) == 200 * MIB
    assert policy.allowed_bytes(reading(process=100, group=(400, 350)), LEVEL) == 134 * MIB
    assert Smallest(ControlGroupHeadroom()).allowed_bytes(reading(), LEVEL) is None
    with pytest.raises(ValueError, match="no policies"):
        Smallest()


def test_what_stands_for_a_policy() -> None:
    assert policy_of("75%") == ShareOfAvailable(0.75)
    assert policy_of(5 << 20).allowed_bytes(reading(), LEVEL) == 5 << 20
    assert policy_of(Fixed("1GiB")) == Fixed("1GiB")


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (3.5, TypeError, "a policy, a budget or a function"),
        (ShareOfAvailable, TypeError, "not the class ShareOfAvailable"),
        ("many", ValueError, "not a number of bytes"),
    ],
)
def test_what_does_not(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        policy_of(value)


def test_shares_out_of_range() -> None:
    for share in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            ShareOfAvailable(share)
    with pytest.raises(ValueError, match="not a number of bytes"):
        ShareOfAvailable(reserve="much")


def test_a_share_is_a_number() -> None:
    with pytest.raises(TypeError, match="share is a number, not '80%'"):
        ShareOfAvailable("80%")  # type: ignore[arg-type]
