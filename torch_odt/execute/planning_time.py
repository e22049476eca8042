"""The time that one preparation may plan, and planning that takes long: in a child process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch_odt.capture.child import ChildFailed, ChildLate, run_in_child
from torch_odt.errors import PlanError

T = TypeVar("T")

# Planners may take longer than they are told to; a child that takes so much longer is stuck.
_PATIENCE, _PATIENCE_SECONDS = 2.0, 30.0


class PlannerStuck(PlanError):
    """A planner went on long after it was to stop."""


@dataclass
class PlanningTime:
    """What is left of the time that all plans of one preparation have together.

    Attributes:
        left_seconds: of it.
    """

    left_seconds: float

    @contextmanager
    def spending(self) -> Iterator[None]:
        """What the body takes is no longer left."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.left_seconds = max(0.0, self.left_seconds - (time.perf_counter() - begin))


def planned_apart(plan: Callable[[float], T], seconds: float) -> T:
    """Plan in a child process, which takes along what solvers leave in memory: it would count.

    What the child could not do for being one is done here, in the time that is left.

    Args:
        plan: `plan(stop_at)` ends about when `time.perf_counter()` is `stop_at`.
        seconds: how long it may take.

    Raises:
        PlannerStuck: it did not end; it would not here either.
    """
    stop_at = time.perf_counter() + seconds
    patience_seconds = _PATIENCE * seconds + _PATIENCE_SECONDS
    try:
        return run_in_child(partial(plan, stop_at), deadline_seconds=patience_seconds)
    except ChildLate:
        raise PlannerStuck(
            f"the planner was given {seconds:.3g} s and had not stopped after {patience_seconds:.3g} s: "
            "choose another planner, or give it more planning_seconds"
        ) from None
    except ChildFailed:
        return plan(stop_at)
