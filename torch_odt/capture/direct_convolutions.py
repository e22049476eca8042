"""Convolutions, and single gradients of them, become operators of this package; the rest stays torch's."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from torch_odt.capture.graph import Op, TrainingGraph, Value, refs
from torch_odt.capture.strides import (
    channels_last_stride,
    contiguous_stride,
    counts_as_channels_last,
    is_contiguous,
    same_layout,
)

_CONVOLUTION, _CONVOLUTION_BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"


@dataclass(frozen=True)
class Call:
    """An operator and what it is given."""

    target: str
    args: tuple[Any, ...]


Forward = Callable[[TrainingGraph, Op], Call | None]
# Of the gradients of input (0) and weight (1), those that are taken.
Gradients = Callable[[TrainingGraph, Op], dict[int, Call]]


def take_over(graph: TrainingGraph, forward: Forward, gradients: Gradients) -> int:
    """Put other operators in the place of torch's.

    Args:
        forward: what takes the place of an `aten.convolution`; None leaves it as it is.
        gradients: what takes the place of an `aten.convolution_backward`, which goes on computing the others. Of both,
            results that are not wanted, or lie otherwise than the operators lay them out, stay as they are.

    Returns:
        How many operators there are now.
    """
    ops: list[Op] = []
    number = 1 + max((op.index for op in graph.ops), default=0)
    count = 0
    for op in graph.ops:
        call = forward(graph, op) if op.target == _CONVOLUTION and _fits(graph, op, 0) else None
        calls = gradients(graph, op) if op.target == _CONVOLUTION_BACKWARD else {}
        calls = {position: each for position, each in calls.items() if _fits(graph, op, position)}
        count += (call is not None) + len(calls)
        if call is not None:
            ops.append(_made(op, call))
        elif calls:
            ops += _split(graph, op, calls, number + len(ops))
        else:
            ops.append(op)
    graph.ops = ops
    return count


def _split(graph: TrainingGraph, op: Op, calls: dict[int, Call], number: int) -> list[Op]:
    """The gradients that are taken, and behind them what is left."""
    made: list[Op] = []
    for position, call in calls.items():
        result = op.writes[position]
        assert result is not None
        graph.values[result].producer = number + len(made)
        made.append(replace(_made(op, call), index=number + len(made), shape_reads=(), writes=(result,)))
    return [*made, *_left(graph, op, calls, number + len(made))]


def _left(graph: TrainingGraph, op: Op, taken: Collection[int], number: int) -> list[Op]:
    """The op without the gradients that are taken; a bias's alone is a sum."""
    writes = tuple(None if position in taken else value for position, value in enumerate(op.writes))
    of_bias = writes[2]
    if writes[0] is None and writes[1] is None:
        if of_bias is None:
            return []
        graph.values[of_bias].producer = number
        summed = _made(op, Call("aten.sum.dim_IntList", (op.args[0], [0, 2, 3])))
        return [replace(summed, index=number, shape_reads=(), writes=(of_bias,))]
    return [replace(op, args=(*op.args[:10], [value is not None for value in writes]), writes=writes)]


def _fits(graph: TrainingGraph, op: Op, position: int) -> bool:
    """Whether a result is wanted, and lies as the operators lay it out: images (0) or a weight's gradient (1).

    Of images, strides of dimensions of size 1 count: what reads them may choose its layout, and its buffers, by them.
    """
    result = op.writes[position]
    if result is None:
        return False
    value = graph.values[result]
    if position == 1:
        return same_layout(value.shape, contiguous_stride(value.shape), value.stride)
    return len(value.shape) == 4 and tuple(value.stride) == channels_last_stride(value.shape)


def _made(op: Op, call: Call) -> Op:
    return replace(op, target=call.target, args=call.args, reads=tuple(dict.fromkeys(refs(call.args))))


def are_images(value: Value) -> bool:
    """Whether the operators read a value where it lies."""
    return value.dtype == "float32" and counts_as_channels_last(value.shape, value.stride)


def is_window(value: Value) -> bool:
    """Whether the operators read a weight where it lies."""
    is_dense = is_contiguous(value.shape, value.stride) or counts_as_channels_last(value.shape, value.stride)
    return value.dtype == "float32" and len(value.shape) == 4 and is_dense
