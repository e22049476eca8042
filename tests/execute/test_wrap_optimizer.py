"""`wrap` with the optimizer: parameters are updated in the backward pass of an ordinary loop, or wait and say why."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from wrapped_models import (
    CASES,
    Conv,
    GraphBreak,
    assert_same,
    images,
    loss_of,
    rows,
    training,
)
from wrapped_optimizers import OPTIMIZERS, Both, Mlp, needs_memory, says, updates_in

from torch_odt import InfeasibleBudget, OdtWarning, memory
from torch_odt.execute.wrap import plan_of, session_of, set_budget, wrap

# torch.compile itself warns of this and that.
pytestmark = [
    pytest.mark.filterwarnings(
        "default", "error::torch_odt.errors.OdtWarning", "ignore:.*could not be updated in the backward pass"
    ),
    pytest.mark.usefixtures("fresh_dynamo"),
]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@needs_memory
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_is_torch_optims_with_a_scheduler(name: str) -> None:
    both = Both(Conv(), OPTIMIZERS[name])
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for _, optimizer in both.sides]
    for _ in range(3):
        both.train(images(4))
        assert not both.gradients(), "the first step updates them too"
        for scheduler in schedulers:
            scheduler.step()
    assert updates_in(both.model) == len(list(both.model.parameters()))
    assert says(both.notes, "(update_in_backward)") and not says(both.notes, "departed")


@needs_memory
@pytest.mark.parametrize("case", CASES)
def test_models_of_every_awkward_kind(case: str) -> None:
    make, batch = CASES[case]
    model = make()
    both = Both(model)
    tolerance = 1e-6 if case == "returns what it keeps" else 0.0
    for seed in range(3):
        x = batch(4)
        for m, optimizer in both.sides:
            torch.manual_seed(seed)
            optimizer.zero_grad()
            loss_of(m(x)).backward()
            optimizer.step()
        assert not both.gradients()
        both.plain.zero_grad()
        assert_same(both.model, both.plain, tolerance)


@needs_memory
def test_the_gradients_do_not_exist_at_once() -> None:
    peaks = {}
    for given in (False, True):
        torch._dynamo.reset()
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)), nn.Linear(256, 3))
        gradients = sum(p.nbytes for p in model.parameters())
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        wrap(model, budget=training("1GiB"), optimizer=optimizer if given else None)
        for _ in range(4):
            optimizer.zero_grad()
            memory.reset_peak()
            before = memory.stats().allocated_bytes or 0
            model(torch.randn(4, 256)).square().mean().backward()
            peaks[given] = (memory.stats().peak_bytes or 0) - before
            optimizer.step()
    assert peaks[False] > gradients > 2 * peaks[True]


@needs_memory
def test_a_budget_without_room_for_the_gradients_is_not_refused() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(40)), nn.Linear(256, 3))
    gradients = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrap(model, budget=training("1GiB"), optimizer=optimizer)

    def step() -> None:
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()

    step()
    set_budget(model, training(session_of(model).used_bytes() + gradients // 4))
    for _ in range(2):
        step()
    assert not says(plan_of(model).notes, "departed")


@needs_memory
def test_the_first_step_needs_no_room_for_the_gradients_either() -> None:
    smallest = {}
    for given in (False, True):
        torch._dynamo.reset()
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(30)), nn.Linear(512, 3))
        gradients = sum(p.nbytes for p in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrap(model, budget=training(4096), optimizer=optimizer if given else None)
        with pytest.raises(InfeasibleBudget) as refused:
            model(torch.randn(4, 512))
        smallest[given] = refused.value.smallest_feasible_bytes
        set_budget(model, training(smallest[given]))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 512)).square().mean().backward()
            optimizer.step()
    assert smallest[False] - smallest[True] > gradients // 2


@needs_memory
@pytest.mark.parametrize("is_first", [True, False])
def test_the_model_called_twice_before_one_backward_pass(is_first: bool) -> None:
    both = Both(Mlp())
    if not is_first:
        both.train(rows(4))
    for _ in range(3):
        both.train(rows(4), lambda model, x: (model(x) * model(x + 1)).sum())
        assert len(both.gradients()) == 6
    assert says(both.notes, "6 gradients are kept for the optimizer's step: a graph besides the model's")
    assert updates_in(both.model) == 0, "planned as it will be"


@needs_memory
def test_graphs_around_a_break_update_what_is_theirs_alone() -> None:
    both = Both(GraphBreak())
    for _ in range(3):
        both.train(images(4))
        assert not both.gradients()
    assert says(both.notes, "graph break") and updates_in(both.model) == len(list(both.model.parameters()))


class SharedAcrossABreak(nn.Module):
    """A weight in two graphs, in one of them only as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.last.weight.detach().norm()
        torch._dynamo.graph_break()
        return self.last(torch.tanh(self.first(x)))


