"""The integer program finds what trying everything finds, says honestly how far it is, and never loses to its start."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from exhaustive import least_cost
from graphs import chain, evaluate, execute, normalised, random_graphs, residual, small_steps
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning.checkmate import optimize
from torch_odt.planning.checkmate_lp import round_relaxation
from torch_odt.planning.explore import lower_bound_bytes
from torch_odt.planning.problem import problem_of
from torch_odt.planning.registry import get_planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Search
from torch_odt.planning.simulate import simulate
from torch_odt.planning.smallest import smallest


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@settings(max_examples=15)
@given(case=st.one_of(small_steps(), random_graphs(most_ops=6)), share=st.floats(0.0, 1.0))
def test_small_graphs_get_the_best_schedule(case: tuple[TrainingGraph, Costs], share: float, solver: Any) -> None:
    graph, costs = case
    problem = problem_of(graph, costs)
    least = lower_bound_bytes(problem)
    budget = int(least + share * (Search(problem, 0).best.peak_bytes - least))
    expected = least_cost(problem, budget)
    found = optimize(graph, costs, budget, gap=0.0, solver=solver)
    check(graph, costs, found.schedule)
    simulation = simulate(graph, costs, found.schedule)
    assert found.is_exact
    assert simulation.seconds == pytest.approx(found.seconds)
    assert found.fits == (simulation.peak_bytes <= budget)
    if expected is not None:
        assert found.fits
        assert found.bound_seconds <= problem.program_seconds + expected + 1e-6
        # A step may need the same thing twice: the search that it starts from may be faster than its own schedules.
        assert simulation.recompute_seconds <= expected + 1e-6
        assert found.gap == pytest.approx(0.0, abs=1e-6)


def check(graph: TrainingGraph, costs: Costs, schedule: Schedule) -> None:
    """What the schedule delivers is what the program delivers."""
    expected = evaluate(graph)
    assert execute(graph, schedule) == {i: expected[output.value] for i, output in enumerate(graph.outputs)}


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in packages else find_spec(name, *rest)
    )


@pytest.mark.parametrize("missing", ["pulp", "highspy"])
def test_what_is_not_installed_is_named_with_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, missing)
    with pytest.raises(PlanError, match=rf"{missing}.*torch_odt\[planners\]"):
        optimize(*chain(4), 1, solver="highs")


def test_without_highs_cbc_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs = chain(8)
    budget = Search(problem_of(graph, costs), 0).best.peak_bytes * 6 // 10
    by_highs = optimize(graph, costs, budget)
    hide(monkeypatch, "highspy")
    assert optimize(graph, costs, budget).seconds == pytest.approx(by_highs.seconds)


@pytest.mark.parametrize("case", [chain(20), residual(6), normalised(6)], ids=["chain", "residual", "normalised"])
@pytest.mark.parametrize("max_nodes", [10, 20])
def test_condensed_graphs_get_schedules_that_fit_and_never_lose_to_the_start(
    case: tuple[TrainingGraph, Costs], max_nodes: int
) -> None:
    graph, costs = case
    budget = Search(problem_of(graph, costs), 0).best.peak_bytes // 2
    found = optimize(graph, costs, budget, max_nodes=max_nodes, time_limit_seconds=5.0)
    check(graph, costs, found.schedule)
    assert found.stages <= max_nodes
    assert found.units <= max_nodes
    assert found.fits
    assert simulate(graph, costs, found.schedule).peak_bytes <= budget
    for other in ("chen", "melon", "min-cut"):
        result = simulate(graph, costs, get_planner(other)(graph, costs, budget))
        assert result.peak_bytes > budget or found.seconds <= result.seconds + 1e-9


@pytest.mark.parametrize("case", [chain(14), residual(5), normalised(4)], ids=["chain", "residual", "normalised"])
@pytest.mark.parametrize("share", [0.6])
def test_rounding_fits_and_stays_above_its_bound(case: tuple[TrainingGraph, Costs], share: float) -> None:
    graph, costs = case
    budget = int(share * Search(problem_of(graph, costs), 0).best.peak_bytes)
    found = round_relaxation(graph, costs, budget)
    check(graph, costs, found.schedule)
    assert found.fits
    assert simulate(graph, costs, found.schedule).peak_bytes <= budget
    assert found.bound_seconds <= optimize(graph, costs, budget, time_limit_seconds=5.0).seconds + 1e-9
    assert found.gap < 0.25


def test_without_time_for_a_relaxation_the_budget_is_used_all_the_same() -> None:
    graph, costs = chain(14)
    budget = int(0.6 * Search(problem_of(graph, costs), 0).best.peak_bytes)
    found = round_relaxation(graph, costs, budget, time_limit_seconds=0.0)
    check(graph, costs, found.schedule)
    assert found.fits
    assert found.seconds < simulate(graph, costs, smallest(graph, costs)[0]).seconds


@settings(max_examples=15)
@given(case=small_steps(), share=st.floats(0.0, 1.0))
def test_rounding_small_steps_is_right(case: tuple[TrainingGraph, Costs], share: float) -> None:
    graph, costs = case
    problem = problem_of(graph, costs)
    budget = int(share * Search(problem, 0).best.peak_bytes)
    found = round_relaxation(graph, costs, budget)
    check(graph, costs, found.schedule)
    assert found.fits == (simulate(graph, costs, found.schedule).peak_bytes <= budget)


@pytest.mark.parametrize("name", ["checkmate", "checkmate-lp"])
def test_the_planners_return_their_best_where_nothing_fits(name: str) -> None:
    graph, costs = chain(12)
    schedule = get_planner(name)(graph, costs, 1)
    check(graph, costs, schedule)
    assert schedule.planner == name
    kept_all = Search(problem_of(graph, costs), 0).best.peak_bytes
    assert simulate(graph, costs, schedule).peak_bytes < kept_all


def test_a_budget_that_nothing_meets_is_no_proof_of_anything() -> None:
    found = optimize(*chain(12), 1)
    assert not found.fits
    assert found.gap == 1.0
