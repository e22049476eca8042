"""dtr: evict on demand what is cheap to bring back, large and has not been touched for long.

Kirisame, Lyubomirsky, Haan, Brennan, He, Roesch, Chen, Tatlock, "Dynamic Tensor Rematerialization", ICLR 2021
(arXiv:2006.09616).

Objective: few recomputed seconds under a byte budget, greedily and without knowing what comes. When the next op does
not fit, the storage with the smallest h = cost / (bytes x staleness) goes. The cost is that of the storage's evicted
neighbourhood: its own op, its missing ancestors, and what has been evicted of its descendants, which would need it.
There, staleness is the time on the clock since the last access; here, in a walk over the program before anything runs,
it is the measured seconds of the ops that have run since then, recomputation included.

On a chain of n equal ops with memory for about the square root of n of them, the paper proves a constant factor of the
program's time. What it does not use is what a planner knows and a running program does not: when a storage is needed
next. A storage that is read in a moment, and was not for long, goes all the same.
"""

from __future__ import annotations

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.calibrate import Attempt, calibrated
from torch_odt.planning.problem import problem_of
from torch_odt.planning.registry import planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.scores import stale_bytes_per_second
from torch_odt.planning.search import Search


@planner("dtr")
def dtr(graph: TrainingGraph, costs: Costs, budget_bytes: int) -> Schedule:
    """Evict what is cheap, large and stale. Choose it to compare with, or to foresee what DTR itself would do."""
    problem = problem_of(graph, costs)

    def aim_at(aim_bytes: int) -> Attempt:
        search = Search(problem, aim_bytes)
        search.try_evicting(stale_bytes_per_second)
        return Attempt(search.schedule("dtr"), search.best.peak_bytes, search.best.peak_bytes)

    return calibrated(aim_at, budget_bytes)
