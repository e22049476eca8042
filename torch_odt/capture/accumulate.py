"""The step as it runs when gradients are there already: matrix products and embeddings add to them.

A later micro-batch adds its gradients to those of the earlier ones. Computed by themselves first, they cost a tensor of
the weight's size and three passes over it each; the dense gradient of a large vocabulary alone may be more than all
activations. A matrix product adds to its result for nothing, and an embedding touches the rows that occur.

The graph keeps its ops and values under their numbers, so a schedule of the one is a schedule of the other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value, refs
from torch_odt.capture.operators import register_operator

ACCUMULATING = frozenset({"odt.accumulate_mm", "odt.accumulate_embedding"})
"""Operators that change their first argument, a gradient."""

_FLOATING = ("float32", "float64")
# What swaps the two axes of a matrix, with the arguments behind the first one.
_SWAPS: dict[str, tuple[tuple[object, ...], ...]] = {
    "aten.t.default": ((),),
    "aten.transpose.int": ((0, 1), (1, 0)),
    "aten.permute.default": (([1, 0],),),
}


def accumulating(graph: TrainingGraph, *, without: Collection[int] = ()) -> TrainingGraph | None:
    """The graph whose gradients are added where that is possible; None when it is nowhere.

    The sums are those of plain accumulation in another order.

    Args:
        without: ops that stay as they are, because they run more than once.
    """
    fusion = _Fusion(graph, without)
    for output in graph.outputs_of("gradient"):
        fusion.try_gradient(output.value, str(output.target))
    return fusion.result()


class _Fusion:
    def __init__(self, graph: TrainingGraph, without: Collection[int]) -> None:
        self._graph = graph
        self._without = without
        self._parameters = {v.target: v for v in graph.values if v.kind == "parameter"}
        self._delivered: dict[int, int] = {}
        for output in graph.outputs:
            self._delivered[output.value] = self._delivered.get(output.value, 0) + 1
        self._ops: dict[int, Op] = {}
        self._accumulators: list[Value] = []

    def try_gradient(self, value: int, target: str) -> None:
        parameter = self._parameters[target]
        if parameter.dtype not in _FLOATING or self._graph.values[value].dtype != parameter.dtype:
            return
        if len(parameter.shape) != 2 or parameter.stride != (parameter.shape[1], 1):
            return
        index = len(self._graph.values) + len(self._accumulators)
        accumulator = replace(
            parameter, index=index, name=f"gradient_of_{parameter.name}", kind="gradient", base=index, target=target
        )
        changed = self._adding_to(accumulator, value)
        if changed is not None:
            self._ops |= changed
            self._accumulators.append(accumulator)

    def _adding_to(self, accumulator: Value, gradient: int) -> dict[int, Op] | None:
        """What computes a gradient, adding to the accumulator instead; None if somebody else reads a part of it."""
        changed: dict[int, Op] = {}
        waiting = [(gradient, False)]
        while waiting:
            value, transposed = waiting.pop()
            op = self._maker(value, accumulator, transposed, is_output=value == gradient)
            if op is None:
                return None
            if op.target in _SWAPS and op.args[1:] in _SWAPS[op.target]:
                waiting.append((op.reads[0], not transposed))
            elif op.target == "aten.add.Tensor" and not op.kwargs and len(op.reads) == 2 == len(op.args):
                changed[op.index] = replace(op, target="odt.first_of")
                waiting += [(part, transposed) for part in op.reads]
            elif not self._computes(op, accumulator, transposed, changed):
                return None
        return changed

    def _maker(self, value: int, accumulator: Value, transposed: bool, *, is_output: bool) -> Op | None:
        """The op that computes a value of the accumulator's form which nobody but one reader sees."""
        graph = self._graph
        info = graph.values[value]
        readers = len(graph.consumers[value]) + self._delivered.get(value, 0)
        if info.producer is None or readers != 1 or (value in self._delivered) != is_output:
            return None
        shape = accumulator.shape[::-1] if transposed else accumulator.shape
        op = graph.ops[info.producer]
        fits = (info.shape, info.dtype) == (shape, accumulator.dtype)
        return op if fits and op.phase == "backward" and op.index not in self._without else None

    def _computes(self, op: Op, accumulator: Value, transposed: bool, changed: dict[int, Op]) -> bool:
        into = Ref(accumulator.index)
        if op.target == "aten.mm.default":
            args = (into, *op.args, transposed)
            changed[op.index] = replace(op, target="odt.accumulate_mm", args=args, reads=_read_by(args))
            return True
        if op.target == "aten.embedding_dense_backward.default" and not transposed and not op.args[4]:
            gradient, indices, _, padding, _ = op.args
            args = (into, gradient, indices, padding)
            changed[op.index] = replace(op, target="odt.accumulate_embedding", args=args, reads=_read_by(args))
            return True
        return False

    def result(self) -> TrainingGraph | None:
        if not self._ops:
            return None
        graph = self._graph
        # What they compute has no bytes of its own.
        shared = {value for op in self._ops.values() for value in op.results}
        values = [replace(v, nbytes=0) if v.base in shared else v for v in graph.values]
        return replace(
            graph,
            ops=[self._ops.get(op.index, op) for op in graph.ops],
            values=[*values, *self._accumulators],
            inputs=[*graph.inputs, *(v.index for v in self._accumulators)],
        )


def _read_by(args: tuple[object, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(refs(args)))


@register_operator("accumulate_mm")
def _accumulate_mm(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, transposed: bool) -> torch.Tensor:
    return (into.t() if transposed else into).addmm_(left, right)


@register_operator("accumulate_embedding")
def _accumulate_embedding(
    into: torch.Tensor, gradient: torch.Tensor, indices: torch.Tensor, padding_idx: int
) -> torch.Tensor:
    kept = into[padding_idx].clone() if padding_idx >= 0 else None
    into.index_add_(0, indices.reshape(-1), gradient.reshape(-1, into.shape[-1]))
    if kept is not None:
        into[padding_idx] = kept
    return into


@register_operator("first_of")
def _first_of(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The sum of two parts that have both been added to the same tensor."""
    return first
