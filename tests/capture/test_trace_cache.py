"""Traces of earlier processes: found while nothing has changed, traced anew after any change, never kept in doubt.

Most tests play the other process in this one: they make an entry, change something, and look for it again.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.described_steps import DescribedStep, remember, through_json
from torch_odt.cache import Cache
from torch_odt.capture.describe import Undescribable
from torch_odt.capture.describe_code import describe_executed
from torch_odt.capture.describe_step import describe_step
from torch_odt.capture.step_data import step_from_data, step_to_data
from torch_odt.capture.trace_cache import remembered_trace
from torch_odt.errors import OdtWarning
from torch_odt.execute.loss import make_compute

SCALE = 2.0
SHIFTS = {"after": [0.5]}


@dataclass
class Settings:
    gain: float = 1.5
    nested: list[int] = field(default_factory=lambda: [1, 2])


SETTINGS = Settings()


def shift(x: Tensor) -> Tensor:
    return x + SHIFTS["after"][0]


def other_shift(x: Tensor) -> Tensor:
    return x + 3


class Block(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.slope = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.layer(x), self.slope) * self.factor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.BatchNorm1d(4)
        self.register_parameter("gain", None)
        self.head = nn.Linear(4, 4)
        self.sizes = torch.tensor([4, 4])

    def forward(self, x: Tensor) -> Tensor:
        x = shift(self.norm(self.blocks(x))) * SCALE * math.sqrt(SETTINGS.gain)
        return self.head(x)


def make_loss(weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(outputs, target) * weight

    return loss


@dataclass
class Step(DescribedStep):
    model: nn.Module = field(default_factory=Net)
    loss_fn: Any = field(default_factory=lambda: make_loss(0.5))


@pytest.fixture(scope="module")
def remembered() -> tuple[str, Any]:
    """What an earlier process has kept of `Step()`."""
    return remember(Step())


def test_an_equal_step_finds_the_same_graph(remembered: tuple[str, Any]) -> None:
    found = Step().find(remembered)
    assert found is not None
    assert found.graph.fingerprint == Step().trace().graph.fingerprint


Change = Callable[[Step, pytest.MonkeyPatch], object]


def _retype(step: Step) -> None:
    step.batch = (step.batch[0].double(), step.batch[1])


def _resize(step: Step) -> None:
    step.batch = (torch.ones(5, 4), torch.zeros(5, 4))


def _tie(step: Step) -> None:
    step.model.blocks[1].layer.weight = step.model.blocks[0].layer.weight


def _rebind(step: Step) -> None:
    step.model.blocks[0].forward = lambda x: x


CHANGES: dict[str, Change] = {
    "an attribute of a submodule": lambda s, m: setattr(s.model.blocks[1], "slope", 0.2),
    "a new attribute": lambda s, m: setattr(s.model, "extra", True),
    "a tensor that is no buffer": lambda s, m: s.model.sizes.add_(1),
    "what trains": lambda s, m: s.model.head.weight.requires_grad_(False),
    "the mode": lambda s, m: s.model.norm.eval(),
    "tied weights": lambda s, m: _tie(s),
    "a parameter's dtype": lambda s, m: s.model.double(),
    "a parameter in place of none": lambda s, m: setattr(s.model, "gain", nn.Parameter(torch.ones(4))),
    "a child in place of another": lambda s, m: s.model.blocks.__setitem__(1, nn.Identity()),
    "a method of one module": lambda s, m: _rebind(s),
    "a hook": lambda s, m: s.model.blocks[0].register_forward_hook(lambda *_: None),
    "the batch's shape": lambda s, m: _resize(s),
    "the batch's dtype": lambda s, m: _retype(s),
    "a value in the loss's closure": lambda s, m: setattr(s, "loss_fn", make_loss(0.7)),
    "another loss": lambda s, m: setattr(s, "loss_fn", F.mse_loss),
    "a loss module": lambda s, m: setattr(s, "loss_fn", nn.MSELoss()),
    "a constant of the module": lambda s, m: m.setitem(globals(), "SCALE", 3.0),
    "something inside a constant": lambda s, m: m.setitem(SHIFTS, "after", [0.7]),
    "a function of the module": lambda s, m: m.setitem(globals(), "shift", other_shift),
    "a class attribute": lambda s, m: m.setattr(Block, "factor", 2.0),
    "a method of a class": lambda s, m: m.setattr(Block, "forward", lambda self, x: self.layer(x)),
    "an attribute of a config object": lambda s, m: m.setattr(SETTINGS, "gain", 2.5),
    "something inside a config object": lambda s, m: m.setattr(SETTINGS, "nested", [1, 3]),
    "a function of torch": lambda s, m: m.setattr(F, "leaky_relu", lambda x, slope: x * slope),
    "a method of a class of torch": lambda s, m: m.setattr(nn.Linear, "forward", lambda self, x: x),
    "the default dtype": lambda s, m: torch.set_default_dtype(torch.float64),
    "an environment variable of torch": lambda s, m: m.setenv("TORCH_SOMETHING", "1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_is_not_found_after_a_change_of(
    name: str, remembered: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step()
    assert step.find(remembered) is not None
    try:
        CHANGES[name](step, monkeypatch)
        assert step.find(remembered) is None
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "settings",
    [torch.autocast("cpu", torch.bfloat16), torch.no_grad(), torch.device("meta")],
    ids=["autocast", "no_grad", "device"],
)
def test_a_step_is_not_found_under_other_settings(
    settings: AbstractContextManager[Any], remembered: tuple[str, Any]
) -> None:
    step = Step()
    with settings:
        assert step.find(remembered) is None


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return scale_backward(gradient)


def scale_backward(x: Tensor) -> Tensor:
    return x * SETTINGS.gain


class Mode(enum.Enum):
    PLAIN = "plain"
    NEGATIVE = "negative"


MODE = Mode.PLAIN


class Habit(nn.Module):
    """A layer, and something that `forward` does with what comes out."""

    def __init__(self, habit: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.habit = habit

    def forward(self, x: Tensor) -> Tensor:
        return self.habit(self.layer(x))


def in_precision(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    @torch.autocast("cpu", dtype)
    def multiply(x: Tensor) -> Tensor:
        return (x @ x.T) @ x

    return multiply


def negate(x: Tensor) -> Tensor:
    return -x if MODE is Mode.NEGATIVE else x


def import_locally(x: Tensor) -> Tensor:
    from math import sqrt

    return x * sqrt(SCALE)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: Clamp.apply, lambda m: m.setattr(SETTINGS, "gain", 3.0)),
        (lambda: negate, lambda m: m.setitem(globals(), "MODE", Mode.NEGATIVE)),
        (lambda: import_locally, lambda m: m.setitem(globals(), "SCALE", 3.0)),
        (lambda: functools.partial(torch.mul, other=SCALE), lambda m: m.setitem(globals(), "SCALE", 3.0)),
        (
            lambda: in_precision(torch.bfloat16 if SCALE == 2.0 else torch.float16),
            lambda m: m.setitem(globals(), "SCALE", 3.0),
        ),
    ],
    ids=["a backward function", "an enumeration", "a local import", "a partial function", "a decorator of torch's"],
)
def test_what_is_reached_on_another_way_is_noticed(
    make: Callable[[], Callable[[Tensor], Tensor]],
    change: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remembered = remember(Step(model=Habit(make())))
    assert Step(model=Habit(make())).find(remembered) is not None
    change(monkeypatch)
    assert Step(model=Habit(make())).find(remembered) is None


def test_the_modules_of_a_loss_belong_to_the_step() -> None:
    project = nn.Linear(4, 4)
    step = Step(loss_fn=lambda outputs, target: F.mse_loss(project(outputs), target))
    remembered = remember(step)
    assert step.find(remembered) is not None
    project.weight.requires_grad_(False)
    assert step.find(remembered) is None


LOCK = threading.Lock()
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=2.0)


def read_environment(x: Tensor) -> Tensor:
    return x * float(os.environ.get("FACTOR", "2"))


def read_environment_by_function(x: Tensor) -> Tensor:
    return x * float(os.getenv("FACTOR", "2"))


def import_environment(x: Tensor) -> Tensor:
    from os import environ

    return x * float(environ.get("FACTOR", "2"))


def read_clock(x: Tensor) -> Tensor:
    return x * (time.time() > 0)


def read_file(x: Tensor) -> Tensor:
    return x * len(open(__file__).readline())  # noqa: PTH123


def read_seed(x: Tensor) -> Tensor:
    return x * torch.initial_seed()


def read_arguments(x: Tensor) -> Tensor:
    return x * len(sys.argv)


def read_context(x: Tensor) -> Tensor:
    return x * CONTEXT.get()


def use_lock(x: Tensor) -> Tensor:
    with LOCK:
        return x


def use_global_by_string(x: Tensor) -> Tensor:
    return x * globals()["SCALE"]


@functools.cache
def remembered_scale() -> float:
    return SCALE


def use_remembered(x: Tensor) -> Tensor:
    return x * remembered_scale()


remembered_scale()


def use_evaluated_code(x: Tensor) -> Tensor:
    return x * eval("SCALE")


def draw(generator: random.Random) -> Callable[[Tensor], Tensor]:
    return lambda x: x * generator.random()


@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        (read_environment, "uses os"),
        (read_environment_by_function, "uses os"),
        (import_environment, "uses os"),
        (read_clock, "uses time"),
        (read_file, "calls open"),
        (read_seed, "uses torch.random.initial_seed"),
        (read_arguments, "uses sys"),
        (read_context, "a _contextvars.ContextVar"),
        (use_lock, "a _thread.lock"),
        (use_global_by_string, "calls globals"),
        (use_evaluated_code, "calls eval"),
        (use_remembered, "remembered"),
        (draw(random.Random(1)), "a random.Random"),
    ],
)
def test_what_depends_on_more_than_the_step_is_not_kept(habit: Callable[[Tensor], Tensor], reason: str) -> None:
    step = Step(model=Habit(habit))
    with pytest.raises(Undescribable, match=reason):
        describe_executed(describe_step(step.model, step.loss_fn, (step.batch, {})), step.record().executed)
    assert step.remember() is None


class PatchedFunctions:
    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.ops.aten.linear(x, weight, bias) * 2


def test_code_that_runs_without_being_found_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.modules.linear.F", PatchedFunctions())
    step = Step(model=Habit(negate))
    with pytest.raises(Undescribable, match=r"code ran that .*test_trace_cache:linear"):
        describe_executed(describe_step(step.model, step.loss_fn, (step.batch, {})), step.record().executed)
    assert step.remember() is None


def test_a_debugger_is_not_disturbed() -> None:
    def watch(*_: object) -> None:
        pass

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        remembered = Step().remember()
        assert sys.gettrace() is watch
    finally:
        sys.settrace(before)
    assert sys.version_info >= (3, 12) or remembered is None


class Constants(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = torch.tensor([[0.1, -0.0, math.inf]] * size, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.table.sum().to(x.dtype) + torch.tensor(True) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_small_constants_come_back_bit_by_bit() -> None:
    step = Step(model=Constants(5))
    found = step.find(remember(step))
    assert found is not None
    expected = step.trace().graph
    assert expected.constants.keys() == found.graph.constants.keys() != set()
    for value, constant in expected.constants.items():
        assert torch.equal(constant, found.graph.constants[value])
        assert constant.dtype == found.graph.constants[value].dtype


def test_large_constants_are_not_kept() -> None:
    assert Step(model=Constants(1 << 14)).remember() is None


class Listed(nn.Module):
    """Uses a parameter behind the tracer's back: its numbers become a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weights = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.weights[0].detach().sum()


