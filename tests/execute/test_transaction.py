"""Transactional steps: a call is made as a whole or not at all, wherever it fails."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from torch import Tensor, nn
from undone_steps import (
    PLENTY,
    Everything,
    Net,
    Rewindable,
    adam,
    allocations,
    batches,
    make_step,
    places,
)

import torch_odt as odt
from torch_odt import memory
from torch_odt._extensions import memory_module
from torch_odt.capture.rewrite import inexact_rewrites
from torch_odt.execute import executor
from torch_odt.memory._tracking import current_category, set_category

pytestmark = [
    pytest.mark.skipif(memory_module is None, reason="torch_odt._memory, which refuses allocations, is not built"),
    pytest.mark.filterwarnings("ignore:an attempt of a step was undone:torch_odt.errors.OdtWarning"),
]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def check_every_failure(step: odt.TrainStep, batch: tuple[Tensor, Tensor], wanted: int, *, lasts: bool = False) -> None:
    """A call from here, refused an allocation at each of so many places."""
    rewindable = Rewindable(step)
    count = allocations(step, batch)
    rewindable.rewind()
    before = Everything.of(step)
    loss = step(*batch)
    after = Everything.of(step)
    chosen = places(count, wanted)
    assert len(chosen) == wanted, f"a call makes {count} allocations"
    for place in chosen:
        rewindable.rewind()
        assert not before.difference(Everything.of(step))
        if lasts:
            with refused(place, lasts=True), pytest.raises((torch.OutOfMemoryError, RuntimeError)):
                step(*batch)
            assert not before.difference(Everything.of(step)), f"allocation {place} of {count}"
            assert step(*batch) == loss and not step.last_retries
        else:
            with refused(place):
                assert step(*batch) == loss, f"allocation {place} of {count}"
            assert [retry.remedy for retry in step.last_retries] == ["released"], f"allocation {place} of {count}"
        assert not after.difference(Everything.of(step)), f"allocation {place} of {count}"


@pytest.mark.parametrize("step_number", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_failed_allocation_changes_no_bit(step_number: int) -> None:
    data = batches()
    step = make_step(Net(), micro_batch=4)
    fresh = Rewindable(step)
    step(*data[0])
    fresh.rewind()
    for number in range(1, step_number):
        step(*data[number])
    check_every_failure(step, data[0], 200)


@pytest.mark.parametrize("step_number", [1, 3])
def test_a_call_that_fails_for_good_leaves_everything_as_it_was(step_number: int) -> None:
    data = batches()
    step = make_step(Net(), micro_batch=4)
    fresh = Rewindable(step)
    step(*data[0])
    fresh.rewind()
    for number in range(1, step_number):
        step(*data[number])
    check_every_failure(step, data[0], 12, lasts=True)


def test_compiled_operators_may_lose_the_class_of_an_error() -> None:
    batch = batches()[0]
    step = make_step(Net(), disable_rewrites=())
    step(*batch)
    check_every_failure(step, batch, 60)


@pytest.mark.slow
def test_a_real_network_at_two_hundred_places() -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.mobilenet_v2(num_classes=5)
    batch = torch.randn(4, 3, 64, 64), torch.randint(5, (4,))
    step = make_step(model, micro_batch=4)
    step(*batch)
    check_every_failure(step, batch, 200)
    check_every_failure(step, batch, 6, lasts=True)


def test_it_is_plain_pytorchs_training() -> None:
    model, data = Net(), batches()
    plain = copy.deepcopy(model)
    optimizer = adam(plain)
    step = make_step(model)
    torch.manual_seed(1)
    losses = [step(*batch) for batch in data]
    torch.manual_seed(1)
    for (x, y), loss in zip(data, losses, strict=True):
        optimizer.zero_grad()
        expected = F.cross_entropy(plain(x), y)
        expected.backward()
        optimizer.step()
        assert torch.equal(expected, loss)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert any("transactional=True" in note for note in step.plan.notes)


def accumulating(model: nn.Module, **options: Any) -> odt.TrainStep:
    return make_step(model, accumulation_steps=3, clip_grad_norm=0.1, **options)


def run_accumulation(model: nn.Module, fails: Callable[[odt.TrainStep, int], None] | None) -> Everything:
    torch.manual_seed(1)
    step = accumulating(model)
    for number, batch in enumerate(batches(4)):
        if fails is not None:
            before = Everything.of(step)
            fails(step, number)
            assert not before.difference(now := Everything.of(step)) and now.gradients == before.gradients
        step(*batch)
    step.flush()
    return Everything.of(step)


@pytest.mark.parametrize("lasts_from", [0, 100])
def test_an_accumulation_goes_on_as_if_nothing_had_failed(lasts_from: int) -> None:
    model = Net()
    expected = run_accumulation(copy.deepcopy(model), None)

    def fails(step: odt.TrainStep, number: int) -> None:
        if number in (1, 2):
            with refused(lasts_from, lasts=True), pytest.raises((torch.OutOfMemoryError, RuntimeError)):
                step(*batches(4)[number])

    assert not expected.difference(run_accumulation(model, fails))


def test_a_flush_for_which_there_is_no_memory_is_made_again() -> None:
    model, data = Net(), batches()
    plain = copy.deepcopy(model)
    steps = [accumulating(each) for each in (plain, model)]
    for step in steps:
        torch.manual_seed(1)
        step(*data[0])
        step(*data[1])
    steps[0].flush()
    with refused(0), pytest.warns(odt.OdtWarning, match="after giving memory back"):
        steps[1].flush()
    assert [retry.remedy for retry in steps[1].last_retries] == ["released"]
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


def test_a_failed_flush_can_be_made_again() -> None:
    model, data = Net(), batches()
    step = accumulating(model)
    step(*data[0])
    step(*data[1])
    before = Everything.of(step)
    for place in range(0, 60, 3):
        with refused(place, lasts=True), pytest.raises(torch.OutOfMemoryError):
            step.flush()
        assert not before.difference(now := Everything.of(step)) and now.gradients == before.gradients
    step.flush()
    assert all(p.grad is None for p in model.parameters()) and step._group.calls == 0


class Stop(Exception):
    """Raised by handlers and hooks."""


@contextmanager
def handled(number: int, handler: Callable[..., Any]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        assert signal.getsignal(number) is handler
        signal.signal(number, before)


def stop(*_: Any) -> None:
    raise Stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_operator(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left, compile_op = 0, executor.compile_op

    def counting(*arguments: Any) -> Callable[[executor.Table], None]:
        call = compile_op(*arguments)

        def count_down(table: executor.Table) -> None:
            nonlocal left
            left -= 1
            call(table)
            if left == 0:
                signal.raise_signal(number)

        return count_down

    monkeypatch.setattr(executor, "compile_op", counting)
    batch = batches()[0]
    step = make_step(Net())
    step(*batch)
    rewindable, before = Rewindable(step), Everything.of(step)
    step(*batch)
    after = Everything.of(step)
    with handled(number, stop):
        for place in random.Random(0).sample(range(1, 30), 25):
            rewindable.rewind()
            left = place
            with pytest.raises(Stop):
                step(*batch)
            assert not before.difference(Everything.of(step))
            step(*batch)
            assert not after.difference(Everything.of(step))


def test_a_signal_just_before_a_category_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def interrupted(name: memory.CategoryName) -> Iterator[None]:
        set_category(name)
        stop()
        yield

    step = make_step(Net())
    step(*batches()[0])
    before = Everything.of(step)
    monkeypatch.setattr(memory, "category", interrupted)
    with pytest.raises(Stop):
        step(*batches()[0])
    assert not before.difference(Everything.of(step))
    assert current_category() == "other"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_time(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Python ignores what is raised while it collects garbage: then the call goes on, and is made as a whole."""
    batch = batches()[0]
    step = make_step(Net())
    step(*batch)
    rewindable, before = Rewindable(step), Everything.of(step)
    step(*batch)
    after = Everything.of(step)
    rewindable.rewind()
    started = time.perf_counter()
    step(*batch)
    seconds = time.perf_counter() - started
    generator, outcomes = random.Random(0), [0, 0]
    has_fired, ignored = False, list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", lambda event: ignored.append(event.exc_type))

    def fire(*_: Any) -> None:
        nonlocal has_fired
        has_fired = True
        signal.raise_signal(number)

    with handled(signal.SIGALRM, fire), handled(number, stop):
        for _ in range(100):
            rewindable.rewind()
            has_fired = False
            ignored.clear()
            with contextlib.suppress(Stop):
                signal.setitimer(signal.ITIMER_REAL, max(1e-5, generator.random() * seconds))
                step(*batch)
                while not ignored:
                    time.sleep(0.001)
            assert has_fired and all(kind is Stop for kind in ignored)
            is_done = bool(before.difference(now := Everything.of(step)))
            outcomes[is_done] += 1
            assert is_done or not ignored
            assert not (after if is_done else before).difference(now)
            if not is_done:
                step(*batch)
                assert not after.difference(Everything.of(step)), "made again, it is the undisturbed one"
    assert outcomes[0] > 10, "some are undone; what comes during the commit, or behind it, is not"


