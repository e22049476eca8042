"""Random numbers of a step in micro-batches: drawn once for the whole batch, sliced for each micro-batch.

So the masks and the state of the generator afterwards equal the plain step's, bit for bit. `hoist_random` takes the
random operators out of a micro-batch's graph; what they draw becomes inputs of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from torch_odt.capture import rewrite
from torch_odt.capture.batch_axis import NotSeparable, RandomPair, Separation, laid_out, with_values
from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value, map_refs, refs
from torch_odt.capture.operators import resolve
from torch_odt.ops import bernoulli_bits, pack_bits, unpack_bits
from torch_odt.ops.random_bits import draws_like_torch

_DROPOUT = "aten.native_dropout.default"
# Operators that use their first argument for its shape, strides and dtype alone.
_LIKE = frozenset(
    f"aten.{name}"
    for name in [
        "bernoulli.p",
        "rand_like.default",
        "randn_like.default",
        "randint_like.default",
        "randint_like.low_dtype",
        "uniform.default",
        "normal_functional.default",
        "exponential.default",
    ]
)
# Operators that take no tensor.
_FREE = frozenset(f"aten.{name}" for name in ["rand.default", "randn.default", "randint.default", "randint.low"])
# What fills a tensor without looking at data: the probabilities of `bernoulli.default` may come from these.
_CREATORS = frozenset(
    f"aten.{name}"
    for name in [
        "full.default",
        "zeros.default",
        "ones.default",
        "scalar_tensor.default",
        "full_like.default",
        "ones_like.default",
        "zeros_like.default",
        "new_full.default",
        "new_ones.default",
        "new_zeros.default",
        "fill.Scalar",
        "empty.memory_format",
        "empty_like.default",
        "new_empty.default",
        "expand.default",
        "view.default",
    ]
)


@dataclass(frozen=True, slots=True)
class Layout:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, value: Value) -> Layout:
        return cls(value.shape, value.stride, value.dtype)

    def is_dense_outside(self, dim: int) -> bool:
        """Whether the elements fill their memory, and those of one index along `dim` lie together."""
        if prod(self.shape) == 0:
            return False
        expected = 1
        order = sorted((axis for axis in range(len(self.shape)) if axis != dim), key=self.stride.__getitem__)
        for axis in (*order, dim):
            if self.shape[axis] != 1 or axis == dim:
                if self.stride[axis] != expected:
                    return False
                expected *= self.shape[axis]
        return True

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers that the full step draws.

    Attributes:
        op: the random operator of the full graph.
        value: the hoisted graph's input that holds a micro-batch's slice of them.
        dim: the batch axis; None when all micro-batches share them.
        outer: how many runs of all samples lie along `dim`.
        rows: elements along `dim` for each sample in each run.
        stride: of the numbers for a micro-batch.
        layout: of the numbers for the whole batch.
        like: what the operator is given where it looks at no data of it.
        needs: the ops that make the arguments of the operator.
    """

    op: Op
    value: int
    dim: int | None
    outer: int
    rows: int
    stride: tuple[int, ...]
    layout: Layout
    like: Layout | None
    needs: tuple[Op, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.layout.dtype)

    @property
    def is_packed(self) -> bool:
        """Whether the numbers are kept as bits: a mask in which every micro-batch is one run of memory."""
        if self.dim is None or self.outer != 1 or self.dtype != torch.bool:
            return False
        return self.layout.is_dense_outside(self.dim)

    @property
    def is_drawn_as_bits(self) -> bool:
        """Whether no booleans exist in between."""
        return self.is_packed and self.op.target == _DROPOUT and _trains(self.op) is not False and draws_like_torch()

    @property
    def drawing_bytes(self) -> int:
        """What drawing takes beside what is kept."""
        return self._whole_bytes if self.is_packed and not self.is_drawn_as_bits else 0

    @property
    def kept_bytes(self) -> int:
        """The numbers for the whole batch, as they are kept during the step."""
        return (prod(self.shape) + 7) // 8 if self.is_packed else self._whole_bytes

    @property
    def _whole_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def slice_bytes(self, samples: int) -> int:
        """What a micro-batch's slice takes beside them: nothing where it is a view."""
        if self.dim is None:
            return 0
        shape = list(self.shape)
        shape[self.dim] = self.outer * self.rows * samples
        strides = zip(shape, self.layout.stride, self.stride, strict=True)
        is_view = not self.is_packed and self.outer == 1 and all(n == 1 or a == b for n, a, b in strides)
        return 0 if is_view else prod(shape) * self.dtype.itemsize

    def draw(self) -> torch.Tensor:
        """The numbers for the whole batch, from torch's default generator as in the full step, for `slice`."""
        with torch.no_grad():
            if self.is_drawn_as_bits:
                # `bernoulli_` goes through the elements in the order of memory, and so do bits.
                return bernoulli_bits(prod(self.shape), 1.0 - self.op.args[1])
            drawn = self._draw_whole()
            return pack_bits(drawn.as_strided((drawn.numel(),), (1,))) if self.is_packed else drawn

    def _draw_whole(self) -> torch.Tensor:
        if self.op.target == _DROPOUT:
            mask = self.layout.empty()
            return mask.fill_(True) if _trains(self.op) is False else mask.bernoulli_(1.0 - self.op.args[1])
        if self.like is not None:
            return resolve(self.op.target)(self.like.empty(), *self.op.args[1:], **self.op.kwargs)
        return _evaluate(self.needs, self.op)

    def slice(self, kept: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The part of what was drawn for the micro-batch of the samples from `start` to `stop`, a view if possible."""
        if self.dim is None:
            return kept
        first, count = start * self.rows, (stop - start) * self.rows
        if self.is_packed:
            shape = tuple(count if dim == self.dim else n for dim, n in enumerate(self.shape))
            outermost = self.layout.stride[self.dim]
            bits = unpack_bits(kept, first * outermost, count * outermost)
            return laid_out(bits.as_strided(shape, self.layout.stride), self.stride)
        if self.outer == 1:
            return laid_out(kept.narrow(self.dim, first, count), self.stride)
        runs = kept.unflatten(self.dim, (self.outer, -1)).narrow(self.dim + 1, first, count)
        return laid_out(runs.flatten(self.dim, self.dim + 1), self.stride)


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
    # What rematerializes is made anew with the numbers, and named again.
    again = [name for name, row in rewrite.REWRITES.items() if row.after_numbering]
    disabled = [name for name in again if not any(_is_note_of(name, note) for note in micro.notes)]
    graph = _copy(micro, [note for note in micro.notes if not any(_is_note_of(name, note) for name in again)])
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


def _is_note_of(name: str, note: str) -> bool:
    return note.endswith(f"({name})")


def _copy(graph: TrainingGraph, notes: list[str]) -> TrainingGraph:
    """The program with ops and values of its own, without rematerializers."""
    return TrainingGraph(
        ops=[replace(op) for op in graph.program],
        values=[replace(value) for value in graph.values],
        inputs=list(graph.inputs),
        outputs=list(graph.outputs),
        boundary=graph.boundary,
        program_length=graph.program_length,
        constants=dict(graph.constants),
        notes=notes,
    )


def _hoist(graph: TrainingGraph, full: TrainingGraph, pair: RandomPair, number: int, separation: Separation) -> Draw:
    op = graph.ops[pair.micro_op]
    drawn = 1 if op.target == _DROPOUT else 0
    full_value = _result(full, full.ops[pair.full_op], drawn)
    value = _as_input(graph, op, drawn, number)
    if op.target == _DROPOUT:
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
    trains = _trains(op)
    assert isinstance(op.args[0], Ref)
    if trains is False:
        op.target, op.args, op.reads = "aten.clone.default", (op.args[0],), (op.args[0].value,)
    else:
        op.target, op.args = "odt.dropout_apply", (op.args[0], Ref(mask.index), op.args[1])
        op.reads = tuple(dict.fromkeys((op.args[0].value, mask.index)))
    op.kwargs, op.shape_reads, op.writes, op.is_random = {}, (), (op.writes[0],), False


def _trains(op: Op) -> bool | None:
    return op.args[2] if len(op.args) > 2 else op.kwargs.get("train")


def _sources(graph: TrainingGraph, op: Op) -> tuple[Layout | None, tuple[Op, ...]]:
    """What a random operator needs to draw: the layout of its first argument, or ops that make its arguments."""
    if op.target == _DROPOUT or op.target in _FREE:
        return None, ()
    if op.target in _LIKE and not any(True for _ in refs((op.args[1:], op.kwargs))):
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
        if producer is None or graph.ops[producer].target not in _CREATORS:
            raise _not_hoistable(op)
        if producer not in found:
            found.add(producer)
            waiting.extend((*graph.ops[producer].reads, *graph.ops[producer].shape_reads))
    return tuple(graph.ops[index] for index in sorted(found))


def _evaluate(ops: tuple[Op, ...], last: Op) -> torch.Tensor:
    table: dict[int, torch.Tensor] = {}

    def call(op: Op) -> Any:
        return resolve(op.target)(*map_refs(op.args, table.__getitem__), **map_refs(op.kwargs, table.__getitem__))

    for op in ops:
        (value,) = op.results
        table[value] = call(op)
    return call(last)
