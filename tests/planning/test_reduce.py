"""What fits into a condensed graph fits into the graph, and every solution there is a schedule here."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from graphs import GraphMaker, chain, normalised, random_graphs, residual
from hypothesis import given, settings
from hypothesis import strategies as st
from models import case_named
from torch import nn

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.rewrite import rewrite
from torch_odt.capture.trace import trace_step
from torch_odt.planning.expand import expand, kept_by
from torch_odt.planning.lowering import lower
from torch_odt.planning.milp import Model
from torch_odt.planning.problem import Problem, problem_of
from torch_odt.planning.reduce import Reduced, reduce
from torch_odt.planning.relaxation import relax
from torch_odt.planning.search import Search, peak_bytes
from torch_odt.planning.simulate import simulate
from torch_odt.planning.solvers import make_solver

GRAPHS = {"chain": chain(24), "residual": residual(10), "normalised": normalised(8)}


@cache
def step_of(name: str) -> TrainingGraph:
    """A step of a model of the table as a graph, without measurements."""
    case = case_named(name)
    args, kwargs = case.batch(case.batch_size, torch.Generator().manual_seed(0))

    def compute(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        return case.loss(model, (args, kwargs)), ()

    return rewrite(trace_step(case.model(), case.loss_fn, compute, (args, kwargs)).graph)


def recomputing(problem: Problem, share: float) -> Search:
    """A search that has tried to evict on demand, within a share of what keeping everything takes."""
    search = Search(problem, int(share * Search(problem, 0).best.peak_bytes))
    search.try_evicting()
    return search


def check_sizes(reduced: Reduced, max_nodes: int) -> None:
    assert reduced.stages <= max(max_nodes, 1)
    assert len(reduced.units) <= max_nodes


@settings(max_examples=60)
@given(case=random_graphs(), share=st.floats(0.2, 1.0), max_nodes=st.integers(1, 40))
def test_what_is_kept_comes_back_as_a_valid_schedule(
    case: tuple[TrainingGraph, Costs], share: float, max_nodes: int
) -> None:
    graph, costs = case
    problem = problem_of(graph, costs)
    reduced = reduce(problem, max_nodes)
    check_sizes(reduced, max_nodes)
    search = recomputing(problem, share)
    runs = expand(reduced, kept_by(reduced, search.best.built.runs))
    assert runs is not None
    simulate(graph, costs, lower(problem, runs))
    # Keeping everything comes back as it is.
    kept_all = Search(problem, 0).best.built.runs
    assert expand(reduced, kept_by(reduced, kept_all)) == kept_all


@settings(max_examples=30)
@given(case=random_graphs(), share=st.floats(0.3, 1.0), max_nodes=st.integers(2, 30))
def test_what_fits_into_the_condensed_graph_fits(
    case: tuple[TrainingGraph, Costs], share: float, max_nodes: int
) -> None:
    graph, costs = case
    problem = problem_of(graph, costs)
    budget = int(share * Search(problem, 0).best.peak_bytes)
    reduced = reduce(problem, max_nodes)
    model = Model(reduced, budget)
    solver = make_solver()
    for _ in range(20):
        if not solver.solve(model.program, None, 5.0, 0.0).has_solution:
            return
        values = model.values()
        if not model.add_violated(values):
            break
    runs = expand(reduced, values.kept_above(reduced, 0.5))
    assert runs is not None
    assert peak_bytes(problem, runs) <= budget


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("max_nodes", [8, 20, 200])
def test_graphs_are_condensed_to_what_is_asked(name: str, max_nodes: int) -> None:
    problem = problem_of(*GRAPHS[name])
    reduced = reduce(problem, max_nodes)
    check_sizes(reduced, max_nodes)
    assert reduced.is_exact == (max_nodes == 200)
    assert reduced.starts[0] == 0
    assert reduced.starts[-1] == len(problem.steps)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "lstm"])
def test_steps_of_models_are_condensed_and_expanded(name: str) -> None:
    graph, costs = step_of(name), Costs({})
    problem = problem_of(graph, costs)
    reduced = reduce(problem, 60)
    check_sizes(reduced, 60)
    search = recomputing(problem, 0.8)
    runs = expand(reduced, kept_by(reduced, search.best.built.runs))
    assert runs is not None
    simulate(graph, costs, lower(problem, runs))


def test_a_relaxation_is_a_bound() -> None:
    problem = problem_of(*GRAPHS["residual"])
    search = recomputing(problem, 0.5)
    assert search.best.fits
    relaxed = relax(Model(reduce(problem), search.budget_bytes), make_solver(), 10.0)
    assert 0.0 < relaxed.bound_cost <= search.best.seconds
    assert relax(Model(reduce(problem), 1), make_solver(), 10.0).is_infeasible


def test_what_an_action_reads_and_what_it_makes_are_in_memory_together() -> None:
    make = GraphMaker()
    x = make.give()
    first = make.op(x, nbytes=3, seconds=0.0)
    second = make.op(first, nbytes=3, seconds=0.0)
    make.output(make.op(x, nbytes=1, seconds=0.0), "loss", 0)
    make.backward()
    make.output(make.op(x, second, nbytes=0, seconds=0.0), "gradient", "w")
    problem = problem_of(*make.finish())
    # Keeping everything takes 6 bytes; both ops again, beside the loss, would take 7.
    reduced = reduce(problem, 200)
    model, solver = Model(reduced, 6), make_solver()
    while solver.solve(model.program, None, 5.0, 0.0).has_solution and model.add_violated(model.values()):
        pass
    runs = expand(reduced, model.values().kept_above(reduced, 0.5))
    assert runs is not None and peak_bytes(problem, runs) == 6