def test_signals_wait_for_the_optimizer() -> None:
    batch = batches()[0]
    optimizer = adam(model := Net())
    step = make_step(model, optimizer=optimizer)
    step(*batch)
    before = Everything.of(step)
    handle = optimizer.register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGTERM))
    with handled(signal.SIGTERM, stop), pytest.raises(Stop):
        step(*batch)
    assert all("step" not in n or v != before.tensors[n] for n, v in Everything.of(step).tensors.items())
    handle.remove()


@pytest.mark.parametrize("where", ["loss", "gradient hook", "optimizer", "after the optimizer"])
def test_whatever_raises(where: str) -> None:
    x, y = batches()[0]
    model = Net()
    optimizer = adam(model)
    armed = False

    def fail(*_: Any) -> None:
        if armed:
            raise Stop

    if where == "gradient hook":
        model.head.weight.register_post_accumulate_grad_hook(fail)
    elif where == "optimizer":
        optimizer.register_step_pre_hook(fail)
    elif where == "after the optimizer":
        optimizer.register_step_post_hook(fail)
    step = make_step(model, optimizer=optimizer, nonfinite="raise")
    step(x, y)
    before = Everything.of(step)
    armed = True
    with pytest.raises(FloatingPointError if where == "loss" else Stop):
        step(x * float("nan") if where == "loss" else x, y)
    assert not before.difference(Everything.of(step)) and not step.last_retries
    armed = False
    step(x, y)
    assert step.optimizer.state[model.head.weight]["step"] == 2


