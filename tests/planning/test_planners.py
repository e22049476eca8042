"""Every planner's schedules compute what the program computes; the searching ones stay within their budgets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from graphs import MB, GraphMaker, chain, evaluate, execute, normalised, random_graphs, residual
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning.auto import auto
from torch_odt.planning.explore import lower_bound_bytes
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.problem import problem_of
from torch_odt.planning.registry import get_planner, planner, planner_names
from torch_odt.planning.schedule import Run, Schedule
from torch_odt.planning.search import Search, peak_bytes
from torch_odt.planning.simulate import simulate
from torch_odt.planning.smallest import smallest

GRAPHS = {"chain": chain(24), "residual": residual(10), "normalised": normalised(8)}
PLANNERS = ("keep-all", "chen", "dtr", "sage", "melon", "min-cut", "capuchin", "auto")
SIMPLE = ("keep-all", "chen", "dtr", "sage", "melon", "min-cut", "capuchin")


def check(graph: TrainingGraph, costs: Costs, schedule: Schedule) -> None:
    """The simulator accepts the schedule, and what it delivers is what the program delivers."""
    simulate(graph, costs, schedule)
    expected = evaluate(graph)
    delivered = execute(graph, schedule)
    assert delivered == {i: expected[output.value] for i, output in enumerate(graph.outputs)}


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("graph_name", GRAPHS)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_schedules_are_right(name: str, graph_name: str, share: float) -> None:
    graph, costs = GRAPHS[graph_name]
    most = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    check(graph, costs, get_planner(name)(graph, costs, int(share * most)))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_graphs(), st.floats(0.0, 1.1), st.sampled_from(SIMPLE))
def test_schedules_of_random_graphs_are_right(case: tuple[TrainingGraph, Costs], share: float, name: str) -> None:
    graph, costs = case
    most = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    check(graph, costs, get_planner(name)(graph, costs, int(share * most)))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_graphs(), st.floats(0.0, 1.1), st.sampled_from(("keep", "accumulate")))
def test_auto_is_right_and_fits_whatever_is_feasible(
    case: tuple[TrainingGraph, Costs], share: float, gradients: str
) -> None:
    graph, costs = case
    _, least = smallest(graph, costs, gradients=gradients)  # type: ignore[arg-type]
    most = simulate(graph, costs, keep_all(graph, costs), gradients=gradients).peak_bytes  # type: ignore[arg-type]
    budget = int(least + share * (most - least))
    schedule = auto(graph, costs, budget, time_limit_seconds=0.2, gradients=gradients)  # type: ignore[arg-type]
    check(graph, costs, schedule)
    assert simulate(graph, costs, schedule, gradients=gradients).peak_bytes <= budget  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_graphs(), st.floats(0.0, 1.0), st.sampled_from(("keep", "accumulate")), st.booleans())
def test_the_quick_count_equals_the_simulator(
    case: tuple[TrainingGraph, Costs], share: float, gradients: str, apart: bool
) -> None:
    graph, costs = case
    problem = problem_of(graph, costs, gradients, apart=apart)  # type: ignore[arg-type]
    search = Search(problem, 0)
    search = Search(problem, int(search.best.peak_bytes * share))
    trial = search.try_evicting()
    counted = simulate(graph, costs, trial.built.schedule(problem, ""), gradients=gradients)  # type: ignore[arg-type]
    whole = counted.arena_peak_bytes + counted.outside_peak_bytes if apart else counted.peak_bytes
    assert trial.peak_bytes == whole
    assert trial.peak_bytes == peak_bytes(problem, trial.built.runs) + problem.apart_bytes
    assert trial.seconds == pytest.approx(counted.recompute_seconds)
    assert trial.peak_bytes >= lower_bound_bytes(problem)


@pytest.mark.parametrize("name", GRAPHS)
def test_keep_all_computes_nothing_twice(name: str) -> None:
    graph, costs = GRAPHS[name]
    result = simulate(graph, costs, keep_all(graph, costs))
    assert result.recomputed_ops == ()


@pytest.mark.parametrize("name", GRAPHS)
def test_auto_is_never_slower_with_a_bigger_budget(name: str) -> None:
    graph, costs = GRAPHS[name]
    _, least = smallest(graph, costs)
    most = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    budgets = [int(least + step / 5 * (most - least)) for step in range(6)]
    results = [simulate(graph, costs, auto(graph, costs, b, time_limit_seconds=1.0)) for b in budgets]
    assert all(r.peak_bytes <= b for r, b in zip(results, budgets, strict=True))
    assert all(more.seconds <= less.seconds + 1e-9 for less, more in pairwise(results))
    assert results[-1].recompute_seconds == 0.0


@pytest.mark.parametrize("name", GRAPHS)
def test_auto_is_no_slower_than_the_others(name: str) -> None:
    graph, costs = GRAPHS[name]
    budget = simulate(graph, costs, keep_all(graph, costs)).peak_bytes // 2
    best = simulate(graph, costs, auto(graph, costs, budget))
    for other in ("chen", "dtr", "sage", "melon", "min-cut"):
        result = simulate(graph, costs, get_planner(other)(graph, costs, budget))
        assert result.peak_bytes > budget or best.seconds <= result.seconds + 1e-9


def test_auto_keeps_what_is_dear_and_recomputes_what_is_cheap() -> None:
    graph, costs = GRAPHS["normalised"]
    most = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    result = simulate(graph, costs, auto(graph, costs, int(0.75 * most)))
    dear = {op.index for op in graph.program if costs.seconds(op.index) >= 3.0}
    assert result.recomputed_ops
    assert dear.isdisjoint(result.recomputed_ops)


def test_a_chain_needs_about_the_square_root_of_its_length() -> None:
    graph, costs = chain(100)
    schedule, least = smallest(graph, costs)
    assert least <= 15 * MB
    assert simulate(graph, costs, schedule).peak_bytes == least
    chen = simulate(graph, costs, get_planner("chen")(graph, costs, 30 * MB))
    assert chen.peak_bytes <= 30 * MB
    assert chen.recompute_seconds <= 101.0


def test_a_footprint_above_the_live_bytes_is_respected() -> None:
    graph, costs = GRAPHS["residual"]
    most = simulate(graph, costs, keep_all(graph, costs)).peak_bytes

    def footprint(schedule: Schedule) -> int:
        result = simulate(graph, costs, schedule)
        return int(1.2 * result.arena_peak_bytes) + result.outside_peak_bytes

    schedule = auto(graph, costs, int(0.7 * most), footprint=footprint, time_limit_seconds=1.0)
    assert footprint(schedule) <= 0.7 * most
    schedule, least = smallest(graph, costs, footprint=footprint)
    assert footprint(schedule) == least


def test_an_impossible_budget_gets_the_smallest_schedule() -> None:
    graph, costs = GRAPHS["chain"]
    _, least = smallest(graph, costs)
    assert simulate(graph, costs, auto(graph, costs, 1)).peak_bytes == least


def test_what_random_ops_drew_is_never_lost() -> None:
    make = GraphMaker()
    x = make.give()
    kept = []
    for _ in range(6):
        noise = make.op(x, nbytes=4 * MB, is_random=True)
        mask = make.op(noise, nbytes=MB)
        x = make.op(x, mask, nbytes=4 * MB)
        kept.append((x, mask))
    make.output(make.op(x, nbytes=4), "loss")
    gradient = make.backward()
    for value, mask in reversed(kept):
        gradient = make.op(gradient, value, mask, nbytes=4 * MB)
    make.output(gradient, "gradient")
    graph, costs = make.finish()
    schedule, least = smallest(graph, costs)
    check(graph, costs, schedule)
    # The masks stay, the noise does not.
    assert least < 24 * MB


def test_several_results_of_one_op_come_back_together() -> None:
    make = GraphMaker()
    x = make.give()
    first, second = make.op(x, nbytes=(8 * MB, 8 * MB), seconds=1.0)
    y = make.op(first, second, nbytes=8 * MB)
    for _ in range(3):
        y = make.op(y, nbytes=8 * MB)
    make.output(make.op(y, nbytes=4), "loss")
    gradient = make.op(make.backward(), y, nbytes=8 * MB)
    make.output(make.op(gradient, first, nbytes=8), "gradient", "a")
    make.output(make.op(gradient, second, nbytes=8), "gradient", "b")
    graph, costs = make.finish()
    schedule = auto(graph, costs, 26 * MB)
    check(graph, costs, schedule)
    assert [i for i in schedule.instructions if i == Run(0)] == [Run(0)] * 2


def test_views_are_taken_again() -> None:
    make = GraphMaker()
    a = make.op(make.give(), nbytes=8 * MB)
    view = make.view(make.view(a))
    y = make.op(view, nbytes=8 * MB)
    y = make.op(y, nbytes=8 * MB)
    make.output(make.op(y, nbytes=4), "loss")
    gradient = make.op(make.backward(), y, nbytes=8 * MB)
    make.output(make.op(gradient, view, nbytes=8), "gradient", "a")
    graph, costs = make.finish()
    schedule = auto(graph, costs, 17 * MB)
    check(graph, costs, schedule)
    assert simulate(graph, costs, schedule).peak_bytes <= 17 * MB
    assert sum(i == Run(2) for i in schedule.instructions) == 2


@pytest.mark.slow
def test_planning_is_deterministic() -> None:
    graph, costs = residual(6)
    most = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    schedules = {tuple(auto(graph, costs, most // 2, time_limit_seconds=20.0).instructions) for _ in range(2)}
    assert len(schedules) == 1


def test_names() -> None:
    assert set(PLANNERS) <= set(planner_names())
    with pytest.raises(PlanError, match=r"no planner 'nonsense'; there are .*melon"):
        get_planner("nonsense")

    @planner("of-a-test")
    def of_a_test(graph: TrainingGraph, costs: Costs, budget_bytes: int) -> Schedule:
        return keep_all(graph, costs, budget_bytes)

    assert get_planner("of-a-test") is of_a_test
    assert "of-a-test" in planner_names()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_graphs(), st.floats(0.3, 1.0))
def test_auto_fits_wherever_another_does_however_little_time_it_has(
    case: tuple[TrainingGraph, Costs], share: float
) -> None:
    graph, costs = case
    budget = int(share * simulate(graph, costs, keep_all(graph, costs)).peak_bytes)
    found = simulate(graph, costs, auto(graph, costs, budget, time_limit_seconds=0.0))
    for other in ("chen", "dtr", "sage", "melon", "min-cut"):
        result = simulate(graph, costs, get_planner(other)(graph, costs, budget))
        assert result.peak_bytes > budget or found.peak_bytes <= budget
