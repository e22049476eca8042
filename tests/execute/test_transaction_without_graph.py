"""Transactional steps without a graph: their code may change anything, and is undone all the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from undone_steps import Everything, Restless, batches, make_step

import torch_odt as odt
from torch_odt._extensions import memory_module

pytestmark = [
    pytest.mark.skipif(memory_module is None, reason="torch_odt._memory, which refuses allocations, is not built"),
    pytest.mark.filterwarnings("ignore:not captured:torch_odt.errors.OdtWarning"),
    pytest.mark.filterwarnings("ignore:an attempt of a step was undone:torch_odt.errors.OdtWarning"),
]


class Stop(Exception):
    """Raised by a hook."""


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def test_a_step_without_a_graph() -> None:
    data = batches()
    model = Restless()
    step = make_step(model)
    step(*data[0])
    assert not step.plan.captured
    before = Everything.of(step)
    bound, seen = model.mean, model.seen

    def fail(*_: Any) -> None:
        raise Stop

    handle = step.optimizer.register_step_post_hook(fail)
    with pytest.raises(Stop):
        step(*data[1])
    handle.remove()
    assert not before.difference(Everything.of(step)) and model.mean is bound and model.seen is seen
    for place in (0, 20, 40, 60):
        with refused(place, lasts=True), pytest.raises((torch.OutOfMemoryError, RuntimeError)):
            step(*data[1])
        assert not before.difference(Everything.of(step)), place
    step(*data[1])
    assert model.count == 2 and len(model.seen) == 2


def test_a_step_without_a_graph_is_made_again() -> None:
    data = batches()

    def train(place: int) -> Everything:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        step = make_step(Restless())
        step(*data[0])
        with refused(place):
            step(*data[1])
        return Everything.of(step)

    expected = train(100_000)
    for place in (40, 90, 110):
        # Measuring its submodules runs its code, which appends to a list.
        assert train(place).tensors == expected.tensors


def test_a_budget_without_room_for_the_copies_is_refused() -> None:
    model, batch = Restless(), batches()[0]
    step = make_step(model, budget=odt.Budget("1MiB", of="training"))
    before = Everything.of(step)
    with pytest.raises(odt.InfeasibleBudget) as refusal:
        step(*batch)
    assert not before.difference(Everything.of(step))
    step.budget = odt.Budget(refusal.value.smallest_feasible_bytes, of="training")
    step(*batch)
    assert not step.plan.captured
