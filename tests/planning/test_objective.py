"""Joules in the place of seconds, and deadlines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import MB, chain
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_odt.capture.costs import Costs, TransferCosts
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.melon import melon
from torch_odt.planning.objective import Goal, schedule_for
from torch_odt.planning.schedule import PageOut, Schedule
from torch_odt.planning.simulate import simulate

# A transfer takes sixty times as long as the op that brings the same back, and less than its joules.
SPEED = MB / 30
TRANSFERS = TransferCosts(0.0, SPEED, 0.0, SPEED, 1 << 40, overlaps=False, watts=0.01)


@pytest.fixture(name="case")
def _case() -> tuple[TrainingGraph, Costs]:
    graph, costs = chain(24)
    return graph, replace(costs, transfers=TRANSFERS, watts=1.0)


def half(case: tuple[TrainingGraph, Costs]) -> int:
    return simulate(*case, keep_all(*case)).peak_bytes // 2


def pages(schedule: Schedule) -> bool:
    return any(isinstance(i, PageOut) for i in schedule.instructions)


def test_seconds_and_joules_choose_otherwise(case: tuple[TrainingGraph, Costs]) -> None:
    fast = schedule_for(melon, *case, half(case))
    frugal = schedule_for(melon, *case, half(case), objective="joules")
    assert not pages(fast) and pages(frugal)
    hasty, sparing = simulate(*case, fast), simulate(*case, frugal)
    assert hasty.seconds < sparing.seconds and sparing.joules < hasty.joules
    assert max(hasty.peak_bytes, sparing.peak_bytes) <= half(case)


def test_joules_are_those_of_ops_and_transfers(case: tuple[TrainingGraph, Costs]) -> None:
    found = simulate(*case, schedule_for(melon, *case, half(case), objective="joules"))
    moved = (found.written_bytes + found.read_bytes) / SPEED
    assert found.wait_seconds == pytest.approx(moved)
    assert found.joules == pytest.approx(found.seconds - moved + 0.01 * moved)


@settings(max_examples=20, deadline=None)
@given(share=st.floats(0.0, 1.0))
def test_a_deadline_is_met_if_the_planner_can(share: float) -> None:
    graph, costs = chain(24)
    case = (graph, replace(costs, transfers=TRANSFERS, watts=1.0))
    fast, frugal = (
        simulate(*case, schedule_for(melon, *case, half(case), objective=objective))  # type: ignore[arg-type]
        for objective in ("seconds", "joules")
    )
    deadline = fast.seconds + share * (frugal.seconds - fast.seconds)
    schedule = schedule_for(melon, *case, half(case), objective="joules", deadline_seconds=deadline)
    found = simulate(*case, schedule)
    assert found.seconds <= deadline and found.peak_bytes <= half(case)
    assert frugal.joules <= found.joules <= fast.joules


def test_an_impossible_deadline_gives_the_fastest(case: tuple[TrainingGraph, Costs]) -> None:
    schedule = schedule_for(melon, *case, half(case), objective="joules", deadline_seconds=0.0)
    assert schedule == melon(*case, half(case))


def test_what_is_refused(case: tuple[TrainingGraph, Costs]) -> None:
    graph, costs = case
    with pytest.raises(PlanError, match="joules need the watts of the processor"):
        schedule_for(melon, graph, replace(costs, watts=0.0), 1, objective="joules")
    with pytest.raises(PlanError, match="there is no objective 'litres'; there are seconds, joules"):
        schedule_for(melon, graph, costs, 1, objective="litres")  # type: ignore[arg-type]


def test_what_is_in_time_comes_first() -> None:
    steps = [(3.0, 1.0), (1.0, 5.0), (2.0, 2.0), (4.0, 0.5)]

    def sorted_by(goal: Goal) -> list[tuple[float, float]]:
        return sorted(steps, key=lambda step: goal.rank(*step))

    assert sorted_by(Goal()) == sorted(steps)
    assert sorted_by(Goal("joules")) == sorted(steps, key=lambda step: step[1])
    assert sorted_by(Goal("joules", 2.5)) == [(2.0, 2.0), (1.0, 5.0), (3.0, 1.0), (4.0, 0.5)]
    assert Goal("joules", 2.5).for_part(0.5) == Goal("joules", 1.25)


def test_goals_that_are_none() -> None:
    with pytest.raises(PlanError, match="there is no objective 'litres'"):
        Goal("litres")  # type: ignore[arg-type]
    for deadline in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="a number of seconds above 0"):
            Goal(deadline_seconds=deadline)
