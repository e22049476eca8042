"""Random numbers of a step in micro-batches: drawn once for the whole batch, sliced for each micro-batch.

So the masks and the state of the generator afterwards equal the plain step's, bit for bit. `hoist_random` takes the
random operators out of a micro-batch's graph; what they draw becomes inputs of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch_odt.capture import rewrite
from torch_odt.capture.draws import CREATORS, DROPOUT, FREE, LIKE, Draw, Layout, drops_out
from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value, refs
from torch_odt.capture.separation import NotSeparable, RandomPair, Separation, with_values


@dataclass(frozen=True, slots=True)
class HoistedGraph:
    """A micro-batch's graph without random operators.

    Attributes:
        graph: its inputs end with one value of kind "input" and target "random:<n>" for each draw.
        draws: in the order in which the full step draws; make all of them once in each step.
        separation: the given one in the numbers of `graph`; its `input_axes` do not hold the draws.
    """

    graph: TrainingGraph
    draws: tuple[Draw, ...]
    separation: Separation


def hoist_random(micro: TrainingGraph, full: TrainingGraph, separation: Separation) -> HoistedGraph:
    """Turn what the random operators of a micro-batch's graph draw into inputs.

    Args:
        micro, full: the graphs that `separation` was proved on. Neither is changed.

    Raises:
        NotSeparable: the draw of an operator depends on data, so that it cannot be made before the step.
    """
    graph, disabled = rewrite.reopen(micro)
    draws = [_hoist(graph, full, pair, number, separation) for number, pair in enumerate(separation.random_ops)]
    if not draws:
        return HoistedGraph(micro, (), separation)
    rewrite.remove_dead(graph)
    names = {value.name: value.index for value in graph.values}
    hoisted = rewrite.number_anew(graph, disabled)
    new_index = {names[value.name]: value.index for value in hoisted.values}
    draws = [replace(draw, value=new_index[draw.value]) for draw in draws]
    moved = with_values(separation, new_index, random_ops=())
    return HoistedGraph(hoisted, tuple(draws), moved)


def _hoist(graph: TrainingGraph, full: TrainingGraph, pair: RandomPair, number: int, separation: Separation) -> Draw:
    op = graph.ops[pair.micro_op]
    drawn = 1 if op.target == DROPOUT else 0
    full_value = _result(full, full.ops[pair.full_op], drawn)
    value = _as_input(graph, op, drawn, number)
    if op.target == DROPOUT:
        _apply_mask(graph, op, value)
    else:
        op.writes, op.is_random = (None,) * len(op.writes), False
    rows = 1 if pair.dim is None else full_value.shape[pair.dim] // (separation.batch * pair.outer)
    like, needs = _sources(full, full.ops[pair.full_op])
    return Draw(
        full.ops[pair.full_op],
        value.index,
        pair.dim,
        pair.outer,
        rows,
        value.stride,
        Layout.of(full_value),
        like,
        needs,
    )


def _result(graph: TrainingGraph, op: Op, position: int) -> Value:
    """What a random operator draws; a mask that nobody reads is like dropout's output, as booleans."""
    index = op.writes[position]
    if index is not None:
        return graph.values[index]
    output = next((v for v in op.writes if v is not None), op.reads[0])
    like = graph.values[output]
    return replace(like, index=-1, name=f"{like.name}_mask", dtype="bool", base=-1, producer=None)


def _as_input(graph: TrainingGraph, op: Op, position: int, number: int) -> Value:
    index = op.writes[position]
    if index is None:
        like = _result(graph, op, position)
        index = len(graph.values)
        graph.values.append(replace(like, index=index, name=f"random_{number}", base=index))
    value = graph.values[index]
    value.kind, value.producer, value.target = "input", None, f"random:{number}"
    graph.inputs.append(index)
    op.writes = tuple(None if i == position else w for i, w in enumerate(op.writes))
    return value


def _apply_mask(graph: TrainingGraph, op: Op, mask: Value) -> None:
    """Make `native_dropout` the product with a mask that is given."""
    trains = drops_out(op)
    assert isinstance(op.args[0], Ref)
    if trains is False:
        op.target, op.args, op.reads = "aten.clone.default", (op.args[0],), (op.args[0].value,)
    else:
        op.target, op.args = "odt.dropout_apply", (op.args[0], Ref(mask.index), op.args[1])
        op.reads = tuple(dict.fromkeys((op.args[0].value, mask.index)))
    op.kwargs, op.shape_reads, op.writes, op.is_random = {}, (), (op.writes[0],), False


def _sources(graph: TrainingGraph, op: Op) -> tuple[Layout | None, tuple[Op, ...]]:
    """What a random operator needs to draw: the layout of its first argument, or ops that make its arguments."""
    if op.target == DROPOUT or op.target in FREE:
        return None, ()
    if op.target in LIKE and not any(True for _ in refs((op.args[1:], op.kwargs))):
        return Layout.of(graph.values[op.args[0].value]), ()
    if op.target == "aten.bernoulli.default":
        return None, _creators(graph, op)
    raise _not_hoistable(op)


def _not_hoistable(op: Op) -> NotSeparable:
    return NotSeparable(
        f"what {op.target.removeprefix('aten.')} draws depends on data, so it cannot be drawn for the whole batch"
    )


def _creators(graph: TrainingGraph, op: Op) -> tuple[Op, ...]:
    """The ops that make the arguments of a random operator, if none of them reads data."""
    found: set[int] = set()
    waiting = [*op.reads, *op.shape_reads]
    while waiting:
        producer = graph.values[waiting.pop()].producer
        if producer is None or graph.ops[producer].target not in CREATORS:
            raise _not_hoistable(op)
        if producer not in found:
            found.add(producer)
            waiting.extend((*graph.ops[producer].reads, *graph.ops[producer].shape_reads))
    return tuple(graph.ops[index] for index in sorted(found))
