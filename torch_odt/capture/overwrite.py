"""Operators that write where a tensor lies which nobody reads after them.

What propagates a gradient through an elementwise operator or a normalisation reads it and an activation, and writes
another of the same size: in place of three tensors two are in memory, often at the very peak of a step, and the
processor need not fetch what it is about to overwrite. In the forward pass of frozen layers the same holds for
activation functions, residuals and norms, where the backward pass needs neither what they read nor what they write.
Sums and statistics of what is overwritten, a bias's gradient or a norm's mean, are computed before.

What is overwritten is never recomputed, nor is what makes it, or sums it up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value, refs
from torch_odt.capture.operators import resolve


@dataclass(frozen=True)
class InPlace:
    """How an operator is told to write into one of its arguments.

    Attributes:
        target: the operator that does, of whose results the one that takes over the memory is none, or ignored.
        result: which of the results takes it over.
        arguments: the arguments that it may overwrite, the best first. Where there are two, either may come first.
        out: the name of an argument for the memory; None where the operator writes into its first argument.
    """

    target: str
    result: int
    arguments: tuple[int, ...]
    out: str | None = None


@dataclass(frozen=True)
class Overwriting:
    """Calls an operator so that a result lies in the memory of an argument.

    Attributes:
        operator: what is called.
        way: how it is told to.
        position: of the argument.
        results: so many the op has.
    """

    operator: Callable[..., Any]
    way: InPlace
    position: int
    results: int

    def given(self, arguments: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The operator's arguments in place of the op's."""
        given, overwritten = list(arguments), arguments[self.position]
        if self.way.out is not None:
            return given, {self.way.out: overwritten}
        if self.position:
            given.insert(0, given.pop(self.position))
        return given, {}

    def __call__(self, *arguments: Any) -> Any:
        given, named = self.given(arguments)
        own = self.operator(*given, **named)
        if self.results == 1:
            return arguments[self.position]
        results = list(own) if isinstance(own, (tuple, list)) else [own]
        results.insert(self.way.result, arguments[self.position])
        return tuple(results)


def _first(target: str, result: int = 0) -> InPlace:
    return InPlace(target, result, arguments=(0,))


def _either(target: str) -> InPlace:
    return InPlace(target, result=0, arguments=(0, 1))


def _grad_input(target: str) -> InPlace:
    return InPlace(target, result=0, arguments=(0,), out="grad_input")


_IN_PLACE: dict[str, InPlace] = {
    "torch_odt.batch_norm_act_backward.default": _first("torch_odt.batch_norm_act_backward_.default"),
    "torch_odt.batch_norm_add_act_backward.default": _first("torch_odt.batch_norm_add_act_backward_.default", result=3),
    "torch_odt.clamp_with_mask.default": _first("torch_odt.clamp_with_mask_.default"),
    "torch_odt.clamp_with_mask_backward.default": _first("torch_odt.clamp_with_mask_backward_.default"),
    "aten.add.Tensor": _either("aten.add_.Tensor"),
    "aten.mul.Tensor": _either("aten.mul_.Tensor"),
    "aten.addcmul.default": InPlace("aten.addcmul.out", result=0, arguments=(1,), out="out"),
    "aten.relu.default": _first("aten.relu_.default"),
    "aten.hardtanh.default": _first("aten.hardtanh_.default"),
    "aten.hardswish.default": _first("aten.hardswish_.default"),
    "aten.silu.default": _first("aten.silu_.default"),
    "aten.gelu.default": _first("aten.gelu_.default"),
    "aten.threshold_backward.default": _grad_input("aten.threshold_backward.grad_input"),
    "aten.hardtanh_backward.default": _grad_input("aten.hardtanh_backward.grad_input"),
    "aten.gelu_backward.default": _grad_input("aten.gelu_backward.grad_input"),
    "aten.silu_backward.default": _grad_input("aten.silu_backward.grad_input"),
    "aten.tanh_backward.default": _grad_input("aten.tanh_backward.grad_input"),
    "aten.sigmoid_backward.default": _grad_input("aten.sigmoid_backward.grad_input"),
}

# They compute too much to be run again for little.
_PRODUCTS = frozenset(
    {
        "aten.convolution.default",
        "torch_odt.depthwise_conv2d.default",
        "torch_odt.pointwise_conv2d.default",
        "torch_odt.stored_pointwise_conv2d.default",
        "aten.addmm.default",
        "aten.mm.default",
        "aten.bmm.default",
    }
)
# What may be overwritten in the forward pass: results of these, which no rematerializer brings back.
_MAKERS = _PRODUCTS | frozenset(_IN_PLACE)
_SUM = "aten.sum.dim_IntList"
# Sums of a tensor are this many times smaller at least.
_TIMES_SMALLER = 16
# How much of an activation may be kept of what is computed from it, and could no longer be computed again.
_KEPT_SHARE = 0.25


