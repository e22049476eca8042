"""The door's face of a step without a graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from torch_odt.capture.loss_modules import all_modules
from torch_odt.capture.trace import Compute
from torch_odt.errors import InfeasibleBudget
from torch_odt.execute.accounting import Allowance
from torch_odt.execute.fallback import FallbackStep, step_line
from torch_odt.planning.plan import PlanLine


class UncapturedStep:
    """Runs a step by activation checkpointing and speaks of budgets as the user does."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        compute: Compute,
        allowance: Allowance,
        reason: str,
        *,
        transactional: bool = False,
    ) -> None:
        state = all_modules(model, loss_fn)
        self._model = model
        self._compute = compute
        self._allowance = allowance
        self._scale = 1.0
        self._results: Any = None
        self.step = FallbackStep(
            model, self._loss, max(1, allowance.step_bytes), reason=reason, state=state, thorough=transactional
        )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], gradient_scale: float) -> tuple[torch.Tensor, Any]:
        """Forward and backward; returns the loss and the model's outputs.

        Raises:
            InfeasibleBudget: the step does not fit with everything checkpointed.
        """
        self._scale = gradient_scale
        try:
            loss = self.step.run(args, kwargs)
        except InfeasibleBudget as error:
            fixed = self._allowance.growth_bytes - self._allowance.step_bytes
            needed = self._allowance.smallest_budget(error.smallest_feasible_bytes + fixed)
            raise InfeasibleBudget(
                self._allowance.budget.text, needed, error.hints, self._allowance.describe()
            ) from error
        results, self._results = self._results, None
        return (loss if gradient_scale == 1.0 else loss / gradient_scale), results

    def lower(self, growth_bytes: int | None) -> None:
        """Do with less growth than was allowed; None for what was."""
        less = 0 if growth_bytes is None else max(0, self._allowance.growth_bytes - growth_bytes)
        step_bytes = max(1, self._allowance.step_bytes - less)
        if step_bytes != self.step.budget_bytes:
            self.step.set_budget(step_bytes)

    @property
    def lines(self) -> tuple[PlanLine, ...]:
        """The footprint as far as it is known: counted in the last step, before that the limit."""
        choice = self.step.choice
        if choice is None:
            steps = step_line([], max(0, self._allowance.step_bytes), "the limit; counted when they run")
        elif choice.counted_bytes is None:
            steps = step_line(choice.names, choice.predicted_bytes, "estimated")
        else:
            steps = step_line(choice.names, choice.counted_bytes, "counted in the last one")
        return (steps, *(line for line in self._allowance.fixed_lines() if line.nbytes))

    @property
    def notes(self) -> tuple[str, ...]:
        """Why there is no graph, and what was not checkpointed."""
        choice = self.step.choice
        return (f"not captured: {self.step.reason}", *(() if choice is None else choice.notes))

    def _loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss, results = self._compute(self._model, args, kwargs)
        self._results = pytree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, results)
        return loss if self._scale == 1.0 else loss * self._scale
