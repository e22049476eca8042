"""The frontier: nothing in it is beaten, everything in it is right."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from graphs import chain, normalised, random_graphs, residual
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning import registry
from torch_odt.planning.frontier import Point, frontier, ladder, non_dominated
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.melon import melon
from torch_odt.planning.objective import Goal
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.simulate import simulate
from torch_odt.planning.smallest import smallest

GRAPHS = {"chain": chain(16), "residual": residual(6), "normalised": normalised(5)}


def check(graph: TrainingGraph, costs: Costs, points: list[Point]) -> None:
    for more, less in pairwise(points):
        assert more.peak_bytes > less.peak_bytes
        assert more.seconds < less.seconds
    for point in points:
        found = simulate(graph, costs, point.schedule)
        assert (point.peak_bytes, point.seconds) == (found.peak_bytes, pytest.approx(found.seconds))


@pytest.mark.parametrize("name", GRAPHS)
def test_it_reaches_from_everything_kept_to_the_fewest_bytes(name: str) -> None:
    graph, costs = GRAPHS[name]
    points = frontier(graph, costs, rungs=4, time_limit_seconds=5.0)
    check(graph, costs, points)
    fastest = simulate(graph, costs, keep_all(graph, costs))
    assert points[0].seconds == pytest.approx(fastest.seconds)
    assert points[0].peak_bytes <= fastest.peak_bytes
    assert points[-1].peak_bytes == smallest(graph, costs)[1]
    assert len(points) >= 4


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_graphs(), st.sampled_from((("auto",), ("melon",), ("sage", "dtr"))))
def test_nothing_in_it_is_beaten(case: tuple[TrainingGraph, Costs], planners: tuple[str, ...]) -> None:
    graph, costs = case
    check(graph, costs, frontier(graph, costs, planners=planners, rungs=2, time_limit_seconds=0.2))


def test_without_time_the_ends_are_there() -> None:
    graph, costs = GRAPHS["residual"]
    points = frontier(graph, costs, planners=("melon", "sage"), time_limit_seconds=0.0)
    assert points[0].planner == "keep-all"
    assert points[-1].planner in ("melon", "sage")
    assert len(points) <= 3


def test_bytes_are_those_of_the_footprint() -> None:
    graph, costs = GRAPHS["chain"]

    def footprint(schedule: Schedule) -> int:
        return 2 * simulate(graph, costs, schedule).peak_bytes

    points = frontier(graph, costs, planners=("melon",), rungs=3, footprint=footprint)
    assert [point.peak_bytes for point in points] == [footprint(point.schedule) for point in points]
    assert len(points) >= 3


def test_a_planner_is_told_the_goal_and_when_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs = GRAPHS["chain"]
    told: list[tuple[str, float, float]] = []

    def solving(
        graph: TrainingGraph,
        costs: Costs,
        budget_bytes: int,
        *,
        objective: str = "seconds",
        deadline_seconds: float = math.inf,
        time_limit_seconds: float = 60.0,
    ) -> Schedule:
        told.append((objective, deadline_seconds, time_limit_seconds))
        return melon(graph, costs, budget_bytes)

    monkeypatch.setitem(registry._PLANNERS, "solving", solving)
    goal = Goal("joules", 1000.0)
    points = frontier(graph, replace(costs, watts=2.0), planners=("solving",), goal=goal, time_limit_seconds=6.0)
    assert len(points) > 1 and len(told) > 2
    assert {(objective, deadline) for objective, deadline, _ in told} == {("joules", 1000.0)}
    assert max(limit for *_, limit in told) <= 6.0


def test_rungs_and_planners_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def greedy(graph: TrainingGraph, costs: Costs, budget_bytes: int, *, time_limit_seconds: float = 60.0) -> Schedule:
        clock[0] += time_limit_seconds
        return melon(graph, costs, budget_bytes)

    monkeypatch.setitem(registry._PLANNERS, "greedy", greedy)
    monkeypatch.setitem(registry._PLANNERS, "as greedy", greedy)
    assert frontier(*GRAPHS["chain"], planners=("greedy", "as greedy"), time_limit_seconds=6.0)
    assert 1.0 < clock[0] <= 6.0


def test_an_unknown_planner_is_refused_at_once() -> None:
    with pytest.raises(PlanError, match="nonsense"):
        frontier(*GRAPHS["chain"], planners=("auto", "nonsense"), time_limit_seconds=0.0)


def test_a_ladder_lies_between_its_ends() -> None:
    assert ladder(100, 200, 4) == [180, 160, 140, 120]
    assert ladder(7, 7, 3) == [7]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))))
def test_what_is_left_out_is_beaten_by_what_is_left(costs: list[tuple[int, int]]) -> None:
    left = non_dominated(costs, lambda cost: (cost[0], float(cost[1])))
    assert set(left) <= set(costs)
    for nbytes, seconds in costs:
        assert any(b <= nbytes and s <= seconds for b, s in left)
    assert all(more[0] > less[0] and more[1] < less[1] for more, less in pairwise(left))
