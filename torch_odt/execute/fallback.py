"""Training a model that cannot be captured: plain PyTorch with activation checkpointing of measured submodules.

No graph is needed, so every model that PyTorch trains trains here too. What it cannot do is plan: the choice of
submodules rests on an estimate, which the allocator's cap and its count put right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from torch_odt import memory
from torch_odt.errors import InfeasibleBudget
from torch_odt.execute.checkpointing import PlainAttributes, checkpointed
from torch_odt.execute.module_costs import ModuleCosts, choose, measure, smallest
from torch_odt.execute.randomness import RandomState
from torch_odt.execute.saved_contents import SavedModules
from torch_odt.planning.plan import PlanLine

# A refusal must name a budget, so measuring may take this much even where the budget is smaller.
_MEASURING_BYTES = 64 << 20
# A choice that did not fit is followed by one whose estimate is smaller by this factor.
NEXT_ESTIMATE = 0.8


@dataclass
class CheckpointChoice:
    """The submodules to checkpoint for batches of one shape, and what they were expected and seen to need.

    Attributes:
        names: qualified names of the submodules.
        predicted_bytes: the estimated peak of a step above the level before it; the limit until something is known.
        counted_bytes: the allocator's count of the same in the last step; None where it does not track.
        notes: what was left out of the choice and why.
    """

    names: list[str]
    predicted_bytes: int
    counted_bytes: int | None = None
    notes: list[str] = field(default_factory=list)


class FallbackStep:
    """Forward and backward of a step of any model inside a budget, gradients exactly those of plain PyTorch.

    Choose it when the step cannot be captured as a graph. As long as nothing has to be checkpointed the step's code
    runs once, as it always does. Where that does not fit, the submodules are measured (two forward passes that keep
    nothing), and those that are checkpointed run a second time in the backward pass.

    Args:
        model: the model whose submodules may be checkpointed.
        compute_loss: called with a step's arguments; runs the model and returns the scalar loss.
        budget_bytes: bytes that a step may take above the level before it, new gradients included.
        reason: why the step could not be captured.
        state: all that a step changes: the model, and what the loss learns; the model alone when None.
        thorough: an attempt that does not fit undoes also what code has changed in containers and bound anew.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss: Callable[..., torch.Tensor],
        budget_bytes: int,
        *,
        reason: str = "",
        state: nn.Module | None = None,
        thorough: bool = False,
    ) -> None:
        self.model = model
        self._thorough = thorough
        self._state = model if state is None else state
        self.budget_bytes = budget_bytes
        self.reason = reason
        self.choice: CheckpointChoice | None = None
        self._compute_loss = compute_loss
        self._costs: dict[Any, ModuleCosts | None] = {}
        self._choices: dict[Any, CheckpointChoice] = {}

    @property
    def predicted_bytes(self) -> int | None:
        """The estimated peak of the last step above the level before it."""
        return None if self.choice is None else self.choice.predicted_bytes

    @property
    def counted_bytes(self) -> int | None:
        """The allocator's count of the last step's peak; None where it does not track."""
        return None if self.choice is None else self.choice.counted_bytes

    def set_budget(self, budget_bytes: int) -> None:
        """Use another budget from the next step on."""
        self.budget_bytes = budget_bytes
        self._choices.clear()

    def run(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> torch.Tensor:
        """Run forward and backward; gradients are added to `.grad`.

        Returns:
            The loss, detached.

        Raises:
            InfeasibleBudget: the step does not fit even with everything checkpointed. Gradients, buffers and random
                number generators are as before the call.
        """
        kwargs = kwargs or {}
        key = (batch_signature(args, kwargs), tuple(module.training for module in self.model.modules()))
        if key not in self._choices and self._is_capped():
            self._choices[key] = CheckpointChoice([], self.budget_bytes)
        while True:
            choice = self.choice = self._choice_for(key, args, kwargs)
            try:
                loss = self._attempt(choice, args, kwargs)
                if key not in self._costs and choice.counted_bytes is not None:
                    choice.predicted_bytes = choice.counted_bytes
                return loss
            except (torch.OutOfMemoryError, MemoryError):
                pass
            # Outside the handler: while it ran, the traceback held the activations of the failed attempt.
            if key in self._costs:
                self._choices[key] = self._more_frugal(self._costs[key], choice)
            else:
                del self._choices[key]

    def _is_capped(self) -> bool:
        """Whether a step that does not fit fails instead of growing: then it may be tried before it is measured."""
        return memory.is_tracking()

    def _choice_for(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckpointChoice:
        if key not in self._choices:
            if key not in self._costs:
                self._costs[key] = self._measure(args, kwargs)
            costs = self._costs[key]
            activations = self.budget_bytes - self._fixed_bytes()
            self._choices[key] = self._describe(costs, [] if costs is None else choose(costs, activations))
        return self._choices[key]

    def _measure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleCosts | None:
        limit_bytes = max(self.budget_bytes, _MEASURING_BYTES)

        def run_forward() -> torch.Tensor:
            return self._compute_loss(*args, **kwargs)

        try:
            costs = measured_inside(self.model, run_forward, limit_bytes)
        except RuntimeError as error:
            if "inside its forward pass" not in str(error):
                raise
            return None
        if costs is not None:
            return costs
        raise InfeasibleBudget(
            self.budget_bytes,
            self._fixed_bytes() + forward_bytes_beyond(self.model, run_forward, limit_bytes),
            hints=("a smaller batch",),
            detail="not even a forward pass that keeps nothing fits",
        )

    def _describe(self, costs: ModuleCosts | None, names: list[str]) -> CheckpointChoice:
        if costs is None:
            note = "the step computes gradients inside its forward pass, so that nothing is checkpointed"
            return CheckpointChoice([], self._fixed_bytes(), notes=[note])
        notes = [f"{name} is not checkpointed: {reason}" for name, reason in costs.unfit.items()]
        return CheckpointChoice(names, costs.estimate(names) + self._fixed_bytes(), notes=notes)

    def _more_frugal(self, costs: ModuleCosts | None, failed: CheckpointChoice) -> CheckpointChoice:
        estimate = failed.predicted_bytes - self._fixed_bytes()
        least = [] if costs is None else smallest(costs)
        if costs is None or costs.estimate(least) >= estimate:
            raise InfeasibleBudget(
                self.budget_bytes,
                max(_with_margin(failed.predicted_bytes), self.budget_bytes + (1 << 20)),
                hints=("a smaller batch", "a model that can be captured"),
                detail=f"the step does not fit with {len(failed.names)} submodules checkpointed"
                + (f" (it cannot be captured: {self.reason})" if self.reason else ""),
            )
        return self._describe(costs, choose(costs, int(estimate * NEXT_ESTIMATE)))

    def _fixed_bytes(self) -> int:
        """What a step needs whatever is checkpointed: new gradients and the copies that undo a failed step."""
        gradients = sum(p.nbytes for p in self._state.parameters() if p.requires_grad)
        return gradients + sum(buffer.nbytes for buffer in self._state.buffers())

    def _attempt(self, choice: CheckpointChoice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        with undone_on_failure(self._state, thorough=self._thorough), _counted(choice), capped(self.budget_bytes):
            with checkpointed(self.model, choice.names), torch.enable_grad():
                loss = self._compute_loss(*args, **kwargs)
            loss.backward()
            return loss.detach()


def measured_inside(model: nn.Module, run_forward: Callable[[], Any], limit_bytes: int) -> ModuleCosts | None:
    """Measure submodules with no more than so many bytes; None when a forward pass that keeps nothing takes more."""
    try:
        with capped(limit_bytes):
            return measure(model, run_forward)
    except (torch.OutOfMemoryError, MemoryError):
        return None


def forward_bytes_beyond(model: nn.Module, run_forward: Callable[[], Any], limit_bytes: int) -> int:
    """For a refusal: what a step needs besides gradients, found by forward passes in twice the bytes, and twice again.

    Where the machine has no more to try with, it is a guess.
    """
    while True:
        limit_bytes *= 2
        if limit_bytes > memory.available():
            return limit_bytes
        costs = measured_inside(model, run_forward, limit_bytes)
        if costs is not None:
            return max(limit_bytes, _with_margin(costs.estimate(smallest(costs))))


def step_line(names: list[str], nbytes: int, note: str) -> PlanLine:
    """A plan's line of a step with these submodules checkpointed."""
    label = f"steps with {len(names)} checkpointed submodules" if names else "plain steps"
    return PlanLine(label, nbytes, note)


def with_temporaries(estimated_bytes: int) -> int:
    """An estimate, and about what operators take for an instant, which it leaves out."""
    return estimated_bytes + estimated_bytes // 4


def without_temporaries(nbytes: int) -> int:
    """The largest estimate that, with temporaries, is no more than so many bytes."""
    return nbytes * 4 // 5


def _with_margin(predicted_bytes: int) -> int:
    """A budget that will be accepted."""
    return with_temporaries(predicted_bytes) + (4 << 20)


@contextlib.contextmanager
def buffers_undone_on_failure(model: nn.Module, buffers: Iterable[torch.Tensor]) -> Iterator[None]:
    """When the body fails, buffers, attributes and random number generators are as if it had not run."""
    random_before = RandomState.capture()
    contents = [(buffer, buffer.detach().clone()) for buffer in buffers]
    attributes = PlainAttributes(model)
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for buffer, content in contents:
                buffer.copy_(content)
        attributes.restore()
        random_before.restore()
        raise


@contextlib.contextmanager
def _modules_undone_on_failure(model: nn.Module) -> Iterator[None]:
    """When the body fails, all that modules hold and random number generators are as if it had not run."""
    random_before = RandomState.capture()
    saved = SavedModules(model, None)
    try:
        yield
    except BaseException:
        saved.restore()
        random_before.restore()
        raise


@contextlib.contextmanager
def undone_on_failure(model: nn.Module, *, thorough: bool = False) -> Iterator[None]:
    """When the body fails, gradients, buffers, attributes and random number generators are as if it had not run.

    With `thorough`, so are buffers that were bound anew, and containers and tensors in attributes. Gradients that exist
    already are put aside and added at the end, in the order in which autograd adds them.
    """
    earlier = {parameter: parameter.grad for parameter in model.parameters() if parameter.requires_grad}
    for parameter in earlier:
        parameter.grad = None
    try:
        with _modules_undone_on_failure(model) if thorough else buffers_undone_on_failure(model, model.buffers()):
            yield
    except BaseException:
        for parameter, gradient in earlier.items():
            parameter.grad = gradient
        raise
    for parameter, gradient in earlier.items():
        if gradient is not None and parameter.grad is not None:
            parameter.grad = gradient.add_(parameter.grad)
        elif gradient is not None:
            parameter.grad = gradient


def capped(budget_bytes: int) -> contextlib.AbstractContextManager[Any]:
    """Bounds what is allocated above the present level; does nothing where nothing is tracked."""
    level = memory.stats().allocated_bytes
    return contextlib.nullcontext() if level is None else memory.cap(max(1, level + budget_bytes))


@contextlib.contextmanager
def _counted(choice: CheckpointChoice) -> Iterator[None]:
    level = memory.stats().allocated_bytes
    memory.reset_peak()
    yield
    peak = memory.stats().peak_bytes
    choice.counted_bytes = None if peak is None or level is None else peak - level


def batch_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a measurement depends on: shapes and dtypes of the tensors among the arguments."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return str(spec), tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in leaves
    )
