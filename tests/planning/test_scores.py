"""Graphs on which one thing decides what is evicted: each score is told from the others by what runs again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pytest
import torch
from graphs import MB, GraphMaker

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.problem import problem_of
from torch_odt.planning.rematerialize import Score, build
from torch_odt.planning.sage import ELEMENT_WISE, sage, states
from torch_odt.planning.scores import (
    bytes_per_second,
    furthest,
    own_bytes_per_second,
    stale_bytes_per_second,
    tensor_size_per_second,
)
from torch_odt.planning.simulate import simulate

CONVOLUTION, RELU, ADD = "aten.convolution.default", "aten.relu.default", "aten.add.Tensor"


def evicted(
    graph: TrainingGraph, costs: Costs, score: Score, budget_bytes: int, dropped: Collection[int] = ()
) -> set[int]:
    """The values that come back when a budget is met with a score."""
    problem = problem_of(graph, costs)
    schedule = build(problem, budget_bytes=budget_bytes, score=score, dropped=dropped).schedule(problem, "")
    found = simulate(graph, costs, schedule)
    assert found.peak_bytes <= budget_bytes
    return {value for op in found.recomputed_ops for value in graph.ops[op].results}


@dataclass(frozen=True)
class Choice:
    """A graph in which one of two storages must go for a moment; the backward pass reads the second one first."""

    graph: TrainingGraph
    costs: Costs
    a: int
    b: int

    def evicted(self, score: Score, budget_bytes: int) -> str:
        """Which of them goes."""
        found = evicted(self.graph, self.costs, score, budget_bytes)
        assert len(found) == 1
        return {self.a: "a", self.b: "b"}[found.pop()]


def choice(
    *, nbytes: tuple[int, int] = (4 * MB, 4 * MB), seconds: tuple[float, float] = (1.0, 1.0), touches_a: bool = False
) -> Choice:
    make = GraphMaker()
    x = make.give()
    a = make.op(x, nbytes=nbytes[0], seconds=seconds[0])
    b = make.op(x, nbytes=nbytes[1], seconds=seconds[1])
    y = make.op(a if touches_a else x, nbytes=8, seconds=1.0)
    large = make.op(y, nbytes=10 * MB, seconds=1.0)
    make.output(make.op(large, nbytes=4, seconds=1.0), "loss", 0)
    gradient = make.op(make.backward(), b, nbytes=8, seconds=5.0)
    make.output(make.op(gradient, a, nbytes=8, seconds=1.0), "gradient", "w")
    return Choice(*make.finish(), a, b)


SCORES = {
    "melon": tensor_size_per_second,
    "sage": bytes_per_second,
    "dtr": stale_bytes_per_second,
    "own": own_bytes_per_second,
    "furthest": furthest,
}


@pytest.mark.parametrize(("name", "goes"), [("melon", "a"), ("furthest", "a"), ("own", "a"), ("dtr", "b")])
def test_melon_looks_at_the_next_use_and_dtr_at_the_last(name: str, goes: str) -> None:
    assert choice(touches_a=True).evicted(SCORES[name], 15 * MB) == goes


@pytest.mark.parametrize(
    ("name", "goes"), [("melon", "b"), ("sage", "b"), ("dtr", "b"), ("own", "b"), ("furthest", "a")]
)
def test_what_is_dear_to_recompute_stays(name: str, goes: str) -> None:
    assert choice(seconds=(30.0, 0.1)).evicted(SCORES[name], 15 * MB) == goes


@pytest.mark.parametrize("name", SCORES)
def test_what_is_large_goes_first(name: str) -> None:
    assert choice(nbytes=(1 * MB, 8 * MB)).evicted(SCORES[name], 18 * MB) == "b"


@pytest.mark.parametrize(("name", "cheap_goes"), [("melon", True), ("sage", True), ("dtr", True), ("own", False)])
def test_missing_ancestors_count(name: str, cheap_goes: bool) -> None:
    """One storage is quick to compute from another that is gone and took long; the other one from an input."""
    make = GraphMaker()
    x = make.give()
    gone = make.op(x, nbytes=8, seconds=20.0)
    behind = make.op(gone, nbytes=4 * MB, seconds=0.1)
    alone = make.op(x, nbytes=4 * MB, seconds=1.0)
    large = make.op(make.op(x, nbytes=8, seconds=40.0), nbytes=10 * MB, seconds=1.0)
    make.output(make.op(large, nbytes=4, seconds=1.0), "loss", 0)
    gradient = make.op(make.backward(), alone, nbytes=8, seconds=1.0)
    make.output(make.op(gradient, behind, nbytes=8, seconds=1.0), "gradient", "w")
    graph, costs = make.finish()
    assert evicted(graph, costs, SCORES[name], 15 * MB) == ({alone} if cheap_goes else {gone, behind})


@pytest.mark.parametrize(("name", "goes"), [("sage", "source"), ("dtr", "alone")])
def test_what_evicted_storages_come_back_from_is_dearer_for_dtr(name: str, goes: str) -> None:
    make = GraphMaker()
    x = make.give()
    source = make.op(x, nbytes=4 * MB, seconds=1.0)
    alone = make.op(x, nbytes=4 * MB, seconds=2.0)
    evicted_before = make.op(source, nbytes=4 * MB, seconds=9.0)
    y = make.op(evicted_before, alone, nbytes=8, seconds=40.0)
    y = make.op(y, nbytes=8, seconds=40.0)
    large = make.op(y, nbytes=10 * MB, seconds=1.0)
    make.output(make.op(large, nbytes=4, seconds=1.0), "loss", 0)
    gradient = make.op(make.backward(), alone, nbytes=8, seconds=1.0)
    gradient = make.op(gradient, evicted_before, nbytes=8, seconds=1.0)
    make.output(make.op(gradient, source, nbytes=8, seconds=1.0), "gradient", "w")
    graph, costs = make.finish()
    found = evicted(graph, costs, SCORES[name], 15 * MB, {evicted_before})
    assert found - {evicted_before} == {{"source": source, "alone": alone}[goes]}


def test_states_are_all_but_cheap_element_wise_results() -> None:
    make = GraphMaker()
    first = make.op(make.give(), target=CONVOLUTION)
    second = make.op(first, target=CONVOLUTION)
    active = make.op(first, target=RELU)
    added = make.op(first, second, target=ADD)
    added_active = make.op(added, target=RELU)
    # Three ops on two inputs are more than five together; what follows begins anew.
    too_much = make.op(added_active, target=RELU)
    behind = make.op(too_much, target=RELU)
    make.output(make.op(behind, active, nbytes=4), "loss", 0)
    make.output(make.op(make.backward(), active, added_active, behind, nbytes=4), "gradient", "w")
    graph, costs = make.finish()
    found = states(problem_of(graph, costs))
    assert found & {first, second, too_much} == {first, second, too_much}
    assert found.isdisjoint({active, added, added_active, behind})


def test_sage_recomputes_every_element_wise_result_once_not_everything_fits() -> None:
    make = GraphMaker()
    x = make.give()
    saved = []
    for _ in range(6):
        y = make.op(x, seconds=5.0, target=CONVOLUTION)
        x = make.op(y, seconds=0.5, target=RELU)
        saved.append((y, x))
    make.output(make.op(x, nbytes=4), "loss", 0)
    gradient = make.backward()
    for y, active in reversed(saved):
        gradient = make.op(gradient, y, active)
    make.output(gradient, "gradient", "w")
    graph, costs = make.finish()
    most = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    assert simulate(graph, costs, sage(graph, costs, most)).recomputed_ops == ()
    found = simulate(graph, costs, sage(graph, costs, most - 1))
    assert {graph.ops[op].target for op in found.recomputed_ops} == {RELU}
    # The last one is read by the loss and at once by the backward pass.
    assert len(found.recomputed_ops) >= len(saved) - 1


def test_element_wise_operators_are_tagged_so_by_torch() -> None:
    own = {"batch_norm_act_normalize", "batch_norm_normalize", "dropout_apply", "scale_masked"}
    untagged = {"_to_copy", "hardswish"}
    for name in ELEMENT_WISE - own - untagged:
        packet = getattr(torch.ops.aten, name)
        assert any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()), name
