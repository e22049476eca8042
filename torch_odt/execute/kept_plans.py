"""The plans of a step, kept with a checkpoint: a run that goes on from there follows them, and has the same bits.

What a planner decides depends on the memory that is there, and into how many micro-batches a batch is cut changes the
last bits of its gradients. So a run that goes on beside other programs must not plan anew.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_odt.errors import CaptureError, InfeasibleBudget, OdtWarning, PlanError, first_line
from torch_odt.execute.planned import GivenPlan
from torch_odt.execute.requirements import Requirements
from torch_odt.planning.plan import Plan
from torch_odt.planning.plan_file import VERSION

if TYPE_CHECKING:
    from torch_odt.execute.optimizer_cost import OptimizerCost
    from torch_odt.execute.optimizer_updates import OptimizerUpdates
    from torch_odt.execute.prepared import Prepared
    from torch_odt.execute.request import StepRequest
    from torch_odt.execute.step import TrainStep

# What decides, beside the memory that is there, how a step is planned.
_OPTIONS = ("planner", "micro_batch", "disabled_rewrites", "accumulation_steps", "transactional")


class PlanKeeper:
    """What a `Checkpointer` asks a step for.

    Args:
        step: the step whose plans are kept, those of the last eight kinds of batch. Under a policy, whose plans change
            with the memory, none are, nor is one followed.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._packed: list[tuple[Plan, bytes]] = []

    @property
    def calls_before_update(self) -> int:
        """How many calls the optimizer has not made its step for yet: a checkpoint has no place for their gradients."""
        return self._step._group.calls

    def state(self) -> dict[str, Any]:
        """The options and plans as plain data."""
        plans = () if self._step.controller is not None else self._step._prepared.plans
        # To write a plan takes as long as a step or so, and it hardly ever changes.
        known = {id(plan): packed for plan, packed in self._packed}
        self._packed = [(plan, known.get(id(plan)) or _packed(plan)) for plan in plans]
        kept = self._step._prepared.kept
        # A kind of batch that has not come again since the run was resumed will come.
        waiting = [] if kept is None else kept.waiting
        return self._options() | {
            "version": VERSION,
            "plans": [*(packed for _, packed in self._packed), *waiting],
        }

    def follow(self, state: Mapping[str, Any]) -> None:
        """Let the step follow what `state` has given. What it cannot follow it plans anew, with a warning."""
        if self._step.controller is not None or not state["plans"]:
            # A policy's plans change with the memory: one that fits is not to stay because it was there before.
            return
        here = self._options()
        differing = [name for name in _OPTIONS if state.get(name) != here[name]]
        if state["version"] != VERSION:
            _warn_of_other_bits(f"its plans are of version {state['version']}, and this torch_odt reads {VERSION}")
        elif differing:
            was = ", ".join(f"{name}={state.get(name)!r}" for name in differing)
            _warn_of_other_bits(f"the run that goes on had {was}")
        else:
            self._step._prepared.kept = KeptPlans(state["plans"])

    def _options(self) -> dict[str, Any]:
        step, request = self._step, self._step._request
        return {
            "planner": request.planner,
            "micro_batch": request.micro_batch,
            "disabled_rewrites": sorted(request.disabled_rewrites),
            "accumulation_steps": step.accumulation_steps,
            "transactional": step.transactional,
        }


class KeptPlans:
    """Plans of a checkpoint, each for one kind of batch.

    Args:
        packed: from `PlanKeeper.state`.
    """

    def __init__(self, packed: Sequence[bytes]) -> None:
        self._packed = tuple(packed)
        self._tried: set[bytes] = set()

    @property
    def waiting(self) -> list[bytes]:
        """Those whose kind of batch has not come yet."""
        return [packed for packed in self._packed if packed not in self._tried]

    def prepare(
        self,
        request: StepRequest,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        want_results: bool,
        cost: OptimizerCost,
        updates: OptimizerUpdates | None,
    ) -> Prepared | None:
        """What runs for a batch as in the run before; None where nothing is kept for it, or it cannot be followed.

        Args:
            cost: of the optimizer.
            updates: what of the optimizer's step can be made in the backward pass.
        """
        found = Requirements.of(request.model, request.loss_fn, args, kwargs)
        refusal: Exception | None = None
        for packed in self._packed:
            try:
                given = GivenPlan.of_value(Plan.from_state(json.loads(zlib.decompress(packed))))
                program = given.program
                if (program.results is not None) != want_results or program.requirements.difference(found):
                    continue
                self._tried.add(packed)
                request.renew(cost, updates if program.makes_updates else None)
                return given.prepare(request, args, kwargs, want_results=want_results)
            except (PlanError, CaptureError, InfeasibleBudget) as error:
                refusal = error
        if refusal is not None:
            _warn_of_other_bits(first_line(refusal))
        return None


def _packed(plan: Plan) -> bytes:
    # The graph is traced again: who has a checkpoint also has the model's code.
    return zlib.compress(json.dumps(plan.to_state(carry_graph=False)).encode(), 1)


def _warn_of_other_bits(why: str) -> None:
    warnings.warn(
        f"the plan of the checkpoint is not followed: {why}. The step is planned anew, and its last bits may differ "
        "from those of a run that was not stopped",
        OdtWarning,
        stacklevel=4,
    )
