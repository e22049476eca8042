"""A model that cannot be captured trains all the same: equality with plain PyTorch, whatever is checkpointed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from awkward import Clamp
from torch import nn
from torch.nn import functional as F

from torch_odt import memory
from torch_odt.errors import InfeasibleBudget
from torch_odt.execute import fallback
from torch_odt.execute.checkpointing import checkpointed
from torch_odt.execute.fallback import FallbackStep
from torch_odt.execute.module_costs import choose, measure, smallest

PLENTY = 1 << 40


@pytest.fixture(params=["nothing", "everything"])
def amount(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How much of the model is checkpointed, whatever the budget."""
    if request.param == "everything":
        monkeypatch.setattr(fallback, "choose", lambda costs, budget: smallest(costs))
        monkeypatch.setattr(FallbackStep, "_is_capped", lambda step: False)
    return str(request.param)


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(F.relu(self.norm(self.conv(x)), inplace=True))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(ConvBlock(8) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class DataDependent(ConvNet):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if x.sum().item() > 0 else block(block(x))
        return self.head(x.mean((2, 3)))


class Clamping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Clamp.apply(self.linear(x))


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Clamping() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.flatten(1)[:, :12].clone())


class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.block = ConvBlock(8)
        self.again = self.block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(F.gelu(self.block(self.stem(x)))).mean((2, 3))


class DictOutput(ConvNet):
    def forward(self, x: torch.Tensor) -> Any:
        logits = super().forward(x)
        return {"logits": logits, "parts": (logits.exp(), None)}


class StepCounter(nn.Module):
    """Its output depends on a buffer, on a replaced buffer and on a plain attribute, all of which forward changes."""

    counter: torch.Tensor
    replaced: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        self.register_buffer("replaced", torch.zeros(6))
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        self.steps += 1
        self.replaced = self.replaced + x.detach().mean(0)
        scale = self.counter * self.steps * random.random()
        return torch.tanh(self.linear(x) * scale + self.replaced)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            StepCounter(), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), StepCounter()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.flatten(1)[:, :6])


class InPlaceOnInput(nn.Module):
    """The second layer changes the first one's output, the last line an input of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.second = nn.Hardswish(inplace=True)
        self.third = nn.Sequential(nn.Tanh(), nn.Sigmoid())
        self.fourth = nn.Sequential(nn.Conv2d(3, 3, 1), nn.GELU(), nn.Conv2d(3, 3, 1))
        self.fifth = copy.deepcopy(self.fourth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x)) * 1.0
        z = self.third(y)
        y += z
        return self.fifth(self.fourth(y)).mean((2, 3))


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return output["logits"].square().mean() + output["parts"][0].mean()
    return output.square().sum()


def plain_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model(x))
    loss.backward()
    return loss.detach()


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (expected[name].grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=0, atol=0, msg=name)
    state = reference.state_dict()
    assert list(state) == list(model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0, msg=name)


MODELS = [ConvNet, DataDependent, CustomFunction, SharedModule, DictOutput, Stateful, InPlaceOnInput]


@pytest.mark.parametrize("make", MODELS)
def test_steps_equal_plain_pytorch(make: Callable[[], nn.Module], amount: str) -> None:
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    step = FallbackStep(model, lambda x: loss_of(model(x)), PLENTY, reason="a test")
    for seed in range(3):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        results = []
        for run in (partial(plain_step, reference, x), partial(step.run, (x,))):
            torch.manual_seed(seed)
            random.seed(seed)
            results.append((run(), torch.get_rng_state(), random.getstate()))
        (loss, rng, python_rng), (ours, our_rng, our_python_rng) = results
        assert torch.equal(loss, ours)
        assert torch.equal(rng, our_rng)
        assert python_rng == our_python_rng
        assert_same(model, reference)
    assert step.choice is not None
    assert bool(step.choice.names) == (amount == "everything")
    if isinstance(model, Stateful):
        assert model.layers[0].steps == reference.layers[0].steps == 3  # type: ignore[union-attr]


def test_frozen_parameters_and_evaluation_mode(amount: str) -> None:
    torch.manual_seed(0)
    model = ConvNet()
    model.stem.requires_grad_(False)
    model.blocks[1].eval()
    reference = copy.deepcopy(model)
    step = FallbackStep(model, lambda x: loss_of(model(x)), PLENTY)
    x = torch.randn(4, 3, 8, 8)
    for run in (lambda: plain_step(reference, x), lambda: step.run((x,))):
        torch.manual_seed(1)
        run()
    assert_same(model, reference)


def test_measuring_changes_nothing_and_finds_what_is_saved() -> None:
    torch.manual_seed(0)
    model = ConvNet()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 3, 8, 8)
    rng = torch.get_rng_state()
    costs = measure(model, lambda: loss_of(model(x)))
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    feature_bytes = 4 * 8 * 8 * 8 * 4
    block = costs.modules["blocks.0"]
    # The convolution's input and output, relu's output, dropout's mask, and BatchNorm's saved mean and invstd.
    assert block.saved_bytes == 4 * feature_bytes + 2 * 8 * 4
    assert block.input_bytes == feature_bytes
    assert block.forward_seconds > 0
    everything = smallest(costs)
    assert costs.estimate(everything) < costs.estimate([]) * 0.7
    assert choose(costs, costs.estimate([])) == []
    partial = choose(costs, (costs.estimate([]) + costs.estimate(everything)) // 2)
    assert 0 < costs.estimate(partial) <= (costs.estimate([]) + costs.estimate(everything)) // 2


def test_modules_whose_input_changes_in_place_are_not_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FallbackStep, "_is_capped", lambda step: False)
    model = InPlaceOnInput()
    costs = measure(model, lambda: loss_of(model(torch.randn(2, 3, 8, 8))))
    assert {"second", "third"} <= set(costs.unfit)
    step = FallbackStep(model, lambda x: loss_of(model(x)), PLENTY)
    step.run((torch.randn(2, 3, 8, 8),))
    assert step.choice is not None
    assert any("second" in note for note in step.choice.notes)


def test_checkpointing_leaves_the_module_tree_alone() -> None:
    model = ConvNet()
    keys, modules = list(model.state_dict()), list(model.named_modules())
    with checkpointed(model, ["stem", "blocks.2"]):
        assert list(model.state_dict()) == keys
        assert list(model.named_modules()) == modules
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("is_capped", [True, False])
def test_a_changed_batch_is_measured_anew(is_capped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_capped:
        monkeypatch.setattr(FallbackStep, "_is_capped", lambda step: False)
    model = ConvNet()
    step = FallbackStep(model, lambda x: loss_of(model(x)), PLENTY)
    step.run((torch.randn(8, 3, 8, 8),))
    large = step.predicted_bytes
    step.run((torch.randn(2, 3, 8, 8),))
    assert step.predicted_bytes is not None and large is not None
    assert step.predicted_bytes < large


class FailsInBackward(torch.autograd.Function):
    """Runs out of memory in its backward pass as long as `allowed` is not set."""

    allowed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if not FailsInBackward.allowed:
            raise torch.OutOfMemoryError("no more")
        return grad


def test_a_step_that_never_fits_is_refused_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = ConvNet()
    model.stem.register_forward_hook(lambda module, args, output: FailsInBackward.apply(output))
    x = torch.randn(4, 3, 8, 8)
    step = FallbackStep(model, lambda x: loss_of(model(x)), PLENTY, reason="a test")

    monkeypatch.setattr(FailsInBackward, "allowed", True)
    step.run((x,))
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    monkeypatch.setattr(FailsInBackward, "allowed", False)
    with pytest.raises(InfeasibleBudget) as refused:
        step.run((x,))
    assert refused.value.smallest_feasible_bytes > 0
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


def test_what_the_loss_learns_is_undone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed attempt may have differentiated the loss already."""
    model, loss_module = ConvNet(), nn.Linear(5, 5)
    state = nn.ModuleList([model, loss_module])
    x = torch.randn(4, 3, 8, 8)
    model.stem.register_forward_hook(lambda module, args, output: FailsInBackward.apply(output))
    step = FallbackStep(model, lambda x: loss_of(loss_module(model(x))), PLENTY, state=state)
    monkeypatch.setattr(FailsInBackward, "allowed", False)
    with pytest.raises(InfeasibleBudget):
        step.run((x,))
    assert all(p.grad is None for p in state.parameters())


