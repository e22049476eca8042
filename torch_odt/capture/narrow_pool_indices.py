"""Max-pooling's indices in a byte each, in place of eight: they count inside the window, not in the whole image.

The output and the gradient keep every bit. Windows are left alone whose indices anybody but their own backward op
reads, or which have more elements than a byte can count.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch_odt.capture.graph import Op, TrainingGraph, refs
from torch_odt.ops.max_pool import MOST_WINDOW_ELEMENTS

POOL = "aten.max_pool2d_with_indices.default"
POOL_BACKWARD = "aten.max_pool2d_with_indices_backward.default"
NARROW = "torch_odt.max_pool2d_with_offsets.default"
NARROW_BACKWARD = "torch_odt.max_pool2d_with_offsets_backward.default"


def narrow_pool_indices(graph: TrainingGraph) -> str | None:
    """The indices of a pooling that its backward op alone reads become offsets inside the window, of one byte."""
    readers: dict[int, list[Op]] = {}
    for op in graph.ops:
        for value in dict.fromkeys(refs([*op.args, op.kwargs])):
            readers.setdefault(value, []).append(op)
    kept = {graph.values[value].base for value in graph.output_values}
    replaced: dict[int, Op] = {}
    for op in graph.ops:
        if op.target != POOL or op.writes[1] is None or op.writes[1] in kept:
            continue
        backward = readers.get(op.writes[1], [])
        if len(backward) != 1 or not _is_backward_of(backward[0], op) or not _takes(graph, op):
            continue
        _narrow(graph, op.writes[1])
        window = _window(op)
        replaced[op.index] = replace(op, target=NARROW, args=(op.args[0], *window), kwargs={})
        gradient, like, *_, indices = backward[0].args
        args = (gradient, like, *window, indices)
        replaced[backward[0].index] = replace(backward[0], target=NARROW_BACKWARD, args=args, kwargs={})
    graph.ops = [replaced.get(op.index, op) for op in graph.ops]
    return f"{len(replaced) // 2} max-poolings keep a byte of each index" if replaced else None


def _is_backward_of(op: Op, pool: Op) -> bool:
    return op.target == POOL_BACKWARD and op.args[1] == pool.args[0] and _window(op) == _window(pool)


def _window(op: Op) -> tuple[Any, ...]:
    """Kernel size, stride, padding, dilation and ceil mode, written out, of a pooling or its backward op."""
    given = list(op.args[1:] if op.target == POOL else op.args[2:7])
    kernel_size, stride, padding, dilation, ceil_mode = given + [[], [0, 0], [1, 1], False][len(given) - 1 :]
    pairs = [kernel_size, stride or kernel_size, padding, dilation]
    return (*(list(pair) * (2 // len(pair)) for pair in pairs), ceil_mode)


def _takes(graph: TrainingGraph, pool: Op) -> bool:
    x = graph.values[pool.args[0].value]
    kernel_size, _, padding, dilation, _ = _window(pool)
    # A dilated window may step over a small input; ATen's index then points behind it.
    reaches = (pad == 0 or size >= step for size, pad, step in zip(x.shape[-2:], padding, dilation, strict=True))
    types = ("float32", "float64", "bfloat16")
    counts = math.prod(kernel_size) <= MOST_WINDOW_ELEMENTS
    return x.dtype in types and math.prod(x.shape) > 0 and counts and all(reaches)


def _narrow(graph: TrainingGraph, indices: int) -> None:
    value = graph.values[indices]
    value.dtype, value.nbytes = "uint8", value.nbytes // 8
