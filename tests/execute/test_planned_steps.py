"""Steps from plan files: the same training as without, here and in another process."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planned_steps import STEPS, Case, assert_equal_bits, saved_plan
from small_steps import PLENTY, Net, make_batches
from torch import nn

import torch_odt as odt
from torch_odt._extensions import memory_module
from torch_odt.planning.plan_file import read_plan_file

MIB = 2**20


class Images(nn.Module):
    """Convolutions and BatchNorm, over the small steps' six features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 1))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.view(-1, 1, 2, 3)).mean((2, 3)))


class Sequences(nn.Module):
    """A recurrent layer and attention, over the same features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.LSTM(2, 4, batch_first=True), nn.LayerNorm(4), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.layer(x.view(-1, 3, 2))
        split = self.norm(states).view(-1, 3, 2, 2).transpose(1, 2)
        return self.head(F.scaled_dot_product_attention(split, split, split).transpose(1, 2).flatten(1))


class Pooled(nn.Module):
    """Pooling, a norm in evaluation mode and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm, self.head = (
            nn.Embedding(5, 6, scale_grad_by_freq=True),
            nn.BatchNorm2d(1),
            nn.Linear(3, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x + self.rows(torch.arange(x.shape[0]) % 5)
        return self.head(F.max_pool2d(self.norm(rows.view(-1, 1, 2, 3)), (2, 1)).flatten(1))


class Weighed(nn.Module):
    """A loss that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs * self.weight, target)


CASES = {
    "momentum": Case(make_optimizer=functools.partial(torch.optim.SGD, momentum=0.9)),
    "adamw in the backward pass": Case(make_optimizer=torch.optim.AdamW),
    "another optimizer": Case(make_optimizer=torch.optim.RMSprop),
    "batch norm": Case(functools.partial(Net, norm=True)),
    "images": Case(Images),
    "sequences": Case(Sequences),
    "pooled": Case(Pooled, options={"disable_rewrites": ["narrow_pool_indices"]}),
    "keep-all": Case(Images, options={"planner": "keep-all"}),
    "dropout": Case(functools.partial(Net, dropout=0.4)),
    "micro-batches": Case(functools.partial(Net, dropout=0.4), options={"micro_batch": 2}),
    "uneven micro-batches": Case(options={"micro_batch": 4}),
    "accumulation": Case(both={"accumulation_steps": 2}),
    "clipping": Case(both={"clip_grad_norm": 0.1}),
    "no rewrites": Case(options={"disable_rewrites": ["update_in_backward", "mark_shape_reads"]}),
}


@pytest.mark.parametrize("carry_graph", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_step_from_a_file_trains_as_the_one_that_was_saved(name: str, carry_graph: bool, tmp_path: Path) -> None:
    case = CASES[name]
    made, wanted = case.plan()
    path = tmp_path / "plan.json"
    made.plan.save(path, carry_graph=carry_graph)
    followed, found = case.train(plan=path, cache=False)
    assert_equal_bits(found, wanted)
    assert followed.plan.micro_batch == made.plan.micro_batch
    assert followed.plan.schedule == made.plan.schedule
    assert not any("departed" in note for note in followed.plan.notes)


def test_a_plan_that_was_made_without_running_a_step(tmp_path: Path) -> None:
    case = CASES["momentum"]
    model = case.make_model()
    optimizer = case.make_optimizer(model.parameters(), lr=0.05)
    plan = odt.plan(
        model, F.cross_entropy, make_batches(1, case.size)[0], budget=PLENTY, optimizer=optimizer, cache=False
    )
    plan.save(tmp_path / "plan.json")
    wanted = case.plan()[1]
    for given in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json"), odt.load_plan(tmp_path / "plan.json")):
        assert_equal_bits(case.train(plan=given)[1], wanted)


def test_a_followed_plan_can_be_saved_again(tmp_path: Path) -> None:
    case = CASES["micro-batches"]
    first = saved_plan(tmp_path / "first.json", case)
    case.train(plan=first)[0].plan.save(tmp_path / "second.json")
    programs = [read_plan_file(path)["program"] for path in (first, tmp_path / "second.json")]
    assert programs[0] == programs[1]


def test_batches_by_keyword_and_outputs(tmp_path: Path) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, *, x: torch.Tensor, y: torch.Tensor, scale: float) -> dict[str, Any]:
            outputs = self.net(x) * scale
            return {"loss": F.cross_entropy(outputs, y), "logits": (outputs, "a word")}

    def train(**options: Any) -> tuple[odt.TrainStep, list[Any]]:
        torch.manual_seed(5)
        model = WithLoss()
        step = odt.TrainStep(model, None, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        return step, [step.with_outputs(x=x, y=y, scale=2.0) for x, y in make_batches(STEPS)]

    made, wanted = train(budget=PLENTY, cache=False)
    made.plan.save(tmp_path / "plan.json")
    step, found = train(plan=tmp_path / "plan.json")
    for (loss, outputs), (wanted_loss, wanted_outputs) in zip(found, wanted, strict=True):
        assert torch.equal(loss, wanted_loss) and torch.equal(outputs["logits"][0], wanted_outputs["logits"][0])
        assert outputs["logits"][1] == "a word"
    x, y = make_batches(1)[0]
    assert torch.isfinite(step(x=x, y=y, scale=2.0))


def test_a_loss_with_parameters_of_its_own(tmp_path: Path) -> None:
    def train(**options: Any) -> tuple[odt.TrainStep, list[torch.Tensor]]:
        torch.manual_seed(5)
        model, loss = Net(), Weighed()
        step = odt.TrainStep(model, loss, torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1), **options)
        return step, [*[step(*batch) for batch in make_batches(STEPS)], loss.weight.detach()]

    made, wanted = train(budget=PLENTY, cache=False)
    made.plan.save(tmp_path / "plan.json")
    assert_equal_bits(train(plan=tmp_path / "plan.json")[1], wanted)


ELSEWHERE = """
import json, sys
import torch
before = set(sys.modules)
import torch_odt as odt
from torch import nn

class Parts(nn.Module):  # parameters under their names, and no code
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

class Descent(torch.optim.Optimizer):  # torch.optim's own import torch._dynamo as soon as they are made
    add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__
    zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-self.defaults["lr"])

torch.manual_seed(5)
model = Parts()
generator = torch.Generator().manual_seed(3)
step = odt.TrainStep(model, None, Descent(model.parameters(), {"lr": 0.05}), plan=sys.argv[1])
losses = []
for _ in range(3):
    x, y = torch.randn(6, 6, generator=generator), torch.randint(3, (6,), generator=generator)
    losses.append(step(x, y).item())
tracing = [n for n in set(sys.modules) - before if n.startswith(("torch._dynamo", "torch._functorch", "torch.fx"))]
print(json.dumps({"losses": losses, "tracing": sorted(tracing)}))
"""


def test_another_process_needs_neither_the_code_nor_a_tracer(tmp_path: Path) -> None:
    step, wanted = Case(options={"disable_rewrites": ["update_in_backward"]}).plan()
    step.plan.save(tmp_path / "plan.json")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-W", "error", "-c", ELSEWHERE, str(tmp_path / "plan.json")]
    outcome = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert found["tracing"] == []
    assert found["losses"] == [loss.item() for loss in wanted[:STEPS]]


def test_the_budget_of_the_plan_is_the_default(tmp_path: Path) -> None:
    path = saved_plan(tmp_path / "plan.json")
    step, _ = Case().train(plan=path)
    assert step.budget.resolve(10).growth_bytes == PLENTY.resolve(10).growth_bytes
    assert step.plan.budget is not None and step.plan.budget.of == "training"


def test_another_budget_may_be_given_and_must_be_large_enough(tmp_path: Path) -> None:
    path = saved_plan(tmp_path / "plan.json")
    given = odt.Budget("1GiB", of="training")
    step, found = Case().train(plan=path, budget=given)
    assert step.budget == given
    assert_equal_bits(found, Case().plan()[1])
    with pytest.raises(odt.InfeasibleBudget, match="1000 B") as refused:
        Case().train(plan=path, budget=odt.Budget(1000, of="training"))
    named = refused.value.smallest_feasible_bytes
    assert named < 64 * MIB
    Case().train(plan=path, budget=odt.Budget(named, of="training"))


@pytest.mark.skipif(memory_module is None, reason="without the compiled allocator there is no arena")
def test_another_budget_between_steps_follows_the_same_plan(tmp_path: Path) -> None:
    step, _ = Case().train(plan=saved_plan(tmp_path / "plan.json"))
    step.budget = odt.Budget("1GiB", of="training")
    assert torch.isfinite(step(*make_batches(1, 6)[0]))
    step.budget = odt.Budget(1000, of="training")
    with pytest.raises(odt.InfeasibleBudget):
        step(*make_batches(1, 6)[0])


@pytest.mark.parametrize(
    "options", [{"planner": "chen"}, {"micro_batch": 2}, {"disable_rewrites": ["fuse_batch_norm"]}]
)
def test_what_the_plan_decides_cannot_be_given_beside_it(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="those of the plan"):
        Case().train(plan=saved_plan(tmp_path / "plan.json"), **options)


def test_a_step_takes_a_budget_or_a_plan() -> None:
    with pytest.raises(TypeError, match="budget="):
        Case().train()
    with pytest.raises(TypeError, match="int"):
        Case().train(plan=3)


def test_a_step_without_a_graph_cannot_be_followed(tmp_path: Path) -> None:
    class Branches(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 1e9 else super().forward(-x)

    with pytest.warns(odt.OdtWarning, match="checkpointed"):
        made, _ = Case(Branches).plan()
    made.plan.save(tmp_path / "plan.json")
    with pytest.raises(odt.PlanError, match="no graph"):
        Case(Branches).train(plan=tmp_path / "plan.json")
