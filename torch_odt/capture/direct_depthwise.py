"""Depthwise convolutions of small images are computed at once.

oneDNN looks up, or compiles and keeps, a kernel for each shape, and brings the weight into its own order at each call:
some 35 microseconds, where the sums of a small image take five. `torch_odt.ops.depthwise_conv2d` does the sums alone.
They are added up in another order, so that results agree within rounding.

oneDNN's own sums are faster for wide windows, and what comes before them counts less the larger the batch is; all sizes
of micro-batches have to be computed alike. Gradients of weights wider than three it computes several times as slowly.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
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
# Products of a sample up to which an operator is taken, by the elements of a window. Of 22 shapes measured with one
# thread and two (AVX-512) they were then 0.9 to 4 times as fast as oneDNN in batches of one, gradients of wide weights
# 5 to 90 times; in batches of eight 0.8 to 1.9 and 3 to 28 times.
_OF_OUTPUT = {9: 1 << 22, 49: 1 << 19}
_OF_INPUT = {49: 1 << 22}
_OF_WEIGHT = {9: 1 << 22, 49: 1 << 24}
# Vectors of channels are full, or half of them.
_CHANNELS = 8
_FEWEST_CHANNELS = 16


def direct_depthwise(graph: TrainingGraph) -> str | None:
    """Depthwise convolutions of small images in channels_last, and their gradients, by operators of this package."""
    ops: list[Op] = []
    number = 1 + max((op.index for op in graph.ops), default=0)
    for op in graph.ops:
        ops += _forward(graph, op) or _backward(graph, op, number + len(ops)) or [op]
    taken = sum(op.target in (FORWARD, GRAD_INPUT, GRAD_WEIGHT) for op in ops)
    graph.ops = ops
    return f"{taken} depthwise convolutions and gradients are computed without oneDNN" if taken else None


def _forward(graph: TrainingGraph, op: Op) -> list[Op] | None:
    if op.target != _CONVOLUTION:
        return None
    x, weight, bias, stride, padding = op.args[:5]
    output = graph.values[op.results[0]]
    if not _is_depthwise(graph, x, weight, op.args[3:9]) or not _is_laid_out(output):
        return None
    if not _is_small(output, graph.values[weight.value], _OF_OUTPUT):
        return None
    args = (x, weight, bias, list(stride), list(padding))
    return [replace(op, target=FORWARD, args=args, reads=_reads(args))]


def _backward(graph: TrainingGraph, op: Op, number: int) -> list[Op] | None:
    """The gradients that the operators take, and behind them what is left to oneDNN; None where that is all."""
    if op.target != _CONVOLUTION_BACKWARD:
        return None
    gradient, x, weight = op.args[:3]
    if not _is_depthwise(graph, x, weight, op.args[4:10]):
        return None
    of_input, of_weight, _ = op.writes
    images, window, of_output = (graph.values[ref.value] for ref in (x, weight, gradient))
    geometry = [list(pair) for pair in op.args[4:6]]
    calls: dict[int, tuple[str, tuple[Any, ...], int]] = {}
    if of_input is not None and _is_laid_out(graph.values[of_input]) and _is_small(of_output, window, _OF_INPUT):
        calls[0] = GRAD_INPUT, (gradient, weight, list(images.shape[2:]), *geometry), of_input
    if of_weight is not None and _is_small(of_output, window, _OF_WEIGHT):
        result = graph.values[of_weight]
        if same_layout(result.shape, contiguous_stride(result.shape), result.stride):
            calls[1] = GRAD_WEIGHT, (gradient, x, list(window.shape[2:]), *geometry), of_weight
    if not calls:
        return None
    made = []
    for step, (target, args, result_index) in enumerate(calls.values()):
        graph.values[result_index].producer = number + step
        new = replace(op, index=number + step, target=target, args=args, reads=_reads(args), shape_reads=())
        made.append(replace(new, writes=(result_index,)))
    return [*made, *_left(graph, op, calls, number + len(made))]


def _left(graph: TrainingGraph, op: Op, taken: Collection[int], number: int) -> list[Op]:
    """The op without the gradients that are taken; a bias's alone is a sum."""
    writes = tuple(None if position in taken else value for position, value in enumerate(op.writes))
    of_bias = writes[2]
    if writes[0] is None and writes[1] is None:
        if of_bias is None:
            return []
        graph.values[of_bias].producer = number
        args = (op.args[0], [0, 2, 3])
        summed = replace(op, index=number, target="aten.sum.dim_IntList", args=args, reads=_reads(args), shape_reads=())
        return [replace(summed, writes=(of_bias,))]
    return [replace(op, args=(*op.args[:10], [value is not None for value in writes]), writes=writes)]


def _is_depthwise(graph: TrainingGraph, x: Ref, weight: Ref, geometry: Sequence[Any]) -> bool:
    """Whether the operators take a convolution, whatever its size.

    Args:
        geometry: stride, padding, dilation, whether it is transposed, output padding and groups.
    """
    images, window = graph.values[x.value], graph.values[weight.value]
    _, padding, dilation, is_transposed, _, groups = geometry
    if len(images.shape) != 4 or is_transposed or groups != images.shape[1] or window.shape[:2] != (groups, 1):
        return False
    if any(each != 1 for each in dilation) or any(p >= k for p, k in zip(padding, window.shape[2:], strict=True)):
        return False
    is_dense = is_contiguous(window.shape, window.stride) or counts_as_channels_last(window.shape, window.stride)
    fills_vectors = groups >= _FEWEST_CHANNELS and groups % _CHANNELS == 0
    return fills_vectors and is_dense and _are_images(images) and window.dtype == "float32"


def _is_small(output: Value, window: Value, most: Mapping[int, int]) -> bool:
    """Whether a sample has no more products than a limit, by the elements of a window.

    Args:
        output: of the convolution, or the gradient of that.
    """
    taps = math.prod(window.shape[2:])
    limit = next((products for elements, products in most.items() if taps <= elements), 0)
    return output.dtype == "float32" and math.prod(output.shape[1:]) * taps <= limit


def _are_images(value: Value) -> bool:
    return value.dtype == "float32" and counts_as_channels_last(value.shape, value.stride)


def _is_laid_out(result: Value) -> bool:
    """Whether a result lies as the operators lay it out."""
    return same_layout(result.shape, channels_last_stride(result.shape), result.stride)


def _reads(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(refs(args)))
