"""Budgets that change while a wrapped model is trained: plans change between steps, and no bit of what is learnt."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactness import WITH_GRADIENTS
from scripted_budgets import Scripted, make_batches, make_net, plainly
from torch import nn

import torch_odt as odt
from torch_odt import memory
from torch_odt.capture.rewrite import inexact_rewrites
from torch_odt.execute.wrap import session_of
from torch_odt.runtime import ShareOfAvailable

# torch.compile itself warns of this and that.
pytestmark = [
    pytest.mark.filterwarnings("default", "error::torch_odt.errors.OdtWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built"),
]
OPTIONS: dict[str, Any] = {"disable_rewrites": inexact_rewrites() | WITH_GRADIENTS}


class Uncaptured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_net()

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    expected = plain.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def smallest_bytes() -> int:
    """What a step of the net takes at least, above the level."""
    model = odt.wrap(make_net(), budget=odt.Budget(4096, of="training"), **OPTIONS)
    with pytest.raises(odt.InfeasibleBudget) as refused:
        model(next(make_batches(1))[0])
    torch._dynamo.reset()
    return refused.value.smallest_feasible_bytes


@pytest.mark.slow
def test_plans_change_and_no_bit_does() -> None:
    low = int(1.1 * smallest_bytes())
    high = 4 * low
    model = make_net()
    plain = copy.deepcopy(model)
    controller = Scripted(*3 * [high], *2 * [low], *4 * [high], grow_after_seconds=0)
    odt.wrap(model, budget=controller, **OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(3)
    losses, planned = [], []
    for inputs, targets in make_batches(8):
        memory.reset_peak()
        before = memory.stats().allocated_bytes or 0
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        taken = (memory.stats().peak_bytes or 0) - before
        optimizer.step()
        losses.append(loss.item())
        planned.append(odt.plan_of(model))
        assert taken <= session_of(model).budget.growth_bytes
    assert losses == plainly(plain, 8)
    assert_same(model, plain)
    assert [decision.action for decision in controller.decisions] == ["begin", "shrink", "grow"]
    recomputed = [bool(plan.recomputed) for plan in planned]
    assert recomputed[2:4] == [True, True] and not any(recomputed[5:])
    assert session_of(model).runner_count == 1, "nothing was compiled again"


def test_less_than_the_smallest_plan_is_a_warning() -> None:
    low = smallest_bytes()
    model = make_net()
    plain = copy.deepcopy(model)
    controller = Scripted(4 * low, 4 * low, low // 4)
    odt.wrap(model, budget=controller, **OPTIONS)
    with pytest.warns(odt.OdtWarning, match="the smallest plan takes") as told:
        losses = plainly(model, 4)
    assert len([each for each in told if issubclass(each.category, odt.OdtWarning)]) == 1
    assert losses == plainly(plain, 4)
    assert [decision.action for decision in controller.decisions] == ["begin", "shrink", "scarce"]


def test_too_little_from_the_beginning() -> None:
    model = make_net()
    plain = copy.deepcopy(model)
    controller = Scripted(4096)
    odt.wrap(model, budget=controller, **OPTIONS)
    with pytest.warns(odt.OdtWarning, match="the smallest plan takes"):
        losses = plainly(model, 3)
    assert losses == plainly(plain, 3)
    assert {decision.action for decision in controller.decisions} == {"begin", "scarce"}


def test_a_model_that_cannot_be_captured() -> None:
    model = Uncaptured()
    plain = copy.deepcopy(model)
    controller = Scripted(1 << 30, 1 << 30, 150 << 20, grow_after_seconds=0)
    odt.wrap(model, budget=controller, **OPTIONS)
    with pytest.warns(odt.OdtWarning, match="cannot be captured"):
        losses = plainly(model, 4)
    assert losses == plainly(plain, 4)
    assert_same(model, plain)
    assert [decision.action for decision in controller.decisions][:2] == ["begin", "shrink"]


def test_a_budget_may_become_a_policy_and_back() -> None:
    model = odt.wrap(make_net(), budget="2GiB", **OPTIONS)
    plainly(model, 1)
    odt.set_budget(model, ShareOfAvailable(0.8, reserve="64MiB"))
    plainly(model, 1)
    assert session_of(model).controller is not None
    odt.set_budget(model, "2GiB")
    plainly(model, 1)
    assert session_of(model).controller is None


def test_a_given_plan_keeps_its_budget(tmp_path: Path) -> None:
    model = odt.wrap(make_net(), budget="2GiB", **OPTIONS)
    plainly(model, 2)
    odt.plan_of(model).save(path := tmp_path / "plan.json")
    with pytest.raises(ValueError, match="made for one budget"):
        odt.wrap(make_net(), plan=path, budget=ShareOfAvailable())
