"""Depthwise convolutions of small images are computed at once.

oneDNN looks up, or compiles and keeps, a kernel for each shape, and brings the weight into its own order at each call:
some 35 microseconds, where the sums of a small image take five. `torch_odt.ops.depthwise_conv2d` does the sums alone.
They are added up in another order, so that results agree within rounding.

oneDNN's own sums are faster for wide windows, and what comes before them counts less the larger the batch is; all sizes
of micro-batches have to be computed alike. Gradients of weights wider than three it computes several times as slowly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch_odt.capture.direct_convolutions import Call, are_images, is_window, take_over
from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value

FORWARD = "torch_odt.depthwise_conv2d.default"
GRAD_INPUT = "torch_odt.depthwise_conv2d_grad_input.default"
GRAD_WEIGHT = "torch_odt.depthwise_conv2d_grad_weight.default"
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
    taken = take_over(graph, _forward, _gradients)
    return f"{taken} depthwise convolutions and gradients are computed without oneDNN" if taken else None


def _forward(graph: TrainingGraph, op: Op) -> Call | None:
    x, weight, bias, stride, padding = op.args[:5]
    output = graph.values[op.results[0]]
    if not _is_depthwise(graph, x, weight, op.args[3:9]):
        return None
    if not _is_small(output, graph.values[weight.value], _OF_OUTPUT):
        return None
    return Call(FORWARD, (x, weight, bias, list(stride), list(padding)))


def _gradients(graph: TrainingGraph, op: Op) -> dict[int, Call]:
    gradient, x, weight = op.args[:3]
    calls: dict[int, Call] = {}
    if not _is_depthwise(graph, x, weight, op.args[4:10]):
        return calls
    images, window, of_output = (graph.values[ref.value] for ref in (x, weight, gradient))
    geometry = [list(pair) for pair in op.args[4:6]]
    if _is_small(of_output, window, _OF_INPUT):
        calls[0] = Call(GRAD_INPUT, (gradient, weight, list(images.shape[2:]), *geometry))
    if _is_small(of_output, window, _OF_WEIGHT):
        calls[1] = Call(GRAD_WEIGHT, (gradient, x, list(window.shape[2:]), *geometry))
    return calls


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
    fills_vectors = groups >= _FEWEST_CHANNELS and groups % _CHANNELS == 0
    return fills_vectors and is_window(window) and are_images(images)


def _is_small(output: Value, window: Value, most: Mapping[int, int]) -> bool:
    """Whether a sample has no more products than a limit, by the elements of a window.

    Args:
        output: of the convolution, or the gradient of that.
    """
    taps = math.prod(window.shape[2:])
    limit = next((products for elements, products in most.items() if taps <= elements), 0)
    return output.dtype == "float32" and math.prod(output.shape[1:]) * taps <= limit
