"""`wrap` with a plan that was made before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_steps import PLENTY, Net, make_batches
from torch import Tensor, nn

import torch_odt as odt
from torch_odt._extensions import memory_module

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(memory_module is None, reason="without the compiled allocator there are no addresses"),
]


def train(model: nn.Module | None = None, size: int = 4, **options: Any) -> tuple[nn.Module, list[Tensor]]:
    """A wrapped model after three steps; losses and parameters."""
    torch.manual_seed(5)
    model = model or Net(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if options.pop("with_optimizer", False):
        options["optimizer"] = optimizer
    odt.wrap(model, **options)
    losses = []
    for x, y in make_batches(3, size):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, [*losses, *(t.detach().clone() for t in model.state_dict().values())]


@pytest.mark.parametrize("options", [{}, {"with_optimizer": True}, {"planner": "keep-all"}])
def test_a_loop_follows_the_plan_of_an_earlier_one(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wanted = train(budget=PLENTY, **options)
    made = odt.plan_of(model)
    made.save(tmp_path / "plan.json")
    torch._dynamo.reset()
    # Nothing is measured any more.
    monkeypatch.setattr("torch_odt.execute.wrap_schedules.profile", None)
    both = {"with_optimizer": options.get("with_optimizer", False)}
    model, found = train(plan=tmp_path / "plan.json", **both)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    followed = odt.plan_of(model)
    assert followed.schedule == made.schedule and followed.layout == made.layout
    assert followed.budget is not None and followed.budget.growth_bytes == PLENTY.resolve(0).growth_bytes


def test_another_graph_is_refused_by_name(tmp_path: Path) -> None:
    made, _ = train(budget=PLENTY)
    odt.plan_of(made).save(tmp_path / "plan.json")
    with pytest.raises(odt.PlanError, match="another graph"):
        train(Net(), plan=tmp_path / "plan.json")
    with pytest.raises(odt.PlanError, match="other arguments, shapes or strides"):
        train(size=5, plan=tmp_path / "plan.json")
    with pytest.raises(odt.PlanError, match=r"0 calls of .*odt.update"):
        train(plan=tmp_path / "plan.json", with_optimizer=True)


def test_a_budget_that_is_too_small_names_both_numbers(tmp_path: Path) -> None:
    made, _ = train(budget=PLENTY)
    odt.plan_of(made).save(tmp_path / "plan.json")
    with pytest.raises(odt.InfeasibleBudget, match=r"1000 B.*smallest feasible one is"):
        train(plan=tmp_path / "plan.json", budget=odt.Budget(1000, of="training"))


def test_plans_of_the_two_doors_are_told_apart(tmp_path: Path) -> None:
    made, _ = train(budget=PLENTY)
    odt.plan_of(made).save(tmp_path / "wrap.json")
    model = Net(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(odt.PlanError, match="one of wrap"):
        odt.TrainStep(model, nn.functional.cross_entropy, optimizer, plan=tmp_path / "wrap.json")
    plan = odt.plan(model, nn.functional.cross_entropy, make_batches(1)[0], budget=PLENTY)
    with pytest.raises(odt.PlanError, match="not one of a wrapped model"):
        odt.wrap(model, plan=plan)


def test_what_the_plan_decides_cannot_be_given_beside_it(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="budget="):
        odt.wrap(Net())
    with pytest.raises(ValueError, match="those of the plan"):
        odt.wrap(Net(), plan=tmp_path / "plan.json", planner="chen")
