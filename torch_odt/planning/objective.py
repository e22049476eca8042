"""What a plan is to spend least of: seconds, or joules within a deadline.

Every planner minimises what ops and transfers cost, whatever unit that is in. So a planner that is given joules in the
place of seconds minimises joules, and one that is given both, one of them at a price, weighs them against each other:
raising the price of a second until the schedule is in time (Lagrange's relaxation) makes any planner obey a deadline.
A planner that has the keywords `objective` and `deadline_seconds` does so itself.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch_odt.capture.costs import Costs, TransferCosts
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning.registry import Planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.simulate import simulate

Objective = Literal["seconds", "joules"]

_PRICES = 12


def _require_known(objective: str) -> None:
    if objective not in get_args(Objective):
        raise PlanError(f"there is no objective {objective!r}; there are {', '.join(get_args(Objective))}")


@dataclass(frozen=True)
class Goal:
    """What a step is to spend least of, and what it may take.

    Attributes:
        objective: "seconds" or "joules".
        deadline_seconds: of a step.

    Raises:
        PlanError: there is no such objective.
        ValueError: no step takes so little.
    """

    objective: Objective = "seconds"
    deadline_seconds: float = math.inf

    def __post_init__(self) -> None:
        _require_known(self.objective)
        if not self.deadline_seconds > 0:
            raise ValueError(f"the deadline is a number of seconds above 0, not {self.deadline_seconds!r}")

    def for_part(self, share: float) -> Goal:
        """For so large a part of a step."""
        return replace(self, deadline_seconds=share * self.deadline_seconds)

    def cost(self, seconds: float, joules: float) -> float:
        """What is to be little."""
        return joules if self.objective == "joules" else seconds

    def rank(self, seconds: float, joules: float) -> tuple[bool, float]:
        """Sorts steps: those that are in time by what they cost, then the others by their seconds."""
        is_late = seconds > self.deadline_seconds
        return is_late, seconds if is_late else self.cost(seconds, joules)


FASTEST = Goal()


def schedule_for(
    planner: Planner,
    graph: TrainingGraph,
    costs: Costs,
    budget_bytes: int,
    *,
    objective: Objective = "seconds",
    deadline_seconds: float = math.inf,
) -> Schedule:
    """A planner's schedule of the fewest seconds, or of the fewest joules that are in time.

    Args:
        planner: what makes schedules.
        graph, costs, budget_bytes: as for the planner.
        objective: what to spend least of.
        deadline_seconds: with joules: what the step may take. Where no schedule of the planner is in time, the fastest
            one returns; the caller simulates it.

    Raises:
        PlanError: joules are asked for, and the costs do not know what the processor draws; or there is no such
            objective.
    """
    _require_known(objective)
    if objective == "seconds":
        return planner(graph, costs, budget_bytes)
    if costs.watts <= 0:
        raise PlanError("joules need the watts of the processor: plan for a device, or give Costs.watts")
    if "deadline_seconds" in inspect.signature(planner).parameters:
        wanted: dict[str, Any] = {"objective": objective, "deadline_seconds": deadline_seconds}
        return planner(graph, costs, budget_bytes, **wanted)

    def at_price(watts: float) -> tuple[Schedule, float]:
        schedule = planner(graph, priced(costs, watts), budget_bytes)
        return schedule, simulate(graph, costs, schedule).seconds

    cheapest, seconds = at_price(0.0)
    if seconds <= deadline_seconds:
        return cheapest
    fastest = planner(graph, costs, budget_bytes)
    if simulate(graph, costs, fastest).seconds > deadline_seconds:
        return fastest
    # Prices between a hundredth of the processor's own watts and a thousand times them.
    low, high, best = math.log(0.01 * costs.watts), math.log(1000 * costs.watts), fastest
    for _ in range(_PRICES):
        middle = (low + high) / 2
        schedule, seconds = at_price(math.exp(middle))
        if seconds > deadline_seconds:
            low = middle
            continue
        high = middle
        if simulate(graph, costs, schedule).joules < simulate(graph, costs, best).joules:
            best = schedule
    return best


def priced(costs: Costs, watts: float) -> Costs:
    """The same costs in joules, and so many of them (`watts`) for each second on top."""
    own = costs.watts + watts
    ops = {index: replace(cost, seconds=cost.seconds * own) for index, cost in costs.ops.items()}
    transfers = costs.transfers
    if transfers is not None:
        transfers = _scaled(transfers, transfers.watts + transfers.waiting_watts + watts)
    return replace(costs, ops=ops, transfers=transfers)


def _scaled(transfers: TransferCosts, factor: float) -> TransferCosts:
    """Transfers that take so many times as long, and that nothing hides: their joules are spent in any case."""
    factor = max(factor, 1e-12)
    return replace(
        transfers,
        write_latency_seconds=transfers.write_latency_seconds * factor,
        read_latency_seconds=transfers.read_latency_seconds * factor,
        write_bytes_per_second=transfers.write_bytes_per_second / factor,
        read_bytes_per_second=transfers.read_bytes_per_second / factor,
        overlaps=False,
    )
