"""How often steps are made, and budgets that are refused at first, or for good."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_odt.errors import InfeasibleBudget
from torch_odt.measure import cell as cell_module
from torch_odt.measure.cell import PlanAgain, measure_cell
from torch_odt.measure.job import How, Job
from torch_odt.measure.record import Cell
from torch_odt.measure.steps import Work

CELL = Cell(suite="s", model="net", batch_size=4, mode="training", engine="torch_odt", threads=1, budget="50%",
            experiment="neighbour", factors={"training": "foreground"})  # fmt: skip


class Planner:
    """Refuses budgets by estimates until a step was tried within the smallest; then by what was measured in it.

    `measured` has a number for each process that asks, and stays at the last one.
    """

    def __init__(self, *, estimated: int, measured: int | Sequence[int]) -> None:
        self._smallest = estimated
        self._measured = [measured] if isinstance(measured, int) else list(measured)
        self.made: list[int] = []

    def __call__(self, job: Job, work: Work) -> tuple[Any, None]:
        budget_bytes = job.how.smallest_bytes or job.how.budget_bytes or 0
        if job.how.was_refused:
            self._smallest = self._measured[0]
            self._measured = self._measured[1:] or self._measured

        def step() -> None:
            if budget_bytes < self._smallest:
                raise InfeasibleBudget(budget_bytes, self._smallest)
            self.made.append(budget_bytes)

        return step, None


def measured(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, *, smallest_tries: int, make_step: Any = None
) -> tuple[Cell, int]:
    """The cell, and how many processes it takes."""
    monkeypatch.setattr(cell_module, "make_step", make_step or planner)
    monkeypatch.setattr(cell_module, "beside_neighbour", lambda job, cell, step_of: (step_of(), cell)[1])
    model = nn.Linear(4, 2)
    work = Work(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(4, 4), torch.zeros(4)))
    job = Job(CELL, How(budget_bytes=100, smallest_tries=smallest_tries))
    for processes in range(1, 9):
        try:
            return measure_cell(job, lambda samples: work), processes
        except PlanAgain as again:
            job = Job.from_json(again.job.to_json())
    raise AssertionError("it does not end")


@pytest.mark.parametrize("smallest_tries", [0, 3])
def test_a_budget_that_only_estimates_refuse_is_taken(monkeypatch: pytest.MonkeyPatch, smallest_tries: int) -> None:
    planner = Planner(estimated=200, measured=90)
    cell, processes = measured(planner, monkeypatch, smallest_tries=smallest_tries)
    assert (planner.made, processes) == ([200, 100], 2)
    assert cell.outcome == "ok" and not cell.notes


def test_the_smallest_budget_is_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(estimated=200, measured=150)
    cell, processes = measured(planner, monkeypatch, smallest_tries=3)
    assert (planner.made, processes) == ([200, 150], 3)
    assert cell.outcome == "ok"
    assert cell.notes == ["50% is 100 B, which is too small: the smallest budget was taken, 150 B"]
    assert cell.key == CELL.key


def test_a_smallest_budget_that_is_refused_again_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(estimated=200, measured=[150, 155, 155])
    cell, processes = measured(planner, monkeypatch, smallest_tries=3)
    assert (planner.made, processes, cell.outcome) == ([200, 155], 4, "ok")
    assert cell.notes == ["50% is 100 B, which is too small: the smallest budget was taken, 155 B"]
    for_ever = Planner(estimated=200, measured=[*range(150, 160)])
    cell, processes = measured(for_ever, monkeypatch, smallest_tries=2)
    assert (cell.outcome, processes) == ("out of memory", 4)


def test_a_step_to_measure_in_that_is_refused_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured on the way to a refusal raises the smallest budget."""
    planner = Planner(estimated=200, measured=120)

    def make_step(job: Job, work: Work) -> tuple[Any, None]:
        if job.how.smallest_bytes == 200:
            planner._smallest = 210
        return planner(job, work)

    cell, _ = measured(planner, monkeypatch, smallest_tries=3, make_step=make_step)
    assert cell.outcome == "ok" and planner.made == [120]


def test_bytes_that_are_too_few_are_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, processes = measured(Planner(estimated=200, measured=150), monkeypatch, smallest_tries=0)
    assert cell.outcome == "out of memory" and "InfeasibleBudget" in cell.reason and processes == 2


def test_a_budget_that_fits_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(estimated=100, measured=90)
    _, processes = measured(planner, monkeypatch, smallest_tries=3)
    assert (planner.made, processes) == ([100], 1)


@pytest.mark.parametrize(("how", "least", "most"), [
    (How(repetitions=3, least_seconds=0.0), 3, 3),
    (How(repetitions=3, least_seconds=0.1), 4, 10),
    (How(repetitions=50, least_seconds=0.1, most_seconds=0.05), 1, 5),
])  # fmt: skip
def test_short_steps_are_repeated_for_a_while(how: How, least: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_module, "make_step", lambda job, work: (lambda: time.sleep(0.01), None))
    monkeypatch.setattr(cell_module, "_looked_into", lambda job, cell, *others: cell)
    work = Work(nn.Linear(4, 2), F.cross_entropy, None, ())  # type: ignore[arg-type]
    cell = measure_cell(Job(replace(CELL, experiment="step"), replace(how, idle_seconds=0.0)), lambda samples: work)
    assert least <= len(cell.step_seconds) == cell.window_steps <= most
