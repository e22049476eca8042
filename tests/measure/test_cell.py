"""Budgets that are refused at first, or for good."""

from __future__ import annotations

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
    """Refuses budgets by estimates until a step was made; then by what was measured in it."""

    def __init__(self, *, estimated: int, measured: int) -> None:
        self._smallest, self._measured = estimated, measured
        self.made: list[int] = []

    def __call__(self, job: Job, work: Work) -> tuple[Any, None]:
        budget_bytes = job.how.budget_bytes or 0

        def step() -> None:
            if budget_bytes < self._smallest:
                raise InfeasibleBudget(budget_bytes, self._smallest)
            self._smallest = self._measured
            self.made.append(budget_bytes)

        return step, None


def measured(planner: Planner, monkeypatch: pytest.MonkeyPatch, *, or_smallest: bool) -> tuple[Cell, int]:
    """The cell, and how many processes it takes."""
    monkeypatch.setattr(cell_module, "make_step", planner)
    monkeypatch.setattr(cell_module, "beside_neighbour", lambda job, cell, step_of: (step_of(), cell)[1])
    model = nn.Linear(4, 2)
    work = Work(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(4, 4), torch.zeros(4)))
    job = Job(CELL, How(budget_bytes=100, or_smallest=or_smallest))
    for processes in range(1, 9):
        try:
            return measure_cell(job, lambda samples: work), processes
        except PlanAgain as again:
            job = Job.from_json(again.job.to_json())
    raise AssertionError("it does not end")


@pytest.mark.parametrize("or_smallest", [True, False])
def test_a_budget_that_only_estimates_refuse_is_taken(monkeypatch: pytest.MonkeyPatch, or_smallest: bool) -> None:
    planner = Planner(estimated=200, measured=90)
    cell, processes = measured(planner, monkeypatch, or_smallest=or_smallest)
    assert (planner.made, processes) == ([200, 100], 2)
    assert cell.outcome == "ok" and not cell.notes


def test_the_smallest_budget_is_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(estimated=200, measured=150)
    cell, processes = measured(planner, monkeypatch, or_smallest=True)
    assert (planner.made, processes) == ([200, 150], 3)
    assert cell.outcome == "ok"
    assert cell.notes == ["50% is 100 B, which is too small: the smallest budget was taken, 150 B"]
    assert cell.key == CELL.key


def test_bytes_that_are_too_few_are_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, processes = measured(Planner(estimated=200, measured=150), monkeypatch, or_smallest=False)
    assert cell.outcome == "out of memory" and "InfeasibleBudget" in cell.reason and processes == 2


def test_a_budget_that_fits_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(estimated=100, measured=90)
    _, processes = measured(planner, monkeypatch, or_smallest=True)
    assert (planner.made, processes) == ([100], 1)
