"""A frozen BatchNorm behind a convolution becomes a part of that convolution's weight and bias.

With fixed statistics and a frozen weight a BatchNorm multiplies each channel by a constant and adds another
(`torch_odt.adapt.FrozenBatchNorm`). To scale the convolution's weight instead costs a pass over the weight in the place
of one over the activation, and the tensor between the two never exists. In the backward pass the gradient goes through
the scaled weight, so that it need not be scaled itself; but where weights are larger than images, at the end of a
network, the gradient is scaled, and the scaled weight is gone after the forward pass.

The scale is rounded into the weight before products are summed, not after: results agree within rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value, refs
from torch_odt.capture.uses import Uses

_CONVOLUTION, _CONVOLUTION_BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
_AFFINE, _TIMES, _TIMES_NUMBER = "aten.addcmul.default", "aten.mul.Tensor", "aten.mul.Scalar"
_VIEW = "aten.view.default"


@dataclass(frozen=True)
class _Match:
    """`convolution * scale + shift`, with a number for each channel.

    Attributes:
        scale, shift: those numbers, in one dimension.
        backward: the convolution's backward op and the gradient that it is to be given, where that is scaled now.
    """

    convolution: Op
    affine: Op
    scale: int
    shift: int
    backward: tuple[Op, Ref] | None


def fold_batch_norm(graph: TrainingGraph) -> str | None:
    """Convolutions take over scale and shift of the frozen BatchNorms behind them."""
    uses = Uses(graph)
    matches = [match for op in graph.ops if (match := _find(graph, uses, op)) is not None]
    folded: dict[int, list[Op]] = {}
    numbers = count(1 + max((op.index for op in graph.ops), default=0))
    for match in matches:
        scaled_weight, folded[match.affine.index] = _fold(graph, uses, match, numbers)
        folded[match.convolution.index] = []
        if match.backward is not None:
            op, gradient = match.backward
            args = (gradient, op.args[1], Ref(scaled_weight), *op.args[3:])
            folded[op.index] = [replace(op, args=args, reads=_reads(args, but=op.shape_reads))]
    graph.ops = [new for op in graph.ops for new in folded.get(op.index, [op])]
    for match in matches:
        _make_late(graph, match.convolution.args[1].value)
    return f"{len(matches)} frozen BatchNorms are a part of the convolutions in front of them" if matches else None


def _find(graph: TrainingGraph, uses: Uses, affine: Op) -> _Match | None:
    if affine.target != _AFFINE or affine.kwargs or not all(isinstance(a, Ref) for a in affine.args):
        return None
    shift, x, scale = (argument.value for argument in affine.args)
    convolution = uses.producer(x)
    per_channel = [_of_channels(graph, uses, value) for value in (scale, shift)]
    if convolution is None or convolution.target != _CONVOLUTION or None in per_channel:
        return None
    is_transposed = convolution.args[6]
    before, after = graph.values[x], graph.values[affine.results[0]]
    if is_transposed or not uses.is_for(x, [affine]) or (before.shape, before.stride) != (after.shape, after.stride):
        return None
    if before.dtype != after.dtype or graph.values[convolution.args[1].value].dtype != after.dtype:
        return None
    backward = _find_backward(graph, uses, convolution, scale)
    return _Match(convolution, affine, per_channel[0], per_channel[1], backward)  # type: ignore[arg-type]


def _of_channels(graph: TrainingGraph, uses: Uses, value: int) -> int | None:
    """The numbers in one dimension that a value of the shape (channels, 1, ...) is a view of."""
    producer = uses.producer(value)
    if producer is None or producer.target != _VIEW:
        return None
    source = graph.values[producer.reads[0]]
    channels = graph.values[value].shape[0]
    return source.index if source.shape == (channels,) and source.stride == (1,) else None


def _find_backward(graph: TrainingGraph, uses: Uses, convolution: Op, scale: int) -> tuple[Op, Ref] | None:
    """The op that propagates the gradient through the convolution, where the gradient is scaled for it alone."""
    weight = graph.values[convolution.args[1].value]
    for op in uses.readers(weight.index):
        if op.target != _CONVOLUTION_BACKWARD or list(op.args[10]) != [True, False, False]:
            continue
        scaling = uses.producer(op.args[0].value)
        if scaling is None or scaling.target != _TIMES or not uses.is_for(op.args[0].value, [op]):
            continue
        gradient, factor = scaling.args
        before, after = graph.values[gradient.value], graph.values[op.args[0].value]
        is_alike = (before.shape, before.stride) == (after.shape, after.stride)
        # Of one sample, because micro-batches of all sizes have to be computed alike.
        image_elements = math.prod(before.shape[1:])
        if is_alike and scale in _unscaled(uses, factor) and math.prod(weight.shape) <= image_elements:
            return op, gradient
    return None


def _unscaled(uses: Uses, factor: Any) -> Iterator[int]:
    """The value itself, and what it is once a number: addcmul's backward pass multiplies by its `value`."""
    if isinstance(factor, Ref):
        yield factor.value
        producer = uses.producer(factor.value)
        if producer is not None and producer.target == _TIMES_NUMBER and producer.args[1] == 1:
            yield producer.reads[0]


