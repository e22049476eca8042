"""A wide tensor between a convolution and a depthwise one exists some channels at a time.

An inverted residual widens its input by a convolution over all channels, and narrows it again behind one that works on
each channel for itself. Where nothing runs backward between the two (a frozen front, as `odt.adapt` leaves one), nobody
else reads what is wide: some of its channels are computed, go through the depthwise convolution and are gone before the
next ones are there. What the depthwise convolutions return is put together again.

That costs some more calls, so it is done only where it changes what every plan needs: where the convolution that needs
most for a sample lies at such a place. Memory is to hold only the next largest then. A BatchNorm between the two is in
the way, unless `fold_batch_norm` has made it a part of the convolution. (J. Lin et al., "MCUNetV2:
Memory-Efficient Patch-based Inference for Tiny Deep Learning", NeurIPS 2021, computes the same layers some pixels at a
time, and the pixels between patches twice. Channels have nothing between them.)

Sums are those of the same numbers; a kernel that is chosen by the number of channels may add them in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value, refs
from torch_odt.capture.uses import Uses

_CONVOLUTION, _SLICE, _CONCATENATE = "aten.convolution.default", "aten.slice.Tensor", "aten.cat.default"
_ACTIVATIONS = frozenset(
    f"aten.{name}.default"
    for name in (
        "relu",
        "hardtanh",
        "clamp",
        "silu",
        "hardswish",
        "hardsigmoid",
        "sigmoid",
        "gelu",
        "leaky_relu",
        "elu",
    )
)
# What vector kernels of convolutions take at a time.
_CHANNELS = 16


@dataclass(frozen=True)
class _Expansion:
    """A convolution that widens, element-wise ops, and a depthwise convolution.

    Attributes:
        parts: so many times the channels between them are cut.
        nbytes_in_parts: what all of this needs at a time when it is cut.
    """

    widening: Op
    between: tuple[Op, ...]
    depthwise: Op
    parts: int
    nbytes_in_parts: int


def split_expansions(graph: TrainingGraph) -> str | None:
    """The widest tensors between two convolutions are computed some channels at a time."""
    needs = {op.index: _need(graph, op) for op in graph.ops if op.target == _CONVOLUTION}
    expansions = {each.depthwise.index: each for each in _find(graph)}
    chosen: list[_Expansion] = []
    while needs:
        largest = max(needs, key=needs.__getitem__)
        # The widening convolution returns what the other one takes.
        of_largest = [each for each in expansions.values() if largest in (each.widening.index, each.depthwise.index)]
        if not of_largest:
            break
        [expansion] = of_largest
        del expansions[expansion.depthwise.index]
        needs[expansion.widening.index] = needs[expansion.depthwise.index] = expansion.nbytes_in_parts
        chosen.append(expansion)
    replaced: dict[int, list[Op]] = {}
    for expansion in chosen:
        for op in (expansion.widening, *expansion.between):
            replaced[op.index] = []
        replaced[expansion.depthwise.index] = _split(graph, expansion, _next_index(graph, replaced))
    graph.ops = [new for op in graph.ops for new in replaced.get(op.index, [op])]
    return f"{len(chosen)} wide activations are computed some channels at a time" if chosen else None


def _find(graph: TrainingGraph) -> Iterator[_Expansion]:
    uses = Uses(graph)
    for depthwise in graph.ops:
        if not _is_plain_convolution(graph, depthwise) or not _is_depthwise(graph, depthwise):
            continue
        between: list[Op] = []
        reader, value = depthwise, depthwise.args[0].value
        while uses.is_for(value, [reader]) and (producer := uses.producer(value)) is not None:
            if producer.phase != "forward" or producer.is_random:
                break
            if producer.target in _ACTIVATIONS and len(producer.results) == 1:
                between.insert(0, producer)
                reader, value = producer, producer.reads[0]
                continue
            if _is_plain_convolution(graph, producer) and producer.args[8] == 1:
                expansion = _expansion(graph, producer, tuple(between), depthwise)
                if expansion is not None:
                    yield expansion
            break


def _is_plain_convolution(graph: TrainingGraph, op: Op) -> bool:
    if op.target != _CONVOLUTION or op.kwargs or op.phase != "forward" or op.args[6]:
        return False
    values = [graph.values[value] for value in (*op.reads, *op.results)]
    return len({value.dtype for value in values}) == 1 and len(graph.values[op.args[0].value].shape) == 4


def _is_depthwise(graph: TrainingGraph, op: Op) -> bool:
    channels = graph.values[op.args[0].value].shape[1]
    return op.args[8] == channels == graph.values[op.args[1].value].shape[0]


def _expansion(graph: TrainingGraph, widening: Op, between: tuple[Op, ...], depthwise: Op) -> _Expansion | None:
    """None where to cut would not need less."""
    taken, wide, returned = (
        graph.values[value] for value in (widening.args[0].value, widening.results[0], depthwise.results[0])
    )
    channels = wide.shape[1]
    possible = [parts for parts in range(2, channels // _CHANNELS + 1) if channels % (parts * _CHANNELS) == 0]
    if not possible:
        return None
    nbytes_taken, nbytes_wide, nbytes_returned = map(_nbytes, (taken, wide, returned))
    narrow = max(nbytes_taken, nbytes_returned)
    parts = next((parts for parts in possible if nbytes_wide <= parts * narrow), possible[-1])
    at_a_time = max(nbytes_taken + nbytes_wide // parts + nbytes_returned, 2 * nbytes_returned)
    if at_a_time >= nbytes_wide + nbytes_returned:
        return None
    return _Expansion(widening, between, depthwise, parts, at_a_time)


def _need(graph: TrainingGraph, convolution: Op) -> int:
    """What a convolution takes and returns for one sample, and its weight where the step makes that."""
    x, weight, result = (
        graph.values[value] for value in (*(each.value for each in convolution.args[:2]), convolution.results[0])
    )
    is_made = graph.values[weight.base].kind == "computed"
    return _nbytes(x) + _nbytes(result) + is_made * math.prod(weight.shape) * _itemsize(weight)


def _nbytes(activation: Value) -> int:
    """Of one sample, so that micro-batches of all sizes are computed alike."""
    return math.prod(activation.shape[1:]) * _itemsize(activation)


def _itemsize(value: Value) -> int:
    return int(getattr(torch, value.dtype).itemsize)


def _next_index(graph: TrainingGraph, replaced: dict[int, list[Op]]) -> int:
    return 1 + max(op.index for ops in (graph.ops, *replaced.values()) for op in ops)


def _split(graph: TrainingGraph, expansion: _Expansion, number: int) -> list[Op]:
    new: list[Op] = []

    def add(like: Op, args: tuple[Any, ...], result: Value, *, is_view: bool = False) -> Ref:
        op = replace(
            like, index=number + len(new), args=args, kwargs={} if is_view else like.kwargs,
            reads=tuple(dict.fromkeys(refs(args))), shape_reads=(), writes=(result.index,), is_view=is_view,
        )  # fmt: skip
        result.producer = op.index
        new.append(op)
        return Ref(result.index)

    def part_of(tensor: Ref | None, start: int, stop: int) -> Ref | None:
        if tensor is None:
            return None
        value = graph.values[tensor.value]
        shape = (stop - start, *value.shape[1:])
        view = graph.add_value(replace(value, shape=shape), value.base)
        like = replace(expansion.widening, target=_SLICE)
        return add(like, (tensor, 0, start, stop), view, is_view=True)

    channels = graph.values[expansion.widening.results[0]].shape[1]
    size = channels // expansion.parts
    together: list[Ref] = []
    for start in range(0, channels, size):
        x = expansion.widening.args[0]
        for op in (expansion.widening, *expansion.between, expansion.depthwise):
            result = graph.add_value(_some_channels(graph.values[op.results[0]], size))
            if op.target != _CONVOLUTION:
                x = add(op, (x, *op.args[1:]), result)
                continue
            weight, bias = (part_of(tensor, start, start + size) for tensor in op.args[1:3])
            groups = size if op is expansion.depthwise else 1
            x = add(op, (x, weight, bias, *op.args[3:8], groups), result)
        together.append(x)
    whole = graph.values[expansion.depthwise.results[0]]
    add(replace(expansion.depthwise, target=_CONCATENATE), (together, 1), whole)
    return new


def _some_channels(value: Value, channels: int) -> Value:
    """A value of so many of its channels, as densely laid out."""
    batch, _, rows, columns = value.shape
    shape = (batch, channels, rows, columns)
    is_channels_last = value.stride[1] == 1 and value.stride[3] == value.shape[1]
    stride = (
        (rows * columns * channels, 1, columns * channels, channels)
        if is_channels_last
        else (rows * columns * channels, rows * columns, columns, 1)
    )
    return replace(value, shape=shape, stride=stride, nbytes=value.nbytes * channels // value.shape[1])
