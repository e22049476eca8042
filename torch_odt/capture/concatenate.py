"""Several training graphs of one step as a single one, so that they can be planned together.

A model with graph breaks is captured as several graphs, whose forward parts run one after the other and whose backward
parts run in the reverse order. What one graph hands to the next belongs to the caller, as it does when they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_odt.capture.graph import Op, Ref, TrainingGraph, map_refs


@dataclass
class Concatenation:
    """The graph of a whole step; for each op, value and output of it, the part it comes from and its index there."""

    graph: TrainingGraph
    ops: list[tuple[int, int]] = field(default_factory=list)
    values: list[tuple[int, int]] = field(default_factory=list)
    outputs: list[tuple[int, int]] = field(default_factory=list)


def concatenate(graphs: Sequence[TrainingGraph]) -> Concatenation:
    """Put graphs together in the order in which their forward parts run."""
    whole = Concatenation(TrainingGraph([], [], [], [], 0, 0))
    order = _order_of_ops(graphs)
    new_op = {origin: index for index, origin in enumerate(order)}
    first_value = [sum(len(g.values) for g in graphs[:part]) for part in range(len(graphs))]
    for part, graph in enumerate(graphs):
        _add_values(whole, part, graph, first_value[part], new_op)
    for origin in order:
        part, index = origin
        whole.graph.ops.append(_moved(graphs[part].ops[index], new_op[origin], first_value[part]))
    whole.ops = order
    whole.graph.boundary = sum(graph.boundary for graph in graphs)
    whole.graph.program_length = sum(graph.program_length for graph in graphs)
    return whole


def _order_of_ops(graphs: Sequence[TrainingGraph]) -> list[tuple[int, int]]:
    parts = range(len(graphs))
    forward = [(p, i) for p in parts for i in range(graphs[p].boundary)]
    backward = [(p, i) for p in reversed(parts) for i in range(graphs[p].boundary, graphs[p].program_length)]
    rematerializers = [(p, i) for p in parts for i in range(graphs[p].program_length, len(graphs[p].ops))]
    return forward + backward + rematerializers


def _add_values(
    whole: Concatenation, part: int, graph: TrainingGraph, first: int, new_op: dict[tuple[int, int], int]
) -> None:
    for value in graph.values:
        whole.graph.values.append(
            replace(
                value,
                index=first + value.index,
                name=f"{value.name}_{part}",
                base=first + value.base,
                producer=None if value.producer is None else new_op[part, value.producer],
                target=None if value.target is None else f"{part}:{value.target}",
            )
        )
        whole.values.append((part, value.index))
    whole.graph.inputs += [first + v for v in graph.inputs]
    whole.graph.constants |= {first + v: tensor for v, tensor in graph.constants.items()}
    whole.graph.rematerializers |= {first + v: new_op[part, op] for v, op in graph.rematerializers.items()}
    whole.graph.notes += [note for note in graph.notes if note not in whole.graph.notes]
    for index, output in enumerate(graph.outputs):
        whole.graph.outputs.append(replace(output, value=first + output.value, target=f"{part}:{output.target}"))
        whole.outputs.append((part, index))


def _moved(op: Op, index: int, first_value: int) -> Op:
    def move(arguments: Any) -> Any:
        return map_refs(arguments, lambda v: Ref(first_value + v))

    return replace(
        op,
        index=index,
        args=move(op.args),
        kwargs=move(op.kwargs),
        reads=tuple(first_value + v for v in op.reads),
        shape_reads=tuple(first_value + v for v in op.shape_reads),
        writes=tuple(None if w is None else first_value + w for w in op.writes),
        overwrites=None if op.overwrites is None else first_value + op.overwrites,
    )
