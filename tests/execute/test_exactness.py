"""The same training inside a budget: every model of the table, through both doors, at several budgets.

What "the same" means is said in `exactness.py`. One plain float32 and one float64 run of a model serve all its tests.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import exactness
import pytest
import torch
from exactness import Outcome, assert_as_exact, assert_identical, assert_same_random_state
from models import AWKWARD, CASES, NETWORKS, Batch, ModelCase, case_named

import torch_odt as odt
from torch_odt.execute.wrap import plan_of

pytestmark = pytest.mark.filterwarnings("default")

AUTOCAST = ("resnet18", "mobilenet_v2-channels_last", "bert_small", "tied_language_model")
PLENTY = odt.Budget("8GiB", of="training")
# What a step may take beside its plan: scalars, and tensors that exist for an instant while the optimizer works.
UNPLANNED_BYTES = 1 << 20


@dataclass
class Planned:
    """What both doors' plans say."""

    captured: bool
    peak_bytes: int
    micro_batch: int | None
    notes: list[str]


class Trials:
    """The runs of one case, each made once and kept as long as the case is being tested."""

    def __init__(self, case: ModelCase, cache: Path) -> None:
        self.case = case
        self.cache = cache
        self._kept: dict[str, tuple[Outcome, Planned]] = {}
        self._smallest: dict[str, int] = {}

    @functools.cached_property
    def plain(self) -> Outcome:
        return exactness.train_plainly(self.case)

    @functools.cached_property
    def exact(self) -> Outcome:
        return exactness.train_plainly(self.case, torch.float64)

    def keep_all(self, door: str) -> tuple[Outcome, Planned]:
        if door not in self._kept:
            self._kept[door] = self.run(door, budget=PLENTY, planner="keep-all")
        return self._kept[door]

    def smallest(self, door: str) -> int:
        """The smallest feasible bytes, as the refusal of an absurd budget names it."""
        if door not in self._smallest:
            with pytest.raises(odt.InfeasibleBudget) as refusal:
                self.run(door, budget=odt.Budget(4096, of="training"))
            assert refusal.value.smallest_feasible_bytes > 4096
            self._smallest[door] = refusal.value.smallest_feasible_bytes
        return self._smallest[door]

    def run(self, door: str, **options: Any) -> tuple[Outcome, Planned]:
        torch._dynamo.reset()
        train = {"step": train_through_step, "wrap": train_through_wrap}[door]
        return train(self.case, cache=self.cache, **options)


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(case_named(request.param), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", autouse=True)
def _random_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def train_through_step(case: ModelCase, *, autocast: bool = False, **options: Any) -> tuple[Outcome, Planned]:
    """Three steps of `odt.TrainStep`, from the state, the seed and the data of the plain run."""
    model = case.model()
    batches = case.batches(exactness.STEPS)
    torch.manual_seed(exactness.SEED)
    step = odt.TrainStep(model, case.loss_fn, exactness.make_optimizer(model.parameters()), **options)
    level = _allocated()

    def call(batch: Batch) -> torch.Tensor:
        args, kwargs = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return step(*args, **kwargs)

    outcome = exactness.train(model, batches, call, lambda: _counted(level))
    plan = step.plan
    return outcome, Planned(plan.captured, plan.peak_bytes, plan.micro_batch, list(plan.notes))


def train_through_wrap(case: ModelCase, *, autocast: bool = False, **options: Any) -> tuple[Outcome, Planned]:
    """Three steps of an ordinary loop over `odt.wrap(model)`."""
    model = case.model()
    batches = case.batches(exactness.STEPS)
    names = list(model.state_dict())
    torch.manual_seed(exactness.SEED)
    wrapped = odt.wrap(model, **options)
    optimizer = exactness.make_optimizer(wrapped.parameters())
    level = _allocated()

    def call(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = case.loss(wrapped, batch)
        loss.backward()
        optimizer.step()
        return loss

    outcome = exactness.train(model, batches, call, lambda: _counted(level))
    assert list(wrapped.state_dict()) == names
    plan = plan_of(wrapped)
    peak_bytes = plan.predicted_bytes + plan.reserved_bytes + plan.tracing_bytes
    return outcome, Planned(not plan.fallback, peak_bytes, None, [*plan.notes, plan.fallback])


def _allocated() -> int:
    return odt.memory.stats().allocated_bytes if odt.memory.is_tracking() else 0


@contextlib.contextmanager
def _counted(level: int) -> Iterator[list[int]]:
    """Yields a list that holds the allocator's peak above `level` once the body is done; empty where nothing counts."""
    peaks: list[int] = []
    if odt.memory.is_tracking():
        odt.memory.reset_peak()
    yield peaks
    if odt.memory.is_tracking():
        peaks.append(odt.memory.stats().peak_bytes - level)


def _assert_inside(outcome: Outcome, budget_bytes: int) -> None:
    over = [peak - budget_bytes for peak in outcome.step_peaks if peak > budget_bytes + UNPLANNED_BYTES]
    assert not over, f"steps went {over} bytes over a budget of {budget_bytes}"


def _assert_captured(plan: Planned, case: ModelCase, door: str) -> None:
    # Dynamo captures the parts of a model around what has no graph, so that `wrap` may capture more than `TrainStep`.
    if door == "step" or case.captured:
        assert plan.captured == case.captured, plan.notes


def _marks(case: ModelCase) -> list[pytest.MarkDecorator]:
    # One worker runs all tests of a case, so that they share its plain runs.
    group = pytest.mark.xdist_group(case.name)
    return [group, pytest.mark.slow] if case in NETWORKS else [group]


def _door_parameters(
    cases: tuple[ModelCase, ...] = CASES, *, wrapped: tuple[ModelCase, ...] = CASES
) -> pytest.MarkDecorator:
    # The budgets that `wrap` names for networks differ from start to start in one process, so they are not run yet.
    pairs = [
        pytest.param(case.name, door, id=f"{case.name}-{door}", marks=_marks(case))
        for case in cases
        for door in case.doors
        if door == "step" or case in wrapped
    ]
    return pytest.mark.parametrize(("trials", "door"), pairs, indirect=["trials"], scope="module")


@_door_parameters()
def test_keep_all_is_bit_equal(trials: Trials, door: str) -> None:
    outcome, plan = trials.keep_all(door)
    assert_identical(outcome, trials.plain)
    _assert_captured(plan, trials.case, door)


@_door_parameters(AWKWARD)
def test_within_what_keeping_everything_takes(trials: Trials, door: str) -> None:
    # For a network this plans what the test above runs, at the price of another capture.
    _check_at(trials, door, max(trials.keep_all(door)[1].peak_bytes, trials.smallest(door)))


@_door_parameters(wrapped=AWKWARD)
def test_within_half_of_what_keeping_everything_takes(trials: Trials, door: str) -> None:
    _check_at(trials, door, max(trials.keep_all(door)[1].peak_bytes // 2, trials.smallest(door)))


@_door_parameters(wrapped=AWKWARD)
def test_within_the_smallest_feasible_budget(trials: Trials, door: str) -> None:
    _check_at(trials, door, trials.smallest(door))


def _check_at(trials: Trials, door: str, budget_bytes: int) -> None:
    outcome, plan = trials.run(door, budget=odt.Budget(budget_bytes, of="training"))
    if plan.micro_batch is None:
        # Recomputation repeats the same kernels on the same bits; only the order of a sum over micro-batches is
        # another.
        assert_identical(outcome, trials.plain)
    else:
        assert_as_exact(outcome, trials.plain, trials.exact)
        assert_same_random_state(outcome, trials.plain)
    _assert_captured(plan, trials.case, door)
    _assert_inside(outcome, budget_bytes)
    if not trials.case.micro_batchable:
        assert plan.micro_batch in (None, trials.case.batch_size), "split a batch whose samples depend on each other"


@pytest.mark.parametrize(
    "trials",
    [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in AUTOCAST],
    indirect=True,
    scope="module",
)
@pytest.mark.parametrize("door", ["step"])
def test_under_bfloat16_autocast(trials: Trials, door: str) -> None:
    plain = exactness.train_plainly(trials.case, autocast=True)
    kept, plan = trials.run(door, budget=PLENTY, planner="keep-all", autocast=True)
    assert_as_exact(kept, plain, trials.exact, exactness.BFLOAT16_ROUNDING)
    budget_bytes = int(0.7 * plan.peak_bytes)
    with contextlib.suppress(odt.InfeasibleBudget):
        tight, _ = trials.run(door, budget=odt.Budget(budget_bytes, of="training"), autocast=True)
        assert_as_exact(tight, plain, trials.exact, exactness.BFLOAT16_ROUNDING)
        _assert_inside(tight, budget_bytes)


def test_the_table_holds_what_it_promises() -> None:
    """Names are unique, and only the two modules made for the purpose cannot be captured."""
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.name for case in CASES if not case.captured} == {"control_flow", "custom_function"}
    assert {case.name for case in AWKWARD} >= {"dropout", "in_place", "frozen", "used_twice", "changing_buffers"}
