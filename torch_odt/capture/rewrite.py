"""Graph passes: from the graph as traced to the graph that is planned.

Each pass is a function `(TrainingGraph) -> str | None` that changes the graph in place and says what it did. Those in
`REWRITES` can be switched off by name; they keep every bit of every output, or keep them within rounding and say so.
`rewrite` runs the passes in order and renumbers what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from torch_odt._extensions import has_kernels
from torch_odt.capture import operators
from torch_odt.capture.batch_norm_match import BATCH_NORM
from torch_odt.capture.choose_layouts import choose_layouts
from torch_odt.capture.decode_again import decode_again
from torch_odt.capture.direct_depthwise import direct_depthwise
from torch_odt.capture.direct_pointwise import direct_pointwise
from torch_odt.capture.fold_batch_norm import fold_batch_norm
from torch_odt.capture.fuse_batch_norm import FUSED, FUSED_NORMALIZE, fuse_batch_norm
from torch_odt.capture.graph import Op, OutputKind, Ref, TrainingGraph, Value, map_refs, refs
from torch_odt.capture.narrow_pool_indices import narrow_pool_indices
from torch_odt.capture.overwrite import overwrite_activations, overwrite_gradients
from torch_odt.capture.pack_activation_masks import pack_activation_masks
from torch_odt.capture.pack_dropout_masks import APPLY, DROPOUT, PACKED, pack_dropout_masks, scaled
from torch_odt.capture.read_codes import read_codes
from torch_odt.capture.split_expansions import split_expansions
from torch_odt.capture.update_in_backward import UpdateRule, update_in_backward
from torch_odt.capture.view_gradients import view_gradients

T = TypeVar("T")

Pass = Callable[[TrainingGraph], str | None]
Stage = Literal["traced", "numbered", "whole batch", "optimizer"]


@dataclass(frozen=True)
class Rewrite:
    """A pass that can be switched off.

    Attributes:
        apply: the pass; its function's name is the rewrite's. One of the stage "optimizer" takes the rules, too.
        is_exact: every output keeps every bit; otherwise outputs agree within rounding.
        needs_kernels: what it puts into the graph is slower than what it replaces unless it is compiled.
        stage: "traced": it changes the graph as it was traced. "numbered": it adds to the graph as it is executed, with
            its ops and values numbered. "whole batch": it changes ops and values, but not their number, of a graph that
            runs all samples at once; the proof that micro-batches add up does not know of it. "optimizer":
            `with_updates` makes it, where the optimizer of a step over the whole batch is known.
    """

    apply: Callable[..., str | None]
    is_exact: bool = True
    needs_kernels: bool = False
    stage: Stage = "traced"


def rewrite(
    graph: TrainingGraph, *, drop: tuple[OutputKind, ...] = (), disabled: Collection[str] = ()
) -> TrainingGraph:
    """The graph to plan: without copies, dead gradients and reads that nothing needs, with fused operators.

    Args:
        graph: as traced. It is changed; use the returned one.
        drop: kinds of outputs that nobody asked for ("result").
        disabled: names of rewrites that are not to be made.
    """
    graph.outputs = [output for output in graph.outputs if output.kind not in drop]
    hand_on_aliases(graph)
    remove_dead(graph)
    for name, pass_ in _enabled(disabled, "traced"):
        _apply(graph, name, pass_)
        remove_dead(graph)
    protect_mutated_buffers(graph)
    return number_anew(graph, disabled)


def number_anew(graph: TrainingGraph, disabled: Collection[str] = ()) -> TrainingGraph:
    """The graph without values that nothing names, its ops and values numbered in order, with rematerializers."""
    result = _renumber(graph)
    for name, pass_ in _enabled(disabled, "numbered"):
        _apply(result, name, pass_)
    return result


def reopen(graph: TrainingGraph) -> tuple[TrainingGraph, frozenset[str]]:
    """A copy of a numbered graph that may be changed, and the rewrites not to be made when it is numbered anew.

    What rematerializes is gone from it: `number_anew` makes that again, and names it again in the notes.
    """
    made = {name for name, row in REWRITES.items() if row.stage == "numbered"}
    missing = frozenset(name for name in made if not any(_is_note_of(name, note) for note in graph.notes))
    copy = TrainingGraph(
        ops=[replace(op) for op in graph.program],
        values=[replace(value) for value in graph.values],
        inputs=list(graph.inputs),
        outputs=list(graph.outputs),
        boundary=graph.boundary,
        program_length=graph.program_length,
        constants=dict(graph.constants),
        notes=[note for note in graph.notes if not any(_is_note_of(name, note) for name in made)],
    )
    return copy, missing


def _is_note_of(name: str, note: str) -> bool:
    return note.endswith(f"({name})")


def with_updates(graph: TrainingGraph, rules: Mapping[str, UpdateRule], *, may_fuse: bool = True) -> TrainingGraph:
    """A numbered graph whose parameters are updated inside of it, as `update_in_backward` says; not changed itself."""
    updated, disabled = reopen(graph)
    _apply(updated, update_in_backward.__name__, lambda graph: update_in_backward(graph, rules, may_fuse=may_fuse))
    return number_anew(updated, disabled).sharing(graph)


def for_whole_batch(graph: TrainingGraph, disabled: Collection[str] = ()) -> TrainingGraph:
    """What is executed where all samples run at once, from a graph that `rewrite` returned, which is not changed."""
    result = replace(
        graph,
        ops=[replace(op) for op in graph.ops],
        values=[replace(value) for value in graph.values],
        notes=list(graph.notes),
    )
    for name, pass_ in _enabled(disabled, "whole batch"):
        _apply(result, name, pass_)
    return result.sharing(graph)


def _enabled(disabled: Collection[str], stage: Stage) -> Iterator[tuple[str, Pass]]:
    for name, row in REWRITES.items():
        if row.stage == stage and name not in disabled:
            yield name, row.apply


def _apply(graph: TrainingGraph, name: str, pass_: Pass) -> None:
    note = pass_(graph)
    if note:
        graph.notes.append(f"{note} ({name})")


def inexact_rewrites() -> frozenset[str]:
    """Those after which results agree within rounding, not bit for bit."""
    return frozenset(name for name, row in REWRITES.items() if not row.is_exact)


def switched_off(names: Iterable[str], planner: str) -> frozenset[str]:
    """What is not to be made: what the user disables, under `keep-all` whatever rounds otherwise, and what is too slow
    without compiled operators.

    Raises:
        ValueError: there is no such rewrite.
        TypeError: one name in place of several.
    """
    if isinstance(names, str):
        raise TypeError(f"disable_rewrites takes several names: write [{names!r}]")
    if not isinstance(names, Iterable):
        raise TypeError(f"disable_rewrites takes names of rewrites, such as ['fuse_batch_norm'], not {names!r}")
    disabled = frozenset(names)
    unknown = sorted(disabled - set(REWRITES))
    if unknown:
        raise ValueError(f"there is no rewrite {unknown[0]!r}; there are {', '.join(REWRITES)}")
    if planner == "keep-all":
        disabled |= inexact_rewrites()
    if not has_kernels:
        disabled |= {name for name, row in REWRITES.items() if row.needs_kernels}
    return disabled


def hand_on_aliases(graph: TrainingGraph) -> None:
    """`detach` and `alias` hand on their input: nothing in a traced graph is changed in place."""
    _hand_on(graph, ("aten.detach.default", "aten.alias.default"))


def remove_copies(graph: TrainingGraph) -> str | None:
    """A `clone` with unchanged strides hands on its input: nothing in a traced graph is changed in place.

    A clone that leaves the graph stays, and so does a clone of something that the caller owns when it leaves as a view.
    """
    removed = _hand_on(graph, ("aten.clone.default",))
    return f"{removed} copies made only for in-place operations removed" if removed else None


def _hand_on(graph: TrainingGraph, targets: Collection[str]) -> int:
    """Put the inputs of these operators in the place of their results where the two are alike; returns how often."""
    leaving = {graph.values[v].base for v in graph.output_values}
    substitute: dict[int, int] = {}
    for op in graph.ops:
        if op.target not in targets:
            continue
        source, result = op.reads[0], op.results[0]
        source = substitute.get(source, source)
        before, after = graph.values[source], graph.values[result]
        if before.stride != after.stride or (op.target == "aten.clone.default" and result in leaving):
            continue
        substitute[result] = source
    _substitute(graph, substitute)
    return len(substitute)


def protect_mutated_buffers(graph: TrainingGraph) -> None:
    """A buffer is overwritten at the end of the forward pass: what reads its old content must have done so by then.

    Forward ops that read it are run once only; backward ops read a copy taken at the start.
    """
    mutated = {o.target for o in graph.outputs_of("mutation")}
    buffers = {v.index for v in graph.values if v.kind in ("buffer", "input") and v.target in mutated}
    late: dict[int, list[Op]] = {}
    for op in graph.ops:
        for value in op.reads:
            if graph.values[value].base in buffers:
                if op.phase == "backward":
                    late.setdefault(value, []).append(op)
                else:
                    op.is_pinned = True
    for value, readers in late.items():
        _insert_early_copy(graph, value, readers)


def mark_shape_reads(graph: TrainingGraph) -> str | None:
    """Arguments that an operator uses for their shape alone need not be kept for it."""
    freed = 0
    for op in graph.ops:
        dtype = graph.values[op.reads[0]].dtype if op.reads else ""
        positions = operators.shape_only_positions(op.target, op.args, dtype, *convolved(graph, op))
        shapes = {op.args[p].value for p in positions if isinstance(op.args[p], Ref)}
        data = set(refs([a for i, a in enumerate(op.args) if i not in positions])) | set(refs(op.kwargs))
        shapes -= data
        freed += sum(graph.values[v].kind == "computed" for v in shapes)
        op.reads = tuple(v for v in op.reads if v not in shapes)
        op.shape_reads = tuple(sorted(shapes))
    return f"{freed} tensors are not kept for operators that use their shape alone" if freed else None


def convolved(graph: TrainingGraph, op: Op) -> list[operators.Laid]:
    """The input and the weight of a convolution's backward op; nothing for other ops."""
    if op.target != "aten.convolution_backward.default":
        return []
    values = [graph.values[argument.value] for argument in op.args[1:3]]
    return [operators.Laid(value.shape, value.stride) for value in values]


