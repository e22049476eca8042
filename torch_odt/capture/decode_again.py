"""A weight that is stored in 8 bits is made for each pass, and gone in between.

What is stored in fewer bits is stored so for want of memory; the weight that it stands for would be kept from the
forward to the backward pass. Those are taken that a convolution reads as they are made, by a product of codes and
scales (`torch_odt.adapt.StoredConv2d` with "affine" codes); weights of linear layers are read through views, and
codebooks looked up. To make it again takes a product for each of its elements, of
which a convolution does one for each pixel. Every bit stays.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch_odt.capture.graph import Op, Ref, TrainingGraph, map_refs
from torch_odt.capture.uses import Uses

_TIMES = "aten.mul.Tensor"


def decode_again(graph: TrainingGraph) -> str | None:
    """Weights in 8 bits that both passes need are made in both."""
    uses = Uses(graph)
    mutated = {output.target for output in graph.outputs_of("mutation")}
    leaving = graph.output_values
    number = 1 + max((op.index for op in graph.ops), default=0)
    changed: dict[int, list[Op]] = {}
    saved_bytes = 0
    for op in graph.ops:
        if op.phase == "backward" or leaving & set(op.results):
            continue
        if not is_decoding(graph, op) or not all(is_held(graph, uses, value, mutated) for value in op.reads):
            continue
        weight = graph.values[op.results[0]]
        readers = uses.readers(weight.index)
        late = [reader for reader in readers if reader.phase == "backward"]
        if not late or len(late) == len(readers) or any(reader.is_view for reader in readers):
            continue
        again = graph.add_value(weight)
        again.producer = number
        for reader in late:
            # An op may read several weights.
            current = changed.get(reader.index, [reader])
            changed[reader.index] = [*current[:-1], _reading(current[-1], weight.index, again.index)]
        maker = replace(op, index=number, writes=(again.index,), phase="backward")
        changed[late[0].index].insert(0, maker)
        number += 1
        saved_bytes += weight.nbytes
    graph.ops = [new for op in graph.ops for new in changed.get(op.index, [op])]
    return f"weights in 8 bits are decoded in each pass, {saved_bytes >> 10} KiB less kept" if changed else None


def is_decoding(graph: TrainingGraph, op: Op) -> bool:
    """Whether an op makes a weight of codes in 8 bits and of their scales."""
    if op.target != _TIMES or op.kwargs or not all(isinstance(argument, Ref) for argument in op.args):
        return False
    codes = graph.values[op.args[0].value]
    return codes.dtype == "int8" and codes.kind != "computed"


def is_held(graph: TrainingGraph, uses: Uses, value: int, mutated: Collection[Any]) -> bool:
    """Whether a value is of the model and stays as it is through the step, or is made of such values."""
    held = graph.values[value]
    if held.kind in ("parameter", "buffer"):
        return held.target not in mutated
    producer = uses.producer(value)
    return producer is not None and all(is_held(graph, uses, read, mutated) for read in producer.reads)


def _reading(op: Op, old: int, new: int) -> Op:
    """The op with another value in the place of one that it reads."""

    def other(value: int) -> Ref:
        return Ref(new if value == old else value)

    def numbers(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new if value == old else value for value in values)

    return replace(
        op,
        args=map_refs(op.args, other),
        kwargs=map_refs(op.kwargs, other),
        reads=numbers(op.reads),
        shape_reads=numbers(op.shape_reads),
    )
