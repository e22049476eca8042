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

Sums are those of the same numbers; a kernel that is chosen by the number of channels may add them in another order,
but for int8's, whose sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value, refs
from torch_odt.capture.uses import Uses

_CONVOLUTION, _INT8_LAYER = "aten.convolution.default", "torch_odt.int8_layer.default"
_GROUPS, _WINDOWS = 8, 11  # among their arguments
_SLICE, _CONCATENATE, _EXPAND = "aten.slice.Tensor", "aten.cat.default", "aten.expand.default"
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
class _Convolution:
    """Where an operator that convolves has its arguments.

    Attributes:
        taken: what it takes; what widens returns them in this order.
        by_channel: what has a row for each channel that it returns, or is None; its weight is the first of them. (Of
            the slot of an int8 weight nothing is read.)
    """

    taken: tuple[int, ...]
    by_channel: tuple[int, ...]

    def weight(self, op: Op) -> Ref:
        ref = op.args[self.by_channel[0]]
        assert isinstance(ref, Ref)
        return ref

    def groups(self, op: Op) -> int:
        return int(op.args[_GROUPS] if op.target == _CONVOLUTION else op.args[_WINDOWS][6])

    def of_channels(self, op: Op, taken: Sequence[Ref], by_channel: Sequence[Ref | None], groups: int) -> list[Any]:
        """The arguments for some of the channels."""
        args = list(op.args)
        for position, value in zip((*self.taken, *self.by_channel), (*taken, *by_channel), strict=True):
            args[position] = value
        if op.target == _CONVOLUTION:
            args[_GROUPS] = groups
        else:
            args[_WINDOWS] = [*args[_WINDOWS][:6], groups]
        return args


# An activation in int8 is its values and a slot: one number, seen in their shape, whose gradient is theirs.
_CONVOLUTIONS = {_CONVOLUTION: _Convolution((0,), (1, 2)), _INT8_LAYER: _Convolution((0, 1), (3, 5, 6))}


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
    needs = {op.index: _need(graph, op) for op in graph.ops if _is_image_convolution(graph, op)}
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
            if (
                _is_plain_convolution(graph, producer)
                and producer.target == depthwise.target
                and _CONVOLUTIONS[producer.target].groups(producer) == 1
                and _takes_all(reader, producer)
                and all(uses.is_for(result, [reader]) for result in producer.results)
            ):
                expansion = _expansion(graph, producer, tuple(between), depthwise)
                if expansion is not None:
                    yield expansion
            break


def _is_image_convolution(graph: TrainingGraph, op: Op) -> bool:
    return op.target in _CONVOLUTIONS and len(graph.values[op.args[0].value].shape) == 4


def _is_plain_convolution(graph: TrainingGraph, op: Op) -> bool:
    if not _is_image_convolution(graph, op) or op.kwargs or op.phase != "forward":
        return False
    if op.target == _INT8_LAYER:
        # What its clamp leaves a backward pass is its third result.
        return op.writes[2] is None and not _is_pooled(op)
    values = [graph.values[value] for value in (*op.reads, *op.results)]
    return not op.args[6] and len({value.dtype for value in values}) == 1


def _is_pooled(op: Op) -> bool:
    """Whether an int8 layer returns less than its convolution: behind seven numbers stand those of a pool."""
    return op.target == _INT8_LAYER and len(op.args[_WINDOWS]) > 7


def _is_depthwise(graph: TrainingGraph, op: Op) -> bool:
    kind = _CONVOLUTIONS[op.target]
    channels = graph.values[op.args[0].value].shape[1]
    return kind.groups(op) == channels == graph.values[kind.weight(op).value].shape[0]


def _takes_all(reader: Op, producer: Op) -> bool:
    """Whether an op takes everything that the one before it returns: of int8, values and slot."""
    taken = _CONVOLUTIONS[reader.target].taken if reader.target in _CONVOLUTIONS else (0,)
    return [reader.args[position].value for position in taken] == list(producer.results)


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
    weight_ref = _CONVOLUTIONS[convolution.target].weight(convolution)
    x, weight, result = (
        graph.values[value] for value in (convolution.args[0].value, weight_ref.value, convolution.results[0])
    )
    is_made = graph.values[weight.base].kind == "computed"
    convolved = _convolved_nbytes(x, weight, convolution.args[_WINDOWS]) if _is_pooled(convolution) else 0
    return _nbytes(x) + convolved + _nbytes(result) + is_made * math.prod(weight.shape) * _itemsize(weight)