def mask_unused_gradients(graph: TrainingGraph) -> str | None:
    """Backward operators with a mask compute only the gradients that somebody reads."""
    used = _used_values(graph)
    masked = 0
    for op in graph.ops:
        position = operators.output_mask_position(op.target)
        if position is None:
            continue
        wanted = [w is not None and w in used for w in op.writes]
        mask = [bool(m) and w for m, w in zip(op.args[position], wanted, strict=True)]
        if mask != list(op.args[position]):
            masked += sum(map(bool, op.args[position])) - sum(mask)
            op.args = (*op.args[:position], mask, *op.args[position + 1 :])
    return f"{masked} gradients that nobody asked for removed" if masked else None


def sum_bias_gradients(graph: TrainingGraph) -> str | None:
    """A convolution whose weight is frozen reads its input for the bias alone, whose gradient is a plain sum."""
    split: list[Op] = []
    taken = 0
    for op in graph.ops:
        split.append(op)
        if op.target != "aten.convolution_backward.default" or op.writes[2] is None or op.args[10][1]:
            continue
        bias_gradient, gradient = op.writes[2], op.args[0]
        op.args = (*op.args[:10], [op.args[10][0], False, False])
        op.writes = (op.writes[0], None, None)
        dims = [0, *range(2, len(graph.values[gradient.value].shape))]
        added = replace(op, index=_next_index(graph, split), target="aten.sum.dim_IntList", args=(gradient, dims))
        split.append(replace(added, reads=(gradient.value,), writes=(bias_gradient,), shape_reads=()))
        graph.values[bias_gradient].producer = added.index
        taken += 1
    graph.ops = [op for op in split if op.results]
    return f"{taken} bias gradients of frozen convolutions are sums that need no input" if taken else None


