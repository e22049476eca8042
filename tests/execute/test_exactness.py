"""The same training inside a budget: every model of the table, through both doors, at several budgets.

What "the same" means is said in `exactness.py`. Rewrites that change the order of sums are off here, so that what is
not cut into micro-batches must have plain PyTorch's bits; `test_fused_steps.py` has them on. One plain float32 and one
float64 run of a model serve all its tests.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import exactness
import pytest
import torch
from exactness import Outcome, assert_as_exact, assert_identical, assert_same_random_state, without_gradients
from models import AWKWARD, CASES, ModelCase, bert_batch, case_named

import torch_odt as odt
from tests.execute.doors import Door, Planned, open_door
from torch_odt.capture.rewrite import inexact_rewrites

# Dynamo looks at the gradients of what crosses from one part of a model to the next.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:not captured"),
]

# Few and small samples: machines without bfloat16 arithmetic are slow with it.
AUTOCAST = (
    replace(case_named("resnet18"), batch_size=2),
    replace(case_named("resnet18-channels_last"), batch_size=2),
    replace(case_named("bert_small"), batch=functools.partial(bert_batch, length=32)),
    case_named("tied_language_model"),
)
# Networks that fresh starts are to refuse, and to train, in the smallest budget: each captures them once more. The
# others are refused, and trained, by a step or a wrapped model that has run before.
FRESH = ("mobilenet_v2", "resnet18", "squeezenet1_1", "shufflenet_v2_x0_5", "tied_language_model")
PLENTY = odt.Budget("8GiB", of="training")
# What a step may take beside its plan: scalars, and tensors that exist for an instant while the optimizer works.
UNPLANNED_BYTES = 1 << 20
# By how much what a capture leaves in the process differs from one to the next.
NOISE_BYTES = 12 << 20


class Trials:
    """The runs of one case, each made once and kept as long as the case is being tested."""

    def __init__(self, case: ModelCase) -> None:
        self.case = case
        self._plenty: dict[str, tuple[Outcome, Planned]] = {}
        self._doors: dict[tuple[str, bool], Door] = {}

    @functools.cached_property
    def plain(self) -> Outcome:
        return exactness.train_plainly(self.case)

    @functools.cached_property
    def exact(self) -> Outcome:
        return exactness.train_plainly(self.case, torch.float64)

    @functools.cached_property
    def beside_kinks(self) -> tuple[Outcome, Outcome]:
        return exactness.train_beside_kinks(self.case)

    @functools.cached_property
    def large(self) -> Trials | None:
        case = self.case.enlarged()
        return None if case is None else Trials(case)

    def plenty(self, door: str) -> tuple[Outcome, Planned]:
        """A run that has to give up nothing; its plan says what 100 % is."""
        if door not in self._plenty:
            self._plenty[door] = self.kept_open(door, PLENTY, keeps_gradients=True).train(PLENTY)
        return self._plenty[door]

    def run(self, door: str, budget: odt.Budget) -> tuple[Outcome, Planned]:
        """Three steps through a door that stays open: another budget, but no other capture where that is possible."""
        return self.kept_open(door, budget).train(budget)

    def kept_open(self, door: str, budget: odt.Budget, *, keeps_gradients: bool = False) -> Door:
        """The door that all runs share; it is opened with this budget if it has not been yet."""
        key = (door, keeps_gradients and door == "step")
        if key not in self._doors:
            self._doors[key] = self.open(door, budget, keeps_gradients=keeps_gradients)
        return self._doors[key]

    def open(self, door: str, budget: odt.Budget, *, keeps_gradients: bool = False, **options: Any) -> Door:
        """A door as a fresh start finds it."""
        disabled = exactness.WITH_GRADIENTS if keeps_gradients else inexact_rewrites()
        return open_door(door, self.case, budget, disable_rewrites=disabled, **options)


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest) -> Trials:
    gc.collect()
    # What other tests have left for good need not be searched for garbage at every start of a step.
    gc.freeze()
    return Trials(request.param)


@pytest.fixture(scope="module", autouse=True)
def _random_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def _assert_inside(outcome: Outcome, budget_bytes: int) -> None:
    over = [peak - budget_bytes for peak in outcome.step_peaks if peak > budget_bytes + UNPLANNED_BYTES]
    assert not over, f"steps went {over} bytes over a budget of {budget_bytes}"


def _assert_captured(plan: Planned, case: ModelCase, door: str) -> None:
    # Dynamo captures the parts of a model around what has no graph, so that `wrap` may capture more than `TrainStep`.
    if door == "step" or case.captured:
        assert plan.captured == case.captured, plan.notes


def _assert_as_planned(plan: Planned, case: ModelCase, door: str) -> None:
    # `wrap` runs a part of a model at addresses of its own until it is known which parts make up a step. They are in
    # each other's way where there are several, as in the models that `TrainStep` cannot capture.
    if door == "step" or case.captured:
        assert not plan.departures, plan.departures


def _marks(case: ModelCase) -> list[pytest.MarkDecorator]:
    # One worker runs all tests of a case, so that they share its plain runs.
    group = pytest.mark.xdist_group(case.name)
    return [group] if case in AWKWARD else [group, pytest.mark.slow]


def _through_both_doors() -> pytest.MarkDecorator:
    pairs = [
        pytest.param(case, door, id=f"{case.name}-{door}", marks=_marks(case)) for case in CASES for door in case.doors
    ]
    return pytest.mark.parametrize(("trials", "door"), pairs, indirect=["trials"], scope="module")


@_through_both_doors()
def test_with_plenty(trials: Trials, door: str) -> None:
    outcome, plan = trials.plenty(door)
    assert_identical(outcome, trials.plain)
    _assert_captured(plan, trials.case, door)
    _assert_as_planned(plan, trials.case, door)


@_through_both_doors()
def test_within_what_keeping_everything_takes(trials: Trials, door: str) -> None:
    peak_bytes = trials.plenty(door)[1].peak_bytes
    assert _check_near(trials, door, peak_bytes) <= 1.05 * peak_bytes + NOISE_BYTES


@_through_both_doors()
def test_within_half_of_what_keeping_everything_takes(trials: Trials, door: str) -> None:
    """With batches so large that half is enough where tests can afford them, else in what the refusal of half names."""
    chosen = trials.large or trials
    half = chosen.plenty(door)[1].peak_bytes // 2
    granted = _check_near(chosen, door, half)
    # `wrap` does not see the loss, so that it cannot cut a batch.
    if trials.large and (door == "step" or not trials.case.micro_batchable):
        assert granted == half


@_through_both_doors()
def test_within_the_smallest_feasible_budget(trials: Trials, door: str) -> None:
    """What the refusal of an absurd budget names is accepted: by the step that was refused, and by a fresh start."""
    absurd = odt.Budget(4096, of="training")
    starts_fresh = trials.case in AWKWARD or trials.case.name in FRESH
    opened = trials.open(door, absurd) if starts_fresh else trials.kept_open(door, absurd)
    smallest = _refusal(lambda: opened.train(absurd))
    assert smallest is not None and smallest > 4096
    budget = odt.Budget(smallest, of="training")
    _check_run(trials, door, opened.train(budget), smallest)
    if starts_fresh:
        _check_run(trials, door, trials.open(door, budget).train(budget), smallest)


def _refusal(attempt: Callable[[], Any]) -> int | None:
    """The budget that a refusal names, None if there is none; nothing of the attempt lives on in a traceback."""
    try:
        attempt()
    except odt.InfeasibleBudget as refusal:
        return refusal.smallest_feasible_bytes
    return None


def _check_near(trials: Trials, door: str, budget_bytes: int) -> int:
    """Check a run at this budget, or at the one that its refusal names; returns the budget of the run."""
    named = _refusal(lambda: _check(trials, door, budget_bytes))
    if named is None:
        return budget_bytes
    assert named > budget_bytes
    _check(trials, door, named)
    return named


def _check(trials: Trials, door: str, budget_bytes: int) -> None:
    _check_run(trials, door, trials.run(door, odt.Budget(budget_bytes, of="training")), budget_bytes)


def _check_run(trials: Trials, door: str, run: tuple[Outcome, Planned], budget_bytes: int) -> None:
    outcome, plan = run
    is_updated = any(note.endswith("(update_in_backward)") for note in plan.notes)
    assert is_updated == (door == "step" and plan.captured and plan.micro_batch is None), plan.notes
    if plan.micro_batch is None:
        # Recomputation repeats the same kernels on the same bits; only the order of a sum over micro-batches is
        # another.
        assert_identical(outcome, without_gradients(trials.plain) if is_updated else trials.plain)
    else:
        assert_as_exact(outcome, trials.plain, trials.exact, beside_kinks=lambda: trials.beside_kinks)
        assert_same_random_state(outcome, trials.plain)
    _assert_captured(plan, trials.case, door)
    _assert_as_planned(plan, trials.case, door)
    _assert_inside(outcome, budget_bytes)
    if not trials.case.micro_batchable:
        assert plan.micro_batch in (None, trials.case.batch_size), "split a batch whose samples depend on each other"


@pytest.mark.parametrize(
    "trials",
    [pytest.param(case, id=case.name, marks=_marks(case)) for case in AUTOCAST],
    indirect=True,
    scope="module",
)
@pytest.mark.parametrize("door", ["step", "wrap"])
def test_under_bfloat16_autocast(trials: Trials, door: str) -> None:
    plain = exactness.train_plainly(trials.case, autocast=True)
    opened = trials.open(door, PLENTY, keeps_gradients=True, autocast=True)
    kept, plan = opened.train(PLENTY)
    assert_as_exact(kept, plain, trials.exact, exactness.BFLOAT16_ROUNDING)
    _assert_as_planned(plan, trials.case, door)
    budget_bytes = int(0.7 * plan.peak_bytes)
    budget_bytes = _refusal(lambda: opened.train(odt.Budget(budget_bytes, of="training"))) or budget_bytes
    tight, plan = opened.train(odt.Budget(budget_bytes, of="training"))
    assert_as_exact(tight, plain, trials.exact, exactness.BFLOAT16_ROUNDING)
    _assert_as_planned(plan, trials.case, door)
    _assert_inside(tight, budget_bytes)


def test_the_table_holds_what_it_promises() -> None:
    """Names are unique, and only the two modules made for the purpose cannot be captured."""
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.name for case in CASES if not case.captured} == {"control_flow", "custom_function"}
    assert {case.name for case in AWKWARD} >= {"dropout", "in_place", "frozen", "used_twice", "changing_buffers"}
