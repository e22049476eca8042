"""A call of a step that is made as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from torch_odt import memory
from torch_odt.execute.accumulation import Shares
from torch_odt.execute.optimizer_updates import IN_STEP
from torch_odt.execute.randomness import RandomState
from torch_odt.execute.request import StepRequest
from torch_odt.execute.saved_contents import SavedContents, SavedModules
from torch_odt.memory._tracking import current_category, set_category


class Transaction:
    """Puts back what a call has changed when its block ends by an exception.

    Until `complete`, gradients from before lie aside and are never written to; buffers, parameters and what the
    optimizer keeps are copied before they change. To put things back takes no memory. A handler of a signal may raise
    at any time until a `SignalGate` is closed, also at the beginning of this object's own `__exit__`, so the block is
    entered twice: `with gate, transaction, transaction:`.

    Args:
        parameters: all that may have gradients.
        optimizer: what updates them.
        request: owns the arena, in which copies lie while it is idle.
        undo: puts back what else has changed.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        request: StepRequest,
        undo: Callable[[], None],
    ) -> None:
        own = (p for group in optimizer.param_groups for p in group["params"])
        self._before = {p: p.grad for p in (*parameters, *own)}
        self._aside: dict[nn.Parameter, torch.Tensor] = {}
        self._optimizer = optimizer
        self._request = request
        self._undo = undo
        self._modules: SavedModules | None = None
        self._update: SavedContents | None = None
        self._random = RandomState.capture()
        self._is_grad_enabled = torch.is_grad_enabled()
        self._is_autocast_enabled = torch.is_autocast_enabled("cpu")
        self._category = current_category()
        self._is_over = False

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self._is_over:
            self._put_back()

    def save_modules(self, model: nn.Module, changed: list[torch.Tensor] | None) -> None:
        """Before the forward pass; for the arguments see `SavedModules`."""
        self._modules = SavedModules(model, changed)

    def set_gradients_aside(self) -> None:
        """The call begins without gradients."""
        for parameter in self._before:
            if parameter.grad is not None:
                self._aside[parameter] = parameter.grad
                parameter.grad = None

    def add_gradients(self, members: Iterable[nn.Parameter], shares: Shares) -> None:
        """Make `.grad` the sum with what lies aside; the earlier gradients of `members` are scaled."""
        scaled = frozenset(members)
        with torch.no_grad(), memory.category("gradient"):
            for parameter, earlier in self._aside.items():
                share = shares.earlier if parameter in scaled else 1.0
                total = earlier.clone() if share == 1.0 else earlier * share
                parameter.grad = total if parameter.grad is None else total.add_(parameter.grad)

    def save_update(self) -> None:
        """Before the optimizer's step: copies of the parameters that it will change, and of all that it keeps."""
        with self._request.copies(), memory.category("optimizer"):
            in_step = vars(self._optimizer).get(IN_STEP, {}).values()
            elsewhere = [each.changed() for each in in_step if each.parameter.grad is not None]
            self._update = SavedContents([vars(self._optimizer), elsewhere], _changes)

    def complete(self) -> None:
        """From now on nothing is put back."""
        self._is_over = True
        self._modules = self._update = None
        self._before, self._aside = {}, {}

    def _put_back(self) -> None:
        self._request.leave_arena()
        torch.set_grad_enabled(self._is_grad_enabled)
        torch.set_autocast_enabled("cpu", self._is_autocast_enabled)
        set_category(self._category)
        for saved in (self._update, self._modules):
            if saved is not None:
                saved.restore()
        for parameter, gradient in self._before.items():
            parameter.grad = gradient
        self._random.restore()
        self._undo()
        self.complete()


def _changes(tensor: torch.Tensor) -> bool:
    """Whether an optimizer's step may change a tensor that the optimizer holds."""
    return not isinstance(tensor, nn.Parameter) or tensor.grad is not None
