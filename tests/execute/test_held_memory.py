"""Memory that is held before a step begins: what other programs take meanwhile is not what the step counts on."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scripted_budgets import BATCH, Scripted, make_net, make_step, plainly, train

import torch_odt as odt
from torch_odt import memory
from torch_odt.execute.prepared import Prepared
from torch_odt.execute.request import Holding
from torch_odt.runtime.budget import Allotment
from torch_odt.runtime.growth import Need

MIB = 1 << 20
HUGE_PAGE_BYTES = 2 * MIB
pytestmark = pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built")


class Overtaken(Scripted):
    """Others take most of what a step was planned for, while it is planned."""

    def __init__(self, before: int, after: int, *, at_step: int = 0, **options: Any) -> None:
        super().__init__(before, **options)
        self._after = after
        self._steps_before = at_step

    def before_step(self, level_bytes: int, need: Need | None) -> Allotment:
        allotment = super().before_step(level_bytes, need)
        if self._steps_before == 0:
            self.growth = [self._after]
        self._steps_before -= 1
        return allotment


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def held_at_begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Of each step, as it begins: what is held, and what its plan uses."""
    found: list[tuple[int, int]] = []
    run = Prepared.run

    def noting(prepared: Prepared, *args: Any, **options: Any) -> Any:
        arena = memory.stats().arena
        assert arena is not None
        found.append((arena.held_bytes, prepared.plan.arena_bytes))
        return run(prepared, *args, **options)

    monkeypatch.setattr(Prepared, "run", noting)
    yield found


@pytest.mark.parametrize("transactional", [False, True])
def test_what_a_step_uses_is_held_when_it_begins(
    cache: Path, held_at_begin: list[tuple[int, int]], transactional: bool
) -> None:
    # More than is left of the smaller budget beside the plan: it must not be taken off that a second time.
    another = make_step(make_net(), Scripted(160 * MIB), cache)._request
    another.place(18 * MIB).hold(18 * MIB)
    gc.collect()
    others = memory.stats().arena
    assert others is not None and others.held_bytes >= 18 * MIB
    high, low = 160 * MIB, 70 * MIB
    controller = Scripted(*3 * [high], *2 * [low], *4 * [high], grow_after_seconds=0)
    model = make_net()
    plain = copy.deepcopy(model)
    step = make_step(model, controller, cache, transactional=transactional)
    assert train(step, 7) == plainly(plain, 7)
    assert len({uses for _, uses in held_at_begin}) >= 2
    for held, uses in held_at_begin:
        # Where the process holds more than was counted, what comes before the step takes pages of the idle arena: how
        # many depends on what else is in this process.
        assert uses - 4 * HUGE_PAGE_BYTES < held - others.held_bytes < uses + HUGE_PAGE_BYTES
    assert "overtaken" not in [decision.action for decision in controller.decisions]


def test_what_others_take_meanwhile_makes_the_plan_smaller(cache: Path, held_at_begin: list[tuple[int, int]]) -> None:
    high, low = 160 * MIB, 60 * MIB
    controller = Overtaken(high, low)
    model = make_net()
    plain = copy.deepcopy(model)
    step = make_step(model, controller, cache)
    assert train(step, 2) == plainly(plain, 2)
    assert [decision.action for decision in controller.decisions][:2] == ["begin", "overtaken"]
    assert "scarce" not in [decision.action for decision in controller.decisions]
    assert all(uses <= held <= low for held, uses in held_at_begin)


def test_held_pages_stay_while_plans_change(cache: Path) -> None:
    """Others cannot come between two plans: pages are given back down to what is allowed, and no further."""
    high, low = 160 * MIB, 70 * MIB
    seconds = count()
    controller = Scripted(high, high, low, high, grow_after_seconds=0, clock=lambda: next(seconds))
    step = make_step(make_net(), controller, cache)
    held: list[int] = []
    room_bytes = controller.room_bytes

    def noting(level_bytes: int) -> int:
        held.append(step._request.held_bytes)
        return room_bytes(level_bytes)

    train(step, 2)
    small_bytes = step._request.held_bytes
    assert 0 < small_bytes <= low
    controller.room_bytes = noting  # type: ignore[method-assign]
    train(step, 2)
    assert held[0] >= small_bytes - HUGE_PAGE_BYTES, "it grows from what it holds"
    assert step._request.held_bytes > small_bytes


def test_a_race_costs_a_piece(cache: Path) -> None:
    request = make_step(make_net(), Scripted(160 * MIB), cache)._request
    request.place(64 * MIB)
    rooms = iter([40 * MIB, 30 * MIB, 3 * MIB])
    assert request.hold(64 * MIB, lambda: next(rooms)) == 48 * MIB
    assert request.held_bytes == 16 * MIB
    assert request.hold(20 * MIB, lambda: 4 * MIB) == 0
    assert request.hold(10 * MIB, lambda: 0) == 0
    assert request.held_bytes == 10 * MIB


def test_what_holding_costs_is_noted(cache: Path) -> None:
    request = make_step(make_net(), Scripted(160 * MIB), cache)._request
    request.place(64 * MIB)
    assert request.holding.seconds_per_byte == 0
    assert request.hold(32 * MIB, lambda: 160 * MIB) == 0
    noted = request.holding.seconds_per_byte
    assert noted > 0
    assert request.hold(10 * MIB, lambda: 160 * MIB) == 0
    assert request.holding.seconds_per_byte == noted, "to give back costs nothing"


def test_of_what_holding_cost_the_last_counts_most() -> None:
    holding = Holding()
    holding.add(100 * MIB, 0.1)
    assert holding.seconds_per_byte * MIB == pytest.approx(0.001)
    holding.add(100 * MIB, 0.4)
    assert holding.seconds_per_byte * MIB == pytest.approx(0.003)
    holding.add(2 * MIB, 0.0)
    holding.add(0, 0.0)
    assert holding.seconds_per_byte * MIB == pytest.approx(0.003), "what was given back a moment ago is cheap"


def test_who_was_kept_from_running_says_nothing_of_what_holding_costs() -> None:
    holding = Holding()
    holding.add(100 * MIB, 60.0)
    assert holding.seconds_per_byte * 100 * MIB < 1


def test_a_pause_gives_back_what_is_held(cache: Path) -> None:
    step = make_step(make_net(), Scripted(160 * MIB), cache)
    train(step, 1)
    assert step._request.held_bytes > 0
    step.release()
    assert step._request.held_bytes == 0
    train(step, 1)
    assert step._request.held_bytes >= step.plan.arena_bytes


def test_a_fixed_budget_holds_nothing(cache: Path, held_at_begin: list[tuple[int, int]]) -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = odt.TrainStep(
        model, F.cross_entropy, optimizer, budget=odt.Budget("160MiB", of="training"), micro_batch=BATCH, cache=cache
    )
    train(step, 2)
    assert [held for held, _ in held_at_begin] == [0, 0]
