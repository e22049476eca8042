"""The time that may be planned, and planning that takes long: in a child process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch_odt.capture.child import ChildFailed, ChildLate, run_in_child
from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning.auto import auto
from torch_odt.planning.by_name import schedule_by_name
from torch_odt.planning.registry import get_planner, limited, own_time_limit
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Footprint
from torch_odt.planning.simulate import simulate

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


def planned(
    name: str, graph: TrainingGraph, costs: Costs, budget_bytes: int, footprint: Footprint, seconds: float
) -> Schedule:
    """A planner's schedule of one graph, looked for as long as is allowed.

    Args:
        name: of the planner.
        graph, costs, budget_bytes: as for the planner.
        footprint: what a schedule really takes.
        seconds: for "auto", to look for something better than what it finds at once; others that stop when they are
            told to take so long at most, and where it is 0, their own limit.

    Raises:
        PlanError: there is no planner of that name, or its solver is not installed.
        PlannerStuck: a named planner did not stop.
    """
    if name != "auto":
        own_seconds = own_time_limit(get_planner(name))
        if own_seconds is None:
            return schedule_by_name(name, graph, costs, budget_bytes, footprint)
        by_name = partial(schedule_by_name, name, graph, costs, budget_bytes, footprint)
        return planned_apart(lambda stop_at: by_name(stop_at=stop_at), seconds or own_seconds)
    quick = auto(graph, costs, budget_bytes, footprint=footprint)
    found = simulate(graph, costs, quick)
    if not seconds or not (found.recomputed_ops or found.written_bytes):
        return quick
    searching = partial(auto, footprint=footprint, start=quick)
    try:
        return planned_apart(lambda stop_at: limited(searching, stop_at)(graph, costs, budget_bytes), seconds)
    except PlannerStuck:
        return quick
