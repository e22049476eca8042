"""When more memory is worth another plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_odt.runtime.growth import Growth, Known, Need, best_known

LEVEL = 1000
AFTER_SECONDS = 5.0


class Watched:
    """Growth above 100 bytes, looked at once a second."""

    def __init__(self, need: Need | None, known: dict[int, int | Known] | None = None) -> None:
        self.growth = Growth(AFTER_SECONDS)
        self.need = need
        self.known = {key: plan if isinstance(plan, Known) else Known(plan) for key, plan in (known or {}).items()}
        self.now = 0.0

    def look(self, wanted: int) -> int | None:
        self.now += 1.0
        return self.growth.look(self.now, LEVEL + wanted, LEVEL + 100, LEVEL, self.need, self.known)

    def first(self, wanted: int, most: int = 100) -> tuple[int, int | None]:
        """After how many looks it grows, and to what."""
        for count in range(1, most):
            if (grown := self.look(wanted)) is not None:
                return count, grown - LEVEL
        return most, None


def need(slowdown: float | None, plan_seconds: float = 0.0, taken: int = 95) -> Need:
    return Need(LEVEL + taken, slowdown, plan_seconds)


def test_what_has_all_it_can_use_never_grows() -> None:
    assert Watched(need(1.01)).first(400) == (100, None)


def test_what_holds_more_than_it_may_does() -> None:
    assert Watched(need(1.0, taken=300)).first(400) == (6, 400), "it had all, and some of it was taken from it"


def test_a_new_plan_waits_until_it_was_missed() -> None:
    # Twice the bytes win three quarters of a fifth of the time.
    assert Watched(need(1.25, plan_seconds=1.4)).first(200) == (11, 200)
    assert Watched(need(1.25, plan_seconds=0.5)).first(200) == (6, 200), "but not before it has been there for a while"
    assert Watched(need(None, plan_seconds=1.5)).first(200) == (6, 200)


def test_what_takes_long_to_hold_waits_until_it_was_missed() -> None:
    known = {LEVEL + 100: LEVEL + 95, LEVEL + 200: LEVEL + 195}
    # As above: 0.15 s are lost each second, and 100 bytes more are held.
    held = Need(LEVEL + 95, 1.25, 0.5, seconds_per_byte=0.014)
    assert Watched(held, known).first(200) == (11, 200)
    assert Watched(replace(held, seconds_per_byte=0.005), known).first(200) == (6, 200)
    assert Watched(replace(held, seconds_per_byte=0.009)).first(200) == (11, 200), "beside what the plan takes"


@given(
    slowdown=st.floats(1.03, 4.0),
    plan_seconds=st.floats(0.0, 5.0),
    seconds_per_byte=st.floats(0.0, 0.05),
    wanted=st.integers(110, 1000),
)
def test_it_never_costs_more_than_twice_what_the_future_would_have(
    slowdown: float, plan_seconds: float, seconds_per_byte: float, wanted: int
) -> None:
    change_seconds = plan_seconds + seconds_per_byte * min(wanted - 95, 95)
    looks, grown = Watched(replace(need(slowdown, plan_seconds), seconds_per_byte=seconds_per_byte)).first(wanted, 1000)
    share = need(slowdown).lost_share(100, wanted)
    lost_before_the_last_look = share * (looks - 2)
    assert grown == wanted or lost_before_the_last_look <= change_seconds
    assert looks <= 6 or lost_before_the_last_look <= change_seconds


def test_what_nobody_will_use_is_not_waited_for() -> None:
    much = Watched(Need(LEVEL + 95, 1.25, 0.5, seconds_per_byte=0.005)).first(10**9)
    assert much == (6, 10**9)


def test_a_plan_that_exists_is_taken_as_soon_as_it_fits_for_long_enough() -> None:
    known = {LEVEL + 100: LEVEL + 95, LEVEL + 500: LEVEL + 180, LEVEL + 150: LEVEL + 140}
    assert Watched(need(1.1, plan_seconds=1e6), known).first(200) == (6, 500)
    assert Watched(need(1.1, plan_seconds=1e6), known).first(170) == (6, 150)
    assert Watched(need(1.1, plan_seconds=1e6), known).first(120) == (100, None)


def test_a_small_plan_that_pays_does_not_wait_for_a_large_one() -> None:
    known = {LEVEL + 500: LEVEL + 480, LEVEL + 150: LEVEL + 140}
    # A fifth is lost; half of that would not be with 140 bytes, nearly all of it with 480.
    held = Need(LEVEL + 95, 1.25, seconds_per_byte=0.01)
    assert Watched(held, known).first(490) == (6, 150)


def measured(slowdown: float, taken: int, at: float = 0.0) -> Known:
    return Known(LEVEL + taken, slowdown, at)


def test_what_was_measured_comes_before_what_was_predicted() -> None:
    need = Need(LEVEL + 95, 1.25, seconds_per_byte=0.002, step_seconds=1.0, measured_slowdown=1.1)
    # 0.2 s to hold 100 bytes: a second's prediction is 0.15, measured are 0.018, and nothing, and more.
    assert Watched(need, {LEVEL + 200: Known(LEVEL + 195)}).first(200) == (6, 200)
    assert Watched(need, {LEVEL + 200: measured(1.08, 195)}).first(200) == (12, 200)
    assert Watched(need, {LEVEL + 200: measured(1.2, 195)}).first(200) == (100, None)
    assert Watched(need, {LEVEL + 200: measured(0.5, 195)}).first(200) == (6, 200)


def test_what_was_measured_long_ago_says_nothing() -> None:
    need = Need(LEVEL + 95, 1.25, seconds_per_byte=0.002, step_seconds=1.0, measured_slowdown=1.1)
    looks, grown = Watched(need, {LEVEL + 200: measured(1.2, 195)}).first(200, 200)
    assert grown == 200 and 120 < looks < 125


def test_no_new_plan_is_faster_than_one_for_more() -> None:
    need = Need(LEVEL + 95, 1.25, plan_seconds=0.5, step_seconds=1.0, measured_slowdown=1.1)
    assert Watched(need).first(200) == (6, 200)
    assert Watched(need, {LEVEL + 400: measured(1.1, 390)}).first(200) == (100, None)
    assert Watched(need, {LEVEL + 150: measured(1.1, 140)}).first(200) == (6, 200), "but than one for less"


def test_what_passes_between_two_steps_is_not_lost() -> None:
    assert Watched(Need(LEVEL + 95, 1.25, plan_seconds=1.4, step_seconds=0.5)).first(200) == (20, 200)


def test_a_dip_is_forgotten_when_it_is_long_ago() -> None:
    watched = Watched(need(None, plan_seconds=3.0))
    assert [watched.look(wanted) for wanted in (400, 110, 400, 400)] == [None] * 4
    found = [watched.look(400) for _ in range(6)]
    assert found[2] is None and found[-1] == LEVEL + 400, "and not 110"


def test_when_less_is_allowed_it_begins_anew() -> None:
    watched = Watched(need(None))
    for _ in range(5):
        watched.look(400)
    watched.growth.stop()
    assert watched.first(400) == (6, 400)
    assert watched.growth.seconds(watched.now) == pytest.approx(AFTER_SECONDS)


def test_without_a_plan_it_only_waits() -> None:
    assert Watched(None).first(200) == (6, 200)


def test_of_plans_that_exist_the_largest_that_fits_is_the_best() -> None:
    known = {10: Known(8), 20: Known(9), 30: Known(25)}
    assert best_known(known, 9, 24) == 20
    assert best_known(known, 1, 30) == 30
    assert best_known(known, 10, 24) is None
    assert best_known({}, 0, 100) is None