@needs_memory
def test_a_parameter_in_two_graphs_waits() -> None:
    both = Both(SharedAcrossABreak())
    for _ in range(3):
        both.train(rows(4))
        assert both.gradients() == {"first.weight", "first.bias", "last.weight"}


@needs_memory
def test_a_loss_that_uses_a_parameter_itself() -> None:
    both = Both(Mlp())

    def with_penalty(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Mlp)
        return model(x).square().mean() + model.layers[0].weight.square().sum()

    def penalty_first(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Mlp)
        penalty = model.layers[0].weight.square().sum()
        return penalty + model(x).square().mean()

    both.train(rows(4))
    for loss_fn in (with_penalty, penalty_first):
        for _ in range(2):
            both.train(rows(4), loss_fn)
            assert both.gradients() == {"layers.0.weight"}
    assert says(both.notes, "1 gradients are kept for the optimizer's step: a graph besides the model's")
    assert updates_in(both.model) == 5, "planned as it will be"
    assert not says(both.notes, "departed")


@needs_memory
def test_a_gradient_that_is_delivered_is_not_copied() -> None:
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrap(model, budget=training("1GiB"), optimizer=optimizer)
    for is_alone in (True, True, False):
        optimizer.zero_grad()
        kept = None if is_alone else model(torch.randn(2, 512))
        loss = model(torch.randn(2, 512)).square().mean()
        before = memory.stats().allocated_bytes or 0
        memory.reset_peak()
        loss.backward()
        peak = (memory.stats().peak_bytes or 0) - before
        optimizer.step()
        del kept, loss
    assert model.weight.grad is not None and model.weight.nbytes <= peak < 1.5 * model.weight.nbytes


@needs_memory
def test_a_graph_of_an_earlier_step_that_is_still_alive() -> None:
    both = Both(Mlp())
    kept = []

    def keeping(model: nn.Module, x: Tensor) -> Tensor:
        kept.append(model(x).square().mean())
        return kept[-1]

    for _ in range(3):
        both.train(rows(4), keeping)
    assert both.gradients() and says(both.notes, "are kept for the optimizer's step")


@needs_memory
def test_retain_graph() -> None:
    both = Both(Mlp())
    both.train(rows(4))
    assert not both.gradients()
    x = rows(4)
    for model, optimizer in both.sides:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        told = "6 parameters could not be updated in the backward pass: the graph is retained.* beside what was planned"
        with pytest.warns(OdtWarning, match=told) if model is both.model else contextlib.nullcontext():
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    both.assert_same()
    assert len(both.gradients()) == 6 and says(both.notes, "the graph is retained")


@needs_memory
def test_gradients_that_are_asked_for_alone() -> None:
    both = Both(Mlp())
    both.train(rows(4))
    x = rows(4).requires_grad_()
    before = copy.deepcopy(both.model.state_dict())
    found = [torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()]) for model, _ in both.sides]
    assert all(torch.equal(ours, plain) for ours, plain in zip(*found, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in both.model.state_dict().items())
    for model, optimizer in both.sides:
        optimizer.zero_grad()
        loss_of(model(x)).backward(inputs=list(model.parameters())[:2])
        optimizer.step()
    both.assert_same()


@needs_memory
def test_accumulation_is_refused_before_anything_changes() -> None:
    both = Both(Mlp())
    both.train(rows(4))
    loss_of(both.model(rows(4))).backward()
    before = copy.deepcopy(both.model.state_dict())
    loss = loss_of(both.model(rows(4)))
    with pytest.raises(RuntimeError, match=r"drop optimizer= from wrap; otherwise call optimizer\.step\(\) after each"):
        loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in both.model.state_dict().items())
    assert not both.gradients()
    both.optimizer.step()
    loss_of(both.model(rows(4))).backward()


@needs_memory
def test_gradients_from_before_are_added_to() -> None:
    both = Both(Mlp())
    x = rows(4)
    for model, optimizer in both.sides:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        loss_of(model(x)).backward()
        optimizer.step()
    both.assert_same()
    assert says(both.notes, "there were gradients already")


@needs_memory
def test_a_parameter_with_a_hook_keeps_its_gradient() -> None:
    seen: list[Tensor] = []
    both = Both(Mlp())
    for _ in range(2):
        both.train(rows(4))
        if not seen:
            both.model.layers[0].weight.register_hook(seen.append)  # type: ignore[index, union-attr]
            # Between the two passes of a step, which was planned without it.
            x = rows(4)
            for model, optimizer in both.sides:
                optimizer.zero_grad()
                loss = loss_of(model(x))
                if model is both.model:
                    model.layers[2].bias.register_hook(seen.append)  # type: ignore[index, union-attr]
                loss.backward()
                optimizer.step()
            both.assert_same()
            assert both.gradients() == {"layers.0.weight", "layers.2.bias"}
    assert both.gradients() == {"layers.0.weight", "layers.2.bias"} and len(seen) == 4
