"""Time for planning: never a worse plan, remembered for later starts, and nothing of it stays in the process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fresh_plans import FreshPlans
from torch import nn

import torch_odt as odt
from torch_odt import memory
from torch_odt.capture.child import ChildFailed, ChildLate
from torch_odt.capture.device import Device
from torch_odt.execute import planning_time, wrap_schedules
from torch_odt.execute.candidates import Candidates
from torch_odt.execute.dry_run import measured
from torch_odt.planning import registry
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.melon import melon
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.simulate import simulate

# Costs that are not measured are the same each time.
BOARD = Device("a board", flops_per_second=1e9, watts=2.0)
BATCH = (torch.ones(4, 2, 4096), torch.tensor([0, 1, 1, 0]))


def make_model() -> nn.Module:
    """Its activations, scarce a megabyte each, are much beside its weights."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(2 if i == 0 else 8, 8, 3, padding=1) for i in range(12)]
    blocks = [each for layer in layers for each in (layer, nn.Tanh())]
    return nn.Sequential(*blocks, nn.AvgPool1d(256), nn.Flatten(), nn.Linear(128, 3))


def plan(megabytes: float, **options: Any) -> odt.Plan:
    budget = odt.Budget(int(megabytes * 2**20), of="training")
    usual: dict[str, Any] = {"cache": FreshPlans(), "device": BOARD, "micro_batch": 4}
    return odt.plan(make_model(), F.cross_entropy, BATCH, budget=budget, **usual | options)


@pytest.fixture(scope="module", autouse=True)
def _steady() -> Iterator[None]:
    """What the process holds differs by some MiB from one plan to the next, which is much beside these budgets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "process_bytes", lambda: 256 << 20)
        yield


@pytest.fixture(scope="module")
def scarce() -> float:
    """Three quarters of what keeping everything takes, in megabytes."""
    return 0.75 * plan(1024).peak_bytes / 2**20


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is planned apart is planned here, so that it can be watched; how long it was to take at most."""
    patience: list[float] = []

    def run(function: Callable[[], Any], *, deadline_seconds: float) -> Any:
        patience.append(deadline_seconds)
        return function()

    monkeypatch.setattr(planning_time, "run_in_child", run)
    return patience


@pytest.mark.parametrize("micro_batch", [4, None])
def test_more_time_never_gives_a_slower_plan(scarce: float, micro_batch: int | None) -> None:
    seconds = [plan(scarce, planning_seconds=each, micro_batch=micro_batch).step_seconds for each in (0, 0.5, 3)]
    assert all(more <= seconds[0] for more in seconds)


def test_no_time_is_taken_unless_it_is_given(scarce: float, in_this_process: list[float]) -> None:
    plan(scarce)
    assert not in_this_process
    plan(scarce, planning_seconds=0.5)
    assert len(in_this_process) == 1
    plan(1024, planning_seconds=0.5)
    assert len(in_this_process) == 1, "nothing is faster than to keep everything"


