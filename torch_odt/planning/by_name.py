"""The schedule of one planner that was asked for by its name: for a goal, for what it really takes, and in time."""

from __future__ import annotations

from functools import partial

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.calibrate import within
from torch_odt.planning.objective import FASTEST, Goal, schedule_for
from torch_odt.planning.registry import get_planner, limited
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Footprint

# The first aim fits as a rule; where it does not, aiming lower needs time too.
_SHARE_OF_AN_AIM = 0.8
# Other prices of a second are tried in any case.
_SHARE_OF_A_PRICE = 0.5


def schedule_by_name(
    name: str,
    graph: TrainingGraph,
    costs: Costs,
    budget_bytes: int,
    footprint: Footprint,
    *,
    goal: Goal = FASTEST,
    stop_at: float | None = None,
) -> Schedule:
    """A planner's schedule whose footprint is within a budget, if aiming lower is enough for that.

    Choose it for every planner but "auto", which takes a footprint itself.

    Args:
        name: of the planner.
        graph, costs, budget_bytes: as for the planner.
        footprint: what a schedule really takes.
        goal: what to spend least of.
        stop_at: the `time.perf_counter()` by which all of it is to be done, as far as the planner looks at the time;
            None leaves it its own limit at each aim.

    Raises:
        PlanError: there is no planner of that name, or its solver is not installed, or joules are asked for where
            nobody knows what the processor draws.

    Example:
        >>> from torch_odt.capture.costs import Costs, OpCost
        >>> from torch_odt.capture.graph import Op, Output, TrainingGraph, Value
        >>> value = Value(0, "loss", (), (), "float32", 4, "computed", 0, producer=0)
        >>> graph = TrainingGraph([Op(0, "aten.loss", (), {}, (), (), (0,))], [value], [], [Output(0, "loss", 0)], 1, 1)
        >>> costs = Costs({0: OpCost(1e-3, ((0, 4),), (0,))})
        >>> schedule_by_name("melon", graph, costs, 64, lambda schedule: 4).planner
        'melon'
    """
    planner = get_planner(name)
    if stop_at is not None:
        planner = limited(planner, stop_at, _SHARE_OF_AN_AIM if goal == FASTEST else _SHARE_OF_A_PRICE)
    aimed = partial(schedule_for, planner, objective=goal.objective, deadline_seconds=goal.deadline_seconds)
    return within(aimed, graph, costs, budget_bytes, footprint)