def _fold(graph: TrainingGraph, uses: Uses, match: _Match, numbers: Iterator[int]) -> tuple[int, list[Op]]:
    """The scaled weight, and the ops that take the place of the affine map.

    Where the weight is made of codes and a scale of its own (`torch_odt.adapt.StoredConv2d`), the scales are multiplied
    with each other first, so that there is one weight and not two.
    """
    weight = graph.values[match.convolution.args[1].value]
    scale = graph.values[match.scale]
    ones = (1,) * (len(weight.shape) - 1)
    like = replace(scale, shape=(*scale.shape, *ones), stride=(1,) * len(weight.shape))
    column = graph.add_value(like, scale.base).index
    scaled = graph.add_value(weight).index
    new = [_op(next(numbers), _VIEW, (Ref(scale.index), [-1, *ones]), column, is_view=True)]
    unscaled, factor = Ref(weight.index), Ref(column)
    if (stored := _stored(graph, uses, weight.index, graph.values[column])) is not None:
        unscaled, own_scale = stored
        factor = Ref(graph.add_value(graph.values[own_scale.value]).index)
        new.append(_op(next(numbers), _TIMES, (own_scale, Ref(column)), factor.value))
    new.append(_op(next(numbers), _TIMES, (unscaled, factor), scaled))
    bias, shift = match.convolution.args[2], match.shift
    if bias is not None:
        shift = graph.add_value(graph.values[shift]).index
        new.append(_op(next(numbers), _AFFINE, (Ref(match.shift), bias, Ref(scale.index)), shift))
    args = (match.convolution.args[0], Ref(scaled), Ref(shift), *match.convolution.args[3:])
    new.append(replace(match.affine, target=_CONVOLUTION, args=args, reads=_reads(args)))
    for op in new:
        for value in op.results:
            graph.values[value].producer = op.index
    return scaled, new


def _make_late(graph: TrainingGraph, weight: int) -> None:
    """A weight that is made of codes, and that the backward pass alone needs by now, is made there."""
    uses = Uses(graph)
    maker, readers = uses.producer(weight), uses.readers(weight)
    is_late = readers and all(op.phase == "backward" for op in readers) and uses.is_for(weight, readers)
    if maker is None or maker.phase == "backward" or not is_late or _codes(graph, maker) is None:
        return
    ops = [op for op in graph.ops if op is not maker]
    ops.insert(next(i for i, op in enumerate(ops) if op is readers[0]), replace(maker, phase="backward"))
    graph.ops = ops


def _stored(graph: TrainingGraph, uses: Uses, weight: int, column: Value) -> tuple[Ref, Ref] | None:
    """The codes and the scales of each channel that a weight is the product of."""
    maker = uses.producer(weight)
    made_of = None if maker is None else _codes(graph, maker)
    if made_of is None:
        return None
    own = graph.values[made_of[1].value]
    return made_of if (own.shape, own.dtype) == (column.shape, column.dtype) else None


def _codes(graph: TrainingGraph, maker: Op) -> tuple[Ref, Ref] | None:
    """The codes in 8 bits and the scales that an op multiplies with each other, if it does."""
    if maker.target != _TIMES or maker.kwargs or not all(isinstance(argument, Ref) for argument in maker.args):
        return None
    codes, scale = maker.args
    return (codes, scale) if graph.values[codes.value].dtype == "int8" else None


def _op(index: int, target: str, args: tuple[Any, ...], result: int, *, is_view: bool = False) -> Op:
    return Op(
        index=index,
        target=target,
        args=args,
        kwargs={},
        reads=_reads(args),
        shape_reads=(),
        writes=(result,),
        is_view=is_view,
    )


def _reads(args: tuple[Any, ...], but: tuple[int, ...] = ()) -> tuple[int, ...]:
    return tuple(dict.fromkeys(value for value in refs(args) if value not in but))
