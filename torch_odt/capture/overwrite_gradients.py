"""Operators of the backward pass that write where a gradient lies which nobody reads after them.

What propagates a gradient through an elementwise operator or a normalisation reads it and an activation, and writes
another of the same size: in place of three tensors two are in memory, often at the very peak of a step, and the
processor need not fetch what it is about to overwrite.

A gradient that is overwritten is never recomputed, nor is what makes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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


_GRAD_INPUT = InPlace(result=0, arguments=(0,), call=_by_grad_input)

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
    "aten.add.Tensor": ("aten.add.Tensor", InPlace(result=0, arguments=(0, 1), call=_into_first)),
    "aten.threshold_backward.default": ("aten.threshold_backward.grad_input", _GRAD_INPUT),
    "aten.hardtanh_backward.default": ("aten.hardtanh_backward.grad_input", _GRAD_INPUT),
    "aten.gelu_backward.default": ("aten.gelu_backward.grad_input", _GRAD_INPUT),
    "aten.silu_backward.default": ("aten.silu_backward.grad_input", _GRAD_INPUT),
    "aten.tanh_backward.default": ("aten.tanh_backward.grad_input", _GRAD_INPUT),
    "aten.sigmoid_backward.default": ("aten.sigmoid_backward.grad_input", _GRAD_INPUT),
}


def overwrite_gradients(graph: TrainingGraph) -> str | None:
    """Let operators of the backward pass write into gradients that they are the last to read."""
    makers = {value: op for op in graph.ops for value in op.results}
    readers = Counter(value for op in graph.ops for value in op.reads)
    leaving = graph.output_values
    sums = _sums_of_parameter_gradients(graph, makers)
    count = 0
    for op in graph.ops:
        if op.phase == "forward" or op.target not in _IN_PLACE or op.index in sums or op.kwargs:
            continue
        way = _IN_PLACE[op.target][1]
        result = op.writes[way.result]
        if result is None or result in leaving:
            continue
        for value in [op.args[i].value for i in way.arguments if isinstance(op.args[i], Ref)]:
            is_alike = _is_alike(graph.values[value], graph.values[result])
            if is_alike and value not in leaving and _is_over(op, value, makers, readers):
                _overwrite(graph, op, value, result, makers[value])
                count += 1
                break
    return f"{count} gradients are overwritten by those that are computed from them" if count else None


def _is_over(op: Op, value: int, makers: Mapping[int, Op], readers: Mapping[int, int]) -> bool:
    """Whether a value is a gradient, and needed by nothing once `op` has run."""
    maker = makers.get(value)
    return (
        maker is not None
        and maker.phase == "backward"
        and not maker.is_view
        and readers[value] == 1
        and list(refs(op.args)).count(value) == 1
    )


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
