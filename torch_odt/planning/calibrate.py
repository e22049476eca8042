"""Calibration: make what a schedule really takes fit, when the bytes that its planner counts are something else.

A planner aims at a number of bytes. What its schedule takes may be more: addresses have gaps between them, and an arena
and what leaves it are not full at the same moment. And below what a greedy planner can reach, its aim only makes it
recompute the same things again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.registry import Planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Footprint
from torch_odt.planning.simulate import simulate

_UNLIMITED = 1 << 60
_STEPS_DOWN = 8
_BISECTIONS = 6


@dataclass(frozen=True)
class Attempt:
    """A schedule that a planner made for an aim.

    Attributes:
        counted_bytes: what the planner counts for it.
        taken_bytes: what it really takes; as a rule at least as much.
    """

    schedule: Schedule
    counted_bytes: int
    taken_bytes: int


Aim = Callable[[int], Attempt]
"""Plans for a number of bytes, as its planner counts them."""


def calibrated(aim_at: Aim, budget_bytes: int) -> Schedule:
    """The schedule that takes no more than a budget; where none is found, the one that takes least."""
    least = _aim_lower(aim_at, budget_bytes)
    if least.taken_bytes <= budget_bytes:
        return least.schedule
    low, high = budget_bytes, aim_at(_UNLIMITED).taken_bytes
    for _ in range(_BISECTIONS):
        aim_bytes = (low + high) // 2
        attempt = aim_at(aim_bytes)
        least = min(least, attempt, key=lambda each: each.taken_bytes)
        if attempt.taken_bytes <= aim_bytes:
            high = attempt.taken_bytes
        else:
            low = aim_bytes
    return least.schedule


def within(planner: Planner, graph: TrainingGraph, costs: Costs, budget_bytes: int, footprint: Footprint) -> Schedule:
    """A planner's schedule whose footprint is within a budget, if aiming lower is enough for that."""

    def aim_at(aim_bytes: int) -> Attempt:
        schedule = planner(graph, costs, aim_bytes)
        return Attempt(schedule, simulate(graph, costs, schedule).peak_bytes, footprint(schedule))

    return _aim_lower(aim_at, budget_bytes).schedule


def _aim_lower(aim_at: Aim, budget_bytes: int) -> Attempt:
    """Aim at a budget, and below it by what is taken too much, for as long as the planner meets its aim.

    A planner that has few schedules needs a longer way down to the next one: the least step doubles.
    """
    aim_bytes = budget_bytes
    least = attempt = aim_at(aim_bytes)
    for step in range(_STEPS_DOWN):
        if attempt.taken_bytes <= budget_bytes or attempt.counted_bytes > aim_bytes:
            break
        aim_bytes -= max(attempt.taken_bytes - budget_bytes, (aim_bytes << step) // 500)
        attempt = aim_at(aim_bytes)
        least = min(least, attempt, key=lambda each: each.taken_bytes)
    return least