def test_trained_numbers_are_not_kept() -> None:
    step = Step(model=Listed())
    assert step.trace().graph.constants
    assert step.remember() is None


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"logits": (y, [y.sum(1)]), "layers": 2, "name": None, "set": {1}}


def test_everything_in_a_step_survives_the_waythrough_json() -> None:
    traced = Step(model=Structured(), loss_fn=lambda o, t: F.mse_loss(o["logits"][0], t)).trace()
    data = step_to_data(traced)
    again = step_from_data(through_json(data))
    assert again.graph == traced.graph
    assert again.result_spec == traced.result_spec and again.result_leaves == traced.result_leaves
    assert step_to_data(again) == data


@pytest.mark.parametrize("part", ["fingerprint", "results", "graph"])
def test_a_damaged_entry_is_ignored_with_a_warning(part: str, remembered: tuple[str, Any]) -> None:
    key, entry = remembered
    step = json.dumps(json.loads(entry["step"]) | {part: "damaged"})
    for text in (step, step[:-1]):
        with pytest.warns(OdtWarning, match="is damaged"):
            assert Step().find((key, entry | {"step": text})) is None


def test_an_entry_with_another_operator_in_it_is_damaged(remembered: tuple[str, Any]) -> None:
    key, entry = remembered
    step = json.loads(entry["step"])
    step["graph"]["ops"][3] = step["graph"]["ops"][2]
    with pytest.warns(OdtWarning, match="fingerprint"):
        assert Step().find((key, entry | {"step": json.dumps(step)})) is None


def test_a_damaged_file_is_traced_anew_with_a_warning(tmp_path: Path, remembered: tuple[str, Any]) -> None:
    cache = Cache(tmp_path)
    cache.save_trace(*remembered)
    (path,) = (tmp_path / "traces").glob("*.json")
    path.write_text(path.read_text()[:-100])
    step = Step()
    with pytest.warns(OdtWarning, match="is damaged"):
        traced = remembered_trace(cache, step.model, step.loss_fn, make_compute(step.loss_fn), (step.batch, {}))
    assert traced.graph.fingerprint == json.loads(remembered[1]["step"])["fingerprint"]


def test_outputs_whose_class_only_the_trace_has_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(data: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr("torch_odt.capture.trace_cache.step_from_text", unknown)
    step = Step()
    traced = remembered_trace(Cache(tmp_path), step.model, step.loss_fn, make_compute(step.loss_fn), (step.batch, {}))
    assert traced.graph == step.trace().graph


def test_a_cache_that_is_off_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_odt.capture.trace_cache.describe", None)
    step = Step()
    compute = make_compute(step.loss_fn)
    remembered_trace(Cache(tmp_path, enabled=False), step.model, step.loss_fn, compute, (step.batch, {}))
    assert not list(tmp_path.iterdir())