def _next_index(graph: TrainingGraph, more: list[Op]) -> int:
    return 1 + max(op.index for op in (*graph.ops, *more))


def remove_dead(graph: TrainingGraph) -> None:
    """Ops whose results nobody reads. A random one stays: what the next one draws depends on it.

    Ops that have none are of use for what they change.
    """
    used = _used_values(graph)
    graph.ops = [op for op in graph.ops if op.is_random or not op.writes or any(r in used for r in op.results)]
    for op in graph.ops:
        if any(r in used for r in op.results):
            op.writes = tuple(w if w in used else None for w in op.writes)


def rematerialize_batch_norm(graph: TrainingGraph) -> str | None:
    """BatchNorm's output comes back from its input with the saved mean and invstd, without a second statistics pass."""
    count = 0
    for op in graph.program:
        is_fused = op.target == FUSED
        if not is_fused and (op.target != BATCH_NORM or not op.args[5]):
            continue
        output, mean, invstd = op.writes[:3]
        if output is None or mean is None or invstd is None:
            continue
        x, weight, bias = op.args[0], op.args[1], op.args[2]
        if not _can_normalize(graph, x, (Ref(mean), Ref(invstd), weight, bias)):
            continue
        arguments = (x, Ref(mean), Ref(invstd), weight, bias, *(op.args[7:] if is_fused else ()))
        _add_rematerializer(graph, op, output, FUSED_NORMALIZE if is_fused else "odt.batch_norm_normalize", arguments)
        count += 1
    return f"{count} BatchNorm outputs can be recomputed from the saved statistics" if count else None


