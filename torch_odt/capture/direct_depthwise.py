"""Depthwise convolutions of small images are computed at once.

oneDNN looks up, or compiles and keeps, a kernel for each shape, and brings the weight into its own order at each call.
Of a small image that takes ten times as long as the sums; `torch_odt.ops.depthwise_conv2d` does the sums alone. They
are added up in another order, so that results agree within rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value, refs
from torch_odt.capture.strides import (
    channels_last_stride,
    contiguous_stride,
    counts_as_channels_last,
    is_contiguous,
    same_layout,
)

FORWARD = "torch_odt.depthwise_conv2d.default"
GRAD_INPUT = "torch_odt.depthwise_conv2d_grad_input.default"
GRAD_WEIGHT = "torch_odt.depthwise_conv2d_grad_weight.default"
_CONVOLUTION, _CONVOLUTION_BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
# Products of a sample up to which no shape was found where oneDNN is faster (one thread, AVX-512, batches of 1 and 8).
MOST_PRODUCTS = 1 << 22


def direct_depthwise(graph: TrainingGraph) -> str | None:
    """Depthwise convolutions of small images in channels_last, and their gradients, by operators of this package."""
    ops: list[Op] = []
    taken = 0
    number = 1 + max((op.index for op in graph.ops), default=0)
    for op in graph.ops:
        new = _forward(graph, op) or _backward(graph, op, number + len(ops))
        taken += new is not None
        ops += [op] if new is None else new
    graph.ops = ops
    return f"{taken} depthwise convolutions and gradients are computed without oneDNN" if taken else None


def _forward(graph: TrainingGraph, op: Op) -> list[Op] | None:
    if op.target != _CONVOLUTION:
        return None
    x, weight, bias, stride, padding = op.args[:5]
    output = graph.values[op.results[0]]
    if not _is_small_depthwise(graph, x, weight, output, op.args[3:9]) or not _is_laid_out(output):
        return None
    args = (x, weight, bias, list(stride), list(padding))
    return [replace(op, target=FORWARD, args=args, reads=_reads(args))]


def _backward(graph: TrainingGraph, op: Op, number: int) -> list[Op] | None:
    if op.target != _CONVOLUTION_BACKWARD:
        return None
    gradient, x, weight = op.args[:3]
    if not _is_small_depthwise(graph, x, weight, graph.values[gradient.value], op.args[4:10]):
        return None
    of_input, of_weight, of_bias = op.writes
    images, window = graph.values[x.value], graph.values[weight.value]
    geometry = [list(pair) for pair in op.args[4:6]]
    calls: list[tuple[str, tuple[Any, ...], int]] = []
    if of_input is not None:
        if not _is_laid_out(graph.values[of_input]):
            return None
        calls.append((GRAD_INPUT, (gradient, weight, list(images.shape[2:]), *geometry), of_input))
    if of_weight is not None:
        of_window = graph.values[of_weight]
        if not same_layout(of_window.shape, contiguous_stride(of_window.shape), of_window.stride):
            return None
        calls.append((GRAD_WEIGHT, (gradient, x, list(window.shape[2:]), *geometry), of_weight))
    if of_bias is not None:
        calls.append(("aten.sum.dim_IntList", (gradient, [0, 2, 3]), of_bias))
    made = []
    for step, (target, args, result) in enumerate(calls):
        index = op.index if step == 0 else number + step
        graph.values[result].producer = index
        made.append(
            replace(op, index=index, target=target, args=args, reads=_reads(args), shape_reads=(), writes=(result,))
        )
    return made


def _is_small_depthwise(graph: TrainingGraph, x: Ref, weight: Ref, output: Value, geometry: Sequence[Any]) -> bool:
    """Whether the operators take a convolution.

    Args:
        output: what it returns, or the gradient of that.
        geometry: stride, padding, dilation, whether it is transposed, output padding and groups.
    """
    images, window = graph.values[x.value], graph.values[weight.value]
    _, padding, dilation, is_transposed, _, groups = geometry
    if len(images.shape) != 4 or is_transposed or groups != images.shape[1] or window.shape[:2] != (groups, 1):
        return False
    if any(each != 1 for each in dilation) or any(p >= k for p, k in zip(padding, window.shape[2:], strict=True)):
        return False
    is_dense = is_contiguous(window.shape, window.stride) or counts_as_channels_last(window.shape, window.stride)
    is_small = math.prod(output.shape[1:]) * math.prod(window.shape[2:]) <= MOST_PRODUCTS
    return is_small and is_dense and _are_images(images) and output.dtype == window.dtype == "float32"


def _are_images(value: Value) -> bool:
    return value.dtype == "float32" and counts_as_channels_last(value.shape, value.stride)


def _is_laid_out(result: Value) -> bool:
    """Whether a result lies as the operators lay it out."""
    return same_layout(result.shape, channels_last_stride(result.shape), result.stride)


def _reads(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(refs(args)))
