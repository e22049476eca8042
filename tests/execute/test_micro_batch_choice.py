"""Which micro-batches are chosen, and how many sizes are looked at for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fresh_plans import FreshPlans
from torch import nn

import torch_odt as odt
from torch_odt import memory
from torch_odt.capture.costs import Costs, TransferCosts
from torch_odt.capture.device import Device
from torch_odt.capture.graph import TrainingGraph
from torch_odt.execute import prepare, session
from torch_odt.execute.dry_run import request_for

# It pages in no time at all, but for the first byte.
STORAGE = TransferCosts(1e3, 1e15, 1e3, 1e15, limit_bytes=1 << 40, overlaps=False)
BOARD = Device("a board", flops_per_second=1e9, watts=2.0, storage=STORAGE)
BATCH = (torch.ones(8, 2, 4096), torch.tensor([0, 1, 1, 0, 0, 1, 1, 0]))


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process holds differs by some MiB from one plan to the next, which is much beside these budgets."""
    monkeypatch.setattr(memory, "process_bytes", lambda: 256 << 20)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that were looked at."""
    sizes: list[int] = []
    original = session.Session.capture

    def capture(self: session.Session, wanted: Any) -> Any:
        sizes.extend(size for size in wanted if size not in sizes)
        return original(self, wanted)

    monkeypatch.setattr(session.Session, "capture", capture)
    return sizes


def slowed(monkeypatch: pytest.MonkeyPatch, factors: dict[int, float]) -> None:
    """An op takes so many times as long, by the samples that are run at once."""
    original = session.profile_graph

    def profile(request: Any, graph: TrainingGraph, **options: Any) -> Costs:
        costs = original(request, graph, **options)
        samples = next(v.shape[0] for v in graph.values if v.kind == "input" and v.shape)
        factor = factors[samples]
        return replace(costs, ops={i: replace(cost, seconds=factor * cost.seconds) for i, cost in costs.ops.items()})

    monkeypatch.setattr(session, "profile_graph", profile)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv1d(2 if i == 0 else 8, 8, 3, padding=1) for i in range(12)]
    blocks = [each for layer in layers for each in (layer, nn.Tanh())]
    return nn.Sequential(*blocks, nn.AvgPool1d(256), nn.Flatten(), nn.Linear(128, 3))


def plan(nbytes: float, **options: Any) -> odt.Plan:
    usual: dict[str, Any] = {"cache": FreshPlans(), "device": BOARD, "budget": odt.Budget(int(nbytes), of="training")}
    return odt.plan(make_model(), F.cross_entropy, BATCH, **usual | options)


def enough_for(micro_batch: int) -> float:
    """What micro-batches take that recompute nothing, and what looking for them may leave behind."""
    return plan(1 << 30, micro_batch=micro_batch).peak_bytes + (6 << 20)


def test_smaller_micro_batches_are_taken_while_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, captured: list[int]
) -> None:
    slowed(monkeypatch, {8: 8.0, 4: 4.0, 2: 2.0, 1: 3.0})
    nbytes = enough_for(4)
    best = plan(nbytes, micro_batch=2).step_seconds
    captured.clear()
    made = plan(nbytes)
    assert made.micro_batch == 2 and not made.recomputed
    assert made.step_seconds == pytest.approx(best)


def test_no_more_than_the_next_size_is_looked_at_where_it_is_slower(
    monkeypatch: pytest.MonkeyPatch, captured: list[int]
) -> None:
    slowed(monkeypatch, {8: 1.0, 4: 1.0, 2: 1.5, 1: 0.1})
    monkeypatch.setattr(prepare, "_smallest_budget", lambda *_: 1 << 40)
    nbytes = enough_for(4)
    captured.clear()
    assert plan(nbytes).micro_batch == 4
    assert captured == [8, 4, 2]


def test_a_batch_that_fits_is_not_cut(monkeypatch: pytest.MonkeyPatch, captured: list[int]) -> None:
    slowed(monkeypatch, {8: 8.0, 4: 4.0, 2: 2.0, 1: 1.0})
    monkeypatch.setattr(prepare, "_smallest_budget", lambda *_: 1 << 40)
    assert plan(1 << 30).micro_batch is None
    assert captured == [8]


def test_waiting_for_a_file_is_no_reason_to_stop() -> None:
    """A plan that pages recomputes nothing either, and smaller micro-batches need not page."""
    pytest.importorskip("pulp")
    request = request_for(
        make_model(),
        F.cross_entropy,
        budget="auto",
        planner="poet-paging",
        device=BOARD,
        page_to="/data",
        cache=FreshPlans(),
    )
    pages = session.Session(request, BATCH, {}, 8, False).candidates(pages=True)
    limit_bytes = int(0.7 * pages.make((8,), 1 << 30).total_bytes)
    assert pages.make((8,), limit_bytes, seconds=2.0).pages
    found = pages.fastest(limit_bytes)
    assert found is not None and len(found.sizes) > 1 and not found.pages
