"""Distillation as a loss: its formula, and steps that equal plain PyTorch's through both doors."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapted_steps import assert_trained_alike, train_both
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.adapt import DistillationLoss, WithHints, distillation_loss

SHAPES = {"late": (12, 4, 4), "early": (16, 8, 8)}
LAYERS = {"early": "1", "late": "3"}
BUDGET = odt.Budget("1GiB", of="training")


@given(
    temperature=st.floats(0.5, 20), soft_weight=st.floats(0, 1), samples=st.integers(1, 6), classes=st.integers(2, 7)
)
def test_the_loss_is_hintons(temperature: float, soft_weight: float, samples: int, classes: int) -> None:
    logits, theirs = torch.randn(samples, classes, dtype=torch.float64), torch.randn(samples, classes).double()
    labels = torch.randint(classes, (samples,))
    ours_soft, theirs_soft = (torch.softmax(each / temperature, 1) for each in (logits, theirs))
    divergence = (theirs_soft * (theirs_soft.log() - ours_soft.log())).sum(1).mean()
    right = -torch.softmax(logits, 1)[range(samples), labels].log().mean()
    expected = soft_weight * temperature**2 * divergence + (1 - soft_weight) * right
    found = distillation_loss(logits, labels, theirs, temperature=temperature, soft_weight=soft_weight)
    torch.testing.assert_close(found, expected)


def test_gradients_keep_their_size_at_high_temperatures() -> None:
    """Section 2.1 of the paper: with T^2, they tend to (z - v) / classes for logits of mean zero."""
    logits = torch.randn(1, 5, dtype=torch.float64).requires_grad_()
    theirs = torch.randn(1, 5, dtype=torch.float64)
    distillation_loss(logits, torch.tensor([0]), theirs, temperature=1e4, soft_weight=1.0).backward()
    zero_mean = [each - each.mean() for each in (logits.detach(), theirs)]
    torch.testing.assert_close(logits.grad, (zero_mean[0] - zero_mean[1]) / 5, rtol=1e-3, atol=1e-4)


def test_a_sample_without_a_label_learns_from_the_mentor_alone() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    theirs = torch.randn(2, 3)
    distillation_loss(logits, torch.tensor([-100, 1]), theirs, soft_weight=0.0).backward()
    assert logits.grad is not None
    assert not logits.grad[0].any() and logits.grad[1].any()
    distillation_loss(logits, torch.tensor([-100, -100]), theirs, soft_weight=0.5).backward()
    assert logits.grad[0].any()


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("hinted", [False, True])
def test_a_captured_step_is_plain_pytorchs(micro_batch: int | None, hinted: bool) -> None:
    mentee = _hinted() if hinted else _mentee()
    batches = [_batch(hinted, seed) for seed in range(3)]
    both = train_both(mentee, batches, DistillationLoss(hint_weight=0.1), micro_batch=micro_batch)
    assert_trained_alike(both, rtol=1e-4)
    step = odt.TrainStep(mentee, DistillationLoss(), _sgd(mentee), budget=BUDGET, micro_batch=micro_batch)
    step(*batches[0])
    assert step.plan.captured
    assert step.plan.micro_batch == micro_batch


def test_wrap_captures_it_as_one_graph() -> None:
    model, loss_fn, (x, target) = _hinted(), DistillationLoss(), _batch(True)
    plain = copy.deepcopy(model)
    wrapped = odt.wrap(model, budget=BUDGET)
    for each in (wrapped, plain):
        for _ in range(2):
            loss_fn(each(x), target).backward()
    plan = odt.plan_of(wrapped)
    assert plan.captured
    assert not [note for note in plan.notes if "graph" in note]
    for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    odt.unwrap(model)


def test_another_temperature_is_another_step(tmp_path: Path) -> None:
    x, target = _batch(False)
    for temperature in (1.0, 8.0):
        mentee, loss_fn = _mentee(), DistillationLoss(temperature=temperature)
        expected = loss_fn(mentee(x), target)
        step = odt.TrainStep(mentee, loss_fn, _sgd(mentee), budget=BUDGET, cache=tmp_path)
        torch.testing.assert_close(step(x, target), expected.detach())
        loss_fn.soft_weight = 0.1
        expected = loss_fn(mentee(x), target)
        torch.testing.assert_close(step(x, target), expected.detach())


def test_hints_are_the_layers_outputs_in_the_mentors_order() -> None:
    hinted, plain, x = _hinted(), _mentee(), _batch(True)[0]
    assert [tuple(each.shape[1:]) for each in hinted(x)] == [(5,), *SHAPES.values()]
    logits, late, early = hinted(x)
    assert torch.equal(logits, plain(x))
    assert torch.equal(late, hinted.regressors[0](plain[:4](x)))
    assert torch.equal(early, hinted.regressors[1](plain[:2](x)))
    assert list(hinted.model.state_dict()) == list(plain.state_dict())


def test_copies_are_apart_and_unload_makes_it_plain() -> None:
    hinted, x = _hinted(), _batch(True)[0]
    for copied in (copy.deepcopy(hinted), pickle.loads(pickle.dumps(hinted))):
        with torch.no_grad():
            copied.model[0].weight.zero_()
        assert not torch.equal(copied(x)[2], hinted(x)[2])
    model = hinted.unload()
    assert hinted.unload() is model
    assert torch.equal(model(x), _mentee()(x))
    assert not any("forward" in vars(module) for module in model.modules())


def test_nothing_of_a_pass_is_kept() -> None:
    hinted, x = _hinted(), _batch(True)[0]
    hinted.model(x)
    hinted(x)
    held = [value for tap in hinted._taps for value in vars(tap).values() if isinstance(value, Tensor)]
    assert not held


@pytest.mark.parametrize(
    ("layer", "ours", "theirs"),
    [
        (nn.Linear(6, 4), (6,), (9,)),
        (nn.Linear(6, 4), (7, 6), (7, 9)),
        (nn.Conv2d(6, 4, 1), (6, 8, 8), (9, 4, 4)),
        (nn.Conv2d(6, 4, 1), (6, 4, 4), (9, 7, 7)),
        (nn.Conv2d(6, 4, 1), (6, 8, 4), (9, 8, 4)),
    ],
)
def test_regressors_fit_shapes(layer: nn.Module, ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    hinted = WithHints(nn.Sequential(layer, nn.Identity()), {"m": "0"}, {"m": theirs}, torch.ones(2, *ours))
    _, hint = hinted(torch.randn(3, *ours))
    assert tuple(hint.shape) == (3, *theirs)
    weights = [module for module in hinted.regressors.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    assert len(weights) == 1


def test_an_output_that_has_logits_is_taken() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(logits=self.head(self.body(x)))

    model, x, target = Named(), torch.ones(2, 4), (torch.tensor([0, 1]), torch.randn(2, 3))
    expected = distillation_loss(model(x).logits, *target)
    assert torch.equal(DistillationLoss()(model(x), target), expected)
    hinted = WithHints(model, {"m": "body"}, {"m": (8,)}, x)
    assert DistillationLoss(hint_weight=0.0)(hinted(x), (*target, torch.zeros(2, 8))) == expected


def test_what_does_not_fit_is_named() -> None:
    mentee, x = _mentee(), torch.randn(2, 3, 8, 8)
    for layers, shapes, said in (
        ({"late": "3"}, SHAPES, "stored layers are 'late', 'early'; layers= names 'late'"),
        ({}, {}, "stored layers are none"),
        ({"late": "layer7", "early": "1"}, SHAPES, "no layer 'layer7'"),
        ({"late": "1", "early": "1"}, SHAPES, "follows one of the mentor's"),
        ({"late": "6"}, {"late": (3, 4, 4)}, r"'6' to follow 'late' would have to turn \(5,\) into \(3, 4, 4\)"),
    ):
        with pytest.raises(ValueError, match=said):
            WithHints(mentee, layers, shapes, x)
        assert not any("forward" in vars(module) for module in mentee.modules())
    hinted = _hinted()
    with pytest.raises(ValueError, match="replaced the forward of '3' already"):
        WithHints(hinted.model, LAYERS, SHAPES, x)
    labels, logits = torch.tensor([0, 1]), torch.randn(2, 5)
    for outputs, target, said in (
        (logits, labels, "the target is"),
        (logits, (labels, torch.randn(2, 6)), "same classes"),
        (logits, (labels, logits, logits), "gives 0 hints and the target holds 1"),
        ((logits, logits), (labels, logits, torch.randn(2, 6)), r"a hint is \(2, 5\)"),
    ):
        with pytest.raises(ValueError, match=said):
            DistillationLoss()(outputs, target)
    for options in ({"temperature": 0.0}, {"soft_weight": 1.5}, {"hint_weight": -1.0}, {"temperature": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(options))):
            DistillationLoss(**options)


def _mentee() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
        )


def _hinted() -> WithHints:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return WithHints(_mentee(), LAYERS, SHAPES, torch.ones(1, 3, 8, 8))


def _batch(hinted: bool, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    x, logits = torch.randn(6, 3, 8, 8, generator=draw), torch.randn(6, 5, generator=draw).half()
    hints = [torch.randn(6, *shape, generator=draw).half() for shape in SHAPES.values()] if hinted else []
    return x, [torch.randint(5, (6,), generator=draw), logits, *hints]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)
