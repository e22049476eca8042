"""What a step that pages takes besides: in the plan's account, and in the budget that is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fresh_plans import FreshPlans
from torch import Tensor, nn

import torch_odt as odt
from torch_odt import memory
from torch_odt.capture.costs import TransferCosts
from torch_odt.capture.device import Device

# Transfers cost next to nothing, so that whatever has to go is paged.
STORAGE = TransferCosts(1e-9, 1e15, 1e-9, 1e15, limit_bytes=1 << 40)
BOARD = Device("a board", flops_per_second=1e9, watts=2.0, storage=STORAGE)
BATCH = (torch.ones(4, 2, 4096), torch.tensor([0, 1, 1, 0]))
BUFFER_BYTES = 1 << 20


class Remembering(nn.Module):
    """Its activations are half a megabyte each, and every step changes a buffer of a megabyte."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Conv1d(2 if i == 0 else 8, 8, 3, padding=1) for i in range(12)]
        self.blocks = nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))
        self.head = nn.Sequential(nn.AvgPool1d(256), nn.Flatten(), nn.Linear(128, 3))
        self.register_buffer("mean", torch.zeros(BUFFER_BYTES // 4 // 8192, 2, 4096))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.head(self.blocks(x))


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the process holds differs by some MiB from one plan to the next, which is much beside these budgets."""
    monkeypatch.setattr(memory, "process_bytes", lambda: 256 << 20)
    yield


def plan(nbytes: int, **options: Any) -> odt.Plan:
    budget = odt.Budget(nbytes, of="training")
    usual: dict[str, Any] = {"cache": FreshPlans(), "device": BOARD, "page_to": "/data"}
    return odt.plan(Remembering(), F.cross_entropy, BATCH, budget=budget, **usual | options)


def copied_bytes(plan: odt.Plan) -> int:
    return sum(line.nbytes for line in plan.lines if line.label == "copies of buffers")


def refused(**options: Any) -> int:
    with pytest.raises(odt.InfeasibleBudget) as refusal:
        plan(1 << 16, **options)
    return refusal.value.smallest_feasible_bytes


def test_copies_for_undoing_a_step_are_counted_where_it_pages() -> None:
    everything = plan(1 << 30)
    assert not copied_bytes(everything)
    scarce = plan(int(0.8 * everything.peak_bytes))
    assert scarce.schedule is not None and scarce.schedule.pages
    assert copied_bytes(scarce) == BUFFER_BYTES
    assert scarce.peak_bytes == sum(line.nbytes for line in scarce.lines) <= 0.8 * everything.peak_bytes


@pytest.mark.parametrize("planner", ["auto", "melon", "poet-remat"])
@pytest.mark.parametrize("page_to", [None, "/data"])
def test_exactly_the_budget_that_is_named_is_accepted(planner: str, page_to: str | None) -> None:
    pytest.importorskip("pulp")
    options: dict[str, Any] = {"planner": planner, "page_to": page_to, "planning_seconds": 1.0}
    named = refused(**options)
    exact = plan(named, **options)
    assert exact.peak_bytes <= named
    assert exact.smallest_feasible_bytes is not None and exact.smallest_feasible_bytes <= named
    assert plan(exact.smallest_feasible_bytes, **options).peak_bytes <= exact.smallest_feasible_bytes


def test_a_file_never_makes_the_named_budget_larger() -> None:
    assert refused() <= refused(page_to=None)