def test_an_optimizer_that_fails_between_its_parameters() -> None:
    class Fragile(torch.optim.SGD):
        """It updates one parameter, changes its own options and fails."""

        def step(self, closure: Any = None) -> None:
            if not armed:
                return
            parameter = self.param_groups[0]["params"][0]
            parameter.data.add_(1)
            self.state[parameter]["half"] = torch.ones(())
            self.param_groups[0]["lr"] = 7.0
            self.attempts = 1
            raise Stop

    model, armed = Net(), False
    optimizer = Fragile(model.parameters(), lr=0.1)
    step = make_step(model, optimizer=optimizer)
    armed = True
    before = Everything.of(step)
    with pytest.raises(Stop):
        step(*batches()[0])
    assert not before.difference(Everything.of(step))
    assert optimizer.param_groups[0]["lr"] == 0.1 and not optimizer.state and not hasattr(optimizer, "attempts")


class Deep(nn.Module):
    """Half a megabyte for each of its layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [m for _ in range(8) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh())]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def test_a_smaller_plan_where_the_ordinary_one_does_not_fit() -> None:
    model = Deep()
    batch = torch.randn(4, 8, 64, 64), torch.randint(5, (4,))
    step = make_step(model, optimizer=sgd(model), micro_batch=4)
    step(*batch)
    rewindable = Rewindable(step)
    level = memory.stats().allocated_bytes or 0
    memory.reset_peak()
    step(*batch)
    plan, after = step.plan, Everything.of(step)
    peak = (memory.stats().peak_bytes or 0) - level
    rewindable.rewind()
    with memory.cap(level + peak * 3 // 4):
        step(*batch)
    remedies = [retry.remedy for retry in step.last_retries]
    assert remedies[0] == "released" and set(remedies[1:]) == {"smaller plan"}
    assert step.plan.recomputed and step.plan.peak_bytes < plan.peak_bytes
    assert any("made again by a plan for" in note for note in step.plan.notes)
    assert not after.difference(Everything.of(step))
    step(*batch)
    assert step.plan is plan and not step.last_retries


def test_retries_are_told_of_once_and_before_anything_is_changed() -> None:
    batch = batches()[0]
    step = make_step(Net())
    step(*batch)
    before = Everything.of(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with refused(20), pytest.raises(odt.OdtWarning, match="made again after giving memory back"):
            step(*batch)
        assert not before.difference(Everything.of(step))
        with refused(20):
            step(*batch)
    assert any("made again after giving memory back" in note for note in step.plan.notes)


def saved_plan(model: nn.Module, folder: Path, **options: Any) -> Path:
    plan = odt.plan(model, F.cross_entropy, batches()[0], budget=PLENTY, optimizer=adam(model), **options)
    plan.save(file := folder / "plan.json")
    return file


def test_an_error_that_nobody_keeps_holds_nothing() -> None:
    batch = batches()[0]
    step = make_step(Net())
    step(*batch)
    level = memory.stats().allocated_bytes
    gc.disable()
    try:
        with refused(60, lasts=True), pytest.raises(torch.OutOfMemoryError) as failed:
            step(*batch)
        del failed
        assert memory.stats().allocated_bytes == level
    finally:
        gc.enable()


def test_a_given_plan_is_followed_and_not_replaced(tmp_path: Path) -> None:
    model, batch = Net(), batches()[0]
    file = saved_plan(model, tmp_path, disable_rewrites=inexact_rewrites() | {"update_in_backward"})
    step = odt.TrainStep(model, F.cross_entropy, adam(model), plan=file, transactional=True)
    step(*batch)
    check_every_failure(step, batch, 10)
    check_every_failure(step, batch, 5, lasts=True)
    with refused(30, lasts=True), pytest.raises(torch.OutOfMemoryError):
        step(*batch)
    assert [retry.remedy for retry in step.last_retries] == ["released"]


def test_a_given_plan_that_updates_in_the_backward_pass_is_refused(tmp_path: Path) -> None:
    model = Net()
    file = saved_plan(model, tmp_path)
    with pytest.raises(ValueError, match=r'disable_rewrites=\["update_in_backward"\]'):
        odt.TrainStep(model, F.cross_entropy, adam(model), plan=file, transactional=True)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_the_plan_counts_what_undoing_takes(accumulation_steps: int) -> None:
    model = nn.Sequential(nn.Linear(300, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 5))
    batch = torch.randn(4, 300), torch.randint(5, (4,))
    step = make_step(model, accumulation_steps=accumulation_steps, clip_grad_norm=1.0)
    level = memory.stats().allocated_bytes or 0
    step(*batch)
    counted = sum(line.nbytes for line in step.plan.lines if line.label not in ("capture and planning", "reserve"))
    memory.reset_peak()
    for _ in range(5):
        step(*batch)
    assert (memory.stats().peak_bytes or 0) - level <= counted + (64 << 10)
    undone = {line.label: line.nbytes for line in step.plan.lines}.get("undoing", 0)
    assert undone >= (sum(p.nbytes for p in model.parameters()) if accumulation_steps > 1 else 0)


def test_an_optimizer_that_failed_does_not_stop_later_groups() -> None:
    model, batch = Net(), batches()[0]
    step = make_step(model, transactional=False, clip_grad_norm=1.0)
    handle = step.optimizer.register_step_pre_hook(stop)
    with pytest.raises(Stop):
        step(*batch)
    handle.remove()
    step(*batch)
    assert step.optimizer.state[model.head.weight]["step"] == 1
