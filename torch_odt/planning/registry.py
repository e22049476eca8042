"""Planners by name.

A planner is one function in one file; `@planner("name")` registers it. The built-in ones are imported when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning.schedule import Schedule

Planner = Callable[[TrainingGraph, Costs, int], Schedule]
"""(graph, costs, budget_bytes) -> schedule. Returns its best even when that does not fit: the caller simulates it."""

_BUILT_IN = {
    "keep-all": "torch_odt.planning.keep_all",
    "chen": "torch_odt.planning.chen",
    "melon": "torch_odt.planning.melon",
    "min-cut": "torch_odt.planning.min_cut",
    "auto": "torch_odt.planning.auto",
}
_PLANNERS: dict[str, Planner] = {}


P = TypeVar("P", bound=Planner)


def planner(name: str) -> Callable[[P], P]:
    """Register a planner under a name; a later one of the same name replaces it."""

    def register(function: P) -> P:
        _PLANNERS[name] = function
        return function

    return register


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
