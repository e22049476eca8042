"""Frontiers of several planners: one graph, one set of measurements, and whatever is known of joules and paging."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fresh_plans import FreshPlans
from torch import Tensor, nn

import torch_odt as odt
from torch_odt._extensions import memory_module
from torch_odt.capture.costs import Costs, TransferCosts
from torch_odt.capture.device import Device
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.rewrite import inexact_rewrites
from torch_odt.execute import frontier as frontier_module
from torch_odt.execute import session
from torch_odt.execute.candidate import Candidate
from torch_odt.execute.candidates import Candidates
from torch_odt.execute.frontier import frontiers
from torch_odt.execute.page_file import PageFile
from torch_odt.planning import registry
from torch_odt.planning.melon import melon
from torch_odt.planning.page.document import page
from torch_odt.planning.plan_text import format_joules
from torch_odt.planning.schedule import Schedule
from torch_odt.runtime.budget import format_bytes

OPTIONS: dict[str, Any] = {"rungs": 2, "time_limit_seconds": 2.0}
WATTS = 4.0
SLOW = TransferCosts(1e-3, 1e6, 1e-3, 1e6, 1 << 40, overlaps=False)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def step(*, norm: bool = False) -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    layers: list[nn.Module] = []
    for i in range(5):
        layers += [nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8) if norm else nn.Tanh(), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return model, F.cross_entropy, (torch.randn(8, 3, 32, 32), torch.arange(8) % 5)


def test_all_planners_are_given_the_same(tmp_path: Path) -> None:
    done: list[str] = []
    found = frontiers(*step(norm=True), planners=("melon", "dtr"), cache=tmp_path, report=done.append, **OPTIONS)
    assert list(found) == done == ["melon", "dtr"]
    for frontier in found.values():
        assert all(more.peak_bytes > less.peak_bytes for more, less in pairwise(frontier))
        assert all(more.step_seconds < less.step_seconds for more, less in pairwise(frontier))
    first, second = (frontier.plans[0] for frontier in found.values())
    assert (first.peak_bytes, first.step_seconds) == (second.peak_bytes, second.step_seconds)
    assert {plan.planner for frontier in found.values() for plan in frontier} <= {"keep-all", "melon", "dtr"}
    assert all(plan.step_joules is None for frontier in found.values() for plan in frontier)


def test_nobody_s_frontier_is_refused() -> None:
    with pytest.raises(odt.PlanError, match="nobody"):
        frontiers(*step(), planners=("melon", "nobody"), cache=FreshPlans())


def without_solver(*_: Any) -> Schedule:
    raise odt.PlanError("this planner needs pulp")


def test_a_planner_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._PLANNERS, "absent", without_solver)
    found = frontiers(*step(norm=True), planners=("absent", "melon"), cache=FreshPlans(), **OPTIONS)
    assert list(found) == ["melon"] and len(found["melon"]) > 1
    assert found["melon"].notes == ("no frontier of absent: this planner needs pulp",)
    assert "note: no frontier of absent" in str(found["melon"])
    with pytest.raises(odt.PlanError, match="needs pulp"):
        frontiers(*step(norm=True), planners=("absent",), cache=FreshPlans(), **OPTIONS)


def test_what_is_too_late_without_paging_may_be_in_time_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def only_paged(candidates: Candidates, *_: Any) -> list[Candidate]:
        made.append(candidates.pages_by)
        return [candidates.smallest(8)] if candidates.pages_by else []

    monkeypatch.setattr(frontier_module, "_candidates", only_paged)
    device = replace(Device.of_value("cortex-a72") or pytest.fail("no device"), storage=SLOW)
    found = frontiers(
        *step(norm=True), planners=("melon",), device=device, page_to="/data", cache=FreshPlans(), **OPTIONS
    )
    assert len(made) == 2 and len(found["melon"]) == 1


def test_a_rest_of_the_batch_is_planned_in_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def patient(graph: Any, costs: Costs, budget_bytes: int, *, time_limit_seconds: float = 60.0) -> Schedule:
        limits.append(time_limit_seconds)
        return melon(graph, costs, budget_bytes)

    monkeypatch.setitem(registry._PLANNERS, "patient", patient)
    found = frontiers(*step(), planners=("patient",), micro_batch=3, cache=FreshPlans(), **OPTIONS)["patient"]
    assert len(found) > 1 and max(limits) <= OPTIONS["time_limit_seconds"]


def test_joules_are_those_of_seconds_where_nothing_is_paged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = session.profile_graph

    def with_watts(request: Any, graph: TrainingGraph, **options: Any) -> Costs:
        return replace(original(request, graph, **options), watts=WATTS)

    monkeypatch.setattr(session, "profile_graph", with_watts)
    model, loss_fn, batch = step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = frontiers(model, loss_fn, batch, planners=("melon",), optimizer=optimizer, cache=tmp_path, **OPTIONS)[
        "melon"
    ]
    assert {plan.micro_batch is None for plan in found} == {False, True}
    for plan in found:
        assert plan.step_joules == pytest.approx(WATTS * plan.step_seconds)
        assert format_joules(plan.step_joules) in str(plan)
    assert odt.Plan.from_state(found.plans[0].to_state()).step_joules == found.plans[0].step_joules
    assert 'value="joules"' in page(found.plans[0], frontiers={"melon": found.plans})


@pytest.mark.skipif(memory_module is None, reason="torch_odt._memory, and with it the pager, is not built")
def test_frontiers_page_where_a_folder_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Transfers cost hardly anything, so that nothing depends on the disk at hand.
    free = TransferCosts(1e-9, 1e15, 1e-9, 1e15, limit_bytes=1 << 40)
    monkeypatch.setattr("torch_odt.execute.page_file._measure", lambda pager, limit_bytes: free)
    folder = PageFile(tmp_path, limit="64MiB")
    found = frontiers(*step(norm=True), planners=("melon",), page_to=folder, cache=FreshPlans(), **OPTIONS)["melon"]
    smallest = found.plans[-1]
    assert smallest.timeline is not None and smallest.timeline.transfers
    assert any("paged out" in note for note in smallest.notes)
    assert f"{format_bytes(smallest.timeline.moved_bytes('out'))} paged out" in page(
        smallest, frontiers={"melon": found.plans}
    )


def test_each_plan_can_be_followed(tmp_path: Path) -> None:
    model, loss_fn, batch = step(norm=True)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss_fn(plain(batch[0]), batch[1]).backward()
        optimizer.step()
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    exact = {"disable_rewrites": inexact_rewrites(), "micro_batch": 8}
    found = odt.frontier(trained, loss_fn, batch, optimizer=optimizer, cache=tmp_path, **exact, **OPTIONS)
    assert len(found) > 1
    for plan in (found.plans[0], found.plans[-1]):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        with pytest.raises(ValueError, match="made for no budget"):
            odt.TrainStep(trained, loss_fn, optimizer, plan=plan)
        following = odt.TrainStep(
            trained, loss_fn, optimizer, plan=plan, budget=odt.Budget("1GiB", of="training"), cache=FreshPlans()
        )
        for _ in range(2):
            following(*batch)
        assert following.plan.recomputed_ops == plan.recomputed_ops
        assert all(torch.equal(*pair) for pair in zip(trained.parameters(), plain.parameters(), strict=True))
    path = tmp_path / "plan.json"
    found.within(found.plans[-1].peak_bytes).save(path)
    assert odt.load_plan(path).peak_bytes == found.plans[-1].peak_bytes