def test_what_was_found_is_remembered(scarce: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[float] = []
    fastest, improved = Candidates.fastest, Candidates.improved

    def begin(self: Candidates, *options: Any) -> Any:
        begun.append(0.0)
        return fastest(self, *options)

    def go_on(self: Candidates, *options: Any) -> Any:
        begun.append(self.planning_seconds)
        return improved(self, *options)

    monkeypatch.setattr(Candidates, "fastest", begin)
    monkeypatch.setattr(Candidates, "improved", go_on)
    quick = plan(scarce, cache=tmp_path)
    begun.clear()
    long = plan(scarce, cache=tmp_path, planning_seconds=0.5)
    assert begun == [0.5] and long.step_seconds <= quick.step_seconds
    for seconds in (0.0, 0.3, 0.5):
        assert plan(scarce, cache=tmp_path, planning_seconds=seconds).schedule == long.schedule
    assert begun == [0.5]
    longer = plan(scarce, cache=tmp_path, planning_seconds=1.0)
    assert begun == [0.5, 1.0] and longer.step_seconds <= long.step_seconds


def test_what_takes_fewest_bytes_is_improved_too(scarce: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is found at once that fits, but with time."""
    monkeypatch.setattr(Candidates, "fastest", lambda *_: None)
    slow, better = (plan(scarce, planning_seconds=seconds) for seconds in (0.0, 1.0))
    assert slow.planner == "smallest" and better.planner == "auto" and better.step_seconds < slow.step_seconds


def test_a_step_plans_longer_too(scarce: float) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = odt.Budget("1GiB", of="training")
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=budget, cache=FreshPlans(), planning_seconds=0.2)
    torch.testing.assert_close(step(*BATCH), F.cross_entropy(make_model()(BATCH[0]), BATCH[1]))


def test_a_child_that_dies_does_not_matter(scarce: float, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getpid()
    calls: list[int] = []

    def fatal(graph: Any, costs: Any, budget_bytes: int) -> Schedule:
        if os.getpid() != parent:
            os._exit(3)
        calls.append(budget_bytes)
        return melon(graph, costs, budget_bytes)

    first = {"fatal": "torch_odt.planning.melon"}
    monkeypatch.setattr(registry, "_BUILT_IN", first | registry._BUILT_IN)
    monkeypatch.setitem(registry._PLANNERS, "fatal", fatal)
    assert plan(scarce, planning_seconds=2.0).recomputed and calls


def test_a_named_planner_stops_when_it_is_told_to(
    scarce: float, in_this_process: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def patient(graph: Any, costs: Any, budget_bytes: int, *, time_limit_seconds: float = 60.0) -> Schedule:
        limits.append(time_limit_seconds)
        return melon(graph, costs, budget_bytes)

    monkeypatch.setitem(registry._PLANNERS, "patient", patient)
    plan(scarce, planner="patient")
    # Its own limit is that of all its plans together.
    assert 5.0 < max(limits) <= 30.0 and in_this_process
    limits.clear()
    in_this_process.clear()
    plan(scarce, planner="patient", planning_seconds=4.0)
    # The last one is for the fewest bytes.
    assert len(limits) > 1 and max(limits) <= 4.0
    limits.clear()
    plan(scarce, planner="patient", planning_seconds=4.0, micro_batch=None)
    assert len(limits) > 2 and max(limits) <= 4.0


@pytest.mark.parametrize("objective", ["seconds", "joules"])
def test_all_that_a_named_planner_does_is_within_one_limit(
    scarce: float, in_this_process: list[float], monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    """Every aim, every micro-batch size, another try in time for a deadline, and what takes fewest bytes."""
    clock = [0.0]
    spent: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def greedy(graph: Any, costs: Any, budget_bytes: int, *, time_limit_seconds: float = 8.0, **_: Any) -> Schedule:
        clock[0] += time_limit_seconds
        spent.append(time_limit_seconds)
        return melon(graph, costs, budget_bytes)

    monkeypatch.setitem(registry._PLANNERS, "greedy", greedy)
    for limit, options in ((8.0, {}), (3.0, {"planning_seconds": 3.0})):
        spent.clear()
        with contextlib.suppress(odt.PlanError):
            plan(
                scarce,
                planner="greedy",
                micro_batch=None,
                objective=objective,
                deadline_seconds=float("inf") if objective == "seconds" else 1e-6,
                **options,
            )
        assert len(spent) > 2 and sum(spent) <= limit


def test_a_planner_that_does_not_stop_is_not_waited_for_twice(scarce: float, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []

    def late(function: Callable[[], Any], *, deadline_seconds: float) -> Any:
        calls.append(deadline_seconds)
        raise ChildLate("the child had no result")

    monkeypatch.setattr(planning_time, "run_in_child", late)
    quick = plan(scarce)
    found = plan(scarce, planning_seconds=0.5)
    assert len(calls) == 1 and any("had not stopped" in note for note in found.notes)
    assert found.step_seconds <= quick.step_seconds * 1.5
    monkeypatch.setitem(registry._PLANNERS, "patient", lambda *_, time_limit_seconds=9.0: pytest.fail("done here"))
    with pytest.raises(odt.PlanError, match=r"was given .* and had not stopped"):
        plan(scarce, planner="patient")


def test_what_a_child_could_not_do_is_done_in_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Callable[[], Any], *, deadline_seconds: float) -> Any:
        time.sleep(0.05)
        raise ChildFailed("killed by SIGKILL")

    monkeypatch.setattr(planning_time, "run_in_child", fail)
    begin = time.perf_counter()
    stop_at = planning_time.planned_apart(lambda stop_at: stop_at, 4.0)
    assert stop_at <= begin + 4.04


def test_a_batch_that_cannot_be_cut_leaves_no_time_to_sizes_that_are_not_tried(
    in_this_process: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_normalised(**options: Any) -> odt.Plan:
        model = nn.Sequential(make_model()[:-1], nn.BatchNorm1d(128), nn.Linear(128, 3))
        budget = odt.Budget("1GiB", of="training")
        return odt.plan(model, F.cross_entropy, BATCH, budget=budget, cache=FreshPlans(), device=BOARD, **options)

    limits: list[float] = []

    def patient(graph: Any, costs: Any, budget_bytes: int, *, time_limit_seconds: float = 60.0) -> Schedule:
        limits.append(time_limit_seconds)
        return melon(graph, costs, budget_bytes)

    monkeypatch.setitem(registry._PLANNERS, "patient", patient)
    plan_normalised(planner="patient", planning_seconds=400.0)
    # Half of it is left for another attempt, and a planner gets most of what there is, but may be called again.
    assert limits[0] == pytest.approx(160.0, abs=10.0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_what_is_no_length_of_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="planning_seconds must be"):
        plan(64, planning_seconds=seconds)
    model = make_model()
    with pytest.raises(ValueError, match="planning_seconds must be"):
        odt.wrap(model, budget="1GiB", planning_seconds=seconds)
    with pytest.raises(ValueError, match="planning_seconds must be"):
        odt.TrainStep(model, None, torch.optim.SGD(model.parameters(), lr=0.1), budget="1GiB", planning_seconds=seconds)


def test_a_given_plan_is_not_looked_for(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"leave out .* and planning_seconds="):
        odt.wrap(model, plan=tmp_path / "plan.json", planning_seconds=1.0)
    with pytest.raises(ValueError, match=r"leave out .* and planning_seconds="):
        odt.TrainStep(
            model,
            F.cross_entropy,
            torch.optim.SGD(model.parameters(), lr=0.1),
            plan=tmp_path / "plan.json",
            planning_seconds=1.0,
        )


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("default", "error::torch_odt.errors.OdtWarning")
def test_a_wrapped_model_is_planned_longer_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []
    original = wrap_schedules.planned

    def record(name: str, *case: Any) -> Schedule:
        asked.append((name, case[-1]))
        return original(name, *case)

    monkeypatch.setattr(wrap_schedules, "planned", record)
    budget = odt.Budget("1GiB", of="training")
    for seconds in (0.2, 0.2, 0.0):
        torch._dynamo.reset()
        model = odt.wrap(make_model(), budget=budget, cache=tmp_path, planning_seconds=seconds)
        for _ in range(3):
            F.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    # The second start finds what the first one has remembered.
    assert asked == [("auto", 0.2), ("auto", 0.0)]


def test_one_graph_is_planned_as_long_as_is_allowed(
    monkeypatch: pytest.MonkeyPatch, in_this_process: list[float]
) -> None:
    graph, costs = measured(make_model(), F.cross_entropy, BATCH, cache=FreshPlans())

    def takes(schedule: Schedule) -> int:
        return simulate(graph, costs, schedule).peak_bytes

    def found(name: str, seconds: float, share: float = 0.6) -> Schedule:
        budget_bytes = int(share * takes(keep_all(graph, costs)))
        return planning_time.planned(name, graph, costs, budget_bytes, takes, seconds)

    quick = simulate(graph, costs, found("auto", 0.0)).seconds
    assert simulate(graph, costs, found("melon", 0.0)).seconds >= quick and not in_this_process
    assert not simulate(graph, costs, found("auto", 0.3, 1.5)).recomputed_ops and not in_this_process
    assert simulate(graph, costs, found("auto", 0.3)).recomputed_ops and len(in_this_process) == 1
    limits: list[float] = []

    def patient(graph: Any, costs: Any, budget_bytes: int, *, time_limit_seconds: float = 60.0) -> Schedule:
        limits.append(time_limit_seconds)
        return melon(graph, costs, budget_bytes)

    monkeypatch.setitem(registry._PLANNERS, "patient", patient)
    for seconds, most in ((2.0, 1.6), (0.0, 48.0)):
        limits.clear()
        found("patient", seconds)
        assert most / 2 < max(limits) <= most