def _can_normalize(graph: TrainingGraph, x: Ref, per_channel: tuple[Ref | None, ...]) -> bool:
    """Whether `odt.batch_norm_normalize` takes these types."""
    own = graph.values[x.value].dtype
    wanted = "float64" if own == "float64" else "float32"
    types = {graph.values[tensor.value].dtype for tensor in per_channel if tensor is not None}
    return own in ("float32", "float64", "bfloat16") and types == {wanted}


def rematerialize_dropout(graph: TrainingGraph) -> str | None:
    """Dropout's output comes back from its input and the mask that was drawn."""
    count = 0
    for op in graph.program:
        if op.target not in (DROPOUT, PACKED):
            continue
        output, mask = op.writes
        if output is None or mask is None:
            continue
        again = replace(op, target=APPLY, args=(op.args[0], Ref(mask), op.args[1]))
        if op.target == PACKED:
            again = scaled(graph, again, channels_last=op.args[2])
        _add_rematerializer(graph, op, output, again.target, again.args)
        count += 1
    return f"{count} dropout outputs can be recomputed from their masks" if count else None


# In the order in which they are made: fusions look for ops as the rewrites before leave them.
REWRITES = {
    row.apply.__name__: row
    for row in (
        Rewrite(remove_copies),
        Rewrite(view_gradients),
        Rewrite(mask_unused_gradients),
        Rewrite(sum_bias_gradients, is_exact=False),
        Rewrite(fold_batch_norm, is_exact=False),
        Rewrite(decode_again),
        Rewrite(choose_layouts, is_exact=False),
        Rewrite(split_expansions, is_exact=False),
        Rewrite(direct_depthwise, is_exact=False, needs_kernels=True),
        Rewrite(direct_pointwise, is_exact=False, needs_kernels=True),
        Rewrite(read_codes, needs_kernels=True),
        Rewrite(narrow_pool_indices, needs_kernels=True),
        Rewrite(mark_shape_reads),
        Rewrite(fuse_batch_norm, is_exact=False, needs_kernels=True),
        Rewrite(pack_activation_masks, needs_kernels=True),
        Rewrite(overwrite_activations),
        Rewrite(overwrite_gradients),
        Rewrite(rematerialize_batch_norm, stage="numbered"),
        Rewrite(rematerialize_dropout, stage="numbered"),
        Rewrite(pack_dropout_masks, needs_kernels=True, stage="whole batch"),
        Rewrite(update_in_backward, stage="optimizer"),
    )
}


