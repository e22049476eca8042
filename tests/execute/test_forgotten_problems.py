"""What planners remember while they run in series is gone when a step is ready."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import torch_odt as odt
from torch_odt.planning.problem import Problem


@pytest.mark.parametrize("budget", ["1GiB", "smallest"])
def test_a_ready_step_holds_no_problem(budget: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(512, 64), torch.randint(4, (512,))
    if budget == "smallest":
        roomy = odt.plan(model, nn.CrossEntropyLoss(), batch, budget=odt.Budget("1GiB", of="training"))
        budget = str(roomy.smallest_feasible_bytes)
    limit = odt.Budget(budget, of="training")
    step = odt.TrainStep(model, nn.CrossEntropyLoss(), optimizer, budget=limit, cache=False)
    step(*batch)
    gc.collect()
    assert not any(isinstance(each, Problem) for each in gc.get_objects())