def test_a_choice_that_does_not_fit_is_followed_by_a_more_frugal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = ConvNet()
    reference = copy.deepcopy(model)
    x = torch.randn(4, 3, 8, 8)
    step = FallbackStep(model, lambda x: loss_of(model(x)), PLENTY)
    attempts: list[int] = []
    attempt = step._attempt

    def refusing(choice: fallback.CheckpointChoice, *rest: Any) -> torch.Tensor:
        attempts.append(choice.predicted_bytes)
        if len(attempts) < 3:
            raise torch.OutOfMemoryError("no more")
        return attempt(choice, *rest)

    monkeypatch.setattr(step, "_attempt", refusing)
    for run in (lambda: plain_step(reference, x), lambda: step.run((x,))):
        torch.manual_seed(1)
        run()
    assert_same(model, reference)
    assert attempts == sorted(attempts, reverse=True)
    assert len(set(attempts)) == 3


@pytest.mark.skipif(not memory.install(), reason="the memory extension is missing")
def test_a_real_cap_is_obeyed_and_met_by_checkpointing() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 1)
            self.blocks = nn.Sequential(*(ConvBlock(8) for _ in range(8)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.stem(x)).mean((2, 3))

    torch.manual_seed(0)
    model = Deep()
    reference = copy.deepcopy(model)
    x = torch.randn(8, 3, 32, 32)
    generous = FallbackStep(model, lambda x: loss_of(model(x)), PLENTY)
    torch.manual_seed(1)
    loss = generous.run((x,))
    assert generous.counted_bytes is not None and generous.choice is not None
    assert generous.choice.names == []
    model.zero_grad()
    model.load_state_dict(reference.state_dict())

    half = generous.counted_bytes // 2
    step = FallbackStep(model, lambda x: loss_of(model(x)), half)
    torch.manual_seed(1)
    assert torch.equal(step.run((x,)), loss)
    assert step.counted_bytes is not None and step.counted_bytes <= half
    torch.manual_seed(1)
    plain_step(reference, x)
    assert_same(model, reference)

    step.set_budget(generous.counted_bytes // 20)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(InfeasibleBudget):
        step.run((x,))
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.skipif(not memory.install(), reason="the memory extension is missing")
def test_the_budget_that_a_refusal_names_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_MEASURING_BYTES", 1 << 16)
    torch.manual_seed(0)
    model = ConvNet()
    x = torch.randn(16, 3, 64, 64)
    with pytest.raises(InfeasibleBudget, match="keeps nothing") as refused:
        FallbackStep(model, lambda x: loss_of(model(x)), 1 << 17).run((x,))
    step = FallbackStep(model, lambda x: loss_of(model(x)), refused.value.smallest_feasible_bytes)
    step.run((x,))
    assert step.counted_bytes is not None and step.counted_bytes <= refused.value.smallest_feasible_bytes
