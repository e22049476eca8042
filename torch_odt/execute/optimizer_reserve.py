"""What the user's optimizer will need; where `wrap` is not told, it looks for it among the objects of the process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from torch_odt import memory
from torch_odt.execute.optimizer_cost import optimizer_cost

# Adam's two moments, where no optimizer is found.
_ASSUMED_STATE = 2


class OptimizerReserve:
    """Memory to keep free for the optimizers of some parameters.

    Args:
        parameters: those of a model.
        optimizer: the one that trains them, where it is known; others are looked for if it does not hold all of them.

    Attributes:
        workspace_bytes: what their steps hold for an instant.
        is_known: they were found; otherwise the figures assume Adam.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer | None = None) -> None:
        trainable = [p for p in parameters if p.requires_grad]
        self.gradient_bytes = sum(p.nbytes for p in trainable)
        self.workspace_bytes = 0
        found = _optimizers_of(trainable) if optimizer is None or not _holds(optimizer, trainable) else [optimizer]
        self._optimizers = [weakref.ref(one) for one in found]
        self.is_known = bool(self._optimizers)
        self._state_bytes = 0 if self.is_known else _ASSUMED_STATE * self.gradient_bytes
        for one in found:
            try:
                cost = optimizer_cost(one)
            except ValueError:
                # It evaluates the model several times in a step; how much it keeps cannot be told in advance.
                self._state_bytes += _ASSUMED_STATE * self.gradient_bytes
                continue
            self._state_bytes += cost.state_bytes
            self.workspace_bytes = max(self.workspace_bytes, cost.workspace_bytes)

    @property
    def is_current(self) -> bool:
        """Whether the optimizers that were found still exist."""
        return self.is_known and all(reference() is not None for reference in self._optimizers)

    @property
    def missing_state_bytes(self) -> int:
        """The part of the optimizers' state that does not exist yet."""
        return max(
            0, self._state_bytes - sum(t.nbytes for reference in self._optimizers for t in _state_of(reference()))
        )

    def tag_state(self) -> None:
        """Count the state that exists as the optimizers'."""
        for reference in self._optimizers:
            for tensor in _state_of(reference()):
                memory.tag(tensor, "optimizer")


def _state_of(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    if optimizer is None:
        return []
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


def _holds(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> bool:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return all(id(parameter) in held for parameter in parameters)


def _optimizers_of(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    wanted = {id(parameter) for parameter in parameters}
    return [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), torch.optim.Optimizer)
        and any(id(p) in wanted for group in getattr(candidate, "param_groups", ()) for p in group["params"])
    ]
