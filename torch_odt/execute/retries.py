"""What is done about a call that has failed for want of memory, or of a disk."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch

from torch_odt import memory
from torch_odt._extensions import memory_module
from torch_odt.errors import InfeasibleBudget, PagingError, first_line
from torch_odt.execute.request import StepRequest
from torch_odt.planning.plan import Plan

Result = TypeVar("Result")
Remedy = Literal["released", "smaller plan", "without paging"]

_MOST_RETRIES = 3
_SMALLER = 0.85
_TEXTS = ("can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class Lowered:
    """What a retry is planned for.

    Attributes:
        growth_bytes: what training may add to the level at construction; None for what the budget says.
        pages: whether it may page, where the step does.
    """

    growth_bytes: int | None = None
    pages: bool = True


@dataclass(frozen=True)
class Retry:
    """A failed attempt of a call, and what was done about it.

    Attributes:
        error: what it failed with, in words.
        remedy: "released" (what can be given back was, and the same plan tried again), "smaller plan", or "without
            paging".
        growth_bytes: what the next attempt was planned for, above the level at construction; None for the ordinary
            budget.
    """

    error: str
    remedy: Remedy
    growth_bytes: int | None = None

    def __str__(self) -> str:
        done = {
            "released": "after giving memory back",
            "smaller plan": f"by a plan for {(self.growth_bytes or 0) / 2**20:.1f} MiB of training",
            "without paging": "by a plan that does not page",
        }
        reason = "after a failed transfer" if self.remedy == "without paging" else "for want of memory"
        return f"an attempt of a step was undone {reason}, and made again {done[self.remedy]}"


def made_in_attempts(
    retries: Retries, request: StepRequest, attempt: Callable[[], Result], tell: Callable[[Retry], None]
) -> Result:
    """What the first attempt returns that does not fail; after each that does, what helps is done.

    Args:
        tell: called with what has been done.

    Raises:
        MemoryError, RuntimeError: the last attempt's, where nothing more can be done.
    """
    while True:
        try:
            return attempt()
        except (MemoryError, RuntimeError) as error:
            retries.note(error, request)
        # Outside the handler: while it ran, the traceback held the tensors of the failed attempt.
        if not retries.prepare_next(request):
            assert retries.failure is not None
            raise retries.failure
        tell(retries.done[-1])


class Retries:
    """The attempts of one call.

    Args:
        can_plan: whether there may be another plan; a given one is followed or not.

    Attributes:
        lowered: what the next attempt is planned for; None for the ordinary budget.
        done: what has been done so far.
        failure: what is to be raised when nothing more can be done.
    """

    def __init__(self, *, can_plan: bool) -> None:
        self._can_plan = can_plan
        self._refusals = _refusals()
        self._taken_bytes: int | None = None
        self._remedy: Remedy | None = None
        self._peak_bytes: int | None = None
        self.lowered: Lowered | None = None
        self.done: list[Retry] = []
        self.failure: BaseException | None = None

    def describe_in(self, plan: Plan) -> None:
        """The plan of an attempt tells of those before."""
        self._peak_bytes = plan.peak_bytes
        if self.done:
            plan.notes = tuple(dict.fromkeys((*plan.notes, *map(str, self.done))))

    def note(self, error: BaseException, request: StepRequest) -> None:
        """An attempt has failed."""
        before, self._refusals = self._refusals, _refusals()
        if isinstance(error, InfeasibleBudget) and self.lowered is not None:
            self._remedy = self._settle(error)
            return
        self.failure = error
        self._remedy = self._remedy_for(error, is_refused=self._refusals > before)
        if self._remedy == "smaller plan":
            allowed = self._lowered.growth_bytes or request.resolve_budget().growth_bytes
            self._taken_bytes = allowed if self._peak_bytes is None else min(allowed, self._peak_bytes)
            self.lowered = replace(self._lowered, growth_bytes=max(1, int(_SMALLER * self._taken_bytes)))
        elif self._remedy == "without paging":
            self.lowered = replace(self._lowered, pages=False)

    def prepare_next(self, request: StepRequest) -> bool:
        """Make what room there is for another attempt; False if there is to be none."""
        if self._remedy is None:
            return False
        growth_bytes = None if self.lowered is None else self.lowered.growth_bytes
        assert self.failure is not None
        self.done.append(Retry(first_line(self.failure), self._remedy, growth_bytes))
        _forget_frames(self.failure)
        if request.arena is not None:
            # What a smaller plan will use is not to be others' meanwhile.
            request.arena.release(min(request.held_bytes, growth_bytes or 0))
        gc.collect()
        memory.trim()
        return True

    def close(self) -> tuple[Retry, ...]:
        """Let go of the failure, which would hold its frames, and they this object; returns what has been done."""
        self.failure = None
        return tuple(self.done)

    @property
    def _lowered(self) -> Lowered:
        return self.lowered or Lowered()

    def _settle(self, error: InfeasibleBudget) -> Remedy | None:
        """Nothing fits where a retry was to be planned: what takes fewest bytes, if that is less than what failed."""
        self.done.pop()
        smallest = error.smallest_feasible_bytes
        if self._lowered.growth_bytes is None or self._taken_bytes is None or smallest >= self._taken_bytes:
            return None
        self._taken_bytes = smallest
        self.lowered = replace(self._lowered, growth_bytes=smallest)
        return "smaller plan"

    def _remedy_for(self, error: BaseException, *, is_refused: bool) -> Remedy | None:
        if len(self.done) == _MOST_RETRIES:
            return None
        if isinstance(error, PagingError):
            return "without paging" if self._can_plan and self._lowered.pages else None
        if not is_shortage(error, is_refused=is_refused):
            return None
        if all(retry.remedy != "released" for retry in self.done):
            return "released"
        return "smaller plan" if self._can_plan else None


def is_shortage(error: BaseException, *, is_refused: bool) -> bool:
    """Whether an error says that there is no memory.

    Args:
        is_refused: an allocation was refused meanwhile: some operators lose the class of the error that says so.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return type(error) is RuntimeError and (is_refused or any(text in str(error) for text in _TEXTS))


def _forget_frames(error: BaseException | None) -> None:
    """Whoever keeps an error is not to keep the tensors of the frames that it came through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _refusals() -> int:
    return 0 if memory_module is None else int(memory_module.refusals())
