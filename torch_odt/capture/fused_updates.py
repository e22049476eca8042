"""Operators of the backward pass that make an update themselves: the gradient is used up as it is computed.

A large layer's gradient takes longer to be written to memory and read again than to be computed, and may be the largest
tensor of a step. Which operators can do without it is registered by those who have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value, refs
from torch_odt.capture.operators import of_torch, register_operator
from torch_odt.capture.strides import is_channels_last, is_contiguous

FUSED_UPDATE = "odt.fused_update"


@dataclass(frozen=True)
class FusedUpdate:
    """How an operator uses a gradient up.

    Attributes:
        gradient: its position among the operator's results.
        weight: the position of what changes among the operator's arguments.
        measured: makes an update that leaves the weight in its range, for the costs of it. It takes the operator's
            arguments and returns its results, with None for the gradient. Executors put the optimizer's own here.
        in_memory_order: it changes weights as they lie, contiguous or, of four dimensions, in torch.channels_last;
            those that lie in another order keep their gradients.
    """

    gradient: int
    weight: int
    measured: Callable[..., Sequence[Tensor | None]]
    in_memory_order: bool = False


_FUSED: dict[tuple[str, str], FusedUpdate] = {}


def register_fused_update(kind: str, target: str, how: FusedUpdate) -> None:
    """Lets an operator of graphs make updates itself.

    Args:
        kind: of updates, the first word of `UpdateRule.text`.
        target: the operator that computes the gradient.
        how: it does so.
    """
    _FUSED[kind, target] = how


def fuse(graph: TrainingGraph, gradient: int, rule: str, changed: Sequence[int], last_read: int) -> list[int] | None:
    """Replace the op that computes a gradient by one that makes the update as well, where there is such an op.

    Args:
        graph: whose ops' indices are their positions.
        gradient: the value, which is delivered and nothing else.
        rule: see `UpdateRule.text`.
        changed: the parameter, and what changes in its place; the last one is the weight.
        last_read: the position after which no op of the backward pass reads these.

    Returns:
        The indices of views of the gradient, which are to be removed; None where nothing was replaced.
    """
    maker, views = _maker(graph, gradient)
    how = None if maker is None else _FUSED.get((rule.partition(" ")[0], maker.target))
    if maker is None or how is None or last_read > maker.index or maker.kwargs or maker.is_random:
        return None
    weight = maker.args[how.weight]
    if not isinstance(weight, Ref) or graph.values[weight.value].base != changed[-1]:
        return None
    value = maker.writes[how.gradient]
    if value is None or graph.values[value].base != graph.values[gradient].base:
        return None
    if how.in_memory_order and not _lies_in_order(graph.values[weight.value]):
        return None
    if sum(graph.values[output.value].base == graph.values[value].base for output in graph.outputs) > 1:
        return None
    returned = tuple(i for i, w in enumerate(maker.writes) if w is not None and i != how.gradient)
    graph.ops[maker.index] = Op(
        index=maker.index,
        target=FUSED_UPDATE,
        args=(rule, maker.target, returned, Ref(changed[0]), *maker.args),
        kwargs={},
        reads=tuple(dict.fromkeys((changed[0], weight.value, *maker.reads))),
        shape_reads=tuple(read for read in maker.shape_reads if read != weight.value),
        writes=tuple(maker.writes[i] for i in returned),
        is_pinned=True,
        phase=maker.phase,
    )
    return views


def require_fused_update(graph: TrainingGraph, op: Op) -> None:
    """Check that a fused update of a graph from elsewhere is one as `fuse` makes them.

    Raises:
        KeyError: no operator makes such an update.
        ValueError, TypeError, AttributeError, IndexError: it is something else.
    """
    rule, target, returned, parameter, *arguments = op.args
    how = _FUSED[rule.partition(" ")[0], target]
    schema = of_torch(target)._schema
    if len(arguments) != len(schema.arguments) or op.kwargs or op.shape_reads:
        raise ValueError("it has other arguments")
    weight = arguments[how.weight]
    if op.reads != tuple(dict.fromkeys((parameter.value, weight.value, *refs(arguments)))):
        raise ValueError("it does not read what its arguments are")
    kept = [position for position in range(len(schema.returns)) if position != how.gradient]
    if type(returned) is not tuple or any(type(position) is not int for position in returned):
        raise TypeError("it returns what has no number")
    if list(returned) != [position for position in kept if position in returned]:
        raise ValueError("it returns the gradient, or in another order")
    if len(op.writes) != len(returned) or None in op.writes:
        raise ValueError("it has other results")
    if graph.values[parameter.value].kind != "parameter":
        raise ValueError("it updates something else than a parameter")
    if how.in_memory_order and not _lies_in_order(graph.values[weight.value]):
        raise ValueError("it updates a weight that lies in another order than it goes through")
    if op.is_view or op.is_random or not op.is_pinned or op.overwrites is not None:
        raise ValueError("it is more than an update")


def _maker(graph: TrainingGraph, gradient: int) -> tuple[Op | None, list[int]]:
    """The op that computes a gradient, and the views of it on the way, which nothing else reads."""
    views: list[int] = []
    value = gradient
    while (producer := graph.values[value].producer) is not None:
        op = graph.ops[producer]
        is_read = any(value in other.reads for other in graph.ops if other.index not in views)
        if is_read:
            break
        if not op.is_view:
            return op, views
        views.append(op.index)
        value = op.reads[0]
    return None, []


def _lies_in_order(weight: Value) -> bool:
    if len(weight.shape) == 4:
        return is_channels_last(weight.shape, weight.stride)
    return is_contiguous(weight.shape, weight.stride)


def changed_by(op: Op) -> tuple[int, int]:
    """The parameter of a fused update, and the weight that it changes."""
    rule, target, _, parameter, *arguments = op.args
    return parameter.value, arguments[_FUSED[rule.partition(" ")[0], target].weight].value


def chosen(results: Sequence[Tensor | None], returned: Sequence[int]) -> Any:
    """What an op returns: of the operator's results those that somebody reads."""
    found = tuple(results[position] for position in returned)
    return found[0] if len(found) == 1 else found


@register_operator("fused_update")
def _measured(rule: str, target: str, returned: Sequence[int], parameter: Tensor, *arguments: Any) -> Any:
    return chosen(_FUSED[rule.partition(" ")[0], target].measured(*arguments), returned)
