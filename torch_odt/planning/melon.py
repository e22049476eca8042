"""melon: evict on demand by tensor size x freed lifetime / recomputation time, until the addresses fit.

Wang et al., "Melon: Breaking the Memory Wall for Resource-Efficient On-Device Machine Learning", MobiSys 2022.

Objective: few recomputed seconds under a byte budget, greedily. At the moment when the next op does not fit, the
storage goes whose eviction frees the most bytes for the longest time per second of recomputation, every missing
ancestor included; the score is taken anew at each eviction. What must fit are addresses and not live bytes alone: the
schedule is packed into an arena, and where gaps make that too large, it is made again for so many bytes less. (The
original edits its layout at each eviction; the packing here is so tight that nothing is left for that.) Plans for a
ladder of budgets are made together by `frontier`, with `planners=("melon",)`.

Near the optimum on chains and for moderate budgets. It decides without looking back, so it may evict early what a
better choice later would have spared, and far below the working set it recomputes the same things again and again;
`auto` searches beyond it.
"""

from __future__ import annotations

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.calibrate import Attempt, calibrated
from torch_odt.planning.pool import QUICK, pack
from torch_odt.planning.problem import problem_of
from torch_odt.planning.registry import planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.scores import tensor_size_per_second
from torch_odt.planning.search import Search


@planner("melon")
def melon(graph: TrainingGraph, costs: Costs, budget_bytes: int) -> Schedule:
    """Recompute what is cheap per byte and second. Choose it where planning must take little time."""
    problem = problem_of(graph, costs)

    def aim_at(aim_bytes: int) -> Attempt:
        search = Search(problem, aim_bytes)
        search.try_evicting(tensor_size_per_second)
        schedule = search.schedule("melon")
        layout = pack(graph, costs, schedule, effort=QUICK)
        gap_bytes = layout.address_peak_bytes - layout.live_peak_bytes
        return Attempt(schedule, search.best.peak_bytes, search.best.peak_bytes + gap_bytes)

    return calibrated(aim_at, budget_bytes)
