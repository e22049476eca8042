"""What an optimizer will hold is predicted from small parameters; here it is compared with the real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_odt as odt
from torch_odt.execute.optimizer_cost import optimizer_cost

MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}
# Step counters, one for each parameter.
SCALAR_BYTES = 600


def make_parameters() -> list[nn.Parameter]:
    shapes = [(300, 200), (200,), (64, 32, 3, 3), (64,), (1000, 50), (7,)]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def set_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("name", MAKERS)
def test_predicted_state_is_the_real_state(name: str) -> None:
    parameters = make_parameters()
    optimizer = MAKERS[name](parameters)
    before = [p.detach().clone() for p in parameters]
    # Adagrad makes its state at once.
    existing = state_bytes(optimizer)
    cost = optimizer_cost(optimizer)
    assert state_bytes(optimizer) == existing and all(p.grad is None for p in parameters)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    set_gradients(parameters)
    optimizer.step()
    # Factored second moments are vectors: their share of a matrix depends on its size.
    tolerance = 0.02 * sum(p.nbytes for p in parameters) if name == "adafactor" else SCALAR_BYTES
    assert abs(cost.state_bytes - state_bytes(optimizer)) <= tolerance
    assert cost.missing_state_bytes == max(0, cost.state_bytes - existing)
    assert optimizer_cost(optimizer).missing_state_bytes <= tolerance


@pytest.mark.parametrize("name", MAKERS)
def test_predicted_workspace_is_not_below_the_measured_one(name: str) -> None:
    odt.memory.install()
    if not odt.memory.is_tracking():
        pytest.skip("nothing counts allocations without the extension")
    parameters = make_parameters()
    optimizer = MAKERS[name](parameters)
    cost = optimizer_cost(optimizer)
    set_gradients(parameters)
    optimizer.step()
    before = odt.memory.stats().allocated_bytes
    odt.memory.reset_peak()
    optimizer.step()
    measured = odt.memory.stats().peak_bytes - before
    assert cost.workspace_bytes >= 0.98 * measured - 4096
    assert cost.workspace_bytes <= 3 * measured + 16384


def test_frozen_parameters_cost_nothing() -> None:
    parameters = make_parameters()
    parameters[0].requires_grad_(False)
    cost = optimizer_cost(torch.optim.Adam(parameters))
    assert abs(cost.state_bytes - 2 * sum(p.nbytes for p in parameters[1:])) <= SCALAR_BYTES


def test_groups_have_options_of_their_own() -> None:
    parameters = make_parameters()
    groups = [{"params": parameters[:1], "momentum": 0.9}, {"params": parameters[1:]}]
    cost = optimizer_cost(torch.optim.SGD(groups, lr=0.1))
    assert abs(cost.state_bytes - parameters[0].nbytes) <= SCALAR_BYTES


def test_hooks_are_not_called_and_make_the_state_uncertain() -> None:
    optimizer = torch.optim.Adam(make_parameters())
    assert optimizer_cost(optimizer).keeps_state_in_place
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert not optimizer_cost(optimizer).keeps_state_in_place
    assert calls == []


def test_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        optimizer_cost(torch.optim.LBFGS(make_parameters()))
