"""keep-all: plain backpropagation, nothing computed twice.

Objective: the least time. Every value is freed right after its last use, so it needs less than eager execution, which
holds what a module saved until the whole module's backward is done. Optimal in time always; in memory only when the
budget does not matter. It ignores the budget.
"""

from __future__ import annotations

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.problem import problem_of
from torch_odt.planning.registry import planner
from torch_odt.planning.rematerialize import build
from torch_odt.planning.schedule import Schedule


@planner("keep-all")
def keep_all(graph: TrainingGraph, costs: Costs, budget_bytes: int = 0) -> Schedule:
    """The program as it is. Choose it when memory is no concern and every bit must equal plain PyTorch's."""
    problem = problem_of(graph, costs)
    return build(problem).schedule(problem, "keep-all")
