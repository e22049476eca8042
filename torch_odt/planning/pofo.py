"""pofo: checkpoints of a chain are kept, offloaded or made again, by dynamic programming.

After Beaumont, Eyraud-Dubois, Shilova, "Efficient Combination of Rematerialization and Offloading for Training DNNs",
NeurIPS 2021.

Objective: the fewest seconds under a byte budget, where a checkpoint may also wait in a file. Where transfers do not
run beside ops, it is optimal on chains among schedules whose checkpoints stay, in memory or in the file, until their
backward op has run and are written anew for each time that they wait; within the rounding of bytes (see rotor.py).
Where transfers run beside ops, a transfer is taken to hide behind whatever runs while its checkpoint waits, as if
there were no other, and of the best tables' schedules the clock chooses. It does not look at the size of the file
before it has a schedule, and at branches no more than rotor does.
"""

from __future__ import annotations

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.persistent import cheapest
from torch_odt.planning.problem import problem_of
from torch_odt.planning.registry import planner
from torch_odt.planning.schedule import Schedule


@planner("pofo")
def pofo(graph: TrainingGraph, costs: Costs, budget_bytes: int) -> Schedule:
    """Rematerialize and offload by dynamic programming. Choose it for deep chains with a file to page to."""
    return cheapest(problem_of(graph, costs), budget_bytes, "pofo", pages=True)
