"""The plans of a step: one for each kind of batch, made when the first of its kind comes."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from torch_odt import memory
from torch_odt.errors import OdtWarning
from torch_odt.execute.named_tensors import StepTensors
from torch_odt.execute.optimizer_cost import optimizer_cost
from torch_odt.execute.optimizer_updates import OptimizerUpdates, updates_of
from torch_odt.execute.planned import GivenPlan
from torch_odt.execute.prepared import Prepared
from torch_odt.execute.request import StepRequest
from torch_odt.execute.requirements import Unchanged
from torch_odt.execute.step_checks import left_out, note_of_left_out, require_updatable
from torch_odt.planning.plan import Plan
from torch_odt.runtime.budget import Allotment, Budget, format_bytes

if TYPE_CHECKING:
    from torch_odt.execute.kept_plans import KeptPlans
    from torch_odt.execute.retries import Lowered
    from torch_odt.execute.session import Captured

# Batches of so many kinds keep their plans.
_MOST_PREPARED = 8
# Where budgets change, plans come back at once from so many, others from the cache: what is kept counts as well, some
# megabytes each.
_MOST_ALLOTTED = 3
_MANY_CAPTURES = 16


@dataclass(frozen=True)
class _Key:
    """What something ready depends on: what was captured, the budget, and how an attempt was lowered."""

    captured: Hashable
    budget: Budget | Allotment
    lowered: Lowered | None = None


class PreparedSteps:
    """What is ready to run, by what it depends on: shapes, modes, what is trained, values that the code reads.

    Args:
        request: what all of it is prepared for.
        given: the plan to follow; None where plans are made.

    Attributes:
        kept: the plans of a checkpoint, which come before any that are made.
    """

    def __init__(self, request: StepRequest, given: GivenPlan | None) -> None:
        self._request = request
        self._given = given
        self.kept: KeptPlans | None = None
        self._prepared: OrderedDict[_Key, Prepared] = OrderedDict()
        # Another budget needs no other capture.
        self._captured: dict[Hashable, Captured] = {}
        self._captures = 0
        self._has_told_of_captures = False
        # Of steps that were not captured: the values that their code could read then, and at the last call.
        self._refused: dict[Hashable, Hashable] = {}
        self._last_values: Hashable = None
        # Of the last call, which the next one is like.
        self._last: tuple[_Key, Prepared] | None = None
        # The step as it was found to be what the given plan is for.
        self._compared: Unchanged | None = None
        self._last_updates: OptimizerUpdates | None = None
        # What the optimizer did not hold when a step was prepared last.
        self._left_out: list[str] | None = None

    def __len__(self) -> int:
        return len(self._prepared)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Those of captured steps that are followed in the ordinary budget as it is now."""
        return tuple(
            prepared.plan
            for key, prepared in self._prepared.items()
            if prepared.plan.captured and key.budget == self._request.budget and key.lowered is None
        )

    def clear(self) -> None:
        """Forget everything."""
        self.forget_plans()
        self._captured.clear()

    def forget_plans(self) -> None:
        """What has been captured serves other plans."""
        self.kept = None
        self._forget_all_but(0)

    def find(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        optimizer: torch.optim.Optimizer,
        tensors: StepTensors,
        *,
        want_results: bool,
        needs_all: str = "",
        lowered: Lowered | None = None,
    ) -> Prepared:
        """What runs for a batch like this one, made when the first of its kind comes.

        Args:
            optimizer: what makes the step's updates.
            tensors: of the step, as they are now.
            needs_all: why all gradients have to exist before the optimizer makes its step; empty if they need not.
            lowered: what an attempt is to do with; None for the ordinary budget.
        """
        if self._given is not None:
            return self._find_given(self._given, args, kwargs, optimizer, tensors, want_results, needs_all)
        # What traces, measures and plans; a start from a plan does without.
        from torch_odt.execute.prepare import prepare
        from torch_odt.execute.session import Captured
        from torch_odt.execute.signature import step_outline, step_values

        updates = self._updates(optimizer, tensors, needs_all)
        signature = None if updates is None else updates.signature
        outline = (want_results, signature, step_outline(tensors, args, kwargs))
        values = step_values(tensors, self._request.loss_fn)
        budget = self._request.budget
        captured: Hashable = (outline, values)
        key, refused = _Key(captured, budget), _Key(outline, budget)
        if lowered is None and self._last is not None and self._last[0] == key:
            # To look a key up takes several times as long.
            return self._entered(self._last[1], tensors, None)
        if key not in self._prepared and refused in self._prepared and not self._is_worth_a_try(outline, values):
            key = refused
        ordinary = self._prepared.get(key)
        if lowered is not None and not (ordinary is not None and ordinary.fallback is not None):
            key = replace(key, lowered=lowered)
        prepared = self._prepared.get(key)
        if prepared is None:
            require_updatable(optimizer, tensors.parameters)
        if prepared is None and self.kept is not None and lowered is None:
            self._make_room()
            cost = optimizer_cost(optimizer)
            prepared = self.kept.prepare(
                self._request, args, kwargs, want_results=want_results, cost=cost, updates=updates
            )
            if prepared is not None:
                self._prepared[key] = prepared
        if prepared is None:
            self._make_room()
            self._request.renew(optimizer_cost(optimizer), updates)
            known = self._captured.setdefault(captured, Captured())
            self._captures += not known.traces
            self._warn_of_many_captures()
            with self._request.lowered(lowered):
                prepared = prepare(self._request, args, kwargs, want_results=want_results, captured=known)
            if prepared.plan.captured:
                if not isinstance(budget, Allotment):
                    _warn_if_scarce(prepared.plan)
            else:
                self._captured.pop(captured, None)
                key = replace(refused, lowered=lowered)
                self._refused[outline] = values
            self._prepared[key] = prepared
            self._left_out = left_out(optimizer, tensors.parameters, self._left_out, stacklevel=7)
            if self._left_out:
                prepared.plan.notes = (*prepared.plan.notes, note_of_left_out(self._left_out))
        self._prepared.move_to_end(key)
        self._last = key, prepared
        return self._entered(prepared, tensors, lowered)

    def _entered(self, prepared: Prepared, tensors: StepTensors, lowered: Lowered | None) -> Prepared:
        prepared.enter(self._request, lowered)
        if prepared.fallback is not None:
            tensors.let_go()
        return prepared

    def _find_given(
        self,
        given: GivenPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        optimizer: torch.optim.Optimizer,
        tensors: StepTensors,
        want_results: bool,
        needs_all: str,
    ) -> Prepared:
        """As the given plan says: whatever it is not for is refused."""
        if self._compared is None or not self._compared.is_as(tensors, args, kwargs):
            self._compared = None
            given.require(self._request.model, self._request.loss_fn, args, kwargs)
            self._compared = Unchanged(tensors, args, kwargs)
        updates = self._updates(optimizer, tensors, needs_all) if given.program.makes_updates else None
        key = _Key((want_results, None if updates is None else updates.signature), self._request.budget)
        if key not in self._prepared:
            require_updatable(optimizer, tensors.parameters)
            self._make_room()
            self._request.renew(optimizer_cost(optimizer), updates)
            self._prepared[key] = given.prepare(self._request, args, kwargs, want_results=want_results)
            _warn_if_scarce(self._prepared[key].plan)
        return self._prepared[key]

    def _updates(
        self, optimizer: torch.optim.Optimizer, tensors: StepTensors, needs_all: str
    ) -> OptimizerUpdates | None:
        """What the optimizer can do before all gradients exist; None if it is not to."""
        disabled = self._request.disabled_rewrites
        self._last_updates = updates_of(optimizer, tensors, disabled, needs_all, self._last_updates)
        return self._last_updates

    def _is_worth_a_try(self, outline: Hashable, values: Hashable) -> bool:
        """Whether a step that was not captured may be by now: what its first run has set up has settled."""
        previous, self._last_values = self._last_values, values
        return values == previous and values != self._refused[outline]

    def _warn_of_many_captures(self) -> None:
        if self._captures < _MANY_CAPTURES or self._has_told_of_captures:
            return
        self._has_told_of_captures = True
        warnings.warn(
            f"the step has been captured {self._captures} times: shapes, modes or plain Python values that "
            "the model or the loss reads keep changing, and each change is captured and planned anew",
            OdtWarning,
            stacklevel=5,
        )

    def _make_room(self) -> None:
        """For one more plan; those of batches or budgets that do not come any more must not pile up."""
        most = _MOST_ALLOTTED if isinstance(self._request.budget, Allotment) else _MOST_PREPARED
        self._forget_all_but(most - 1)
        while len(self._captured) > _MOST_PREPARED:
            del self._captured[next(iter(self._captured))]

    def _forget_all_but(self, count: int) -> None:
        """The plans that ran last stay."""
        self._last = None
        while len(self._prepared) > count:
            _, oldest = self._prepared.popitem(last=False)
            self._request.unload(oldest.tables)


def _warn_if_scarce(plan: Plan) -> None:
    """A fixed budget says what a step may take, not that it is there."""
    assert plan.budget is not None
    missing_bytes = plan.budget.level_bytes + plan.peak_bytes - memory.process_bytes()
    available_bytes = memory.available()
    if missing_bytes > available_bytes:
        warnings.warn(
            f"the step takes {format_bytes(missing_bytes)} more, and {format_bytes(available_bytes)} are available: "
            'the system may end the process. The budget "auto" takes what is available',
            OdtWarning,
            stacklevel=5,
        )
