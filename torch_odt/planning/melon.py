"""melon: evict on demand by tensor size x freed lifetime / recomputation time.

Wang et al., "Melon: Breaking the Memory Wall for Resource-Efficient On-Device Machine Learning", MobiSys 2022.

Objective: few recomputed seconds under a byte budget, greedily. At the moment when the next op does not fit, the
storage goes whose eviction frees the most bytes for the longest time per second of recomputation, every missing
ancestor included; the score is taken anew at each eviction. Near the optimum on chains and for moderate budgets. It
decides without looking back, so it may evict early what a better choice later would have spared, and far below the
working set it recomputes the same things again and again; `auto` searches beyond it.
"""

from __future__ import annotations

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.problem import problem_of
from torch_odt.planning.registry import planner
from torch_odt.planning.rematerialize import Walk, build
from torch_odt.planning.schedule import Schedule

_MAX_RECOMPUTATION = 8.0
_NO_TIME = 1e-9


def tensor_size_per_second(walk: Walk, storage: int) -> float:
    """Melon's TPS: bytes x freed lifetime / seconds to recompute it with all of its missing ancestors."""
    freed = walk.next_use(storage) - walk.position
    return walk.problem.nbytes[storage] * freed / (walk.missing_seconds(storage) + _NO_TIME)


@planner("melon")
def melon(graph: TrainingGraph, costs: Costs, budget_bytes: int) -> Schedule:
    """Recompute what is cheap per byte and second. Choose it where planning must take little time."""
    problem = problem_of(graph, costs)
    built = build(
        problem,
        budget_bytes=budget_bytes,
        score=tensor_size_per_second,
        max_recompute_seconds=_MAX_RECOMPUTATION * problem.program_seconds,
    )
    return built.schedule(problem, "melon")
