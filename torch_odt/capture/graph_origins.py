"""Whether a graph from elsewhere tells truly where its values come from.

Whose memory a value lies in decides what may be overwritten or updated in place: a file that calls a view of the batch
a part of a weight would have an update change the batch.
"""

from __future__ import annotations

from torch_odt.capture.graph import Op, TrainingGraph
from torch_odt.errors import PlanError


def check_origins(graph: TrainingGraph) -> None:
    """Check producers, results and bases against the ops.

    Raises:
        PlanError: an op writes what is not its own to write, or a value has another origin than the graph says.
    """
    _check_given(graph)
    makers: dict[int, Op] = {}
    given = {*graph.inputs, *graph.constants}
    for op in graph.program:
        early = next((read for read in (*op.reads, *op.shape_reads) if read not in given and read not in makers), None)
        if early is not None:
            raise _is_not(graph, early, f"is read by op {op.index} before it is computed")
        for value in op.results:
            if value in makers:
                raise _is_not(graph, value, f"is computed by ops {makers[value].index} and {op.index}")
            makers[value] = op
    for op in graph.ops[graph.program_length :]:
        if any(value not in makers for value in op.results):
            raise PlanError(f"op {op.index} of the graph computes again what nothing has computed")
    for found in graph.values:
        maker = makers.get(found.index)
        if (found.kind == "computed") != (maker is not None):
            raise _is_not(graph, found.index, "is computed by no op, or is both computed and given")
        if maker is not None:
            _check_computed(graph, found.index, maker)


def _check_given(graph: TrainingGraph) -> None:
    """Parameters and the like are there once, and lie in memory of their own."""
    seen: set[tuple[str, str | int | None]] = set()
    for index in (*graph.inputs, *graph.constants):
        value = graph.values[index]
        if value.kind == "computed" or value.base != index or value.producer is not None:
            raise _is_not(graph, index, "is given, and nevertheless computed or a part of another one")
        if index in graph.constants:
            if index in graph.inputs or value.kind != "constant":
                raise _is_not(graph, index, "is a constant, and called something else")
        elif value.target is not None:
            name = (value.kind, value.target)
            if name in seen:
                raise _is_not(graph, index, f"is {value.kind} {value.target} a second time")
            seen.add(name)


def _check_computed(graph: TrainingGraph, value: int, maker: Op) -> None:
    found = graph.values[value]
    if found.producer != maker.index:
        raise _is_not(graph, value, f"is computed by op {maker.index}, and not by {found.producer}")
    source = maker.reads[0] if maker.is_view and maker.reads else maker.overwrites
    shared = set() if source is None else {graph.values[source].base}
    own = set() if maker.is_view else {value}
    if found.base not in own | shared:
        raise _is_not(graph, value, "lies in other memory than its op says")


def _is_not(graph: TrainingGraph, value: int, what: str) -> PlanError:
    return PlanError(f"value {value} of the graph, {graph.values[value].name!r}, {what}")
