"""More time: every planner is tried, nothing gets worse by it, and what takes a time limit is given one."""

from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Any

import pytest
from graphs import chain, normalised, random_graphs, residual
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError, ScheduleError
from torch_odt.planning.auto import auto
from torch_odt.planning.calibrate import within
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.registry import _BUILT_IN, built_in_names, get_planner, limited, takes_time_limit
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.simulate import simulate
from torch_odt.planning.smallest import smallest
from torch_odt.planning.thorough import Best, improve_until

Case = tuple[TrainingGraph, Costs]
GRAPHS = {"chain": chain(24), "residual": residual(10), "normalised": normalised(8)}
OTHERS = [name for name in built_in_names() if name != "auto" and not takes_time_limit(get_planner(name))]


def peak(case: Case, schedule: Schedule) -> int:
    return simulate(*case, schedule).peak_bytes


def seconds(case: Case, schedule: Schedule) -> float:
    return simulate(*case, schedule).seconds


def budget_of(case: Case, share: float) -> int:
    least = smallest(*case)[1]
    return int(least + share * (peak(case, keep_all(*case)) - least))


def improved(case: Case, budget_bytes: int, limit_seconds: float = 10.0) -> Schedule:
    """From the schedule of the fewest bytes alone, with no other search."""
    start = smallest(*case)[0]
    best = Best(*case, budget_bytes, lambda schedule: peak(case, schedule), "keep", start)
    return improve_until(time.perf_counter() + limit_seconds, best, lambda _: start)


def only(monkeypatch: pytest.MonkeyPatch, **planners: Any) -> None:
    """Of the built-in planners there are no others."""
    module = ModuleType("planners_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("torch_odt.planning.registry._BUILT_IN", dict.fromkeys(planners, module.__name__))
    monkeypatch.setattr("torch_odt.planning.registry._PLANNERS", planners)


@pytest.mark.parametrize("graph_name", GRAPHS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_no_planner_is_better_than_all_of_them(graph_name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {name: get_planner(name) for name in OTHERS}
    only(monkeypatch, **quick)
    case = GRAPHS[graph_name]
    budget_bytes = budget_of(case, share)
    found = improved(case, budget_bytes)
    assert peak(case, found) <= budget_bytes and found.planner == "auto"
    for planner in quick.values():
        other = within(planner, *case, budget_bytes, lambda schedule: peak(case, schedule))
        assert peak(case, other) > budget_bytes or seconds(case, found) <= seconds(case, other)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_graphs(), st.floats(0.0, 1.1))
def test_more_time_never_gives_a_slower_schedule(case: Case, share: float) -> None:
    budget_bytes = budget_of(case, share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["torch_odt.planning.auto"], "QUICK_SECONDS", 0.02)
        quick = auto(*case, budget_bytes, time_limit_seconds=0.02)
        again = auto(*case, budget_bytes, time_limit_seconds=0.2, start=quick)
        long = auto(*case, budget_bytes, time_limit_seconds=0.2)
    assert peak(case, quick) <= budget_bytes and peak(case, again) <= budget_bytes and peak(case, long) <= budget_bytes
    assert seconds(case, again) <= seconds(case, quick)
    # The quick search is a part of the long one, but not to the trial.
    assert seconds(case, long) <= 1.5 * seconds(case, quick)


def test_planners_with_a_limit_share_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, float] = {}

    def solving(name: str) -> Any:
        def plan(graph: TrainingGraph, costs: Costs, budget: int, *, time_limit_seconds: float = 60.0) -> Schedule:
            limits.setdefault(name, time_limit_seconds)
            return smallest(graph, costs)[0]

        return plan

    only(monkeypatch, first=solving("first"), second=solving("second"))
    case = GRAPHS["chain"]
    improved(case, budget_of(case, 0.5), 9.0)
    # The search has taken no time of its third.
    assert limits["first"] == pytest.approx(0.6 * 4.5, rel=0.2)
    assert limits["second"] == pytest.approx(0.6 * 9.0, rel=0.2)
    limits.clear()
    improved(case, budget_of(case, 0.5), 3.0)
    assert not limits, "too little for programs that have to be written down first"


def test_a_planner_that_is_better_wins_and_errors_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    case = GRAPHS["chain"]
    budget_bytes = budget_of(case, 0.5)

    def without_solver(*_: Any) -> Schedule:
        raise PlanError("this planner needs pulp")

    only(monkeypatch, absent=without_solver, melon=get_planner("melon"))
    melon = get_planner("melon")(*case, budget_bytes)
    assert seconds(case, improved(case, budget_bytes)) == seconds(case, melon) < seconds(case, smallest(*case)[0])

    def wrong(*_: Any) -> Schedule:
        return Schedule((), 0)

    only(monkeypatch, wrong=wrong)
    with pytest.raises(ScheduleError):
        improved(case, budget_bytes)


def test_without_time_the_start_is_returned() -> None:
    case = GRAPHS["chain"]
    assert improved(case, budget_of(case, 0.5), -1.0).instructions == smallest(*case)[0].instructions


def test_limits() -> None:
    assert takes_time_limit(get_planner("auto")) and not takes_time_limit(get_planner("melon"))
    assert limited(get_planner("melon"), 0.0) is get_planner("melon")
    assert {"checkmate", "checkmate-lp"} <= {name for name in _BUILT_IN if takes_time_limit(get_planner(name))}

    def solving(graph: TrainingGraph, costs: Costs, budget_bytes: int, *, time_limit_seconds: float = 60.0) -> Schedule:
        limits.append(time_limit_seconds)
        return smallest(graph, costs)[0]

    limits: list[float] = []
    in_time = limited(solving, time.perf_counter() + 4.0, 0.5)
    in_time(*GRAPHS["chain"], 0)
    limited(solving, time.perf_counter() - 1.0)(*GRAPHS["chain"], 0)
    assert limits == [pytest.approx(2.0, abs=0.5), 0.0]
