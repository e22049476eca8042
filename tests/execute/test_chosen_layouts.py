"""Steps whose layouts are chosen for the whole graph: what plain PyTorch computes, through both doors."""

from __future__ import annotations

import copy
import itertools
import math

import exactness
import pytest
import torch
import torchvision
from fresh_plans import FreshPlans
from models import CLASSES, Batch, ModelCase, case_named
from torch import Tensor, nn
from torch.nn import functional as F

import torch_odt as odt
from tests.capture.test_choose_layouts import EveryKind
from tests.execute.doors import open_door
from tests.execute.test_fused_steps import in_float64, train_in_little

PLENTY = odt.Budget("2GiB", of="training")
FLOAT64_ROUNDING = 1e-9


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 too, where rounding carries nothing over, and whatever the copies cost."""
    monkeypatch.setattr("torch_odt.capture.choose_layouts.convolves_by_onednn", lambda dtype: True)
    monkeypatch.setattr("torch_odt.capture.choose_layouts.MOST_COPIED", math.inf)


def make_batch(n: int, generator: torch.Generator) -> Batch:
    images = torch.randn(n, 3, 32, 32, generator=generator, dtype=torch.float64)
    return (images, torch.randint(5, (n,), generator=generator)), {}


def make_every_kind() -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(2), EveryKind()).double()


def make_squeezenet() -> nn.Module:
    return torchvision.models.squeezenet1_1(num_classes=CLASSES).double()


EVERY_KIND = ModelCase("every_kind", make_every_kind, make_batch, loss_fn=F.cross_entropy)
SQUEEZENET = ModelCase("squeezenet", make_squeezenet, make_batch, loss_fn=F.cross_entropy)


@pytest.mark.parametrize("door", ["step", "wrap"])
@pytest.mark.parametrize("case", [EVERY_KIND, SQUEEZENET], ids=lambda case: case.name)
def test_graphs_compute_what_plain_pytorch_does(case: ModelCase, door: str) -> None:
    check(case, door)


def check(case: ModelCase, door: str) -> None:
    plain = exactness.train_plainly(case, torch.float64)
    opened = open_door(door, case, PLENTY, cache=FreshPlans(), disable_rewrites=["update_in_backward"])
    outcome, plan = opened.train(PLENTY)
    assert any("(choose_layouts)" in note for note in plan.notes), plan.notes
    assert not plan.departures
    exactness.assert_as_exact(outcome, plain, plain, FLOAT64_ROUNDING)
    exactness.assert_same_random_state(outcome, plain)
    exactness.assert_identical(train_in_little(opened, plan.peak_bytes // 2), outcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, door",
    [
        ("resnet18", "step"),
        ("resnet18", "wrap"),
        ("googlenet-auxiliary", "step"),
        ("densenet121", "step"),
        ("shufflenet_v2_x0_5", "step"),
    ],
)
def test_large_models_compute_what_plain_pytorch_does(name: str, door: str) -> None:
    check(in_float64(case_named(name)), door)


def test_micro_batches_compute_it_too() -> None:
    plain = exactness.train_plainly(SQUEEZENET, torch.float64)
    outcome, plan = open_door("step", SQUEEZENET, PLENTY, micro_batch=1, disable_rewrites=["update_in_backward"]).train(
        PLENTY
    )
    assert plan.micro_batch == 1 and any("(choose_layouts)" in note for note in plan.notes)
    exactness.assert_as_exact(outcome, plain, plain, FLOAT64_ROUNDING)


class ReturnsImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [3, 16, 16, 16, 16, 1]
        self.layers = nn.ModuleList(nn.Conv2d(n, m, 3, padding=1) for n, m in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(F.relu(x))
        return x, x.sin().expand(-1, 3, -1, -1)


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_leaves_a_wrapped_model_has_its_strides() -> None:
    model = ReturnsImages().double()
    plain = copy.deepcopy(model)
    odt.wrap(model, budget=PLENTY)
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [side(given) for side, given in zip((model, plain), inputs, strict=True)]
    for first, second in outputs:
        (first.square().sum() + second.sin().sum()).backward()
    assert any("(choose_layouts)" in note for note in odt.plan_of(model).notes)
    ours, theirs = (
        [*output, given.grad, *(p.grad for p in side.parameters())]
        for output, given, side in zip(outputs, inputs, (model, plain), strict=True)
    )
    for tensor, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=FLOAT64_ROUNDING, atol=FLOAT64_ROUNDING)
        assert tensor.stride() == wanted.stride()


def test_images_that_a_step_returns_have_their_strides() -> None:
    model = nn.Sequential(*ReturnsImages().double().layers)
    plain = copy.deepcopy(model)
    step = odt.TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), budget=PLENTY)
    x, y = (torch.randn(3, n, 16, 16, dtype=torch.float64) for n in (3, 1))
    _, image = step.with_outputs(x, y)
    assert any("(choose_layouts)" in note for note in step.plan.notes)
    torch.testing.assert_close(image, plain(x), rtol=FLOAT64_ROUNDING, atol=FLOAT64_ROUNDING)
    assert image.stride() == plain(x).stride()
