"""A step that goes on from a checkpoint follows the plans that it had, whatever memory there is by then."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_odt as odt
from torch_odt.runtime import Checkpointer, ShareOfAvailable

MIB = 1 << 20
LITTLE, PLENTY = 16 * MIB, 1 << 30
AMPLE = odt.Budget("256MiB", of="training")
STEPS, STOPPED_AFTER = 6, 3
SIZES = (4096, 4096, 1024)


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What the system says that there is."""
    found = [PLENTY]
    monkeypatch.setattr("torch_odt.runtime.budget.available", lambda: found[0])
    yield found


class Run:
    """A training whose last bits depend on how its batches are cut; every third of them is a smaller one."""

    def __init__(self, folder: Path | None = None, every_steps: int | None = None, **options: Any) -> None:
        torch.manual_seed(3)
        first, second = nn.Linear(32, 256), nn.Linear(256, 256)
        self.model = nn.Sequential(first, nn.GELU(), nn.Dropout(0.1), second, nn.GELU(), nn.Linear(256, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        options = {"budget": "auto", **options}
        self.step = odt.TrainStep(self.model, F.cross_entropy, self.optimizer, **options)
        if folder is not None:
            self.checkpointer = Checkpointer(
                folder, model=self.model, optimizer=self.optimizer, step=self.step, every_steps=every_steps
            )

    def train(self, first: int, last: int) -> list[torch.Tensor]:
        losses = []
        for number in range(first, last):
            generator = torch.Generator().manual_seed(number)
            count = SIZES[number % len(SIZES)]
            inputs, targets = torch.randn(count, 32, generator=generator), torch.arange(count) % 3
            losses.append(self.step(inputs, targets))
        return [*losses[-3:], *(tensor.clone() for tensor in self.model.state_dict().values()), torch.get_rng_state()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def cuts(run: Run) -> set[int | None]:
    return {plan.micro_batch for plan in run.step._prepared.plans}


def test_resumed_with_another_amount_of_memory_the_bits_stay(tmp_path: Path, available: list[int]) -> None:
    """Beside as much as there is, a batch is not cut; in little, it is. Both kinds of batches keep their plans."""
    available[0] = LITTLE
    uninterrupted = Run()
    wanted = uninterrupted.train(0, STEPS)
    first = Run(tmp_path)
    first.train(0, STOPPED_AFTER)
    first.checkpointer.save(STOPPED_AFTER)
    assert len(cuts(first)) == 2 and cuts(first) == cuts(uninterrupted)
    available[0] = PLENTY
    second = Run(tmp_path)
    assert second.checkpointer.resume() is not None
    second.train(STOPPED_AFTER, STOPPED_AFTER + 1)
    # The smaller batches have not come again when the run is stopped for the second time.
    second.checkpointer.save(STOPPED_AFTER + 1)
    assert len(cuts(second)) == 1
    third = Run(tmp_path)
    assert third.checkpointer.resume() is not None
    assert equal(third.train(STOPPED_AFTER + 1, STEPS)[-len(wanted) + 3 :], wanted[3:])
    assert cuts(third) == cuts(first)
    planned_anew = Run()
    Checkpointer(tmp_path, model=planned_anew.model, optimizer=planned_anew.optimizer).resume()
    found = planned_anew.train(STOPPED_AFTER + 1, STEPS)[-len(wanted) + 3 :]
    assert not equal(found, wanted[3:]), "without the plans the bits differ"
    assert cuts(planned_anew) == {None}


def test_what_does_not_fit_any_more_is_planned_anew(tmp_path: Path, available: list[int]) -> None:
    available[0] = PLENTY
    first = Run(tmp_path)
    first.train(0, 1)
    first.checkpointer.save(1)
    available[0] = LITTLE
    second = Run(tmp_path)
    second.checkpointer.resume()
    with pytest.warns(odt.OdtWarning, match=r"plan of the checkpoint is not followed: the budget auto.*too small"):
        second.train(1, 2)
    assert cuts(second) != {None}


def test_what_changes_the_plan_is_named(tmp_path: Path) -> None:
    first = Run(tmp_path, budget=AMPLE)
    first.train(2, 3)
    first.checkpointer.save(1)
    second = Run(tmp_path, budget=AMPLE, micro_batch=512)
    with pytest.warns(odt.OdtWarning, match="the run that goes on had micro_batch=None"):
        second.checkpointer.resume()
    second.train(2, 3)
    assert second.step.plan.micro_batch == 512


def test_a_change_of_the_budget_forgets_what_was_kept(tmp_path: Path) -> None:
    first = Run(tmp_path, budget=AMPLE)
    first.train(2, 3)
    first.checkpointer.save(1)
    second = Run(tmp_path, budget=AMPLE)
    second.checkpointer.resume()
    second.step.budget = odt.Budget("300MiB", of="training")
    assert second.step._prepared.kept is None


def test_another_graph_is_planned_anew(tmp_path: Path) -> None:
    first = Run(tmp_path, budget=AMPLE)
    first.train(2, 3)
    first.checkpointer.save(1)
    second = Run(tmp_path, budget=AMPLE)
    second.model[2].p = 0.2
    second.checkpointer.resume()
    with pytest.warns(odt.OdtWarning, match="the plan is for another graph"):
        second.train(2, 3)


def test_other_threads_are_told_of(tmp_path: Path) -> None:
    run = Run(tmp_path, budget=AMPLE)
    before = torch.get_num_threads()
    run.checkpointer.save(1)
    torch.set_num_threads(before + 1)
    try:
        with pytest.warns(odt.OdtWarning, match=f"written with {before} threads of torch, and there are {before + 1}"):
            run.checkpointer.resume()
    finally:
        torch.set_num_threads(before)


def test_a_policy_keeps_no_plans(tmp_path: Path) -> None:
    first = Run(tmp_path, budget=ShareOfAvailable(0.5))
    first.train(2, 3)
    first.checkpointer.save(1)
    second = Run(tmp_path, budget=ShareOfAvailable(0.5))
    resumed = second.checkpointer.resume()
    assert resumed is not None and resumed.step == 1
    second.train(2, 3)


def test_a_policy_follows_no_plan_of_a_fixed_budget(tmp_path: Path) -> None:
    """One that was made for little would stay however much memory comes back."""
    first = Run(tmp_path, budget=AMPLE)
    first.train(2, 3)
    first.checkpointer.save(1)
    second = Run(tmp_path, budget=ShareOfAvailable(0.5))
    assert second.checkpointer.resume() is not None
    assert second.step._prepared.kept is None
    second.train(2, 3)


@pytest.mark.parametrize("transactional", [False, True])
def test_an_accumulation_is_never_cut_in_two(tmp_path: Path, transactional: bool) -> None:
    options = {"budget": AMPLE, "accumulation_steps": 3, "transactional": transactional}
    first = Run(tmp_path, every_steps=4, **options)
    saved = []
    for step in range(1, 7):
        first.train(2, 3)
        saved.append(first.checkpointer.step_done(step) is not None)
        if step == 4:
            with pytest.raises(odt.CheckpointError, match="middle of an accumulation, after 1 calls"):
                first.checkpointer.save(step)
    assert saved == [False] * 5 + [True]
    first.train(2, 3)
    with first.checkpointer, pytest.raises(SystemExit):
        for step in range(7, 10):
            if step == 7:
                signal.raise_signal(signal.SIGTERM)
            else:
                first.train(2, 3)
            first.checkpointer.step_done(step)
    second = Run(tmp_path, **options)
    resumed = second.checkpointer.resume()
    assert resumed is not None and resumed.step == 9
    generator = torch.get_rng_state()
    for run in (first, second):
        torch.set_rng_state(generator)
        for _ in range(3):
            run.train(2, 3)
    assert equal(list(first.model.state_dict().values()), list(second.model.state_dict().values()))
