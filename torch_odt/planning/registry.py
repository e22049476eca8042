"""Planners by name.

A planner is one function in one file; `@planner("name")` registers it. The built-in ones are imported when asked for.
One that can use more time than it needs has an argument `time_limit_seconds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any, TypeVar

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning.schedule import Schedule

Planner = Callable[[TrainingGraph, Costs, int], Schedule]
"""(graph, costs, budget_bytes) -> schedule. Returns its best even when that does not fit: the caller simulates it."""

_BUILT_IN = {
    "keep-all": "torch_odt.planning.keep_all",
    "chen": "torch_odt.planning.chen",
    "dtr": "torch_odt.planning.dtr",
    "sage": "torch_odt.planning.sage",
    "melon": "torch_odt.planning.melon",
    "min-cut": "torch_odt.planning.min_cut",
    "capuchin": "torch_odt.planning.capuchin",
    "checkmate": "torch_odt.planning.checkmate",
    "checkmate-lp": "torch_odt.planning.checkmate_lp",
    "rotor": "torch_odt.planning.rotor",
    "pofo": "torch_odt.planning.pofo",
    "poet": "torch_odt.planning.poet",
    "poet-paging": "torch_odt.planning.poet",
    "poet-remat": "torch_odt.planning.poet",
    "auto": "torch_odt.planning.auto",
}
_PAGING = frozenset({"capuchin", "pofo", "poet", "poet-paging"})
_PLANNERS: dict[str, Planner] = {}


P = TypeVar("P", bound=Planner)


def planner(name: str) -> Callable[[P], P]:
    """Register a planner under a name; a later one of the same name replaces it."""

    def register(function: P) -> P:
        _PLANNERS[name] = function
        return function

    return register


def built_in_names() -> tuple[str, ...]:
    """The names of the planners that come along."""
    return tuple(_BUILT_IN)


def is_for_paging(name: str) -> bool:
    """Whether a planner that comes along is another one without anything to page to."""
    return name in _PAGING


def takes_time_limit(planner: Planner) -> bool:
    """Whether a planner has an argument `time_limit_seconds`, by which it stops."""
    return "time_limit_seconds" in signature(planner).parameters


def own_time_limit(planner: Planner) -> float | None:
    """How many seconds a planner takes at most where it is not told; None if it does not look at the time."""
    parameter = signature(planner).parameters.get("time_limit_seconds")
    return float(parameter.default) if parameter is not None and isinstance(parameter.default, int | float) else None


def limited(planner: Planner, deadline: float, share: float = 1.0) -> Planner:
    """A planner that takes a share of the time that is left when it is called; itself if it takes no limit.

    Args:
        deadline: as `time.perf_counter()` counts.
    """
    if not takes_time_limit(planner):
        return planner

    @wraps(planner)
    def plan(graph: TrainingGraph, costs: Costs, budget_bytes: int, **goal: Any) -> Schedule:
        goal["time_limit_seconds"] = share * max(0.0, deadline - time.perf_counter())
        return planner(graph, costs, budget_bytes, **goal)

    return plan


def planner_names() -> tuple[str, ...]:
    """The names that `get_planner` knows, built-in ones first."""
    return tuple(dict.fromkeys((*_BUILT_IN, *_PLANNERS)))


def get_planner(name: str) -> Planner:
    """The planner of a name.

    Raises:
        PlanError: there is none; the text lists the names.
    """
    if name not in _PLANNERS and name in _BUILT_IN:
        import_module(_BUILT_IN[name])
    if name not in _PLANNERS:
        raise PlanError(f"there is no planner {name!r}; there are {', '.join(planner_names())}")
    return _PLANNERS[name]
