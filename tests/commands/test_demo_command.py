"""`torch-odt demo`, with a small model."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

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
    assert document["torch_odt"]["losses"][0] == pytest.approx(document["plain"]["losses"][0], rel=1e-3)


@pytest.fixture
def job(net: Path) -> Job:
    return Job(f"{net}:make", batch_size=4, image_size=16, steps=2, learning_rate=0.1, seed=0, quiet=True)


def test_infeasible_budget(job: Job) -> None:
    with pytest.raises(InfeasibleBudget):
        work(dataclasses.replace(job, budget_bytes=1000))


def test_infeasible_budget_as_json(terminal: Terminal, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = subprocess.CompletedProcess([], 0, stdout=json.dumps(refused_result(job)))
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: refused)
    outcome = terminal("demo", "--budget", "6MiB", "--json")
    assert outcome.code == 2
    assert outcome.document["error"] == "InfeasibleBudget"
    assert outcome.document["smallest_feasible_bytes"] > 1000


def refused_result(job: Job) -> dict[str, Any]:
    with pytest.raises(InfeasibleBudget) as refusal:
        work(dataclasses.replace(job, budget_bytes=1000))
    return dataclasses.asdict(Result(refusal=list(refusal.value.__reduce__()[1])))


def test_a_budget_that_was_not_kept_is_a_failure(terminal: Terminal, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Result(peak_bytes=7 << 20, step_seconds=0.1, losses=[1.0] * 9, validation_accuracy=0.5, plan_text="a plan")
    monkeypatch.setattr(demo, "_in_process", lambda job: ours)
    outcome = terminal("demo", "--budget", "6MiB")
    assert outcome.code == 1
    assert "was exceeded" in outcome.out


def test_plain_pytorch_that_was_killed(terminal: Terminal, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Result(peak_bytes=5 << 20, step_seconds=0.1, losses=[1.0] * 9, validation_accuracy=0.5, plan_text="a plan")
    monkeypatch.setattr(demo, "_in_process", lambda job: ours if job.budget_bytes else None)
    outcome = terminal("demo", "--budget", "6MiB")
    assert outcome.code == 0
    assert "Plain PyTorch was killed" in outcome.out
    assert "was kept. Accuracy on digits never seen: 50%" in outcome.out
    assert terminal("demo").code == 2
