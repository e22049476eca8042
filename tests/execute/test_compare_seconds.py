"""How much of `planning_seconds` a planner is given that looks at its time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_odt.capture.costs import Costs
from torch_odt.capture.device import Device
from torch_odt.capture.graph import TrainingGraph
from torch_odt.execute.compare import compare
from torch_odt.planning import registry
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.schedule import Schedule


def test_a_planner_receives_most_of_the_time_for_a_batch_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It may plan in a process of its own.
    received = tmp_path / "received"

    def timed(graph: TrainingGraph, costs: Costs, budget_bytes: int, *, time_limit_seconds: float = 60.0) -> Schedule:
        with received.open("a") as file:
            file.write(f"{time_limit_seconds}\n")
        return keep_all(graph, costs, budget_bytes)

    monkeypatch.setitem(registry._PLANNERS, "timed", timed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    compare(
        model,
        F.cross_entropy,
        (torch.ones(4, 8), torch.tensor([0, 1, 1, 0])),
        planners=("timed",),
        budgets=[lambda everything_bytes: 2 * everything_bytes],
        micro_batch=4,
        device=Device("a board", flops_per_second=1e9, watts=2.0),
        planning_seconds=1000.0,
        cache=False,
    )
    (seconds,) = map(float, received.read_text().split())
    assert 700 < seconds <= 800