def overwrite_activations(graph: TrainingGraph) -> str | None:
    """Let operators of the forward pass write into what they are the last to read.

    That is done where the backward pass needs neither of the two, and little of what is computed from them nearby, or
    nothing of what came before them: what is overwritten cannot be computed again.
    """
    makers, readers = _makers_and_readers(graph)
    kept = {graph.values[value].base for value in graph.output_values}
    kept |= {graph.values[value].base for op in graph.ops if op.phase == "backward" for value in op.reads}
    start = _frozen_start(graph, kept)
    count = 0
    for op in graph.ops:
        if op.phase != "forward" or op.target not in _IN_PLACE:
            continue
        way = _IN_PLACE[op.target]
        result = op.writes[way.result]
        if result is None or graph.values[result].base in kept:
            continue
        if op.index not in start:
            nearby_bytes = _kept_nearby_bytes(graph, result, readers, kept)
            if nearby_bytes > _KEPT_SHARE * graph.values[result].nbytes:
                continue
        for value in _overwritable(graph, op, way, result):
            maker = _maker(graph, op, value, makers, readers)
            if maker is not None and maker.target in _MAKERS and graph.values[value].base not in kept:
                _overwrite(graph, op, value, result, maker, readers)
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
    _sum_early(graph)
    makers, readers = _makers_and_readers(graph)
    leaving = {graph.values[value].base for value in graph.output_values}
    sums = _sums_of_parameter_gradients(graph, makers)
    count = 0
    for op in graph.ops:
        if op.phase == "forward" or op.target not in _IN_PLACE or op.index in sums or op.kwargs:
            continue
        way = _IN_PLACE[op.target]
        result = op.writes[way.result]
        if result is None or graph.values[result].base in leaving:
            continue
        for value in _overwritable(graph, op, way, result):
            maker = _maker(graph, op, value, makers, readers)
            if maker is not None and maker.phase == "backward" and graph.values[value].base not in leaving:
                _overwrite(graph, op, value, result, maker, readers)
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


def _makers_and_readers(graph: TrainingGraph) -> tuple[dict[int, Op], dict[int, list[Op]]]:
    readers: dict[int, list[Op]] = {}
    for op in graph.ops:
        for value in op.reads:
            readers.setdefault(value, []).append(op)
    return {value: op for op in graph.ops for value in op.results}, readers


def _maker(
    graph: TrainingGraph, op: Op, value: int, makers: Mapping[int, Op], readers: Mapping[int, Sequence[Op]]
) -> Op | None:
    """What has computed a value that `op` is the last to read, behind views of it; None where the caller has it.

    Layers of a transformer compute on (samples, tokens, channels) and multiply (samples x tokens, channels).
    """
    *others, last = readers[value]
    if last is not op or not all(_makes_little(graph, other, value) for other in others):
        return None
    maker = makers.get(value)
    while maker is not None and maker.is_view:
        value = maker.reads[0]
        if len(readers[value]) != 1:
            return None
        maker = makers.get(value)
    return maker


def _makes_little(graph: TrainingGraph, op: Op, value: int) -> bool:
    """Whether an op makes so little of a value that nobody runs it again to save memory."""
    is_small = all(_TIMES_SMALLER * graph.values[r].nbytes <= graph.values[value].nbytes for r in op.results)
    return is_small and not op.is_view and op.overwrites is None


def _sum_early(graph: TrainingGraph) -> None:
    """A gradient that is summed for a bias, and goes on through an operator that may overwrite it, is summed first."""
    _, readers = _makers_and_readers(graph)
    ordered: dict[int, Op] = {}
    for op in graph.ops:
        if op.phase == "backward" and op.target in _IN_PLACE:
            summed = [(other, value) for value in op.reads for other in readers[value] if other.target == _SUM]
            ordered |= {other.index: other for other, value in summed if _makes_little(graph, other, value)}
        ordered.setdefault(op.index, op)
    graph.ops = list(ordered.values())


def _is_alike(one: Value, other: Value) -> bool:
    return (one.shape, one.stride, one.dtype, one.nbytes) == (other.shape, other.stride, other.dtype, other.nbytes)


def _overwrite(
    graph: TrainingGraph, op: Op, argument: int, result: int, maker: Op, readers: Mapping[int, Sequence[Op]]
) -> None:
    op.overwrites = argument
    for each in (maker, *readers[argument]):
        each.is_pinned = True
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
    way = _IN_PLACE[op.target]
    position = next(i for i in way.arguments if op.args[i] == Ref(op.overwrites))
    return Overwriting(resolve(way.target), way, position, len(op.writes))
