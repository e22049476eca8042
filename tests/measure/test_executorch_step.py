"""ExecuTorch's training beside plain PyTorch's: the same losses; a reason where it cannot be had."""

from __future__ import annotations

import copy
import importlib.metadata
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_odt.capture.child import ChildFailed
from torch_odt.measure.cell import measure_cell
from torch_odt.measure.executorch_step import ExecuTorchStep, NotTrainable, _named, executorch_reason
from torch_odt.measure.job import How, Job
from torch_odt.measure.record import Cell, Machine, Record
from torch_odt.measure.report import table
from torch_odt.measure.steps import PlainStep, Work
from torch_odt.measure.suites import SUITES, Choices

CELL = Cell(suite="architectures", model="net", batch_size=4, mode="training", engine="executorch", threads=1)
is_installed = pytest.mark.skipif(bool(executorch_reason()), reason="executorch is not installed")


def make_work(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> Work:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
    ).to(memory_format=torch.channels_last)  # fmt: skip
    batch = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last), torch.randint(10, (4,))
    return Work(model, F.cross_entropy, optimizer(model.parameters(), lr=0.1, **options), batch)


@is_installed
@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_losses_are_those_of_plain_pytorch(momentum: float) -> None:
    work = make_work(momentum=momentum, weight_decay=0.01)
    theirs = ExecuTorchStep(Work(copy.deepcopy(work.model), work.loss_fn, work.optimizer, work.batch))
    plain = PlainStep(work)
    losses = [(theirs().item(), plain().item()) for _ in range(5)]
    assert losses[0][0] > losses[-1][0]
    for their_loss, loss in losses:
        assert their_loss == pytest.approx(loss, rel=1e-4)


@is_installed
@pytest.mark.slow
def test_a_cell_is_measured_and_one_that_cannot_be_says_why() -> None:
    job = Job(CELL, How(repetitions=2, idle_seconds=0.05))
    cell = measure_cell(job, lambda _: make_work())
    assert cell.outcome == "ok" and len(cell.step_seconds) >= 2 and (cell.peak_bytes or 0) > 0
    assert any("portable operators" in note for note in cell.notes)
    assert any("program loaded" in note for note in cell.notes)
    refused = measure_cell(job, lambda _: make_work(torch.optim.Adam))
    assert refused.outcome == "skipped" and "ExecuTorch has SGD only, not Adam" in refused.reason


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        torch.OutOfMemoryError("the cap is reached"),
        RuntimeError("std::bad_alloc"),
        ChildFailed("the child ended without a result (killed by SIGKILL)"),
    ],
)
def test_an_export_without_memory_is_out_of_memory(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(work: Work) -> None:
        with _named("export"):
            raise error

    monkeypatch.setattr("torch_odt.measure.cell.ExecuTorchStep", refuse)
    cell = measure_cell(Job(CELL, How(idle_seconds=0)), lambda _: make_work())
    assert cell.outcome == "out of memory" and str(error) in cell.reason


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("torch_odt.measure.executorch_step.version", absent)
    assert 'executorch: install it with pip install "torch_odt[executorch]"' in executorch_reason()


def test_a_model_that_it_cannot_train_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(work: Work) -> None:
        raise NotTrainable("ExecuTorch cannot load the step: operator aten::special is missing")

    monkeypatch.setattr("torch_odt.measure.cell.ExecuTorchStep", refuse)
    cell = measure_cell(Job(CELL, How(idle_seconds=0)), lambda _: make_work())
    assert cell.outcome == "skipped" and "aten::special is missing" in cell.reason


def test_it_stands_beside_the_steps_of_training_alone() -> None:
    jobs = list(SUITES["architectures"](Choices(quick=True, cores=1, executorch=True)))
    theirs = [job.cell for job in jobs if job.cell.engine == "executorch"]
    assert theirs and all(cell.mode == "training" and cell.experiment == "step" and not cell.budget for cell in theirs)


def test_a_table_names_the_engine() -> None:
    cells = [
        Cell(suite="architectures", model="lenet", batch_size=4, mode="training", engine=engine, threads=1,
             step_seconds=[seconds])
        for engine, seconds in (("torch", 0.002), ("torch_odt", 0.001), ("executorch", 0.02))
    ]  # fmt: skip
    rows = table(Record(Machine(name="a board", processor="Cortex-A72", cores=4), cells)).splitlines()
    assert any("torch_odt" in row and "0.50×" in row for row in rows)
    assert any("ExecuTorch" in row and "10.00×" in row for row in rows)
