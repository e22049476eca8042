"""The two doors of the package as tests go through them: three steps of a case, at one budget after the other."""

from __future__ import annotations

import abc
import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import exactness
import torch
from exactness import Outcome
from models import Batch, ModelCase

import torch_odt as odt
from torch_odt.execute.accounting import held_by_process
from torch_odt.execute.wrap import session_of


@dataclass
class Planned:
    """What both doors' plans say, and the allocations that were not as planned, by reason."""

    captured: bool
    peak_bytes: int
    micro_batch: int | None
    notes: list[str]
    departures: Counter[str] = field(default_factory=Counter)


class Door(abc.ABC):
    """A model that is trained from the state, the seed and the data of the plain run, at one budget after the other."""

    def __init__(self, case: ModelCase, autocast: bool = False, steps: int = exactness.STEPS) -> None:
        self.case = case
        self.model = case.model()
        self.batches = case.batches(steps)
        self._autocast = autocast
        self._start = copy.deepcopy(self.model.state_dict())

    def train(self, budget: odt.Budget) -> tuple[Outcome, Planned]:
        self.model.zero_grad()
        self.model.load_state_dict(self._start)
        torch.manual_seed(exactness.SEED)
        step = self._ready(budget)
        level, departed = _allocated(), _departed()

        def call(batch: Batch) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
                return step(batch)

        outcome = exactness.train(self.model, self.batches, call, lambda: _counted(level))
        planned = self._planned()
        planned.departures = _departed() - departed
        return outcome, planned

    @abc.abstractmethod
    def _ready(self, budget: odt.Budget) -> Callable[[Batch], torch.Tensor]:
        """What trains on a batch within the budget."""

    @abc.abstractmethod
    def _planned(self) -> Planned:
        """What the plan of the last run says."""


class StepDoor(Door):
    """`odt.TrainStep`."""

    def __init__(
        self,
        case: ModelCase,
        budget: odt.Budget,
        *,
        autocast: bool = False,
        steps: int = exactness.STEPS,
        **options: Any,
    ) -> None:
        super().__init__(case, autocast, steps)
        optimizer = exactness.make_optimizer(self.model.parameters())
        self._step = odt.TrainStep(self.model, case.loss_fn, optimizer, budget=budget, **options)

    def _ready(self, budget: odt.Budget) -> Callable[[Batch], torch.Tensor]:
        self._step.optimizer.state.clear()
        self._step.budget = budget
        # As a new step would: what the tests have kept since is not training's.
        self._step._request.level_bytes = held_by_process()
        return lambda batch: self._step(*batch[0], **batch[1])

    def _planned(self) -> Planned:
        plan = self._step.plan
        return Planned(plan.captured, plan.peak_bytes, plan.micro_batch, list(plan.notes))


class WrapDoor(Door):
    """An ordinary loop over `odt.wrap(model)`."""

    def __init__(self, case: ModelCase, budget: odt.Budget, *, autocast: bool = False, **options: Any) -> None:
        super().__init__(case, autocast)
        odt.wrap(self.model, budget=budget, **options)
        assert list(self.model.state_dict()) == list(self._start)

    def _ready(self, budget: odt.Budget) -> Callable[[Batch], torch.Tensor]:
        session_of(self.model).level_bytes = held_by_process()
        odt.set_budget(self.model, budget)
        optimizer = exactness.make_optimizer(self.model.parameters())

        def step(batch: Batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.case.loss(self.model, batch)
            with torch.autocast("cpu", enabled=False):
                loss.backward()
            optimizer.step()
            return loss

        return step

    def _planned(self) -> Planned:
        plan = odt.plan_of(self.model)
        return Planned(plan.captured, plan.peak_bytes, plan.micro_batch, list(plan.notes))


def open_door(door: str, case: ModelCase, budget: odt.Budget, **options: Any) -> Door:
    """A door, "step" or "wrap", as a fresh start finds it; `options` are those of `TrainStep` or `wrap`."""
    torch._dynamo.reset()
    return {"step": StepDoor, "wrap": WrapDoor}[door](case, budget, **options)


def _allocated() -> int:
    return odt.memory.stats().allocated_bytes if odt.memory.is_tracking() else 0


def _departed() -> Counter[str]:
    """Allocations so far that were not as planned, by reason; no model of the table allocates by its data."""
    arena = odt.memory.stats().arena
    return Counter() if arena is None else Counter({**arena.misses, "smaller": arena.smaller})


@contextlib.contextmanager
def _counted(level: int) -> Iterator[list[int]]:
    """Yields a list that holds the allocator's peak above `level` once the body is done; empty where nothing counts."""
    peaks: list[int] = []
    if odt.memory.is_tracking():
        odt.memory.reset_peak()
    yield peaks
    if odt.memory.is_tracking():
        peaks.append(odt.memory.stats().peak_bytes - level)
