"""Planners compared by joules, within a deadline, with paging and with an optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fresh_plans import FreshPlans
from torch import nn

import torch_odt as odt
from torch_odt import memory
from torch_odt.capture.costs import TransferCosts
from torch_odt.capture.device import Device
from torch_odt.execute.compare import Comparison, compare

needs_arena = pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built")

# To page takes longer than to compute anew, and draws next to nothing.
STORAGE = TransferCosts(1e-3, 1e6, 1e-3, 1e6, 1 << 40, overlaps=False, watts=1e-6)
BOARD = Device("a slow board", flops_per_second=1e9, watts=2.0, storage=STORAGE)
BATCH = (torch.ones(4, 2, 8192), torch.tensor([0, 1, 1, 0]))
ON_BOARD: dict[str, Any] = {"device": BOARD, "page_to": "/the/boards/own", "objective": "joules"}


def make_model() -> nn.Module:
    """Its activations, a megabyte each, are much beside its weights."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(2 if i == 0 else 8, 8, 3, padding=1) for i in range(10)]
    blocks = [each for layer in layers for each in (layer, nn.Tanh())]
    return nn.Sequential(*blocks, nn.AvgPool1d(512), nn.Flatten(), nn.Linear(128, 3))


def compared(*planners: str, share: float = 0.6, model: nn.Module | None = None, **options: Any) -> list[Comparison]:
    return compare(
        model or make_model(),
        F.cross_entropy,
        BATCH,
        planners=planners,
        budgets=[lambda everything_bytes: int(share * everything_bytes)],
        **{"cache": FreshPlans(), "micro_batch": 4} | options,
    )


def test_joules_are_what_operators_and_transfers_draw() -> None:
    (frugal,) = compared("melon", **ON_BOARD)
    (fast,) = compared("melon", **ON_BOARD | {"objective": "seconds"})
    assert fast.energy_joules and frugal.energy_joules and fast.step_seconds and frugal.step_seconds
    assert frugal.energy_joules < fast.energy_joules and frugal.step_seconds > fast.step_seconds
    # To compute everything once takes 2 W; what is paged is waited for at a millionth of that.
    (everything,) = compared("keep-all", share=1.0, **ON_BOARD)
    assert everything.step_seconds is not None
    assert everything.energy_joules == pytest.approx(2.0 * everything.step_seconds)
    waiting = frugal.step_seconds - everything.step_seconds
    assert frugal.paged_bytes and waiting == pytest.approx(2 * frugal.paged_bytes / 1e6, rel=0.05)
    assert frugal.energy_joules == pytest.approx(2.0 * everything.step_seconds + 1e-6 * waiting)
    assert any("a slow board" in note for note in frugal.notes)


@pytest.mark.parametrize("name", ["capuchin", "pofo"])
def test_who_is_made_for_paging_says_that_there_is_none(name: str) -> None:
    planner, other = compared(name, "melon", share=0.8, device=BOARD)
    # A planner that finds nothing pages nothing either.
    assert planner.paged_bytes in (None, 0) and other.paged_bytes == 0
    assert [note for note in planner.notes if "nothing to page to" in note and name in note]
    assert not [note for note in other.notes if "nothing to page to" in note]
    (paging,) = compared(name, **ON_BOARD)
    assert not [note for note in paging.notes if "nothing to page to" in note]


def test_a_plan_that_is_late_is_none() -> None:
    (made,) = compared("melon", **ON_BOARD)
    assert made.step_seconds is not None
    (timely,) = compared("melon", **ON_BOARD, deadline_seconds=0.9 * made.step_seconds)
    assert timely.feasible and timely.step_seconds and timely.energy_joules and made.energy_joules
    assert timely.step_seconds <= 0.9 * made.step_seconds and timely.energy_joules > made.energy_joules
    (late,) = compared("melon", **ON_BOARD, deadline_seconds=1e-9)
    assert not late.feasible
    assert late.peak_bytes is late.step_seconds is late.energy_joules is late.paged_bytes is None
    assert any("is too late" in note for note in late.notes)


def test_an_optimizers_state_counts() -> None:
    model = make_model()
    state_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
    (without,) = compared("keep-all", share=1.0, device=BOARD)
    adam = torch.optim.Adam(model.parameters())
    (everything,) = compared("keep-all", share=1.0, model=model, device=BOARD, optimizer=adam)
    assert everything.feasible and everything.peak_bytes == everything.budget_bytes
    assert without.peak_bytes is not None
    assert everything.peak_bytes >= without.peak_bytes - state_bytes // 2 + state_bytes
    (made,) = compared("melon", model=model, device=BOARD, optimizer=adam)
    assert made.peak_bytes is not None and state_bytes < made.peak_bytes <= made.budget_bytes
    (refused,) = compared("melon", share=0.5 * state_bytes / everything.peak_bytes, model=model, optimizer=adam)
    assert not refused.feasible


def test_what_cannot_be_measured_is_refused() -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="leave out the steps, or the optimizer"):
        compared("melon", model=model, optimizer=sgd, steps=1)
    with pytest.raises(ValueError, match="leave out the steps, or the device"):
        compared("melon", device=BOARD, steps=1)
    with pytest.raises(ValueError, match="no storage to page to"):
        compared("melon", device=Device("bare", 1e9, 2.0), page_to="/data")
    with pytest.raises(odt.PlanError, match="there is no objective"):
        compared("melon", objective="litres")


@needs_arena
def test_plans_that_page_are_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file so fast that it is worth while in any case.
    fast = TransferCosts(0.0, 1e15, 0.0, 1e15, 1 << 30)
    monkeypatch.setattr("torch_odt.execute.page_file._measure", lambda *_: fast)
    (made,) = compared("capuchin", page_to=tmp_path, steps=1)
    assert made.paged_bytes and made.peak_bytes and made.measured_step_seconds
    assert made.measured_peak_bytes is not None
    assert 0.5 * made.peak_bytes < made.measured_peak_bytes <= made.peak_bytes
