"""Every planner, executed and not only simulated: real networks trained at three budgets, down to its smallest one.

No batch is cut, so that every bit is plain PyTorch's. What the allocator counts stays inside the budget.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import exactness
import pytest
import torch
from exactness import WITH_GRADIENTS, Outcome, assert_identical, without_gradients
from models import ModelCase, bert_batch, case_named, image_batch

import torch_odt as odt
from tests.execute.doors import Planned, StepDoor
from torch_odt import memory
from torch_odt.capture.costs import TransferCosts
from torch_odt.capture.rewrite import inexact_rewrites
from torch_odt.execute import page_file
from torch_odt.planning.registry import built_in_names, get_planner, takes_time_limit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built"),
]

STEPS = 2
PLENTY = odt.Budget("8GiB", of="training")
ABSURD = odt.Budget(4096, of="training")
# Between the smallest budget that a planner names (0) and the one that is named for keeping everything (1).
SHARES = (0.0, 0.4, 0.8)
# Batches so large that activations are much beside parameters, and what a budget needs in any case.
CASES = (
    replace(case_named("mobilenet_v2"), batch_size=16, batch=image_batch(96)),
    replace(case_named("resnet50"), batch_size=16, batch=image_batch(64)),
    replace(case_named("bert_small"), batch_size=16, batch=functools.partial(bert_batch, length=64)),
)
# `keep-all` meets no budget below what it takes; see test_budget_is_kept.py.
PLANNERS = tuple(name for name in built_in_names() if name != "keep-all")
PAGING = ("capuchin", "pofo", "poet", "poet-paging")
PLANNING_SECONDS = 1.0


@dataclass(frozen=True)
class Runs:
    """What all planners are compared with.

    Attributes:
        cache: graphs and measurements, made once; of all workers.
        kept_bytes: the budget that is named where everything is kept.
    """

    case: ModelCase
    cache: Path
    plain: Outcome
    kept_bytes: int

    def door(self, planner: str, budget: odt.Budget, page_to: Path | None = None) -> StepDoor:
        takes_long = planner != "auto" and takes_time_limit(get_planner(planner))
        return StepDoor(
            self.case,
            budget,
            steps=STEPS,
            planner=planner,
            cache=self.cache,
            # What pages updates parameters after the backward pass: compared with what does the same, it spares more.
            disable_rewrites=inexact_rewrites() | (WITH_GRADIENTS if page_to else frozenset()),
            planning_seconds=PLANNING_SECONDS if takes_long else 0.0,
            page_to=page_to,
            micro_batch=self.case.batch_size,
        )


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def runs(request: pytest.FixtureRequest) -> Runs:
    gc.collect()
    case = request.param
    plain = exactness.train_plainly(case, steps=STEPS)
    runs = Runs(case, Path(os.environ["TORCH_ODT_TESTS_CACHE"], "executed"), plain, 0)
    return replace(runs, kept_bytes=_smallest_bytes(runs.door("keep-all", ABSURD)))


def _smallest_bytes(door: StepDoor) -> int:
    with pytest.raises(odt.InfeasibleBudget) as refusal:
        door.train(ABSURD)
    return refusal.value.smallest_feasible_bytes


@pytest.fixture(autouse=True)
def _random_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_planner_trains_as_plain_pytorch_does_inside_its_budgets(
    runs: Runs, planner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if takes_time_limit(get_planner(planner)) and planner != "auto" and not importlib.util.find_spec("pulp"):
        pytest.skip("pulp is not installed")
    page_to, kept_bytes = None, runs.kept_bytes
    if planner in PAGING:
        # So cheap that whoever may page does.
        monkeypatch.setattr(
            page_file, "_measure", lambda _, limit_bytes: TransferCosts(0.0, 1e15, 0.0, 1e15, limit_bytes)
        )
        page_to = tmp_path
        kept_bytes = _smallest_bytes(runs.door("keep-all", ABSURD, page_to))
    door = runs.door(planner, ABSURD, page_to)
    smallest = _smallest_bytes(door)
    assert smallest < kept_bytes
    pages = False
    for share in SHARES:
        budget_bytes = int(smallest + share * (kept_bytes - smallest))
        outcome, planned = door.train(odt.Budget(budget_bytes, of="training"))
        _assert_exact(runs, outcome, planned)
        assert planned.peak_bytes <= budget_bytes
        assert max(outcome.step_peaks) <= budget_bytes
        assert not planned.departures, planned.departures
        pages |= any("are paged out" in note for note in planned.notes)
    # The optimizer's step takes most there, and what was paged is long gone by then; on processors whose kernels take
    # more room in the backward pass it does not, and something is paged.
    is_vain = planner == "poet-paging" and runs.case.name == "resnet50"
    assert pages == (planner in PAGING) or (is_vain and not pages)
    assert not list(tmp_path.iterdir())


def _assert_exact(runs: Runs, outcome: Outcome, planned: Planned) -> None:
    is_updated = any(note.endswith("(update_in_backward)") for note in planned.notes)
    assert_identical(outcome, without_gradients(runs.plain) if is_updated else runs.plain)
