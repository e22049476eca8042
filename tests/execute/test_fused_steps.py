"""Steps with fused operators: what plain PyTorch computes, and the same bits at every budget.

Where rounding carries an activation over a bound of its clamp, its gradient appears or vanishes: one of them moves the
gradients of a small batch by up to a few per cent, in plain float32 as in ours, each at random, and parameters that
start at 0 with them. So graphs are held to plain PyTorch closely in float64, where rounding carries nothing over. In
float32 whole steps are held to float64 roughly, and gradients closely in the best of several steps, which is one
without such an event.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import exactness
import pytest
import torch
import torchvision
from models import CLASSES, Batch, ModelCase, case_named
from torch import nn

import torch_odt as odt
from tests.capture.test_rewrite import execute
from tests.execute.doors import Door, open_door
from torch_odt.capture.rewrite import rewrite
from torch_odt.capture.trace import trace_step
from torch_odt.execute.loss import make_compute

GRADIENTS = ("first gradients", "last gradients", "parameters")
CARRIED_OVER = 0.2
FOLLOWING = 1e-4
PLENTY = odt.Budget("8GiB", of="training")
FLOAT64_ROUNDING = 1e-9
# MobileNetV2 with few channels: torch is slow at depthwise convolutions in float64.
NARROW_MOBILENET = replace(
    case_named("mobilenet_v2-channels_last"),
    name="narrow_mobilenet_v2-channels_last",
    make=lambda: torchvision.models.mobilenet_v2(num_classes=CLASSES, width_mult=0.25).to(
        memory_format=torch.channels_last
    ),
)
WITH_BATCH_NORM = [
    NARROW_MOBILENET,
    *map(
        case_named,
        [
            "resnet18",
            "resnet18-channels_last",
            "resnet50",
            "googlenet-auxiliary",
            "densenet121",
            "mobilenet_v3_small",
            "shufflenet_v2_x0_5",
            "vgg11_bn",
        ],
    ),
]
# Both doors make the same rewrites: of the other one, a network of each kind of block.
WRAPPED = ("narrow_mobilenet_v2-channels_last", "resnet18-channels_last", "shufflenet_v2_x0_5")
THROUGH_DOORS = [
    pytest.param(case, door, id=f"{case.name}-{door}")
    for case in WITH_BATCH_NORM
    for door in ("step", "wrap")
    if door == "step" or case.name in WRAPPED
]
NAMES = ["mobilenet_v2", "mobilenet_v2-channels_last", "resnet18", "resnet18-channels_last"]


def assert_near(
    outcome: exactness.Outcome, plain: exactness.Outcome, exact: exactness.Outcome, rounding: float
) -> None:
    """The first loss closely, gradients and what they make of parameters roughly.

    Later losses, and buffers, follow parameters that gradients have moved.
    """
    first = (exactness.Outcome({"losses": {"0": of.tensors["losses"]["0"]}}) for of in (outcome, plain, exact))
    exactness.assert_as_exact(*first, rounding)

    def parts(of: exactness.Outcome, gradients: bool) -> exactness.Outcome:
        return exactness.Outcome(
            {name: group for name, group in of.tensors.items() if (name in GRADIENTS) == gradients}
        )

    exactness.assert_as_exact(*(parts(of, False) for of in (outcome, plain, exact)), max(rounding, FOLLOWING))
    exactness.assert_as_exact(*(parts(of, True) for of in (outcome, plain, exact)), CARRIED_OVER)


def train(case: ModelCase, budget: odt.Budget, autocast: bool = False) -> tuple[exactness.Outcome, odt.Plan]:
    model = case.model()
    torch.manual_seed(exactness.SEED)
    optimizer = exactness.make_optimizer(model.parameters())
    # Convolutions in another layout round otherwise, and carry other activations over a bound than plain's.
    disabled = ["choose_layouts", "update_in_backward"]
    step = odt.TrainStep(model, case.loss_fn, optimizer, budget=budget, disable_rewrites=disabled)

    def call(batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return step(*batch[0], **batch[1])

    outcome = exactness.train(model, case.batches(exactness.STEPS), call)
    return outcome, step.plan


def in_float64(case: ModelCase) -> ModelCase:
    def batch(n: int, generator: torch.Generator) -> Batch:
        return exactness.to_dtype(case.batch(n, generator), torch.float64)

    return replace(case, make=lambda: case.make().double(), batch=batch)


@pytest.mark.slow
@pytest.mark.parametrize("case, door", THROUGH_DOORS)
def test_graphs_compute_in_float64_what_plain_pytorch_does(case: ModelCase, door: str) -> None:
    case = in_float64(case)
    plain = exactness.train_plainly(case, torch.float64)
    opened = open_door(door, case, PLENTY, disable_rewrites=["update_in_backward"])
    outcome, plan = opened.train(PLENTY)
    assert any("fused" in note for note in plan.notes), plan.notes
    exactness.assert_as_exact(outcome, plain, plain, FLOAT64_ROUNDING)
    assert not plan.departures
    exactness.assert_identical(train_in_little(opened, plan.peak_bytes // 2), outcome)


def train_in_little(opened: Door, budget_bytes: int) -> exactness.Outcome:
    """Trains at a budget, or at the one that its refusal names."""
    try:
        return opened.train(odt.Budget(budget_bytes, of="training"))[0]
    except odt.InfeasibleBudget as refusal:
        smallest = refusal.smallest_feasible_bytes
    # Outside the handler: the traceback holds tensors of the refused attempt.
    return opened.train(odt.Budget(smallest, of="training"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_with_plenty_and_with_the_least(name: str) -> None:
    case = case_named(name)
    plain, exact = exactness.train_plainly(case), exactness.train_plainly(case, torch.float64)
    outcome, plan = train(case, PLENTY)
    assert any("fused" in note for note in plan.notes), plan.notes
    assert_near(outcome, plain, exact, exactness.ROUNDING)
    exactness.assert_same_random_state(outcome, plain)

    with pytest.raises(odt.InfeasibleBudget) as refusal:
        train(case, odt.Budget("4KiB", of="training"))
    smallest = refusal.value.smallest_feasible_bytes
    tight, _ = train(case, odt.Budget(smallest, of="training"))
    exactness.assert_identical(tight, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenet_v2-channels_last", "resnet18"])
def test_under_bfloat16_autocast(name: str) -> None:
    case = case_named(name)
    plain, exact = exactness.train_plainly(case, autocast=True), exactness.train_plainly(case, torch.float64)
    outcome, plan = train(case, PLENTY, autocast=True)
    assert any("fused" in note for note in plan.notes), plan.notes
    assert_near(outcome, plain, exact, exactness.BFLOAT16_ROUNDING)


def gradients_of(model: nn.Module, case: ModelCase, batch: Batch) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    case.loss(model, batch).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def distance(gradients: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    return max(float((gradients[name] - wanted).norm() / wanted.norm()) for name, wanted in exact.items())


@pytest.mark.slow
def test_the_best_of_several_steps_is_as_near_as_plain_float32() -> None:
    case = case_named("resnet18-channels_last")
    distances = []
    for seed in range(4):
        model, (batch,) = case.model(seed), case.batches(1, seed)
        exact = gradients_of(copy.deepcopy(model).double(), case, exactness.to_dtype(batch, torch.float64))
        traced = trace_step(model, case.loss_fn, make_compute(case.loss_fn), batch).graph
        found = execute(rewrite(traced, drop=("result",)), model, batch[0])
        ours = {str(name): tensor for (kind, name), tensor in found.items() if kind == "gradient"}
        distances.append((distance(ours, exact), distance(gradients_of(model, case, batch), exact)))
    best, best_of_plain = (min(column) for column in zip(*distances, strict=True))
    assert best <= 2 * best_of_plain + exactness.ROUNDING
