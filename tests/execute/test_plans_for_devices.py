"""Plans for machines that are described, not measured; joules and deadlines."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fresh_plans import FreshPlans
from torch import nn

import torch_odt as odt
from torch_odt.capture.costs import TransferCosts
from torch_odt.capture.device import Device
from torch_odt.capture.power import Power
from torch_odt.execute import dry_run, session

STORAGE = TransferCosts(1e-3, 1e6, 1e-3, 1e6, 1 << 40, overlaps=False, watts=1e-6)
# To page takes longer than to compute anew, and draws next to nothing.
BOARD = Device("a slow board", flops_per_second=1e9, watts=2.0, storage=STORAGE)
BATCH = (torch.ones(4, 2, 8192), torch.tensor([0, 1, 1, 0]))


def make_model() -> nn.Module:
    """Its activations, a megabyte each, are much beside its weights."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(2 if i == 0 else 8, 8, 3, padding=1) for i in range(10)]
    blocks = [each for layer in layers for each in (layer, nn.Tanh())]
    return nn.Sequential(
        *blocks,
        nn.AvgPool1d(512),
        nn.Flatten(),
        nn.Linear(128, 3),
    )


def plan(share: float = 1.0, **options: Any) -> odt.Plan:
    """For a share of what keeping everything takes."""
    usual = {"cache": FreshPlans(), "device": BOARD, "micro_batch": 4} | options
    budget = odt.Budget("1GiB", of="training")
    if share < 1:
        budget = odt.Budget(int(share * plan(**options).peak_bytes), of="training")
    return odt.plan(make_model(), F.cross_entropy, BATCH, budget=budget, **usual)


@pytest.fixture(autouse=True)
def _measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "profile", lambda *_, **__: pytest.fail("an operator was measured"))


def test_nothing_is_measured_and_the_plan_says_for_whom_it_is() -> None:
    made = plan(device="cortex-a72")
    assert made.device == "Raspberry Pi 4B+ (Cortex-A72)" and made.objective == "seconds"
    assert made.step_joules == pytest.approx(3.0 * made.step_seconds)
    assert any("nothing was measured" in note for note in made.notes)
    assert "Raspberry Pi 4B+ (Cortex-A72)" in str(made) and " J" in str(made)
    document = made.to_dict()
    assert document["device"] == made.device and document["step_joules"] == made.step_joules


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text('description = "a board"\nflops_per_second = 1e9\nwatts = 2.0\n')
    by_file, itself = plan(device=path), plan()
    assert by_file.device == "a board" and by_file.step_seconds == itself.step_seconds
    half = replace(BOARD, flops_per_second=5e8)
    assert plan(device=half).step_seconds == pytest.approx(2 * itself.step_seconds)
    path.write_text("watts = 2.0\n")
    with pytest.raises(ValueError, match="is missing; a device has"):
        plan(device=path)


def test_joules_are_saved_where_seconds_are_not_scarce() -> None:
    # The folder is the device's.
    fast = plan(0.6, page_to="/nowhere/at/all")
    frugal = plan(0.6, page_to="/nowhere/at/all", objective="joules")
    assert fast.step_joules and frugal.step_joules
    assert frugal.step_joules < fast.step_joules and frugal.step_seconds > fast.step_seconds
    assert any("are paged out" in note for note in frugal.notes)
    between = (fast.step_seconds + frugal.step_seconds) / 2
    timely = plan(0.6, page_to="/nowhere/at/all", objective="joules", deadline_seconds=between)
    assert timely.step_seconds <= between and timely.step_joules
    assert frugal.step_joules <= timely.step_joules <= fast.step_joules
    assert "fewest joules" in str(timely) and timely.to_dict()["deadline_seconds"] == between


def test_nothing_is_paged_without_a_folder() -> None:
    made = plan(0.6, objective="joules")
    assert made.schedule is not None and not made.schedule.pages
    told = "nothing is paged: a slow board has storage; page_to= (--page-to) allows its use"
    assert told in made.notes
    assert told not in plan(0.6, page_to="/data").notes
    assert told not in plan(0.6, device=replace(BOARD, storage=None)).notes
    assert told not in plan(0.6, planner="rotor").notes
    assert told not in plan().notes, "there is room for everything"
    with pytest.raises(odt.InfeasibleBudget, match="page_to=, for the device has storage"):
        plan(0.05)


def test_what_cannot_be_planned() -> None:
    with pytest.raises(odt.PlanError, match=r"no plan within the budget meets the deadline of 1e-09 s"):
        plan(deadline_seconds=1e-9)
    with pytest.raises(ValueError, match="a slow board has no storage to page to"):
        plan(device=replace(BOARD, storage=None), page_to="/data")
    with pytest.raises(ValueError, match="there is no device 'abacus'"):
        plan(device="abacus")
    with pytest.raises(odt.PlanError, match="there is no objective"):
        plan(objective="litres")


def test_the_file_may_hold_no_more_than_its_limit() -> None:
    unlimited = plan(0.6, page_to="/data", objective="joules")
    none = plan(0.6, page_to=odt.PageFile("/data", limit=4096), objective="joules")
    assert unlimited.schedule is not None and unlimited.schedule.pages
    assert none.schedule is not None and not none.schedule.pages


@pytest.mark.parametrize("knows_allocations", [True, False])
def test_such_a_plan_is_followed_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows_allocations: bool
) -> None:
    monkeypatch.undo()
    costs = odt.profile(make_model(), F.cross_entropy, BATCH, cache=FreshPlans()) if knows_allocations else None
    made = plan(0.7, objective="joules", deadline_seconds=100.0, costs=costs)
    assert any("allocations are guessed" in note for note in made.notes) is not knows_allocations
    made.save(tmp_path / "plan.json")
    assert odt.load_plan(tmp_path / "plan.json").to_dict() == made.to_dict()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = odt.TrainStep(
        model, F.cross_entropy, optimizer, plan=tmp_path / "plan.json", budget=odt.Budget("1GiB", of="training")
    )
    departs = pytest.warns(odt.OdtWarning, match="departed from the plan")
    with contextlib.nullcontext() if knows_allocations else departs:
        loss = step(*BATCH)
    torch.testing.assert_close(loss, F.cross_entropy(make_model()(BATCH[0]), BATCH[1]))
    assert step.plan.device == "a slow board" and step.plan.step_joules == made.step_joules


def test_the_frontier_of_joules() -> None:
    options: dict[str, Any] = {"device": BOARD, "cache": FreshPlans(), "time_limit_seconds": 2.0, "rungs": 2}
    found = odt.frontier(make_model(), F.cross_entropy, BATCH, objective="joules", **options)
    joules = [made.step_joules for made in found]
    assert joules == sorted(joules) and len(joules) > 1 and " J" in str(found)
    late = found.plans[-1].step_seconds
    timely = odt.frontier(make_model(), F.cross_entropy, BATCH, deadline_seconds=0.999 * late, **options)
    assert all(made.step_seconds <= 0.999 * late for made in timely)
    with pytest.raises(odt.PlanError, match="every plan takes longer than the deadline of 1e-09 s"):
        odt.frontier(make_model(), F.cross_entropy, BATCH, deadline_seconds=1e-9, **options)


def test_joules_of_this_machine_name_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(dry_run, "measure_power", lambda: Power(40.0, 8.0, "joules by a sensor"))
    made = plan(device="this", objective="joules")
    assert made.step_joules == pytest.approx(40.0 * made.step_seconds)
    assert "joules by a sensor" in made.notes
    assert plan(device="this").step_joules is None
