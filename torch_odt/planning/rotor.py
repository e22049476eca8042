"""rotor: optimal checkpointing of a chain whose checkpoints stay, by dynamic programming.

After Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory", 2019 (arXiv:1911.13214).

Objective: the fewest recomputed seconds under a byte budget. Optimal on a chain of ops of any sizes and times, each
with one op in the backward pass, among schedules in which a checkpoint stays until its backward op has run; and within
the rounding of bytes to a four hundredth of the budget. A schedule that gives a checkpoint up earlier can be faster,
and so can, in a network with branches, one that looks into its blocks: here a block is cut where little crosses, and
what it saves is all that its backward segment reads, or that without what is cheapest to make again. Deep chains at
small budgets, where things are computed many times, are what it is for.
"""

from __future__ import annotations

from dataclasses import replace

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.persistent import cheapest
from torch_odt.planning.problem import problem_of
from torch_odt.planning.registry import planner
from torch_odt.planning.schedule import Schedule


@planner("rotor")
def rotor(graph: TrainingGraph, costs: Costs, budget_bytes: int) -> Schedule:
    """Checkpoints by dynamic programming. Choose it for deep chains with little memory; it never pages."""
    return cheapest(problem_of(graph, replace(costs, transfers=None)), budget_bytes, "rotor")
