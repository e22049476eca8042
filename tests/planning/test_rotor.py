"""Dynamic programming over chains finds what trying every persistent schedule finds, in networks whatever fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from graphs import MB, GraphMaker, chain, evaluate, execute, normalised, random_graphs, residual
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_odt.capture.costs import Costs, TransferCosts
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.chain import chain_of
from torch_odt.planning.checkmate import optimize
from torch_odt.planning.explore import lower_bound_bytes
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.paging_incumbent import PagingIncumbent, PricedGoal
from torch_odt.planning.persistent import cheapest
from torch_odt.planning.poet import optimize as optimize_paging
from torch_odt.planning.pofo import pofo
from torch_odt.planning.problem import BOUNDARY, Problem, problem_of
from torch_odt.planning.registry import get_planner
from torch_odt.planning.rotor import rotor
from torch_odt.planning.schedule import PageOut, Schedule
from torch_odt.planning.search import Search
from torch_odt.planning.simulate import simulate

Case = tuple[TrainingGraph, Costs]

SERIAL = TransferCosts(0.1, 10.0, 0.1, 20.0, 1 << 40, overlaps=False)


@st.composite
def random_chains(draw: st.DrawFn) -> Case:
    """Layers of any sizes, each with one op in the backward pass that reads its input and maybe its output."""
    make = GraphMaker()
    sizes, seconds = st.integers(1, 9), st.integers(0, 6)
    values = [make.op(make.give(), nbytes=draw(sizes), seconds=float(draw(seconds)))]
    for _ in range(draw(st.integers(2, 4))):
        values.append(
            make.op(values[-1], nbytes=draw(sizes), seconds=float(draw(seconds)), workspace=draw(st.integers(0, 4)))
        )
    make.output(make.op(values[-1], nbytes=0, seconds=0.0), "loss", 0)
    gradient = make.backward()
    for layer in reversed(range(1, len(values))):
        reads = draw(st.sampled_from(((layer - 1,), (layer - 1, layer))))
        gradient, weight = make.op(
            gradient, *(values[i] for i in reads), nbytes=(draw(sizes), 1), workspace=draw(st.integers(0, 4))
        )
        make.output(weight, "gradient", f"w{layer}")
    make.output(gradient, "gradient", "input")
    return make.finish()


def persistent_schedules(problem: Problem) -> Iterator[list[int]]:
    """Every sequence of steps in which checkpoints stay; a layer is one op, the last one the loss."""
    groups = chain_of(problem)
    last_group = len(groups) - 1

    @cache
    def parts(first: int, last: int) -> list[tuple[int, ...]]:
        (run,), back = groups[first].steps, groups[first].segment
        if first == last == last_group:
            return [(run, BOUNDARY, *back)]
        if first == last:
            is_read = any(s in problem.reads[op] for op in back for s in problem.results[run])
            return [(run, *back) if is_read else tuple(back)]
        found = [(run, *inner, *back) for inner in parts(first + 1, last)]
        for middle in range(first + 1, last + 1):
            way = tuple(op for group in groups[first:middle] for op in group.steps)
            found += [(*way, *behind, *before) for behind in parts(middle, last) for before in parts(first, middle - 1)]
        return found

    yield from map(list, parts(0, last_group))


def between(case: Case, share: float) -> int:
    least = lower_bound_bytes(problem_of(*case))
    return int(least + share * (simulate(*case, keep_all(*case)).peak_bytes - least))


def check(case: Case, schedule: Schedule) -> None:
    graph, _ = case
    expected = evaluate(graph)
    assert execute(graph, schedule) == {i: expected[output.value] for i, output in enumerate(graph.outputs)}


@settings(max_examples=60, deadline=None)
@given(case=random_chains(), share=st.floats(0.0, 1.0))
def test_no_schedule_whose_checkpoints_stay_is_faster(case: Case, share: float) -> None:
    budget, problem = between(case, share), problem_of(*case)
    schedule = rotor(*case, budget)
    check(case, schedule)
    found = simulate(*case, schedule)
    incumbent = PagingIncumbent(problem, budget, problem.steps, PricedGoal())
    for runs in persistent_schedules(problem):
        incumbent.offer(runs)
    assert incumbent.fits == (found.peak_bytes <= budget)
    if incumbent.fits:
        assert found.seconds == pytest.approx(problem.program_seconds + incumbent.counted.extra_cost)
        best = optimize(*case, budget, gap=0.0)
        assert best.bound_seconds <= found.seconds + 1e-6


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=random_graphs(), share=st.floats(0.0, 1.1), overlaps=st.booleans(), name=st.sampled_from(("rotor", "pofo")))
def test_schedules_of_random_graphs_are_right(case: Case, share: float, overlaps: bool, name: str) -> None:
    graph, costs = case
    case = (graph, replace(costs, transfers=replace(SERIAL, overlaps=overlaps, limit_bytes=2 * 4096)))
    schedule = get_planner(name)(*case, between(case, share))
    check(case, schedule)
    assert simulate(*case, schedule).file_peak_bytes <= 2 * 4096
    assert schedule.planner == name


@settings(max_examples=25, deadline=None)
@given(case=random_chains(), share=st.floats(0.0, 1.0))
def test_offloading_is_never_slower_than_doing_without_and_never_beats_the_bound(case: Case, share: float) -> None:
    graph, costs = case
    case = (graph, replace(costs, transfers=SERIAL))
    budget = between(case, share)
    schedule = pofo(*case, budget)
    check(case, schedule)
    found, alone = simulate(*case, schedule), simulate(*case, rotor(*case, budget))
    if alone.peak_bytes <= budget:
        assert found.peak_bytes <= budget
        assert found.seconds <= alone.seconds + 1e-9
    if found.peak_bytes <= budget:
        assert optimize_paging(*case, budget, gap=0.0).bound_seconds <= found.seconds + 1e-6


def test_a_deep_chain_in_little_memory() -> None:
    case = chain(60)
    budget = 9 * MB
    schedule = rotor(*case, budget)
    check(case, schedule)
    found = simulate(*case, schedule)
    assert found.peak_bytes <= budget
    # With seven checkpoints a chain of sixty takes less than three forward passes more.
    assert found.recompute_seconds < 3 * 60
    assert simulate(*case, get_planner("chen")(*case, budget)).peak_bytes > budget


@pytest.mark.parametrize("case", [residual(10), normalised(8)], ids=["residual", "normalised"])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_networks_with_branches_and_pinned_ops(case: Case, share: float) -> None:
    budget = between(case, share)
    schedule = rotor(*case, budget)
    check(case, schedule)
    found = simulate(*case, schedule)
    assert found.peak_bytes <= budget
    assert found.seconds <= 1.5 * simulate(*case, get_planner("auto")(*case, budget)).seconds


def test_offloading_pays_where_transfers_run_beside_ops() -> None:
    graph, costs = chain(20)
    case = (graph, replace(costs, transfers=TransferCosts(0.0, 2 * MB, 0.0, 2 * MB, 1 << 40)))
    budget = 8 * MB
    schedule = pofo(*case, budget)
    check(case, schedule)
    assert any(isinstance(i, PageOut) for i in schedule.instructions)
    found, alone = simulate(*case, schedule), simulate(*case, rotor(*case, budget))
    assert max(found.peak_bytes, alone.peak_bytes) <= budget
    assert found.seconds < alone.seconds


@pytest.mark.parametrize("planner", [rotor, pofo])
def test_the_planners_return_their_best_where_nothing_fits(planner: object) -> None:
    case = chain(12)
    schedule = planner(*case, 1)  # type: ignore[operator]
    check(case, schedule)
    assert simulate(*case, schedule).peak_bytes < simulate(*case, keep_all(*case)).peak_bytes


@pytest.mark.parametrize("name", ["rotor", "pofo"])
@pytest.mark.parametrize("budget_bytes", [0, -5])
def test_less_than_no_bytes_gets_what_takes_least(name: str, budget_bytes: int) -> None:
    """Whoever aims below a budget may aim there."""
    assert get_planner(name)(*chain(8), budget_bytes) == get_planner(name)(*chain(8), 1)


def test_a_table_that_is_not_complete_in_time_is_left() -> None:
    problem = problem_of(*chain(8))
    everything = Search(problem, 0).best.peak_bytes
    assert cheapest(problem, everything // 2, "rotor", stop_at=0.0) == cheapest(problem, 2 * everything, "rotor")
