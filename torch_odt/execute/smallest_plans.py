"""The schedule of the fewest bytes, remembered from one process to the next.

It may take seconds to find, it is asked for whenever a budget is refused and before the first step of `wrap`, and a
budget that was named once must be accepted afterwards.
"""

from __future__ import annotations

from torch_odt.cache import Cache, plan_key
from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.profile import machine_name, settings_name
from torch_odt.errors import ScheduleError
from torch_odt.planning.schedule import Schedule, schedule_from_data, schedule_to_data
from torch_odt.planning.search import Footprint
from torch_odt.planning.simulate import simulate
from torch_odt.planning.smallest import smallest


def remembered_smallest(
    cache: Cache, graph: TrainingGraph, costs: Costs, *, kind: str = "", footprint: Footprint | None = None
) -> Schedule:
    """The schedule that needs the least memory.

    Args:
        cache: where to look first.
        kind: names what `footprint` counts.
        footprint: what a schedule really takes.
    """
    key = plan_key("smallest", kind, graph.fingerprint, machine_name(), settings_name())
    data = cache.load_plan(key)
    if data is not None:
        try:
            schedule = schedule_from_data(data)
            simulate(graph, costs, schedule)
            return schedule
        except (ScheduleError, ValueError, KeyError, TypeError, IndexError):
            pass
    schedule, _ = smallest(graph, costs, footprint=footprint)
    cache.save_plan(key, schedule_to_data(schedule))
    return schedule
