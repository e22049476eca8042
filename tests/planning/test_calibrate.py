"""Planners aim below a budget by what is taken on top of it, and return what takes least where nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from graphs import chain, normalised
from hypothesis import given
from hypothesis import strategies as st

from torch_odt.planning import melon as melon_module
from torch_odt.planning.calibrate import Attempt, calibrated, within
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.melon import melon
from torch_odt.planning.pool import Layout, pack
from torch_odt.planning.registry import get_planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.simulate import simulate


def planner(counted_by: Callable[[int], int], gap_bytes: int = 0) -> Callable[[int], Attempt]:
    """A planner whose schedules have the bytes that they take for a name."""

    def aim_at(aim_bytes: int) -> Attempt:
        counted_bytes = counted_by(aim_bytes)
        taken_bytes = counted_bytes + gap_bytes
        return Attempt(Schedule((), 0, str(taken_bytes)), counted_bytes, taken_bytes)

    return aim_at


@given(st.integers(100, 10_000), st.integers(0, 20))
def test_a_gap_is_allowed_for(budget_bytes: int, gap_bytes: int) -> None:
    taken = int(calibrated(planner(lambda aim: min(aim, 10_000), gap_bytes), budget_bytes).planner)
    assert budget_bytes - gap_bytes - budget_bytes // 500 - 1 <= taken <= budget_bytes


@given(st.integers(500, 9000), st.integers(1, 400))
def test_what_takes_least_is_found_below_what_can_be_reached(floor_bytes: int, budget_bytes: int) -> None:
    """Aimed too low, a greedy planner takes as much as if nothing had been asked of it."""
    taken = int(
        calibrated(planner(lambda aim: min(aim, 10_000) if aim >= floor_bytes else 10_000), budget_bytes).planner
    )
    assert floor_bytes <= taken <= floor_bytes + 10_000 // 2**6 + 1


def test_what_fits_is_found_far_below_what_takes_a_little_too_much() -> None:
    def aim_at(aim_bytes: int) -> Attempt:
        counted_bytes, taken_bytes = (aim_bytes, 1001) if aim_bytes >= 600 else (500, 500)
        return Attempt(Schedule((), 0, str(taken_bytes)), counted_bytes, taken_bytes)

    assert calibrated(aim_at, 1000).planner == "500"


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_melon_allows_for_gaps_between_addresses(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_gaps(*args: Any, **options: Any) -> Layout:
        layout = pack(*args, **options)
        return replace(layout, address_peak_bytes=int(1.25 * layout.live_peak_bytes))

    graph, costs = normalised(8)
    budget = int(share * simulate(graph, costs, keep_all(graph, costs)).peak_bytes)
    assert simulate(graph, costs, melon(graph, costs, budget)).peak_bytes <= budget
    monkeypatch.setattr(melon_module, "pack", with_gaps)
    found = simulate(graph, costs, melon(graph, costs, budget))
    assert found.peak_bytes + 0.25 * found.arena_peak_bytes <= 1.001 * budget


@pytest.mark.parametrize("name", ["dtr", "sage", "melon", "min-cut"])
def test_a_planner_can_be_held_to_a_footprint(name: str) -> None:
    graph, costs = chain(24)

    def footprint(schedule: Schedule) -> int:
        return int(1.2 * simulate(graph, costs, schedule).peak_bytes)

    budget = int(0.75 * footprint(keep_all(graph, costs)))
    assert footprint(get_planner(name)(graph, costs, budget)) > budget
    assert footprint(within(get_planner(name), graph, costs, budget, footprint)) <= budget
