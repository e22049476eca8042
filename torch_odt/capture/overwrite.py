"""Operators that write where a tensor lies which nobody reads after them.

What propagates a gradient through an elementwise operator or a normalisation reads it and an activation, and writes
another of the same size: in place of three tensors two are in memory, often at the very peak of a step, and the
processor need not fetch what it is about to overwrite. In the forward pass of frozen layers the same holds for
activation functions and residuals, where the backward pass needs neither what they read nor what they write.

What is overwritten is never recomputed, nor is what makes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value, refs
from torch_odt.capture.operators import resolve


@dataclass(frozen=True)
class InPlace:
    """How an operator is told to write into one of its arguments.

    Attributes:
        result: which of its results takes over the memory.
        arguments: the arguments that it may overwrite, the best first.
        call: `call(function, arguments, position)` runs the operator so that the result lies in argument `position`.
    """

    result: int
    arguments: tuple[int, ...]
    call: Callable[[Callable[..., Any], Sequence[Any], int], Any]


def _into_first(_function: Callable[..., Any], arguments: Sequence[Any], position: int) -> Tensor:
    """A sum is the same whichever of its parts it is added to."""
    into: Tensor = arguments[position]
    return into.add_(arguments[1 - position])


def _by_grad_input(function: Callable[..., Any], arguments: Sequence[Any], position: int) -> Tensor:
    return function(*arguments, grad_input=arguments[position])


def _batch_norm(function: Callable[..., Any], arguments: Sequence[Any], position: int) -> tuple[Tensor, ...]:
    parameter_gradients = function(*arguments)
    return arguments[position], *parameter_gradients


def _batch_norm_of_sum(function: Callable[..., Any], arguments: Sequence[Any], position: int) -> tuple[Tensor, ...]:
    gradients = function(*arguments)
    return *gradients, arguments[position]


def _times(_function: Callable[..., Any], arguments: Sequence[Any], position: int) -> Tensor:
    """A product is the same whichever of its factors it takes the place of."""
    into: Tensor = arguments[position]
    return into.mul_(arguments[1 - position])


def _itself(function: Callable[..., Any], arguments: Sequence[Any], position: int) -> Any:
    function(*arguments)
    return arguments[position]


def _by_out(function: Callable[..., Any], arguments: Sequence[Any], position: int) -> Any:
    return function(*arguments, out=arguments[position])


def _with_mask(function: Callable[..., Any], arguments: Sequence[Any], position: int) -> tuple[Tensor, Tensor]:
    mask = function(*arguments)
    return arguments[position], mask


_GRAD_INPUT = InPlace(result=0, arguments=(0,), call=_by_grad_input)
_FIRST = InPlace(result=0, arguments=(0,), call=_itself)

# What takes its place is the overload that writes into a tensor of the caller's, where there is one.
_IN_PLACE: dict[str, tuple[str, InPlace]] = {
    "torch_odt.batch_norm_act_backward.default": (
        "torch_odt.batch_norm_act_backward_.default",
        InPlace(result=0, arguments=(0,), call=_batch_norm),
    ),
    "torch_odt.batch_norm_add_act_backward.default": (
        "torch_odt.batch_norm_add_act_backward_.default",
        InPlace(result=3, arguments=(0,), call=_batch_norm_of_sum),
    ),
    "torch_odt.clamp_with_mask.default": (
        "torch_odt.clamp_with_mask_.default",
        InPlace(result=0, arguments=(0,), call=_with_mask),
    ),
    "torch_odt.clamp_with_mask_backward.default": ("torch_odt.clamp_with_mask_backward_.default", _FIRST),
    "aten.add.Tensor": ("aten.add.Tensor", InPlace(result=0, arguments=(0, 1), call=_into_first)),
    "aten.mul.Tensor": ("aten.mul.Tensor", InPlace(result=0, arguments=(0, 1), call=_times)),
    "aten.addcmul.default": ("aten.addcmul.out", InPlace(result=0, arguments=(1,), call=_by_out)),
    "aten.relu.default": ("aten.relu_.default", _FIRST),
    "aten.hardtanh.default": ("aten.hardtanh_.default", _FIRST),
    "aten.hardswish.default": ("aten.hardswish_.default", _FIRST),
    "aten.silu.default": ("aten.silu_.default", _FIRST),
    "aten.gelu.default": ("aten.gelu_.default", _FIRST),
    "aten.threshold_backward.default": ("aten.threshold_backward.grad_input", _GRAD_INPUT),
    "aten.hardtanh_backward.default": ("aten.hardtanh_backward.grad_input", _GRAD_INPUT),
    "aten.gelu_backward.default": ("aten.gelu_backward.grad_input", _GRAD_INPUT),
    "aten.silu_backward.default": ("aten.silu_backward.grad_input", _GRAD_INPUT),
    "aten.tanh_backward.default": ("aten.tanh_backward.grad_input", _GRAD_INPUT),
    "aten.sigmoid_backward.default": ("aten.sigmoid_backward.grad_input", _GRAD_INPUT),
}

# They compute too much to be run again for little.
_PRODUCTS = frozenset({"aten.convolution.default", "aten.addmm.default", "aten.mm.default", "aten.bmm.default"})
# What may be overwritten in the forward pass: results of these, which no rematerializer brings back.
_MAKERS = _PRODUCTS | frozenset(_IN_PLACE)
# How much of an activation may be kept of what is computed from it, and could no longer be computed again.
_KEPT_SHARE = 0.25


def overwrite_activations(graph: TrainingGraph) -> str | None:
    """Let operators of the forward pass write into what they are the last to read.

    That is done where the backward pass needs neither of the two, and little of what is computed from them nearby, or
    nothing of what came before them: what is overwritten cannot be computed again.
    """
    makers = {value: op for op in graph.ops for value in op.results}
    readers: dict[int, list[Op]] = {}
    for op in graph.ops:
        for value in op.reads:
            readers.setdefault(value, []).append(op)
    kept = {graph.values[value].base for value in graph.output_values}
    kept |= {graph.values[value].base for op in graph.ops if op.phase == "backward" for value in op.reads}
    counts = Counter({value: len(ops) for value, ops in readers.items()})
    start = _frozen_start(graph, kept)
    count = 0
    for op in graph.ops:
        if op.phase != "forward" or op.target not in _IN_PLACE:
            continue
        way = _IN_PLACE[op.target][1]
        result = op.writes[way.result]
        if result is None or graph.values[result].base in kept:
            continue
        if op.index not in start:
            nearby_bytes = _kept_nearby_bytes(graph, result, readers, kept)
            if nearby_bytes > _KEPT_SHARE * graph.values[result].nbytes:
                continue
        for value in _overwritable(graph, op, way, result):
            maker = _maker(value, makers, counts)
            if maker is not None and maker.target in _MAKERS and graph.values[value].base not in kept:
                _overwrite(graph, op, value, result, maker)
                count += 1
                break
    return f"{count} activations are overwritten by those that are computed from them" if count else None


def _frozen_start(graph: TrainingGraph, kept: Collection[int]) -> set[int]:
    """The ops in front of the first one that reads what trains, or of which the backward pass reads anything."""
    trained = {str(output.target) for output in graph.outputs_of("gradient")}
    start: set[int] = set()
    for op in graph.ops:
        is_kept = any(graph.values[value].base in kept for value in op.results)
        if op.phase == "backward" or is_kept or any(str(graph.values[value].target) in trained for value in op.reads):
            break
        start.add(op.index)
    return start


def _kept_nearby_bytes(
    graph: TrainingGraph, value: int, readers: Mapping[int, Sequence[Op]], kept: Collection[int]
) -> int:
    """Bytes of what the backward pass reads and no more than one matrix product or convolution makes of a value."""
    found: set[int] = set()
    seen = {(value, False)}
    waiting = [(value, False)]
    while waiting:
        source, is_behind_product = waiting.pop()
        for op in readers.get(source, ()):
            is_product = op.target in _PRODUCTS
            if op.phase == "backward" or (is_product and is_behind_product):
                continue
            for result in op.results:
                if graph.values[result].base in kept:
                    found.add(graph.values[result].base)
                elif (after := (result, is_behind_product or is_product)) not in seen:
                    seen.add(after)
                    waiting.append(after)
    return sum(graph.values[base].nbytes for base in found)


def overwrite_gradients(graph: TrainingGraph) -> str | None:
    """Let operators of the backward pass write into gradients that they are the last to read."""
    makers = {value: op for op in graph.ops for value in op.results}
    readers = Counter(value for op in graph.ops for value in op.reads)
    leaving = {graph.values[value].base for value in graph.output_values}
    sums = _sums_of_parameter_gradients(graph, makers)
    count = 0
    for op in graph.ops:
        if op.phase == "forward" or op.target not in _IN_PLACE or op.index in sums or op.kwargs:
            continue
        way = _IN_PLACE[op.target][1]
        result = op.writes[way.result]
        if result is None or graph.values[result].base in leaving:
            continue
        for value in _overwritable(graph, op, way, result):
            maker = _maker(value, makers, readers)
            if maker is not None and maker.phase == "backward" and graph.values[value].base not in leaving:
                _overwrite(graph, op, value, result, maker)
                count += 1
                break
    return f"{count} gradients are overwritten by those that are computed from them" if count else None


def _overwritable(graph: TrainingGraph, op: Op, way: InPlace, result: int) -> list[int]:
    """The arguments that are as large as the result, and stand among the arguments once."""
    arguments = [op.args[i].value for i in way.arguments if i < len(op.args) and isinstance(op.args[i], Ref)]
    named = list(refs(op.args))
    return [
        value
        for value in arguments
        if not op.kwargs and named.count(value) == 1 and _is_alike(graph.values[value], graph.values[result])
    ]


def _maker(value: int, makers: Mapping[int, Op], readers: Mapping[int, int]) -> Op | None:
    """What has computed a value, behind views of it; None where it is read more than once, or belongs to the caller.

    Layers of a transformer compute on (samples, tokens, channels) and multiply (samples x tokens, channels).
    """
    maker = makers.get(value)
    while maker is not None and readers[value] == 1 and maker.is_view:
        value = maker.reads[0]
        maker = makers.get(value)
    return maker if readers[value] == 1 else None


def _is_alike(one: Value, other: Value) -> bool:
    return (one.shape, one.stride, one.dtype, one.nbytes) == (other.shape, other.stride, other.dtype, other.nbytes)


def _overwrite(graph: TrainingGraph, op: Op, argument: int, result: int, maker: Op) -> None:
    op.overwrites = argument
    op.is_pinned = maker.is_pinned = True
    old, new = graph.values[result].base, graph.values[argument].base
    for value in graph.values:
        if value.base == old:
            value.base = new


def _sums_of_parameter_gradients(graph: TrainingGraph, makers: Mapping[int, Op]) -> set[int]:
    """Later micro-batches add the parts of these to gradients that exist."""
    found: set[int] = set()
    waiting = [output.value for output in graph.outputs_of("gradient")]
    while waiting:
        op = makers.get(waiting.pop())
        if op is not None and op.index not in found and (op.is_view or op.target == "aten.add.Tensor"):
            found.add(op.index)
            waiting.extend(op.reads)
    return found


def function_of(op: Op) -> Callable[..., Any]:
    """What to call for an op; where it overwrites an argument, the result lies there."""
    if op.overwrites is None:
        return resolve(op.target)
    target, way = _IN_PLACE[op.target]
    function = resolve(target)
    position = next(i for i in way.arguments if op.args[i] == Ref(op.overwrites))

    def call(*arguments: Any) -> Any:
        return way.call(function, arguments, position)

    return call
