"""`torch-odt demo`, with a small model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from terminals import Terminal

from torch_odt.commands import demo
from torch_odt.commands.demo_worker import Job, Result, work
from torch_odt.errors import InfeasibleBudget

TINY = ("--image-size", "32", "--batch-size", "16", "--steps", "9")


@pytest.mark.slow
def test_comparison(terminal: Terminal, net: Path) -> None:
    outcome = terminal("demo", "--model", f"{net}:make", *TINY, "--budget", "128MiB", "--json")
    assert outcome.code == 0, outcome.err
    document = outcome.document
    assert document["budget_bytes"] == 128 << 20
    assert document["within_budget"] is True
    assert len(document["torch_odt"]["losses"]) == 9
    assert document["torch_odt"]["losses"][:8] == pytest.approx(document["plain"]["losses"], rel=1e-3)


@pytest.fixture
def job(net: Path) -> Job:
    return Job(f"{net}:make", batch_size=4, image_size=16, steps=2, learning_rate=0.1, seed=0, quiet=True)


def test_infeasible_budget(job: Job) -> None:
    with pytest.raises(InfeasibleBudget):
        work(dataclasses.replace(job, budget_bytes=1000))


def test_plain_pytorch_that_was_killed(terminal: Terminal, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Result(peak_bytes=5 << 20, step_seconds=0.1, losses=[1.0] * 9, validation_accuracy=0.5, plan_text="a plan")
    monkeypatch.setattr(demo, "_in_process", lambda job: ours if job.budget_bytes else None)
    outcome = terminal("demo", "--budget", "6MiB")
    assert outcome.code == 0
    assert "Plain PyTorch was killed" in outcome.out
    assert "was kept. Accuracy on digits never seen: 50%" in outcome.out
    assert terminal("demo").code == 2
