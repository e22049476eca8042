"""An ordinary loop over a wrapped model that has its optimizer, beside a plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wrapped_models import (
    loss_of,
    planned_step,
    wrapped,
)

from torch_odt._extensions import memory_module
from torch_odt.capture.update_in_backward import UPDATE
from torch_odt.execute.wrap import plan_of

needs_memory = pytest.mark.skipif(memory_module is None, reason="torch_odt._memory is not built")

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Both:
    """A wrapped model that was given its optimizer, and a plain one."""

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer = OPTIMIZERS["sgd"], **options: Any) -> None:
        self.plain = copy.deepcopy(model)
        self.optimizer, self.plain_optimizer = (make_optimizer(m.parameters()) for m in (model, self.plain))
        self.model, _ = wrapped(model, planner="keep-all", optimizer=self.optimizer, **options)
        self.sides = ((self.model, self.optimizer), (self.plain, self.plain_optimizer))

    def train(self, x: Tensor, loss_fn: Callable[[nn.Module, Tensor], Tensor] | None = None, **options: Any) -> None:
        """A step of each: the same bits in parameters, buffers and the optimizer's state."""
        losses = []
        for model, optimizer in self.sides:
            torch.manual_seed(5)
            optimizer.zero_grad()
            loss = loss_of(model(x)) if loss_fn is None else loss_fn(model, x)
            loss.backward(**options)
            optimizer.step()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        self.assert_same()

    def assert_same(self) -> None:
        for name, expected in self.plain.state_dict().items():
            assert torch.equal(self.model.state_dict()[name], expected), name
        own, plain = self.optimizer.state_dict(), self.plain_optimizer.state_dict()
        assert own["param_groups"] == plain["param_groups"]
        assert own["state"].keys() == plain["state"].keys()
        for index, state in plain["state"].items():
            for name, tensor in state.items():
                assert torch.equal(own["state"][index][name], tensor), (index, name)

    @property
    def notes(self) -> tuple[str, ...]:
        return plan_of(self.model).notes

    def gradients(self) -> set[str]:
        return {name for name, parameter in self.model.named_parameters() if parameter.grad is not None}


def updates_in(model: nn.Module) -> int:
    return sum(op.target == UPDATE for op in planned_step(model).graph.program)


def says(notes: tuple[str, ...], text: str) -> bool:
    return any(text in note for note in notes)
