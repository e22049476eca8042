"""What is done about a call that has failed: which errors speak of memory, and what follows one another."""

from __future__ import annotations

import pytest
import torch
from undone_steps import Net, make_step

import torch_odt as odt
from torch_odt.errors import InfeasibleBudget, PagingError
from torch_odt.execute.retries import Lowered, Retries, is_shortage


def test_what_speaks_of_memory() -> None:
    with pytest.raises(RuntimeError) as impossible:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_shortage(impossible.value, is_refused=False)
    assert is_shortage(torch.OutOfMemoryError("full"), is_refused=False)
    assert is_shortage(MemoryError(), is_refused=False)
    assert not is_shortage(RuntimeError("shapes differ"), is_refused=False)
    assert is_shortage(RuntimeError("unknown"), is_refused=True)
    assert not is_shortage(odt.PlanError("another step"), is_refused=True)


def test_what_follows_a_shortage() -> None:
    request = make_step(Net(), budget=odt.Budget(1000 << 20, of="training"))._request
    retries = Retries(can_plan=True)
    for _ in range(3):
        retries.note(MemoryError("full"), request)
        assert retries.prepare_next(request)
    assert [retry.remedy for retry in retries.done] == ["released", "smaller plan", "smaller plan"]
    assert retries.lowered == Lowered(growth_bytes=int(0.85 * int(0.85 * (1000 << 20))))
    last = MemoryError("still full")
    retries.note(last, request)
    assert not retries.prepare_next(request) and retries.failure is last


def test_the_smallest_plan_is_tried_where_nothing_smaller_fits() -> None:
    request = make_step(Net(), budget=odt.Budget(1000 << 20, of="training"))._request
    retries, full = Retries(can_plan=True), MemoryError("full")
    for _ in range(2):
        retries.note(full, request)
        assert retries.prepare_next(request)
    retries.note(InfeasibleBudget("850 MiB", 900 << 20), request)
    assert retries.prepare_next(request) and retries.lowered == Lowered(900 << 20)
    assert [retry.growth_bytes for retry in retries.done] == [None, 900 << 20]
    retries.note(InfeasibleBudget("900 MiB", 950 << 20), request)
    assert not retries.prepare_next(request) and retries.failure is full


def test_a_transfer_that_fails_leads_to_a_plan_without_paging_once() -> None:
    request = make_step(Net())._request
    retries = Retries(can_plan=True)
    retries.note(PagingError("torn"), request)
    assert retries.prepare_next(request) and retries.lowered == Lowered(pages=False)
    retries.note(MemoryError("full"), request)
    assert retries.prepare_next(request) and retries.lowered == Lowered(pages=False)
    retries.note(PagingError("torn"), request)
    assert not retries.prepare_next(request)


def test_a_given_plan_is_only_made_again() -> None:
    request = make_step(Net())._request
    retries = Retries(can_plan=False)
    retries.note(MemoryError("full"), request)
    assert retries.prepare_next(request) and retries.lowered is None
    retries.note(MemoryError("full"), request)
    assert not retries.prepare_next(request)
