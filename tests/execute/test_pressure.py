"""Steps that are told while they run that less is allowed: they give back at once, and no bit of a result changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactness import WITH_GRADIENTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_budgets import BATCH, Scripted, make_net
from torch import Tensor, nn

import torch_odt as odt
from torch_odt import memory
from torch_odt.capture.costs import TransferCosts
from torch_odt.capture.rewrite import inexact_rewrites
from torch_odt.execute import page_file, pressure
from torch_odt.runtime import Decision, Reading

MIB = 1 << 20
NEVER = 1 << 60
# What a process holds is not all that torch counts: gradients, the heap of small blocks, buffers of libraries.
SLACK = 6 * MIB
pytestmark = pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built")


class Falling(Scripted):
    """Allowed is plenty, and from some look on of each call little, until it ends.

    Attributes:
        high: what is allowed before that.
        held: what the process held at each look of the present call.
        relieved: what was decided meanwhile, and after how many looks.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(1 << 30, read=self._reading, grow_after_seconds=0, on_decision=self._note, **options)
        self._falls_at, self._low = NEVER, 0
        self.high = 1 << 30
        self.held: list[int] = []
        self.relieved: list[tuple[int, Decision]] = []

    def next_call(self, falls_at: int = NEVER, low: int = 0) -> None:
        self._falls_at, self._low = falls_at, low
        self.growth = [self.high]
        self.held.clear()
        self.relieved.clear()

    def lacking_bytes(self, level_bytes: int, need_bytes: int) -> int:
        self.held.append(memory.process_bytes())
        if len(self.held) > self._falls_at:
            self.growth = [self._low]
        return super().lacking_bytes(level_bytes, need_bytes)

    def _note(self, decision: Decision) -> None:
        if decision.action in ("evict", "keep"):
            self.relieved.append((len(self.held), decision))

    def check_held(self) -> None:
        """What was decided to be given back is given back, at once and until the end of the call."""
        freed_bytes = 0
        for at, decision in self.relieved:
            freed_bytes += decision.freed_bytes
            assert max(self.held[at:], default=0) <= self.held[0] - freed_bytes + SLACK

    @staticmethod
    def _reading() -> Reading:
        return Reading(0.0, memory.process_bytes(), 1 << 40, {"system": 1 << 40}, 1 << 41)


class Transformer(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True) for _ in range(2)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)).mean(1))


def make_transformer() -> nn.Module:
    torch.manual_seed(1)
    return Transformer()


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(BATCH, 3, 64, 64, generator=generator), torch.randint(4, (BATCH,), generator=generator)


def sequences() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(BATCH, 96, 16, generator=generator), torch.randint(4, (BATCH,), generator=generator)


class Training:
    """The same training by a step under a controller and plainly; every call is compared bit for bit."""

    def __init__(
        self,
        model: nn.Module,
        batch: tuple[Tensor, Tensor],
        cache: Path,
        *,
        controller: Falling | None = None,
        **options: Any,
    ) -> None:
        self.model, self.batch = model, batch
        self.plain = copy.deepcopy(model)
        self.controller = controller or Falling()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.05, momentum=0.9)
        exact: dict[str, Any] = {"disable_rewrites": inexact_rewrites(), "micro_batch": BATCH}
        self.step = odt.TrainStep(
            model, F.cross_entropy, self.optimizer, budget=self.controller, cache=cache, **(exact | options)
        )
        self.calls = 0

    def call(self, **fall: int) -> None:
        self.calls += 1
        expected = self._plainly()
        # What was freed there would count as taken by others, and plans would depend on how soon that passes.
        memory.trim()
        state = torch.get_rng_state()
        self.controller.next_call(**fall)
        torch.manual_seed(self.calls)
        assert torch.equal(self.step(*self.batch), expected)
        assert torch.equal(torch.get_rng_state(), state)
        for ours, theirs in zip(self.model.state_dict().values(), self.plain.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)

    def _plainly(self) -> Tensor:
        torch.manual_seed(self.calls)
        self.plain_optimizer.zero_grad()
        loss = F.cross_entropy(self.plain(*self.batch[:-1]), self.batch[-1])
        loss.backward()
        self.plain_optimizer.step()
        return loss.detach()

    @property
    def decision(self) -> Decision:
        """The one that the last call made while it ran."""
        ((_, decision),) = self.controller.relieved
        return decision


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def looks_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a step that is so slow that between two instructions there is always time to look."""
    monkeypatch.setattr(pressure, "_PIECE_SECONDS", 0.0)
    monkeypatch.setattr(pressure, "_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(pressure, "_LOOKING_SHARE", float("inf"))


@pytest.fixture
def looks_often(looks_everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to plan before each instruction anew where less is allowed than can be reached."""
    monkeypatch.setattr(pressure, "_LOOKING_SHARE", 0.2)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "cnn": (make_net, images),
    "transformer": (make_transformer, sequences),
}


