"""sage: evict at the moment of need by seconds per byte; cheap element-wise results are not kept at all.

Gim, Ko, "Memory-Efficient DNN Training on Mobile Devices" (SAGE), MobiSys 2022.

Objective: few recomputed seconds under a byte budget, greedily. Two rules. Element-wise ops whose results come back
from a few others are no states of the step: their results leave memory after the forward pass has read them and are
recomputed where the backward pass needs them. Of the states, the one with the fewest seconds per byte goes when the
next op does not fit, and nothing goes before. Different from the original: a storage costs its missing ancestors as
well as its own op, nobody keeps what no op reads any more, and where everything fits nothing is recomputed, because
here an element-wise op is not fused into its readers and takes its time.

SAGE's other half, gradient accumulation, is the choice among micro-batch sizes that every planner goes through: each
size gets the fastest recomputation that fits, the fastest total wins, and another budget decides anew at the end of a
batch. One half alone is the planner "keep-all" (accumulation only) or micro-batches of the whole batch
(recomputation only).

Near the optimum where normalisations and activations hold most of the bytes, as in convolutional networks at moderate
budgets. The score looks neither at how long a storage would be gone nor at what is gained by evicting two together, so
that on long chains of equal ops it recomputes the same ones again and again.
"""

from __future__ import annotations

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.calibrate import Attempt, calibrated
from torch_odt.planning.keep_set import forward_storages
from torch_odt.planning.problem import Problem, problem_of
from torch_odt.planning.registry import planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.scores import bytes_per_second
from torch_odt.planning.search import Search

# The paper's bound on the ops times the inputs of what is computed together with its reader.
_MOST_OPS_TIMES_INPUTS = 5

ELEMENT_WISE = frozenset(
    {
        "_to_copy", "abs", "add", "addcdiv", "addcmul", "bitwise_and", "bitwise_not", "bitwise_or", "clamp", "clone",
        "div", "elu", "eq", "erf", "exp", "ge", "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh", "le",
        "leaky_relu", "log", "logical_not", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "ne", "neg",
        "pow", "reciprocal", "relu", "rsqrt", "rsub", "sigmoid", "silu", "softplus", "sqrt", "square", "sub", "tanh",
        "threshold", "where",
        # This package's own.
        "batch_norm_act_normalize", "batch_norm_normalize", "dropout_apply", "scale_masked",
    }
)  # fmt: skip
"""Operators, without namespace and overload, that compute each element from the same element of what they read."""


def states(problem: Problem) -> frozenset[int]:
    """The storages of the forward pass that are worth keeping: all but cheap element-wise results."""
    found: set[int] = set()
    inlined: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
    for storage in forward_storages(problem):
        op = problem.rerun[storage]
        ops: set[int] = {op}
        inputs: set[int] = set()
        for source in problem.reads[op]:
            more_ops, more_inputs = inlined.get(source, ((), (source,)))
            ops.update(more_ops)
            inputs.update(more_inputs)
        name = problem.graph.ops[op].target.split(".")[:2][-1]
        if name in ELEMENT_WISE and len(ops) * len(inputs) <= _MOST_OPS_TIMES_INPUTS:
            inlined[storage] = frozenset(ops), frozenset(inputs)
        else:
            found.add(storage)
    return frozenset(found)


@planner("sage")
def sage(graph: TrainingGraph, costs: Costs, budget_bytes: int) -> Schedule:
    """Recompute element-wise ops, and evict on demand. Choose it with micro-batches, where planning must be quick."""
    problem = problem_of(graph, costs)
    kept = states(problem)

    def aim_at(aim_bytes: int) -> Attempt:
        search = Search(problem, aim_bytes)
        if not search.best.fits:
            search.try_keeping(kept, bytes_per_second)
        if not search.best.fits:
            # Keeping what an element-wise op reads may take more than keeping its result.
            search.try_evicting(bytes_per_second)
        return Attempt(search.schedule("sage"), search.best.peak_bytes, search.best.peak_bytes)

    return calibrated(aim_at, budget_bytes)