def _convolved_nbytes(x: Value, weight: Value, windows: Sequence[int]) -> int:
    """What an int8 convolution makes of one sample before it is pooled."""
    sizes = zip(x.shape[2:], weight.shape[2:], windows[:2], windows[2:4], windows[4:6], strict=True)
    pixels = [(n + 2 * pad - dilation * (k - 1) - 1) // stride + 1 for n, k, stride, pad, dilation in sizes]
    return int(weight.shape[0]) * math.prod(pixels)


def _nbytes(activation: Value) -> int:
    """Of one sample, so that micro-batches of all sizes are computed alike."""
    return math.prod(activation.shape[1:]) * _itemsize(activation)


def _itemsize(value: Value) -> int:
    return int(getattr(torch, value.dtype).itemsize)


def _next_index(graph: TrainingGraph, replaced: dict[int, list[Op]]) -> int:
    return 1 + max(op.index for ops in (graph.ops, *replaced.values()) for op in ops)


def _split(graph: TrainingGraph, expansion: _Expansion, number: int) -> list[Op]:
    new: list[Op] = []

    def add(like: Op, args: Sequence[Any], results: Sequence[Value], *, is_view: bool = False) -> list[Ref]:
        kept = iter(results)
        op = replace(
            like, index=number + len(new), args=tuple(args), kwargs={} if is_view else like.kwargs,
            reads=tuple(dict.fromkeys(refs(args))), shape_reads=(), is_view=is_view,
            writes=tuple(next(kept).index if each is not None else None for each in like.writes),
        )  # fmt: skip
        for result in results:
            result.producer = op.index
        new.append(op)
        return [Ref(result.index) for result in results]

    def add_view(target: str, tensor: Ref, args: tuple[Any, ...], view: Value) -> Ref:
        like = replace(expansion.widening, target=target, writes=(view.index,))
        return add(like, (tensor, *args), [view], is_view=True)[0]

    def part_of(tensor: Ref | None, start: int, stop: int) -> Ref | None:
        if tensor is None:
            return None
        value = graph.values[tensor.value]
        shape = (stop - start, *value.shape[1:])
        return add_view(_SLICE, tensor, (0, start, stop), graph.add_value(replace(value, shape=shape), value.base))

    channels = graph.values[expansion.widening.results[0]].shape[1]
    size = channels // expansion.parts
    together: list[list[Ref]] = []
    for start in range(0, channels, size):
        kind = _CONVOLUTIONS[expansion.widening.target]
        taken = [expansion.widening.args[position] for position in kind.taken]
        for op in (expansion.widening, *expansion.between, expansion.depthwise):
            results = [graph.add_value(_some_channels(graph.values[each], size)) for each in op.results]
            if op.target not in _CONVOLUTIONS:
                taken = add(op, (*taken, *op.args[1:]), results)
                continue
            by_channel = [part_of(op.args[position], start, start + size) for position in kind.by_channel]
            groups = size if op is expansion.depthwise else 1
            taken = add(op, kind.of_channels(op, taken, by_channel, groups), results)
        together.append(taken)
    values, *slots = (graph.values[each] for each in expansion.depthwise.results)
    like = replace(expansion.depthwise, target=_CONCATENATE, writes=(values.index,))
    add(like, ([each[0] for each in together], 1), [values])
    for slot, part in zip(slots, together[0][1:], strict=True):
        _look_into(graph, slot, graph.values[part.value])
        one = graph.add_value(replace(slot, shape=(slot.shape[0], 1, *slot.shape[2:])), slot.base)
        add_view(_EXPAND, add_view(_SLICE, part, (1, 0, 1), one), (list(slot.shape),), slot)
    return new


def _look_into(graph: TrainingGraph, value: Value, other: Value) -> None:
    """What lay in a value lies in another one's memory."""
    for each in graph.values:
        if each.base == value.index:
            each.base = other.base


def _some_channels(value: Value, channels: int) -> Value:
    """A value of so many of its channels, as densely laid out."""
    batch, _, rows, columns = value.shape
    shape = (batch, channels, rows, columns)
    if value.nbytes == _itemsize(value):  # one number, seen everywhere
        return replace(value, shape=shape)
    is_channels_last = value.stride[1] == 1 and value.stride[3] == value.shape[1]
    stride = (
        (rows * columns * channels, 1, columns * channels, channels)
        if is_channels_last
        else (rows * columns * channels, rows * columns, columns, 1)
    )
    return replace(value, shape=shape, stride=stride, nbytes=value.nbytes * channels // value.shape[1])