@pytest.mark.usefixtures("looks_everywhere")
@pytest.mark.parametrize(
    ("name", "transactional", "count"),
    [
        ("cnn", False, 3),
        ("transformer", True, 3),
        pytest.param("cnn", True, 24, marks=pytest.mark.slow),
        pytest.param("transformer", False, 24, marks=pytest.mark.slow),
    ],
)
def test_less_is_allowed_at_any_moment(name: str, transactional: bool, count: int, cache: Path) -> None:
    make, make_batch = CASES[name]
    training = Training(make(), make_batch(), cache, transactional=transactional)
    training.call()
    training.call()
    looks, plan = len(training.controller.held), training.step.plan
    assert looks > 60 and not training.controller.relieved
    low = plan.peak_bytes - plan.arena_bytes // 2
    evictions = 0
    for number in range(count):
        training.call(falls_at=1 + number * looks // count, low=low)
        if training.decision.action == "evict":
            assert training.decision.freed_bytes > 0.3 * plan.arena_bytes
            training.controller.check_held()
            evictions += 1
    assert evictions > 0.6 * count
    # What is allowed again is used again: the next call is not made by a smaller plan.
    training.call()
    assert training.step.plan.peak_bytes == plan.peak_bytes


@pytest.fixture(scope="module")
def small(cache: Path) -> Training:
    images, targets = CASES["cnn"][1]()
    training = Training(make_net(), (images[:, :, ::2, ::2], targets), cache)
    training.call()
    return training


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moment=st.floats(0, 1), share=st.floats(0, 1))
@pytest.mark.usefixtures("looks_often")
def test_any_amount(small: Training, moment: float, share: float) -> None:
    small.call()
    looks, plan = len(small.controller.held), small.step.plan
    small.call(falls_at=int(moment * looks), low=int(share * plan.peak_bytes))
    small.controller.check_held()
    for _, decision in small.controller.relieved:
        assert (decision.action == "evict") == (decision.freed_bytes > 0)
    assert sum(decision.freed_bytes for _, decision in small.controller.relieved) <= plan.arena_bytes


class FailingInside(Falling):
    """What it asks, or whom it tells, fails while a step runs."""

    asks = tells = False

    def lacking_bytes(self, level_bytes: int, need_bytes: int) -> int:
        lacking = super().lacking_bytes(level_bytes, need_bytes)
        if self.asks and len(self.held) > 30:
            raise OSError("too many open files")
        return lacking

    def _note(self, decision: Decision) -> None:
        super()._note(decision)
        if self.tells and decision.action == "evict":
            raise LookupError("no such writer")


@pytest.mark.usefixtures("looks_everywhere")
@pytest.mark.parametrize("what", ["asks", "tells"])
def test_an_error_while_a_step_runs_leaves_no_step_half_done(what: str, cache: Path) -> None:
    training = Training(make_net(), images(), cache, controller=FailingInside())
    training.call()
    low = training.step.plan.peak_bytes - training.step.plan.arena_bytes // 2
    setattr(training.controller, what, True)
    training.call(falls_at=40, low=low)
    setattr(training.controller, what, False)
    with pytest.warns(odt.OdtWarning, match="could not give memory back: (OSError: too many|LookupError: no such)"):
        training.call()
    training.call(falls_at=40, low=low)
    assert training.decision.action == "evict", "it is looked again"


