"""`wrap` with the optimizer: other optimizers, hooks, loaded state, switching off, and bad input."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from wrapped_models import (
    Conv,
    TiedLanguageModel,
    images,
    loss_of,
    planned_step,
    rows,
    tokens,
    training,
    wrapped,
)
from wrapped_optimizers import OPTIMIZERS, Both, MakeOptimizer, Mlp, needs_memory, says

from torch_odt import OdtWarning
from torch_odt._extensions import memory_module
from torch_odt.execute.wrap import plan_of, session_of, set_budget, unwrap, wrap

# torch.compile itself warns of this and that.
pytestmark = [
    pytest.mark.filterwarnings("default", "error::torch_odt.errors.OdtWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize(
    ("make_optimizer", "text"),
    [
        (lambda parameters: torch.optim.RMSprop(parameters), "RMSprop makes its step as a whole"),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True), "foreach=True"),
    ],
)
def test_other_optimizers_make_their_own_step(make_optimizer: MakeOptimizer, text: str) -> None:
    both = Both(Mlp(), make_optimizer)
    both.train(rows(4))
    assert len(both.gradients()) == 6
    if memory_module is not None:
        assert says(both.notes, text)


@needs_memory
def test_an_optimizer_with_hooks_makes_its_own_step() -> None:
    both = Both(Mlp())
    both.train(rows(4))
    assert not both.gradients()
    seen = []
    for _, optimizer in both.sides:
        optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    for _ in range(2):
        both.train(rows(4))
        assert len(both.gradients()) == 6
    assert says(both.notes, "the optimizer has hooks") and len(seen) == 4


@needs_memory
def test_one_optimizer_of_two_wrapped_models() -> None:
    first, last = Mlp(), nn.Linear(5, 3)
    optimizer = OPTIMIZERS["sgd"]([*first.parameters(), *last.parameters()])
    plain = copy.deepcopy(nn.Sequential(first, last))
    ours = [*first.parameters(), *last.parameters()]
    plain_optimizer = OPTIMIZERS["sgd"](plain.parameters())
    for model in (first, last):
        wrap(model, budget=training("1GiB"), optimizer=optimizer)
    for _ in range(3):
        x = rows(4)
        last(first(x)).square().mean().backward()
        assert all(p.grad is None for p in ours)
        optimizer.step()
        plain_optimizer.zero_grad()
        plain(x).square().mean().backward()
        plain_optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, plain.parameters(), strict=True))


@needs_memory
def test_parameters_that_the_optimizer_does_not_hold() -> None:
    model = Mlp()
    plain = copy.deepcopy(model)
    optimizers = [OPTIMIZERS["adam"](m.layers[0].parameters()) for m in (model, plain)]
    wrap(model, budget=training("1GiB"), optimizer=optimizers[0])
    x = rows(4)
    for _ in range(2):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            m.zero_grad()
            loss_of(m(x)).backward()
            optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.grad is None) == name.startswith("layers.0")
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


@needs_memory
def test_loaded_state_and_changed_hyperparameters() -> None:
    both = Both(Mlp(), OPTIMIZERS["adam"])
    start = copy.deepcopy(both.model.state_dict())
    for index in range(4):
        both.train(rows(4))
        for model, optimizer in both.sides:
            if index == 0:
                model.load_state_dict(start)
            if index == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if index == 2:
                optimizer.param_groups[0]["weight_decay"] = 0.1
        assert not both.gradients()


@needs_memory
def test_evaluation_in_between_and_a_smaller_last_batch() -> None:
    both = Both(Conv())
    for _ in range(2):
        for count in (4, 4, 2):
            both.train(images(count))
            assert not both.gradients()
        x = images(4)
        outputs = []
        for model, _ in both.sides:
            model.eval()
            with torch.no_grad():
                outputs.append(model(x))
            model.train()
        assert torch.equal(*outputs)


@needs_memory
def test_tied_parameters_are_updated_once() -> None:
    both = Both(TiedLanguageModel(), OPTIMIZERS["adam"])
    for _ in range(3):
        both.train(tokens(4), lambda model, x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()))
        assert not both.gradients()


@needs_memory
def test_a_step_with_a_closure() -> None:
    both = Both(Mlp())
    x = rows(4)
    for _ in range(3):
        for model, optimizer in both.sides:

            def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> float:
                optimizer.zero_grad()
                loss = loss_of(model(x))
                loss.backward()
                return loss.item()

            optimizer.step(closure)  # type: ignore[arg-type]
        assert not both.gradients()
        both.assert_same()


def test_switched_off_by_name_and_undone() -> None:
    both = Both(Mlp(), disable_rewrites=["update_in_backward"])
    both.train(rows(4))
    assert len(both.gradients()) == 6 and not both.optimizer._optimizer_step_post_hooks
    both = Both(Mlp())
    assert both.optimizer._optimizer_step_post_hooks
    loss = loss_of(both.model(rows(4)))
    unwrap(both.model)
    assert not both.optimizer._optimizer_step_post_hooks
    loss.backward()
    assert len(both.gradients()) == 6, "nobody would notice the optimizer's step"


@needs_memory
def test_inside_a_small_budget() -> None:
    """Activations are computed again from parameters that have not been updated by then."""
    layers = [layer for _ in range(8) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    both = Both(model)
    unwrap(model)
    wrapped(model, planner="auto", optimizer=both.optimizer)
    for index in range(4):
        if index == 2:
            tight = planned_step(model).peak_bytes * 2 // 3
            set_budget(model, training(session_of(model).used_bytes() + tight))
        both.train(images(8, 64))
        assert not both.gradients()
    assert plan_of(model).recomputed and not says(both.notes, "departed")


@needs_memory
def test_a_model_without_a_graph_delivers_its_gradients() -> None:
    class Hidden(Mlp):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    both = Both(Hidden())
    with pytest.warns(OdtWarning, match="cannot be captured"):
        both.train(rows(4))
    both.train(rows(4))
    assert len(both.gradients()) == 6
    assert says(both.notes, "the optimizer makes its step after the backward pass: there is no graph")


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="holds no parameter of this model"):
        wrap(Mlp(), budget="1GiB", optimizer=OPTIMIZERS["sgd"](Mlp().parameters()))
    with pytest.raises(TypeError, match="the optimizer is a float"):
        wrap(Mlp(), budget="1GiB", optimizer=0.1)  # type: ignore[arg-type]
