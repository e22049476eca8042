"""Steps that follow a plan of an earlier step, beside that step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from small_steps import PLENTY, Net, make_batches
from torch import Tensor, nn

import torch_odt as odt

STEPS = 3


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        options: of the step that makes the plan.
        both: of the step that follows it too.
    """

    make_model: Callable[[], nn.Module] = Net
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    loss_fn: Callable[..., Any] | None = F.cross_entropy
    options: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    size: int = 6

    def train(self, batches: Sequence[Any] = (), **options: Any) -> tuple[odt.TrainStep, list[Tensor]]:
        """A step after three batches; the losses, and everything that training changes."""
        torch.manual_seed(5)
        model = self.make_model()
        optimizer = self.make_optimizer(model.parameters(), lr=0.05)
        step = odt.TrainStep(model, self.loss_fn, optimizer, **self.both, **options)
        losses = [step(*batch) for batch in batches or make_batches(STEPS, self.size)]
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        tensors = [*losses, *model.state_dict().values(), *filter(torch.is_tensor, state), torch.get_rng_state()]
        return step, [tensor.detach().clone() for tensor in tensors]

    def plan(self) -> tuple[odt.TrainStep, list[Tensor]]:
        """The step that makes the plan."""
        return self.train(**{"budget": PLENTY, **self.options})


def assert_equal_bits(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def saved_plan(path: Path, case: Case | None = None, *, carry_graph: bool = True) -> Path:
    """The file of a case's plan."""
    (case or Case()).plan()[0].plan.save(path, carry_graph=carry_graph)
    return path