@pytest.mark.usefixtures("looks_everywhere")
def test_who_wants_still_more_is_seen_after_an_eviction(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour that grows asks again at once; what an eviction took is no reason to be blind for long."""
    monkeypatch.setattr(pressure, "_LOOKING_SHARE", 0.02)
    clock = [0.0]
    monkeypatch.setattr(pressure.time, "perf_counter", lambda: clock[0])
    rest_within = pressure.rest_within

    def slow(*args: Any) -> Any:
        clock[0] += 1.0
        return rest_within(*args)

    training = Training(make_net(), images(), cache)
    training.call()
    plan = training.step.plan
    monkeypatch.setattr(pressure, "rest_within", slow)
    training.call(falls_at=20, low=plan.peak_bytes - plan.arena_bytes // 2)
    at, _ = training.controller.relieved[0]
    assert len(training.controller.held) > at + 10


@pytest.mark.usefixtures("looks_everywhere")
def test_the_next_call_is_planned_for_what_is_allowed(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    training = Training(make_net(), images(), cache)
    training.controller._log = log
    training.call()
    plan = training.step.plan
    low = plan.peak_bytes - plan.arena_bytes // 2
    training.call(falls_at=40, low=low)
    training.controller.growth = [low]
    torch.manual_seed(0)
    training.step(*training.batch)
    assert training.step.plan.peak_bytes <= low < plan.peak_bytes
    written = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["action"] for line in written] == ["evict"]
    assert written[0]["freed_bytes"] > 0 and written[0]["budget_bytes"] < training.step._request.level_bytes + low + 1


@pytest.mark.usefixtures("looks_everywhere")
def test_where_nothing_can_be_gained_the_step_goes_on(cache: Path) -> None:
    """What it takes are gradients: there is next to nothing in the arena."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 4))
    batch = torch.randn(2, 8), torch.randint(4, (2,))
    training = Training(model, batch, cache, micro_batch=2, disable_rewrites=WITH_GRADIENTS)
    training.call()
    budget = training.step.budget
    training.call(falls_at=1, low=MIB)
    assert training.decision.action == "keep" and training.decision.freed_bytes == 0
    assert training.step.budget == budget


def make_separable() -> nn.Module:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(4):
        layers += [nn.GroupNorm(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


@pytest.mark.usefixtures("looks_everywhere")
@pytest.mark.parametrize("falls_at", [8, 40])
def test_later_micro_batches_do_with_less_too(cache: Path, falls_at: int) -> None:
    steps, controllers, models = [], [], []
    for _ in range(2):
        model, controller = make_separable(), Falling()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        steps.append(
            odt.TrainStep(model, F.cross_entropy, optimizer, budget=controller, micro_batch=BATCH // 2, cache=cache)
        )
        controllers.append(controller)
        models.append(model)
    batch = images()
    for call in range(2):
        if call:
            plan = steps[1].plan
            controllers[1].next_call(falls_at=falls_at, low=plan.peak_bytes - plan.arena_bytes // 3)
        losses = []
        for step in steps:
            torch.manual_seed(call)
            losses.append(step(*batch))
        assert torch.equal(*losses)
        assert all(torch.equal(a, b) for a, b in zip(*(model.state_dict().values() for model in models), strict=True))
    _, decision = controllers[1].relieved[0]
    assert decision.action == "evict" and decision.freed_bytes > 0.3 * plan.arena_bytes
    controllers[1].check_held()


@pytest.mark.usefixtures("looks_everywhere")
def test_a_call_that_fails_after_it_gave_back_is_undone(cache: Path) -> None:
    training = Training(make_net(), images(), cache, transactional=True, nonfinite="raise")
    training.call()
    before = copy.deepcopy(training.model.state_dict())
    plan = training.step.plan
    training.controller.next_call(falls_at=10, low=plan.peak_bytes - plan.arena_bytes // 3)
    with pytest.raises(FloatingPointError):
        training.step(torch.full_like(training.batch[0], float("nan")), training.batch[1])
    assert training.decision.action == "evict"
    for ours, theirs in zip(training.model.state_dict().values(), before.values(), strict=True):
        assert torch.equal(ours, theirs)
    training.call()
    assert training.step._request.held_bytes >= training.step.plan.arena_bytes


@pytest.mark.usefixtures("looks_everywhere")
@pytest.mark.parametrize("falls_at", [30, *(pytest.param(at, marks=pytest.mark.slow) for at in (5, 15, 60))])
def test_a_step_that_pages_gives_back_too(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, falls_at: int
) -> None:
    # The planner recomputes where a disk is slow, as it looks beside other programs.
    fast = TransferCosts(0.0, 1e12, 0.0, 1e12, limit_bytes=1 << 40)
    monkeypatch.setattr(page_file, "_measure", lambda pager, limit_bytes: fast)
    training = Training(make_net(), images(), cache, planner="capuchin", page_to=tmp_path)
    training.call()
    training.controller.high = int(0.8 * training.step.plan.peak_bytes)
    training.call()
    training.call()
    plan = training.step.plan
    assert training.step._current is not None and training.step._current.pages, plan.notes
    training.call(falls_at=falls_at, low=plan.peak_bytes - plan.arena_bytes // 3)
    assert training.controller.relieved[0][1].action == "evict"


def test_a_short_step_is_not_looked_at(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "_INTERVAL_SECONDS", 60.0)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    training = Training(model, (torch.randn(2, 8), torch.ones(2).long()), cache, micro_batch=2)
    for _ in range(3):
        training.call(falls_at=0, low=0)
    assert not training.controller.held


def test_a_fixed_budget_is_not_looked_at(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pressure.Pressure, "__init__")
    monkeypatch.delattr(pressure.Pressure, "run")
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    budget = odt.Budget("1GiB", of="training")
    odt.TrainStep(model, F.cross_entropy, optimizer, budget=budget, micro_batch=BATCH, cache=cache)(*images())