def _renumber(graph: TrainingGraph) -> TrainingGraph:
    """Drop values that nothing names, and number ops and values anew."""
    named = {v for op in graph.ops for v in (*op.reads, *op.shape_reads, *op.results)}
    named |= graph.output_values | set(graph.inputs)
    named |= {graph.values[v].base for v in named}
    new_index = {old: new for new, old in enumerate(v.index for v in graph.values if v.index in named)}
    new_op = {op.index: position for position, op in enumerate(graph.ops)}

    # Networks have thousands of references and of shapes: equal ones are one object.
    new_ref = {old: Ref(new) for old, new in new_index.items()}
    shared: dict[Any, Any] = {}

    def same(thing: T) -> T:
        found: T = shared.setdefault(thing, thing)
        return found

    def renumber(arguments: Any) -> Any:
        return map_refs(arguments, new_ref.__getitem__)

    values: list[Value] = []
    for value in graph.values:
        if value.index in named:
            producer = new_op.get(value.producer) if value.producer is not None else None
            index, base = new_index[value.index], new_index[value.base]
            value = replace(value, index=index, base=base, producer=producer)
            value.shape, value.stride, value.dtype = same(value.shape), same(value.stride), same(value.dtype)
            values.append(value)
    ops = [
        replace(
            op,
            index=new_op[op.index],
            target=same(op.target),
            args=renumber(op.args),
            kwargs=renumber(op.kwargs),
            reads=tuple(new_index[v] for v in op.reads),
            shape_reads=tuple(new_index[v] for v in op.shape_reads),
            overwrites=None if op.overwrites is None else new_index[op.overwrites],
            writes=tuple(None if w is None else new_index[w] for w in op.writes),
        )
        for op in graph.ops
    ]
    return TrainingGraph(
        ops=ops,
        values=values,
        inputs=[new_index[v] for v in graph.inputs],
        outputs=[replace(o, value=new_index[o.value]) for o in graph.outputs],
        boundary=sum(op.phase == "forward" for op in ops),
        program_length=len(ops),
        constants={new_index[v]: t for v, t in graph.constants.items() if v in named},
        notes=graph.notes,
    )


def _substitute(graph: TrainingGraph, substitute: dict[int, int]) -> None:
    if not substitute:
        return

    for op in graph.ops:
        _substitute_in(op, substitute)
    graph.outputs = [replace(o, value=substitute.get(o.value, o.value)) for o in graph.outputs]
    for value in graph.values:
        base = value.base
        while base in substitute:
            base = graph.values[substitute[base]].base
        value.base = base


def _substitute_in(op: Op, substitute: dict[int, int]) -> None:
    def hand_on(value: int) -> Ref:
        return Ref(substitute.get(value, value))

    op.args, op.kwargs = map_refs(op.args, hand_on), map_refs(op.kwargs, hand_on)
    op.reads = tuple(dict.fromkeys(substitute.get(v, v) for v in op.reads))


def _insert_early_copy(graph: TrainingGraph, value: int, readers: list[Op]) -> None:
    original = graph.values[value]
    copy = replace(
        original, index=len(graph.values), name=f"{original.name}_before", kind="computed", base=len(graph.values)
    )
    graph.values.append(copy)
    op = Op(
        index=_next_index(graph, []),
        target="aten.clone.default",
        args=(Ref(value),),
        kwargs={},
        reads=(value,),
        shape_reads=(),
        writes=(copy.index,),
        is_pinned=True,
    )
    copy.producer = op.index
    graph.ops.insert(0, op)
    for reader in readers:
        _substitute_in(reader, {value: copy.index})


def _used_values(graph: TrainingGraph) -> set[int]:
    """Values that an output, a random draw or a change depends on, walking back through what ops really read."""
    used = set(graph.output_values)
    for op in reversed(graph.ops):
        if op.is_random or not op.writes or any(r in used for r in op.results):
            used.update(op.reads)
    return used


def _add_rematerializer(graph: TrainingGraph, op: Op, value: int, target: str, args: tuple[Any, ...]) -> None:
    again = Op(
        index=len(graph.ops),
        target=target,
        args=args,
        kwargs={},
        reads=tuple(dict.fromkeys(refs(args))),
        shape_reads=(),
        writes=(value,),
        phase=op.phase,
    )
    graph.ops.append(again)
    graph.rematerializers[value] = again.index


def describe(graph: TrainingGraph) -> Counter[str]:
    """How often each operator stands in the program."""
    return Counter(op.target for op in graph.program)
