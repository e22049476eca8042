"""What a step's Python code reads and does besides: a change is noticed, and code with effects runs as Python."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_steps import Net, assert_equal_models, make_batches, make_step, plain_step, sgd, train_both
from torch import Tensor, nn

import torch_odt as odt


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def test_a_plain_attribute_of_the_model_changes() -> None:
    def scale(index: int, model: nn.Module) -> None:
        model.scale = 1.0 + (index >= 2)

    step = train_both(Net(), make_batches(4), between=scale)
    assert len(step._prepared) == 2


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs, target) * self.scale


class ScaledCallable:
    scale = 1.0

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs, target) * self.scale


@pytest.mark.parametrize("make", [Scaled, ScaledCallable])
def test_a_plain_attribute_of_the_loss_changes(make: type) -> None:
    loss_fn = make()

    def scale(index: int, model: nn.Module) -> None:
        loss_fn.scale = 1.0 + (index >= 2)

    train_both(Net(), make_batches(4), between=scale, loss_fn=loss_fn)


def test_a_module_that_the_loss_function_reaches_changes() -> None:
    head = nn.Linear(3, 3)

    def change(index: int, model: nn.Module) -> None:
        nn.init.constant_(head.weight, 0.1 * index)

    def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs + head(outputs), target)

    step = train_both(Net(), make_batches(3), between=change, loss_fn=loss_fn)
    assert step.plan.captured


def test_class_weights_that_the_loss_function_reaches_change() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))

    def change(index: int, model: nn.Module) -> None:
        criterion.weight.copy_(torch.arange(3) + 1.0 + index)

    step = train_both(
        Net(), make_batches(3), between=change, loss_fn=lambda outputs, target: criterion(outputs, target)
    )
    assert step.plan.captured


SETTINGS = argparse.Namespace(scale=1.0)


def scaled_loss(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target) * SETTINGS.scale


class ScaledByGlobal(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SETTINGS.scale


@pytest.mark.parametrize("in_loss", [True, False])
def test_an_attribute_of_a_global_object_changes(in_loss: bool) -> None:
    def change(index: int, model: nn.Module) -> None:
        SETTINGS.scale = 1.0 / (index + 1)

    model, loss_fn = (Net(), scaled_loss) if in_loss else (ScaledByGlobal(), F.cross_entropy)
    step = train_both(model, make_batches(3), between=change, loss_fn=loss_fn)
    assert step.plan.captured


FACTOR = 1.0
OFFSET = torch.zeros(3)
MODULE = types.ModuleType("users_settings")
MODULE.factor = 1.0  # type: ignore[attr-defined]


def _doubled(x: Tensor) -> Tensor:
    return x * (2 * FACTOR)


def _by_another_function(outputs: Tensor, target: Tensor) -> Tensor:
    return _doubled(F.cross_entropy(outputs, target))


def _by_a_module(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target) * MODULE.factor


def _by_a_tensor(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs + OFFSET, target)


class ByAClass(Net):
    factor = 1.0

    def _scaled(self, x: Tensor) -> Tensor:
        return _doubled(x) * self.factor

    def forward(self, x: Tensor) -> Tensor:
        return self._scaled(super().forward(x))


@pytest.mark.parametrize("loss_fn", [_by_another_function, _by_a_module, _by_a_tensor, F.cross_entropy])
def test_what_the_code_names_changes(loss_fn: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def change(index: int, model: nn.Module) -> None:
        monkeypatch.setitem(globals(), "FACTOR", 1.0 / (index + 1))
        monkeypatch.setitem(globals(), "OFFSET", torch.full((3,), float(index)) * torch.arange(3))
        monkeypatch.setattr(MODULE, "factor", 2.0 - index)
        monkeypatch.setattr(ByAClass, "factor", 1.0 + index)

    model = ByAClass() if loss_fn is F.cross_entropy else Net()
    step = train_both(model, make_batches(3), between=change, loss_fn=loss_fn)
    assert step.plan.captured


class CONFIG:
    factor = 1.0


CRITERION = nn.CrossEntropyLoss()


def _by_a_class(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target) * CONFIG.factor


def _by_a_module_without_tensors(outputs: Tensor, target: Tensor) -> Tensor:
    return CRITERION(outputs, target)


class Holding(Net):
    """Functions and objects of the user's as attributes, and a method that reads a closure."""

    def __init__(self, scale: Callable[[], float]) -> None:
        super().__init__()
        self.activation = _doubled
        self.strength = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(super().forward(x)) * self.strength()


def test_what_held_and_foreign_objects_read_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = 1.0

    def change(index: int, model: nn.Module) -> None:
        nonlocal scale
        scale = 1.0 + index
        monkeypatch.setitem(globals(), "FACTOR", 1.0 / (index + 1))
        monkeypatch.setattr(CONFIG, "factor", 2.0 - index)
        monkeypatch.setattr(CRITERION, "label_smoothing", 0.1 * index)

    for model, loss_fn in (
        (Holding(lambda: scale), F.cross_entropy),
        (Net(), _by_a_class),
        (Net(), _by_a_module_without_tensors),
    ):
        step = train_both(model, make_batches(3), between=change, loss_fn=loss_fn)
        assert step.plan.captured


class Trainer:
    """Holds more than its loss reads."""

    def __init__(self) -> None:
        self.steps = 0
        self.weight = 0.5

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs, target) * self.weight


