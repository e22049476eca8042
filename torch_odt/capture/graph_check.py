"""Whether a graph from elsewhere is what it says.

What the trace and the rewrites derive from operators is derived again: above all which arguments are used for their
shape alone, because those get no memory when the graph runs. Whether it is the right graph, nobody can tell from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import torch

from torch_odt.capture import operators
from torch_odt.capture.accumulate import ACCUMULATING
from torch_odt.capture.carried_operators import are_plain, may_be_carried
from torch_odt.capture.fused_updates import FUSED_UPDATE, require_fused_update
from torch_odt.capture.graph import Op, OutputKind, Ref, TrainingGraph, ValueKind, refs
from torch_odt.capture.graph_origins import check_origins
from torch_odt.capture.overwrite import function_of
from torch_odt.capture.pack_dropout_masks import PACKED
from torch_odt.capture.rewrite import convolved
from torch_odt.capture.update_in_backward import UPDATES
from torch_odt.errors import PlanError

_RNN, _RNN_BACKWARD = "aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default"
# What this package's functions take; torch's operators look at the types of their arguments by themselves.
_NUMBER, _MAYBE = (int, float), (Ref, type(None))
_OWN_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "odt.batch_norm_normalize": (Ref, Ref, Ref, _MAYBE, _MAYBE),
    "odt.dropout_apply": (Ref, Ref, _NUMBER),
    PACKED: (Ref, _NUMBER, bool),
    "odt.accumulate_mm": (Ref, Ref, Ref, bool),
    "odt.accumulate_embedding": (Ref, Ref, Ref, int),
    "odt.first_of": (Ref, Ref),
}
# Where a convolution's strides stand. ATen's kernels end the process, or hardly ever end, where windows are a million
# pixels apart.
_STRIDES = {"aten.convolution.default": 3, "aten.convolution_backward.default": 4}
_LARGEST_STRIDE = 1024
_NOT_CARRIED = "is none of the operators that a plan file may carry; save the plan with carry_graph=False"
_OTHER_FACTS = "is a view or draws random numbers, or does not, against what the graph says"


def check_graph(graph: TrainingGraph) -> None:
    """Check everything about a graph that could make its execution something else than operators on tensors.

    Raises:
        PlanError: a value or an op does not exist, or an op is not what its operator is.
    """
    _check_numbers(graph)
    for value in graph.values:
        _check_value(graph, value.index)
    check_origins(graph)
    for op in graph.ops:
        _check_op(graph, op)


def _check_numbers(graph: TrainingGraph) -> None:
    values, ops = len(graph.values), len(graph.ops)
    _require_below(values, graph.inputs, "an input")
    _require_below(values, (output.value for output in graph.outputs), "an output")
    _require_below(values, (*graph.rematerializers, *graph.constants), "a rematerializer or a constant")
    _require_below(ops, graph.rematerializers.values(), "a rematerializer")
    _require_below(ops + 1, (graph.boundary, graph.program_length), "the graph's length")
    if any(output.kind not in get_args(OutputKind) for output in graph.outputs):
        raise PlanError("the graph has an output of an unknown kind")
    for op in graph.ops:
        _require_below(values, (*refs((op.args, op.kwargs)), *op.reads, *op.shape_reads, *op.results), f"op {op.index}")
    for value in graph.values:
        _require_below(values, (value.base,), f"value {value.index}")
        _require_below(ops, () if value.producer is None else (value.producer,), f"value {value.index}")


def _require_below(limit: int, numbers: Iterable[Any], what: str) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < limit:
            raise PlanError(f"{what} of the graph names number {number!r}, which does not exist")


def _check_value(graph: TrainingGraph, index: int) -> None:
    value = graph.values[index]
    sizes = (*value.shape, *value.stride, value.nbytes)
    if value.kind not in get_args(ValueKind) or any(type(size) is not int or size < 0 for size in sizes):
        raise PlanError(f"value {index} of the graph is no tensor of a step")
    if len(value.shape) != len(value.stride) or not isinstance(getattr(torch, value.dtype, None), torch.dtype):
        raise PlanError(f"value {index} of the graph is no tensor")
    if index in graph.inputs or value.kind == "computed":
        return
    if index not in graph.constants:
        raise PlanError(f"value {index} of the graph comes from nowhere")


def _check_op(graph: TrainingGraph, op: Op) -> None:
    if op.phase not in ("forward", "backward"):
        raise _is_not(op, f"belongs to no half of the step, but to {op.phase!r}")
    if op.target in UPDATES:
        # The door compares those of the program with the optimizer.
        if op.index >= graph.program_length or op.phase != "backward":
            raise _is_not(op, "may not stand in the forward pass, nor behind the program")
        if op.target == FUSED_UPDATE:
            _check_fused_update(graph, op)
        return
    try:
        function_of(op)
    except (KeyError, ValueError, StopIteration) as error:
        package = "torch_odt.quant" if op.target.startswith("torch_odt.") else "the package that has it"
        text = f"the plan uses {op.target!r}, which is no operator in this process; import {package}"
        raise PlanError(text) from error
    used = set(refs((op.args, op.kwargs)))
    if {*op.reads, *op.shape_reads} != used or not used.difference(op.reads) == set(op.shape_reads):
        raise _is_not(op, "does not read what its arguments are")
    dtype = graph.values[op.reads[0]].dtype if op.reads else ""
    positions = _shape_positions(graph, op, dtype)
    if not {v.value for i, v in enumerate(op.args) if i in positions and isinstance(v, Ref)}.issuperset(op.shape_reads):
        raise _is_not(op, "reads data of arguments that the graph leaves without memory")
    if not are_plain((op.args, op.kwargs)):
        raise _is_not(op, "asks for another device or layout than that of ordinary tensors")
    if not op.target.startswith("odt."):
        _check_overload(op)
        if op.target in _STRIDES:
            _check_strides(op, op.args[_STRIDES[op.target]])
    elif not _has_own_arguments(op):
        raise _is_not(op, "has other arguments than its function takes")
    elif op.is_view or op.is_random != (op.target == PACKED):
        raise _is_not(op, _OTHER_FACTS)
    elif op.target in ACCUMULATING and graph.values[op.args[0].value].kind != "gradient":
        raise _is_not(op, "adds to something else than a gradient")
    if op.overwrites is not None:
        _check_overwritten(graph, op, op.overwrites)
    if op.target == _RNN_BACKWARD:
        _check_workspace(graph, op)


def _check_strides(op: Op, strides: Any) -> None:
    if not isinstance(strides, (list, tuple)) or not all(
        isinstance(stride, int) and 0 < stride <= _LARGEST_STRIDE for stride in strides
    ):
        raise _is_not(op, f"has windows further apart than a plan file may say ({_LARGEST_STRIDE})")


def _check_fused_update(graph: TrainingGraph, op: Op) -> None:
    """As with other updates, the door compares with the optimizer whose update it is."""
    try:
        require_fused_update(graph, op)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _is_not(op, f"is no update that an operator makes as it computes the gradient: {error!r}") from error
    if not are_plain(op.args):
        raise _is_not(op, "asks for another device or layout than that of ordinary tensors")


def _has_own_arguments(op: Op) -> bool:
    kinds = _OWN_ARGUMENTS.get(op.target, ())
    return len(op.args) == len(kinds) and not op.kwargs and all(map(isinstance, op.args, kinds))


def _check_overwritten(graph: TrainingGraph, op: Op, value: int) -> None:
    """What is overwritten is a result of the step, or a view of one, that nothing else looks at."""
    reader = op
    while True:
        found = graph.values[value]
        if value in graph.output_values:
            raise _is_not(op, "overwrites what leaves the step")
        readers = [other for other in graph.ops if value in other.reads]
        # Sums that come first, once, if it is not a view of it that is read.
        are_early = all(reader is op and other.is_pinned and not other.is_view for other in readers[:-1])
        is_last = bool(readers) and readers[-1] is reader and are_early
        if found.kind != "computed" or found.producer is None or not is_last:
            raise _is_not(op, "overwrites what is not its own to overwrite")
        reader = graph.ops[found.producer]
        if not reader.is_view:
            return
        if not reader.reads:
            raise _is_not(reader, "is a view of nothing")
        value = reader.reads[0]


def _check_workspace(graph: TrainingGraph, op: Op) -> None:
    """The backward op of a recurrent layer follows numbers that its forward op alone knows."""
    workspace = op.args[-1]
    producer = graph.values[workspace.value].producer if isinstance(workspace, Ref) else None
    maker = None if producer is None else graph.ops[producer]
    if maker is None or maker.target != _RNN or maker.writes[3:] != (workspace.value,):
        raise _is_not(op, "reads something else than the workspace of a forward op")
    if (maker.args[:5], maker.args[9:12]) != (op.args[:5], op.args[14:17]) or maker.args[15:] != (True,):
        raise _is_not(op, "reads the workspace of another layer's forward op")


def _shape_positions(graph: TrainingGraph, op: Op, dtype: str) -> tuple[int, ...]:
    try:
        return operators.shape_only_positions(op.target, op.args, dtype, *convolved(graph, op))
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise _is_not(op, "lacks arguments") from error


def _check_overload(op: Op) -> None:
    """An operator of torch's dispatcher, with the arguments that it takes."""
    overload = operators.of_torch(op.target)
    schema = overload._schema
    if not may_be_carried(overload):
        raise _is_not(op, _NOT_CARRIED)
    names = [argument.name for argument in schema.arguments]
    if len(op.args) > len(names) or not op.kwargs.keys() <= set(names[len(op.args) :]):
        raise _is_not(op, "has other arguments in this version of torch")
    if [str(r.type) for r in schema.returns] == ["Tensor"] * len(schema.returns) != [] and (
        len(op.writes) != len(schema.returns) or op.writes == (None,)
    ):
        raise _is_not(op, f"has {len(schema.returns)} results, and not {len(op.writes)}")
    named = dict(zip(names, op.args, strict=False)) | op.kwargs
    facts = (operators.is_view(overload), operators.is_random(overload, named))
    if (op.is_view, op.is_random) != facts:
        raise _is_not(op, _OTHER_FACTS)
    if op.is_view and (not op.reads or op.args[:1] != (Ref(op.reads[0]),)):
        raise _is_not(op, "is a view of something else")


def _is_not(op: Op, what: str) -> PlanError:
    return PlanError(f"op {op.index} of the graph, {op.target}, {what}")
