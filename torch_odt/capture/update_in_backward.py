"""Parameters are updated in the backward pass, each as soon as its gradient is complete.

The gradient is gone right after, so that never more than a few of them exist at once, and it is still in the caches
when it is used (TTE's operator reordering: Lin et al., "On-Device Training Under 256KB Memory", 2022, section 3.2).
An update waits until nothing reads the parameter any more: neither what propagates gradients through it, nor what may
have to compute an activation again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from torch_odt.capture import fused_updates
from torch_odt.capture.batch_norm_match import BATCH_NORM
from torch_odt.capture.fuse_batch_norm import FUSED
from torch_odt.capture.fused_updates import FUSED_UPDATE, fuse
from torch_odt.capture.graph import Op, Output, Ref, TrainingGraph, Value
from torch_odt.capture.pack_dropout_masks import DROPOUT, PACKED

UPDATE = "odt.update"
UPDATES = frozenset({UPDATE, FUSED_UPDATE})
# What these return is computed again by other ops, from what they read, although they run once themselves.
_REMATERIALIZED = frozenset({BATCH_NORM, FUSED, DROPOUT, PACKED})


@dataclass(frozen=True)
class UpdateRule:
    """How one parameter is updated.

    Attributes:
        text: the optimizer's name, and what of it is in use: all that decides which tensors exist meanwhile.
        state: what the optimizer keeps for it, by name: "step" a number, everything else as large as the parameter.
        into: the name of the buffer that changes, where the parameter does no more than take its gradient.
    """

    text: str
    state: tuple[str, ...]
    into: str = ""


def update_in_backward(graph: TrainingGraph, rules: Mapping[str, UpdateRule], *, may_fuse: bool = True) -> str | None:
    """Put updates into the graph in the place of the gradients that are delivered.

    Args:
        graph: without rematerializers. Its ops and values are to be numbered anew afterwards.
        rules: by the parameters' names; what is not among them delivers its gradient as before.
        may_fuse: operators that can use a gradient up as they compute it do so; it can be delivered no more then.
    """
    taken = [output for output in graph.outputs_of("gradient") if _can_update(graph, output, rules)]
    if not taken:
        return None
    parameters = {str(v.target): v for v in graph.values if v.kind == "parameter"}
    buffers = _buffers(graph)
    changed = {
        name: [parameters[name], *([buffers[rules[name].into]] if rules[name].into else ())]
        for name in (str(output.target) for output in taken)
    }
    updated = frozenset(value.index for values in changed.values() for value in values)
    _run_once(graph, updated, frozenset(graph.values[output.value].base for output in taken))
    last_reads = _last_reads(graph)
    after: dict[int, list[Op]] = {}
    fused, removed = 0, set()
    for number, output in enumerate(taken):
        name = str(output.target)
        values = [value.index for value in changed[name]]
        last_read = max(last_reads[value] for value in values)
        views = fuse(graph, output.value, rules[name].text, values, last_read) if may_fuse else None
        if views is not None:
            fused += 1
            removed.update(views)
            continue
        complete = graph.values[output.value].producer
        assert complete is not None
        op = _update_op(graph, len(graph.ops) + number, changed[name], output.value, rules[name])
        after.setdefault(max(complete, last_read), []).append(op)
    graph.ops = [
        new
        for position, op in enumerate(graph.ops)
        if position not in removed
        for new in (op, *after.get(position, ()))
    ]
    graph.outputs = [output for output in graph.outputs if output not in taken]
    of_these = f", {fused} of them by the operators that compute these" if fused else ""
    return f"{len(taken)} parameters are updated as soon as their gradients are complete{of_these}; these are gone then"


def _can_update(graph: TrainingGraph, output: Output, rules: Mapping[str, UpdateRule]) -> bool:
    producer = graph.values[output.value].producer
    rule = rules.get(str(output.target))
    if rule is None or producer is None or graph.ops[producer].phase != "backward":
        return False
    return not rule.into or rule.into in _buffers(graph)


def _buffers(graph: TrainingGraph) -> dict[str, Value]:
    return {str(value.target): value for value in graph.values if value.kind == "buffer"}


def _run_once(graph: TrainingGraph, updated: frozenset[int], gradients: frozenset[int]) -> None:
    """Pin the ops of the backward pass that propagate gradients through parameters, and those that make gradients.

    If they could run again, parameters would have to wait for everything that comes behind them.
    """
    needed_elsewhere = {graph.values[output.value].base for output in graph.outputs} - gradients
    for op in reversed(graph.ops):
        if op.phase == "forward":
            return
        bases = {graph.values[value].base for value in op.reads}
        makes_gradients = needed_elsewhere.isdisjoint(graph.values[value].base for value in op.results)
        if not makes_gradients:
            needed_elsewhere |= bases
        if not op.is_view and (makes_gradients or not updated.isdisjoint(bases)):
            op.is_pinned = True


def _last_reads(graph: TrainingGraph) -> list[int]:
    """For each storage, the position after which no op of the backward pass reads it, be it to compute again."""
    last = [-1] * len(graph.values)
    for position in reversed(range(len(graph.ops))):
        op = graph.ops[position]
        in_backward = op.phase == "backward"
        bases = [graph.values[value].base for value in op.reads]
        until = position if in_backward else -1
        if op.may_rerun or op.target in _REMATERIALIZED:
            until = max([until, *(last[graph.values[value].base] for value in op.results)])
        for base in bases:
            last[base] = max(last[base], until)
    return last


def _update_op(graph: TrainingGraph, index: int, changed: list[Value], gradient: int, rule: UpdateRule) -> Op:
    parameter, *buffers = changed
    state = [_state_value(graph, parameter, name) for name in rule.state]
    reads = (parameter.index, gradient, *state, *(buffer.index for buffer in buffers))
    return Op(
        index=index,
        target=UPDATE,
        args=(rule.text, *map(Ref, reads)),
        kwargs={},
        reads=reads,
        shape_reads=(),
        writes=(),
        is_pinned=True,
        phase="backward",
    )


def changed_by(graph: TrainingGraph, op: Op) -> frozenset[int]:
    """The storages that an update changes, of those that belong to the caller; none of any other op."""
    if op.target == FUSED_UPDATE:
        return frozenset(graph.values[value].base for value in fused_updates.changed_by(op))
    if op.target != UPDATE:
        return frozenset()
    return frozenset(value for value in op.reads if value == op.reads[0] or graph.values[value].kind == "buffer")


def counter_dtype() -> torch.dtype:
    """Of the number of steps, as torch.optim keeps it."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def _state_value(graph: TrainingGraph, parameter: Value, name: str) -> int:
    index = len(graph.values)
    value = replace(
        parameter,
        index=index,
        name=f"{parameter.name}_{name}",
        kind="state",
        base=index,
        target=f"{parameter.target}/{name}",
    )
    if name == "step":
        dtype = counter_dtype()
        value = replace(value, shape=(), stride=(), dtype=str(dtype).removeprefix("torch."), nbytes=dtype.itemsize)
    graph.values.append(value)
    graph.inputs.append(index)
    return index