def test_a_function_below_many_decorators_is_the_same_at_each_call() -> None:
    """As methods of transformers are: nothing of them may look new each time."""

    def decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            return function(*args, **kwargs)

        return call

    def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs, target)

    for _ in range(6):
        loss_fn = decorated(loss_fn)
    step = train_both(Net(), make_batches(4), loss_fn=loss_fn)
    assert step._prepared._captures == 1


def test_what_the_loss_does_not_read_may_change() -> None:
    trainer = Trainer()

    def count(index: int, model: nn.Module) -> None:
        trainer.steps += 1
        trainer.weight = 0.5 + (index >= 2)

    step = train_both(Net(), make_batches(4), between=count, loss_fn=trainer.loss)
    assert len(step._prepared) == 2


class Lazy(Net):
    """Its first forward sets an attribute up."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(6) / 6
        return super().forward(x + self.table)


@pytest.mark.filterwarnings("ignore:not captured")
def test_what_the_first_step_sets_up_is_captured_later() -> None:
    step = make_step(Lazy())
    captured = []
    for batch in make_batches(4):
        step(*batch)
        captured.append(step.plan.captured)
    assert captured == [False, False, True, True]


def test_a_model_without_inputs() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = nn.Parameter(torch.zeros(3))

        def forward(self) -> Tensor:
            return self.values

    step = make_step(Constant(), F.mse_loss)
    assert step(torch.ones(3)).item() == 1.0


CALLS = 0


class Statistics:
    """An object of the user's own, which a model holds in a list."""

    def __init__(self) -> None:
        self.calls = 0
        self.history: list[int] = []
        self.streams = {"numbers": iter(range(1, 100))}


class Effectful(Net):
    """Does something besides computing tensors."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.calls = 0
        self.numbers = itertools.count(1) if what == "counts by itertools" else None
        self.stream = iter(range(1, 100)) if what == "draws from an iterator" else None
        self.dice = random.Random(3) if what == "rolls dice" else None
        self.statistics = [Statistics()] if "held object" in what else []

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        factor = 1
        match self.what:
            case "counts in an attribute":
                self.calls += 1
                factor = self.calls
            case "counts in a held object":
                self.statistics[0].calls += 1
                factor = self.statistics[0].calls
            case "appends to a held object's list":
                self.statistics[0].history.append(1)
                factor = len(self.statistics[0].history)
            case "draws from a held object's iterator":
                factor = next(self.statistics[0].streams["numbers"])
            case "counts in a global":
                CALLS += 1
                factor = CALLS
            case "counts by itertools":
                factor = next(self.numbers)  # type: ignore[arg-type]
            case "draws from an iterator":
                factor = next(self.stream)  # type: ignore[arg-type]
            case "rolls dice":
                factor = self.dice.randint(1, 6)  # type: ignore[union-attr]
            case "prints":
                print("forward")
        return super().forward(x) * factor


EFFECTS = ["counts in an attribute", "counts in a global", "counts by itertools", "draws from an iterator",
           "rolls dice", "prints", "counts in a held object", "appends to a held object's list",
           "draws from a held object's iterator"]  # fmt: skip


@pytest.mark.parametrize("what", EFFECTS)
def test_code_with_effects_runs_once_a_step(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    def restart(index: int, model: nn.Module) -> None:
        global CALLS
        CALLS = index

    model = Effectful(what)
    plain = copy.deepcopy(model)
    optimizer = sgd(plain.parameters())
    step = make_step(model)
    batches = make_batches(3)
    with pytest.warns(odt.OdtWarning, match="not captured: the step "):
        restart(0, model)
        losses = [step(*batch) for batch in batches]
    printed = capsys.readouterr().out
    restart(0, plain)
    assert losses == [plain_step(plain, batch, optimizer) for batch in batches]
    assert printed == capsys.readouterr().out
    assert_equal_models(model, plain)
    assert model.calls == plain.calls
    assert not step.plan.captured and len(step._prepared) == 1, "what cannot be captured is not tried again"
    if odt.memory.is_tracking():
        assert step.plan.lines[0].label == "plain steps" and step.plan.lines[0].nbytes < 1 << 20, "counted"


@pytest.mark.filterwarnings("ignore:not captured")
def test_a_loss_that_counts_its_calls_is_not_captured() -> None:
    count = 0

    def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return F.cross_entropy(outputs, target)

    step = make_step(Net(), loss_fn)
    step(*make_batches(1)[0])
    assert not step.plan.captured
    assert "count" in step.plan.notes[0]


class WithPlainTensor(Net):
    """A tensor that is no buffer; used, and in one variant changed, by the forward pass."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.plain = torch.full((6,), 2.0)
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            self.plain += 1
        return super().forward(x * self.plain)


@pytest.mark.filterwarnings("ignore:not captured")
@pytest.mark.parametrize("changes", [False, True])
def test_a_tensor_that_is_no_buffer(changes: bool) -> None:
    def change(index: int, model: nn.Module) -> None:
        if index == 2:
            model.plain.mul_(0.5)

    step = train_both(WithPlainTensor(changes), make_batches(4), between=change)
    assert step.plan.captured is not changes


@dataclasses.dataclass
class Halved:
    """A callable that compares by value, and so has no hash."""

    by: float = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x / self.by


def test_a_forward_may_be_an_object_without_a_hash() -> None:
    class Halves(nn.Module):
        forward = Halved()

    model = Net()
    model.add_module("halves", Halves())
    train_both(model, make_batches(2))
