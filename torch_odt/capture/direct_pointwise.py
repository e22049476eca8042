"""Convolutions of small images with windows of one element are computed at once.

oneDNN compiles and keeps kernels for some shapes and hands others to MKL, which copies large weights whole and keeps
the room; of small images all that takes as long as the sums. `torch_odt.ops.pointwise_conv2d` does the sums alone. They
are added up in another order, so that results agree within rounding.

The larger the images and the batch, the less is gained; all sizes of micro-batches have to be computed alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch_odt.capture.direct_convolutions import Call, are_images, is_window, take_over
from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value

FORWARD = "torch_odt.pointwise_conv2d.default"
GRAD_INPUT = "torch_odt.pointwise_conv2d_grad_input.default"
GRAD_WEIGHT = "torch_odt.pointwise_conv2d_grad_weight.default"
# Products of a sample up to which operators are taken. Of 23 shapes measured (AVX-512, Zen 4; batches of one and eight)
# they were then 1.0 to 5.7 times as fast as oneDNN with one thread; with two 1.0 to 5.5 times, and gradients of weights
# 0.7 to 6: the slowest were of many pixels and few channels, in batches of eight. With more products there is no
# difference worth the other rounding.
_MOST_PRODUCTS = 1 << 24
# Half a vector.
_CHANNELS = 8


def direct_pointwise(graph: TrainingGraph) -> str | None:
    """Pointwise convolutions of small images in channels_last, and their gradients, by operators of this package."""
    taken = take_over(graph, _forward, _gradients)
    return f"{taken} pointwise convolutions and gradients are computed without oneDNN" if taken else None


def _forward(graph: TrainingGraph, op: Op) -> Call | None:
    x, weight, bias = op.args[:3]
    is_taken = _is_taken(graph, x, weight, op.args[3:9], graph.values[op.results[0]])
    return Call(FORWARD, (x, weight, bias)) if is_taken else None


def _gradients(graph: TrainingGraph, op: Op) -> dict[int, Call]:
    gradient, x, weight = op.args[:3]
    if not _is_taken(graph, x, weight, op.args[4:10], graph.values[gradient.value]):
        return {}
    return {0: Call(GRAD_INPUT, (gradient, weight)), 1: Call(GRAD_WEIGHT, (gradient, x))}


def _is_taken(graph: TrainingGraph, x: Ref, weight: Ref, geometry: Sequence[Any], output: Value) -> bool:
    """Whether a convolution is pointwise, and of no more products than are taken.

    Args:
        output: of the convolution, or the gradient of that.
    """
    products = math.prod(output.shape[1:]) * graph.values[x.value].shape[1]
    return _is_pointwise(graph, x, weight, geometry) and products <= _MOST_PRODUCTS


def _is_pointwise(graph: TrainingGraph, x: Ref, weight: Ref, geometry: Sequence[Any]) -> bool:
    """Whether the operators take a convolution, whatever its size.

    Args:
        geometry: stride, padding, dilation, whether it is transposed, output padding and groups.
    """
    images, window = graph.values[x.value], graph.values[weight.value]
    stride, padding, _, is_transposed, _, groups = geometry
    if len(images.shape) != 4 or is_transposed or groups != 1 or window.shape[2:] != (1, 1):
        return False
    if any(step != 1 for step in stride) or any(padding):
        return False
    fills_vectors = all(channels % _CHANNELS == 0 for channels in window.shape[:2])
    return fills_vectors and is_window(window) and are_images(images)
