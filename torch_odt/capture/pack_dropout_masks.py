"""Dropout that draws its mask as bits and applies it in one pass; its backward op reads the bits.

The bits are those that `native_dropout` would have drawn, and so are the results and the generator's state.
Micro-batches take slices of masks that are drawn before the step (see `randomness`), so that this is for graphs of the
whole batch.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from torch_odt.capture.graph import Op, Ref, TrainingGraph, refs
from torch_odt.capture.operators import register_operator
from torch_odt.capture.pack_activation_masks import gives_layout_of, has_one_order
from torch_odt.capture.strides import is_contiguous
from torch_odt.ops import bernoulli_bits, scale_masked
from torch_odt.ops.masked import memory_format_of, pack_in_order
from torch_odt.ops.random_bits import draws_like_torch

DROPOUT, DROPOUT_BACKWARD = "aten.native_dropout.default", "aten.native_dropout_backward.default"
APPLY = "odt.dropout_apply"
PACKED = "odt.packed_dropout"
SCALE = "torch_odt.scale_masked.default"

# Asked now, since its answer takes memory: a plan that comes from a cache would meet it within a step.
draws_like_torch()


def pack_dropout_masks(graph: TrainingGraph) -> str | None:
    """Dropout keeps a bit of each element in place of a byte."""
    readers: dict[int, list[Op]] = {}
    for op in graph.ops:
        for value in dict.fromkeys(refs([op.args, op.kwargs])):
            readers.setdefault(value, []).append(op)
    leaving = graph.output_values
    replaced: dict[int, Op] = {}
    count = 0
    for op in graph.program:
        if op.target != DROPOUT or op.writes[0] is None or op.writes[1] is None or op.args[2:] != (True,):
            continue
        using = readers.get(op.writes[1], [])
        if op.writes[1] in leaving or not _takes(graph, op, using):
            continue
        count += 1
        x = graph.values[op.args[0].value]
        channels_last = not is_contiguous(x.shape, x.stride)
        _pack(graph, op.writes[1])
        replaced[op.index] = replace(op, target=PACKED, args=(op.args[0], op.args[1], channels_last), kwargs={})
        for user in using:
            replaced[user.index] = scaled(graph, user, channels_last)
    graph.ops = [replaced.get(op.index, op) for op in graph.ops]
    return f"{count} dropout masks are drawn and kept as bits" if count else None


def scale_of(p: float, dtype: torch.dtype) -> float:
    """What dropout multiplies by: ATen rounds it to the type of its input, though not in the backward pass."""
    return torch.tensor(0.0 if p == 1.0 else 1.0 / (1.0 - p), dtype=dtype).item()


def _takes(graph: TrainingGraph, dropout: Op, using: list[Op]) -> bool:
    """Whether the mask is for dropout alone, and results keep their layouts."""
    x = graph.values[dropout.args[0].value]
    results = [graph.values[value] for op in (dropout, *using) for value in op.results[:1]]
    sources = [graph.values[op.args[0].value] for op in using]
    return (
        x.dtype in ("float32", "float64", "bfloat16")
        and has_one_order(x)
        and all(op.target in (DROPOUT_BACKWARD, APPLY) for op in using)
        and all(gives_layout_of(source, x) for source in sources)
        and all((value.shape, value.stride, value.dtype) == (x.shape, x.stride, x.dtype) for value in results)
    )


def _pack(graph: TrainingGraph, mask: int) -> None:
    value = graph.values[mask]
    nbytes = (math.prod(value.shape) + 7) // 8
    value.shape, value.stride, value.dtype, value.nbytes = (nbytes,), (1,), "uint8", nbytes


def scaled(graph: TrainingGraph, op: Op, channels_last: bool) -> Op:
    """A backward op, or what computes dropout's output again, with a mask of bits."""
    tensor, mask, number = op.args
    assert isinstance(tensor, Ref)
    dtype = getattr(torch, graph.values[tensor.value].dtype)
    scale = number if op.target == DROPOUT_BACKWARD else scale_of(number, dtype)
    return replace(op, target=SCALE, args=(tensor, mask, scale, channels_last), kwargs={})


@register_operator("packed_dropout")
def _packed_dropout(x: torch.Tensor, p: float, channels_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if not x.is_contiguous(memory_format=memory_format_of(channels_last)):
        # Numbers are drawn in the order of memory, which is not the one that was foreseen.
        output, mask = torch.ops.aten.native_dropout(x, p, True)
        return output, pack_in_order(mask, channels_last)
    bits = bernoulli_bits(x.numel(), 1.0 - p)
    return scale_masked(x, bits, scale_of(p, x.dtype), channels_last), bits
