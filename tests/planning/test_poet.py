"""POET finds what trying everything finds, obeys deadlines and the file's size, and never loses to another planner."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from exhaustive import least_cost
from graphs import MB, GraphMaker, chain, evaluate, execute, normalised, random_graphs, residual, small_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_odt.capture.costs import Costs, TransferCosts
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning import poet
from torch_odt.planning.explore import lower_bound_bytes
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.lowering import lower, runs_of
from torch_odt.planning.objective import Objective, schedule_for
from torch_odt.planning.paging_incumbent import PricedGoal
from torch_odt.planning.poet import Means, optimize
from torch_odt.planning.problem import Problem, problem_of
from torch_odt.planning.registry import get_planner
from torch_odt.planning.schedule import PageIn, PageOut, Schedule
from torch_odt.planning.search import Search
from torch_odt.planning.simulate import simulate

Case = tuple[TrainingGraph, Costs]

# A storage of the small graphs is written in up to two of their seconds.
SMALL = TransferCosts(0.1, 5.0, 0.2, 10.0, 1 << 40, overlaps=False, watts=0.3)
LARGE = replace(SMALL, write_bytes_per_second=2 * MB, read_bytes_per_second=4 * MB)


def paging(case: Case, transfers: TransferCosts) -> Case:
    graph, costs = case
    return graph, replace(costs, transfers=transfers, watts=1.0)


def allowed(case: Case, means: Means) -> Problem:
    graph, costs = case
    problem = problem_of(graph, replace(costs, transfers=None) if means == "rematerialization" else costs)
    return replace(problem, rerun=[-1] * len(problem.rerun)) if means == "paging" else problem


def between(case: Case, share: float) -> int:
    """A budget between what nothing can go below and what keeping everything takes."""
    problem = problem_of(*case)
    least = lower_bound_bytes(problem)
    return int(least + share * (Search(problem, 0).best.peak_bytes - least))


def check(case: Case, schedule: Schedule) -> None:
    graph, _ = case
    expected = evaluate(graph)
    assert execute(graph, schedule) == {i: expected[output.value] for i, output in enumerate(graph.outputs)}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=st.one_of(small_steps(most_ops=3), random_graphs(most_ops=3)),
    share=st.floats(0.0, 1.0),
    objective=st.sampled_from(("seconds", "joules")),
    means=st.sampled_from(("both", "paging", "rematerialization")),
    slack=st.sampled_from((float("inf"), 0.5, 0.2)),
    waiting_watts=st.sampled_from((0.0, 0.4)),
)
def test_small_graphs_get_the_best_schedule(
    case: Case, share: float, objective: Objective, means: Means, slack: float, waiting_watts: float
) -> None:
    case = paging(case, replace(SMALL, waiting_watts=waiting_watts))
    budget, problem = between(case, share), allowed(case, means)
    deadline = problem.program_seconds + slack * max(problem.program_seconds, 1.0)
    goal = PricedGoal(objective, deadline, 1.0)
    expected = least_cost(problem, budget, goal)
    found = optimize(*case, budget, objective=objective, deadline_seconds=deadline, means=means, gap=0.0)
    check(case, found.schedule)
    simulation = simulate(*case, found.schedule)
    assert found.is_exact
    assert found.seconds == pytest.approx(simulation.seconds)
    in_time = simulation.seconds <= deadline * (1 + 1e-6)
    assert found.fits == (in_time and simulation.peak_bytes <= budget)
    if expected is not None:
        assert found.fits
        program = goal.program_cost(problem)
        reached, bound = simulation.seconds, found.bound_seconds
        if objective == "joules":
            reached, bound = simulation.joules, found.bound_joules
            assert found.joules == pytest.approx(simulation.joules)
        assert bound <= program + expected + 1e-5
        assert reached <= program + expected + 1e-5
        assert found.gap == pytest.approx(0.0, abs=1e-5)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=st.one_of(small_steps(), random_graphs(most_ops=8)),
    share=st.floats(0.0, 1.0),
    overlaps=st.booleans(),
    file_blocks=st.sampled_from((2, 4, 1 << 20)),
)
def test_it_never_loses_to_another_planner_and_its_bound_holds(
    case: Case, share: float, overlaps: bool, file_blocks: int
) -> None:
    case = paging(case, replace(SMALL, overlaps=overlaps, limit_bytes=4096 * file_blocks))
    budget = between(case, share)
    found = optimize(*case, budget, time_limit_seconds=5.0)
    check(case, found.schedule)
    simulation = simulate(*case, found.schedule)
    assert simulation.seconds == pytest.approx(found.seconds)
    assert simulation.file_peak_bytes <= 4096 * file_blocks
    for name in ("melon", "capuchin", "pofo", "min-cut", "sage"):
        other = simulate(*case, get_planner(name)(*case, budget))
        if other.peak_bytes <= budget:
            assert found.fits
            assert found.seconds <= other.seconds + 1e-6


@pytest.mark.parametrize("case", [chain(10), residual(4), normalised(3)], ids=["chain", "residual", "normalised"])
@pytest.mark.parametrize("share", [0.4])
def test_both_means_together_are_no_worse_than_either_alone(case: Case, share: float) -> None:
    case = paging(case, LARGE)
    budget = between(case, share)
    found = {
        means: optimize(*case, budget, objective="joules", means=means, time_limit_seconds=4.0)  # type: ignore[arg-type]
        for means in ("both", "paging", "rematerialization")
    }
    for each in found.values():
        check(case, each.schedule)
        assert each.fits
        assert found["both"].bound_joules <= each.joules + 1e-6
        assert found["both"].joules <= each.joules + 1e-6
    pages = {means: any(isinstance(i, PageOut) for i in each.schedule.instructions) for means, each in found.items()}
    assert pages["paging"] and not pages["rematerialization"]
    assert not simulate(*case, found["paging"].schedule).recomputed_ops
    assert found["both"].schedule.planner == "poet"


def test_a_deadline_is_met_where_it_costs_joules() -> None:
    # Paging takes few joules and much time; recomputation the other way round.
    slow = replace(LARGE, write_bytes_per_second=MB, read_bytes_per_second=MB, watts=0.05)
    case = paging(chain(9), slow)
    budget = between(case, 0.4)
    frugal = optimize(*case, budget, objective="joules", time_limit_seconds=4.0)
    hasty = optimize(*case, budget, time_limit_seconds=4.0)
    assert hasty.seconds < frugal.seconds
    deadline = (hasty.seconds + frugal.seconds) / 2
    schedule = schedule_for(get_planner("poet"), *case, budget, objective="joules", deadline_seconds=deadline)
    simulation = simulate(*case, schedule)
    assert simulation.seconds <= deadline * (1 + 1e-6)
    assert frugal.joules < simulation.joules < simulate(*case, hasty.schedule).joules
    late = optimize(*case, budget, objective="joules", deadline_seconds=0.5 * hasty.seconds, time_limit_seconds=4.0)
    assert not late.fits
    assert late.gap == 1.0
    assert late.seconds == pytest.approx(hasty.seconds, rel=1e-3)


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_file_never_holds_more_than_it_may(overlaps: bool) -> None:
    case = paging(chain(16), replace(LARGE, overlaps=overlaps))
    budget = between(case, 0.3)
    free = optimize(*case, budget, objective="joules", time_limit_seconds=4.0)
    assert simulate(*case, free.schedule).file_peak_bytes > 4 * MB
    narrow = paging(chain(16), replace(LARGE, overlaps=overlaps, limit_bytes=4 * MB))
    found = optimize(*narrow, budget, objective="joules", time_limit_seconds=4.0)
    simulation = simulate(*narrow, found.schedule)
    check(narrow, found.schedule)
    assert found.fits
    assert 0 < simulation.file_peak_bytes <= 4 * MB
    assert free.joules <= found.joules + 1e-6
    assert found.bound_joules <= found.joules + 1e-6


def test_transfers_beside_ops_are_hidden() -> None:
    case = paging(chain(16), replace(LARGE, overlaps=True))
    budget = between(case, 0.5)
    found = optimize(*case, budget, time_limit_seconds=4.0)
    simulation = simulate(*case, found.schedule)
    assert any(isinstance(i, PageIn) for i in found.schedule.instructions)
    transfers = simulation.written_bytes / (2 * MB) + simulation.read_bytes / (4 * MB)
    assert simulation.wait_seconds < 0.5 * transfers
    assert found.gap < 0.05


def test_random_numbers_come_back_from_the_file() -> None:
    make = GraphMaker()
    x = make.give()
    drawn = [make.op(x, nbytes=MB, is_random=True) for _ in range(5)]
    make.output(make.op(drawn[0], nbytes=1), "loss", 0)
    gradient = make.backward()
    for value in reversed(drawn):
        gradient = make.op(gradient, value, nbytes=1)
    make.output(gradient, "gradient", "w")
    case = paging(make.finish(), LARGE)
    found = optimize(*case, 2 * MB + 8)
    check(case, found.schedule)
    assert found.fits
    assert not optimize(*case, 2 * MB + 8, means="rematerialization").fits


@settings(max_examples=60)
@given(case=random_graphs(), share=st.floats(0.2, 1.0), name=st.sampled_from(("melon", "capuchin", "pofo")))
def test_the_steps_of_a_schedule_make_the_same_schedule(case: Case, share: float, name: str) -> None:
    case = paging(case, replace(SMALL, overlaps=True))
    problem = problem_of(*case)
    schedule = get_planner(name)(*case, between(case, share))
    assert lower(problem, runs_of(problem, schedule), name) == schedule


def test_what_it_starts_from_is_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def look() -> float:
        clock[0] += 1e-3
        return clock[0]

    def slow(*options: object, stop_at: float = math.inf, **_: object) -> Schedule:
        asked.append(stop_at)
        clock[0] += 1.0
        return keep_all(*case)

    asked: list[float] = []
    case = paging(chain(9), replace(LARGE, watts=0.05))
    monkeypatch.setattr(time, "perf_counter", look)
    monkeypatch.setattr(poet, "capuchin", slow)
    monkeypatch.setattr(poet, "cheapest", slow)
    found = optimize(*case, between(case, 0.4), objective="joules", deadline_seconds=1e-3, time_limit_seconds=6.0)
    check(case, found.schedule)
    # A third of its time is for them: two, and the second of them is told when to stop.
    assert len(asked) == 2 and asked[1] == pytest.approx(2.0, abs=0.1)
    assert clock[0] < 7.0


def test_without_time_it_returns_what_takes_least() -> None:
    case = paging(chain(9), LARGE)
    found = optimize(*case, between(case, 0.0), time_limit_seconds=0.0)
    check(case, found.schedule)
    assert found.fits and found.solve_seconds == 0.0


def test_joules_need_watts() -> None:
    graph, costs = chain(4)
    with pytest.raises(PlanError, match="joules need the watts"):
        optimize(graph, costs, 1, objective="joules")


@pytest.mark.parametrize("name", ["poet", "poet-paging", "poet-remat"])
def test_the_planners_return_their_best_where_nothing_fits(name: str) -> None:
    case = paging(chain(8), LARGE)
    schedule = get_planner(name)(*case, 1)
    check(case, schedule)
    assert schedule.planner == name
    assert simulate(*case, schedule).peak_bytes < simulate(*case, keep_all(*case)).peak_bytes
