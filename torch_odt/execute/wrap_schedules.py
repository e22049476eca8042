"""What the graphs of a wrapped model cost, and their schedules: measured and planned once, remembered if possible."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from torch_odt import memory
from torch_odt.cache import Cache, plan_key
from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.machine import machine_name, settings_name
from torch_odt.capture.profile import profile
from torch_odt.errors import PlanError
from torch_odt.execute.accounting import nearby, rounded
from torch_odt.execute.page_file import OpenPageFile
from torch_odt.execute.planning_time import planned
from torch_odt.execute.smallest_plans import remembered_smallest
from torch_odt.execute.wrap_given import GivenSchedule
from torch_odt.execute.wrap_plan import footprint
from torch_odt.planning.schedule import Schedule, schedule_from_data, schedule_to_data
from torch_odt.planning.simulate import simulate


@dataclass
class WrapSchedules:
    """Makes schedules for graphs.

    Attributes:
        planner: a planner's name.
        planning_seconds: how long to look for a better plan than the one that is found at once.
        cache: where measurements and schedules are kept.
        page_file: what may be paged to; None where nothing is.
        given: the plan to follow; None where one is to be made.
        measuring_bytes: how large an operator may be that is measured now.
    """

    planner: str
    planning_seconds: float
    cache: Cache
    page_file: OpenPageFile | None
    given: GivenSchedule | None
    measuring_bytes: Callable[[], int]
    _costs: dict[str, Costs] = field(default_factory=dict)

    @property
    def library_bytes(self) -> int:
        """What math libraries keep for the operators of all graphs so far."""
        return max((costs.library_bytes for costs in self._costs.values()), default=0)

    def costs_of(self, graph: TrainingGraph) -> Costs:
        key = graph.fingerprint
        if key not in self._costs:
            given = None if self.given is None else self.given.costs_for(graph)
            self._costs[key] = given or self._measure(graph, self.measuring_bytes)
        return self._costs[key]

    def measure_all(self, *graphs: TrainingGraph) -> bool:
        """Before a refusal: measure what was too large for the budget too. Whether there was any."""
        estimated = [graph for graph in graphs if self.costs_of(graph).too_large]
        for graph in estimated:
            self._costs[graph.fingerprint] = self._measure(graph, memory.available)
        return bool(estimated)

    def forget_estimates(self) -> None:
        """What was too large to be measured may not be any more."""
        self._costs = {key: costs for key, costs in self._costs.items() if not costs.too_large}

    def smallest(self, graph: TrainingGraph) -> Schedule:
        """The schedule of the fewest bytes."""
        costs = self.costs_of(graph)
        # One that rests on estimates, or on a device's speed, is not to be remembered.
        is_lasting = not costs.too_large and costs.transfers is None
        return remembered_smallest(self.cache if is_lasting else Cache(enabled=False), graph, costs)

    def fastest(self, graph: TrainingGraph, room: int) -> Schedule:
        """The schedule that an earlier process has made for about this room, or a new one."""
        costs = self.costs_of(graph)
        for nbytes in nearby(room) if room > 0 else ():
            data = self.cache.load_plan(self._key(graph, nbytes))
            if data is not None:
                with contextlib.suppress(PlanError, ValueError, KeyError, TypeError, IndexError):
                    schedule = schedule_from_data(data)
                    simulate(graph, costs, schedule)
                    if footprint(graph, costs, schedule) <= room:
                        return schedule
        rounded_bytes = rounded(max(0, room))
        footprint_of = partial(footprint, graph, costs)
        schedule = planned(self.planner, graph, costs, rounded_bytes, footprint_of, self.planning_seconds)
        if not costs.too_large:
            self.cache.save_plan(self._key(graph, rounded_bytes), schedule_to_data(schedule))
        return schedule

    def _key(self, graph: TrainingGraph, rounded_bytes: int) -> str:
        transfers = "" if self.page_file is None else self.page_file.costs.name
        made_by = (rounded_bytes, self.planner, self.planning_seconds, transfers)
        return plan_key("wrap", graph.fingerprint, machine_name(), settings_name(), *made_by)

    def _measure(self, graph: TrainingGraph, limit_bytes: Callable[[], int]) -> Costs:
        costs = profile(graph, cache=self.cache, limit_bytes=limit_bytes)
        return replace(costs, transfers=None if self.page_file is None else self.page_file.costs)
