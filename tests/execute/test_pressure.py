"""Steps that are told while they run that less is allowed: they give back at once, and no bit of what is learnt changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scripted_budgets import BATCH, Scripted, make_net, make_step
from torch import Tensor, nn

import torch_odt as odt
from torch_odt import memory
from torch_odt.capture.rewrite import inexact_rewrites
from torch_odt.execute import pressure
from torch_odt.runtime import Reading

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built")


def reading() -> Reading:
    return Reading(0.0, memory.process_bytes(), 1 << 40, {"system": 1 << 40}, 1 << 41)


class Falling(Scripted):
    """Allowed is much, and from some look of each call on little, until the call ends."""

    def __init__(self, high: int, low: int, **options: Any) -> None:
        super().__init__(high, read=reading, grow_after_seconds=0, **options)
        self.high, self.low = high, low
        self.falls_at = 1 << 60
        self.held: list[int] = []

    def next_call(self, falls_at: int) -> None:
        self.falls_at, self.held, self.growth = falls_at, [], [self.high]

    def lacking_bytes(self, level_bytes: int, need_bytes: int) -> int:
        self.held.append(memory.process_bytes())
        if len(self.held) > self.falls_at:
            self.growth = [self.low]
        return super().lacking_bytes(level_bytes, need_bytes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def looks_at_every_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "_PIECE_SECONDS", 0.0)
    monkeypatch.setattr(pressure, "_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(pressure, "_LOOKING_SHARE", float("inf"))


def test_cnn(cache: Path) -> None:
    controller = Falling(160 * MIB, 60 * MIB)
    model = make_net()
    plain = copy.deepcopy(model)
    step = make_step(model, controller, cache)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(BATCH, 3, 64, 64), torch.randint(4, (BATCH,))
    import time
    for call in range(20):
        controller.next_call(call * 12)
        n = len(controller.decisions)
        torch.manual_seed(call)
        t = time.time()
        loss = step(x, y)
        t = time.time() - t
        state = torch.get_rng_state()
        torch.manual_seed(call)
        optimizer.zero_grad()
        expected = F.cross_entropy(plain(x), y)
        expected.backward()
        optimizer.step()
        print(call, len(controller.held), f"{t:.2f}", [(d.action, d.freed_bytes >> 20, d.budget_bytes>>20, d.process_bytes>>20) for d in list(controller.decisions)[n:]], step.plan.peak_bytes >> 20, step.plan.arena_bytes >> 20, [h >> 20 for h in controller.held[max(0, call*12 - 1):][::12]])
        assert torch.equal(loss, expected)
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
