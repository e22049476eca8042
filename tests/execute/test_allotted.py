"""Budgets that change while training runs: plans change between calls, and no bit of what is learnt."""

from __future__ import annotations

import copy
import gc
import json
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scripted_budgets import BATCH, Scripted, make_batches, make_net, make_step, plainly, train

import torch_odt as odt
from torch_odt import memory
from torch_odt.capture.rewrite import inexact_rewrites
from torch_odt.execute import session
from torch_odt.execute.candidates import Candidates
from torch_odt.runtime import ShareOfAvailable

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def sizes(cache: Path) -> tuple[int, int]:
    """What the smallest plan takes, and what one takes that has plenty, both above the level."""
    model = make_net()
    batch = next(make_batches(1))
    plan = odt.plan(
        model,
        F.cross_entropy,
        batch,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        budget=odt.Budget("4GiB", of="training"),
        cache=cache,
        disable_rewrites=inexact_rewrites(),
        micro_batch=BATCH,
    )
    assert plan.smallest_feasible_bytes is not None
    return plan.smallest_feasible_bytes, plan.peak_bytes


def test_plans_change_and_no_bit_does(cache: Path, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    smallest, kept = sizes
    low, high = int(1.15 * smallest), int(1.3 * kept)
    assert low < 0.8 * kept
    model = make_net()
    plain = copy.deepcopy(model)
    plain_losses = plainly(plain, 9)
    captures = []
    capture = session.capture_sizes
    monkeypatch.setattr(session, "capture_sizes", lambda *given: captures.append(given[-1]) or capture(*given))
    measured = []
    measure = session.profile_graph
    monkeypatch.setattr(
        session, "profile_graph", lambda request, graph, **how: measured.append(graph) or measure(request, graph, **how)
    )

    growth = [high, high, low, low, high, high, low, (low + high) // 2, high, high]
    step = make_step(model, Scripted(*growth, grow_after_seconds=0), cache)
    torch.manual_seed(3)
    losses, peaks, allowed = [], [], []
    for batch in make_batches(9):
        memory.reset_peak()
        before = memory.stats().allocated_bytes or 0
        losses.append(step(*batch).item())
        peaks.append((memory.stats().peak_bytes or 0) - before)
        allowed.append(step.plan.peak_bytes)
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    assert step.controller is not None
    assert [decision.action for decision in step.controller.decisions][:3] == ["begin", "shrink", "grow"]
    assert len(set(allowed)) >= 2 and min(allowed) <= low
    assert all(peak <= limit for peak, limit in zip(peaks, allowed, strict=True))
    assert sum(len(each) for each in captures if each) <= 1
    assert len(measured) == 1, "other amounts need no other graph and no other costs"


def test_plans_for_other_amounts_do_not_pile_up(cache: Path, sizes: tuple[int, int]) -> None:
    smallest, kept = sizes
    # What follows soon upon another lower amount is taken for pressure.
    shares = [share for share in (1.3, 0.8, 0.6, 0.45, 0.3, 0.2) for _ in range(4)]
    growth = [int(smallest + share * (kept - smallest)) for share in shares]
    step = make_step(make_net(), Scripted(*growth), cache)
    plans, peaks = [], set()
    for batch in make_batches(len(growth)):
        step(*batch)
        plans.append(weakref.ref(step.plan))
        peaks.add(step.plan.peak_bytes)
    gc.collect()
    assert len(peaks) > 3
    assert len({id(plan) for plan in (found() for found in plans) if plan is not None}) <= 3


def test_less_than_the_smallest_plan_is_a_warning(
    sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest, kept = sizes
    log = tmp_path / "decisions.jsonl"
    controller = Scripted(int(1.3 * kept), int(1.3 * kept), smallest // 4, log=log)
    model = make_net()
    plain = copy.deepcopy(model)
    searched_after = []
    fastest = Candidates.fastest

    def noted(*given: Any) -> Any:
        searched_after.append(controller.decisions[-1].action)
        return fastest(*given)

    monkeypatch.setattr(Candidates, "fastest", noted)
    step = make_step(model, controller, tmp_path)
    with pytest.warns(odt.OdtWarning, match="the smallest plan takes") as told:
        losses = train(step, 4)
    assert len(told) == 1
    assert "begin" in searched_after
    assert "scarce" not in searched_after, "what was named is followed, and nothing faster is looked for"
    assert losses == plainly(plain, 4)
    actions = [json.loads(line)["action"] for line in log.read_text().splitlines()]
    assert actions == ["begin", "shrink", "scarce"]


@contextmanager
def garbage_of(nbytes: int) -> Iterator[None]:
    """Inside, the process holds so much in a cycle that nobody has looked for yet."""
    gc.collect()
    gc.disable()
    try:
        cycle: list[Any] = [torch.ones(nbytes // 4)]
        cycle.append(cycle)
        del cycle
        yield
    finally:
        gc.enable()


def test_garbage_is_no_reason_to_refuse(cache: Path, sizes: tuple[int, int]) -> None:
    smallest, kept = sizes
    step = make_step(make_net(), Scripted(int(1.3 * kept), int(1.2 * smallest)), cache)
    first, second = make_batches(2)
    step(*first)
    with garbage_of(2 * kept):
        step(*second)
    assert step.controller is not None
    assert "scarce" not in {decision.action for decision in step.controller.decisions}


def test_garbage_is_not_counted_with_a_step_that_is_known(cache: Path, sizes: tuple[int, int]) -> None:
    _, kept = sizes
    budget = odt.Budget(4 * kept, of="training")
    step = make_step(make_net(), budget, cache)
    train(step, 1)
    again = make_step(make_net(), budget, cache)
    with garbage_of(2 * kept):
        train(again, 1)
    assert again.plan.peak_bytes < step.plan.peak_bytes + kept


def test_a_share_of_what_is_available(cache: Path) -> None:
    model = make_net()
    plain = copy.deepcopy(model)
    step = make_step(model, ShareOfAvailable(0.8, reserve="64MiB"), cache)
    assert train(step, 2) == plainly(plain, 2)
    assert step.controller is not None and step.controller.current == step.budget


def test_a_budget_may_become_a_policy_and_back(cache: Path) -> None:
    model = make_net()
    step = make_step(model, "2GiB", cache)
    train(step, 1)
    step.budget = lambda reading: reading.process_bytes + (1 << 30)
    train(step, 1)
    assert step.controller is not None
    step.budget = "2GiB"
    train(step, 1)
    assert step.controller is None and str(step.budget) == "2.00 GiB (process)"


def test_a_given_plan_keeps_its_budget(cache: Path, tmp_path: Path) -> None:
    step = make_step(make_net(), "2GiB", cache)
    train(step, 1)
    path = tmp_path / "plan.json"
    step.plan.save(path)
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with pytest.raises(ValueError, match="made for one budget"):
        odt.TrainStep(model, F.cross_entropy, optimizer, plan=path, budget=ShareOfAvailable())


def test_what_is_no_budget() -> None:
    with pytest.raises(TypeError, match="a policy, a budget or a function"), warnings.catch_warnings():
        make_step(make_net(), 3.5, Path("unused"))
