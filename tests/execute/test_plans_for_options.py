"""Plans that are made for a step with options, without running one: as the step itself makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_steps import PLENTY, Net, make_batches, sgd

import torch_odt as odt

BATCHES = make_batches(3)


def plan(model: Net, **options: Any) -> odt.Plan:
    optimizer = sgd(model.parameters())
    return odt.plan(model, F.cross_entropy, BATCHES[0], budget=PLENTY, optimizer=optimizer, **options)


def steps(model: Net, **options: Any) -> odt.TrainStep:
    return odt.TrainStep(model, F.cross_entropy, sgd(model.parameters()), **options)


@pytest.mark.parametrize("options", [{"accumulation_steps": 2}, {"clip_grad_norm": 1.0}, {}])
def test_such_a_plan_is_that_of_the_step_and_is_followed(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net()
    own = steps(model, budget=PLENTY, **options)
    own(*BATCHES[0])
    made = plan(model, **options)
    assert made.schedule == own.plan.schedule
    waits = [note for note in own.plan.notes if "the optimizer makes its step after" in note]
    assert bool(waits) == bool(options) and all(note in made.notes for note in waits)
    made.save(tmp_path / "plan.json")
    follower = steps(model, plan=tmp_path / "plan.json", budget=PLENTY, **options)
    before = model.head.weight.detach().clone()
    for batch in BATCHES:
        follower(*batch)
    assert not torch.equal(model.head.weight, before)


def test_gradients_of_several_calls_are_counted() -> None:
    def gradient_bytes(steps: int) -> int:
        made = plan(Net(), accumulation_steps=steps)
        return sum(line.nbytes for line in made.lines if line.label == "gradients")

    assert gradient_bytes(4) > gradient_bytes(1)
    with pytest.raises(ValueError, match="accumulation_steps must be at least 1, not 0"):
        plan(Net(), accumulation_steps=0)


def test_outputs_are_delivered_by_a_plan_that_was_made_for_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    expected = model(BATCHES[0][0]).detach()
    plan(model, with_outputs=True).save(tmp_path / "plan.json")
    _, outputs = steps(model, plan=tmp_path / "plan.json", budget=PLENTY).with_outputs(*BATCHES[0])
    torch.testing.assert_close(outputs, expected)
    plan(model).save(tmp_path / "plain.json")
    with pytest.raises(odt.PlanError, match="without the model's outputs"):
        steps(model, plan=tmp_path / "plain.json", budget=PLENTY).with_outputs(*BATCHES[0])
