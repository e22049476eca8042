"""A clamp's backward pass needs one bit of each element; where it keeps a tensor for that alone, bits take its place.

ReLU's backward op reads its output, hardtanh's its input. Where no other backward op reads that tensor's data (a
pooling behind it needs the shape alone), the forward op notes the bits. Where a convolution keeps it anyway, bits would
only be more. Outputs and gradients keep every bit, but for gradients at a NaN in front of a hardtanh, which ATen passes
on or not depending on their place; here they are passed on.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value
from torch_odt.capture.strides import is_channels_last, is_contiguous, same_layout

CLAMP = "torch_odt.clamp_with_mask.default"
CLAMP_BACKWARD = "torch_odt.clamp_with_mask_backward.default"
_RELU, _RELU_BACKWARD = "aten.relu.default", "aten.threshold_backward.default"
_HARDTANH, _HARDTANH_BACKWARD = "aten.hardtanh.default", "aten.hardtanh_backward.default"


def pack_activation_masks(graph: TrainingGraph) -> str | None:
    """Tensors that are kept for the backward op of one clamp become a bit an element."""
    late = _backward_readers(graph)
    leaving = {graph.values[value].base for value in graph.output_values}
    replaced: dict[int, Op] = {}
    saved_bytes = 0
    for op in graph.ops:
        if op.target not in (_RELU, _HARDTANH) or op.phase != "forward":
            continue
        kept = graph.values[op.results[0] if op.target == _RELU else op.reads[0]]
        readers = late.get(kept.base, [])
        if graph.values[kept.base].kind != "computed" or kept.base in leaving or len(readers) != 1:
            continue
        (backward,) = readers
        if not _is_backward_of(backward, op) or not _takes(graph, op, backward):
            continue
        mask = _add_mask(graph, op)
        output = graph.values[op.results[0]]
        channels_last = not is_contiguous(output.shape, output.stride)
        replaced[op.index] = _forward(op, mask, channels_last)
        replaced[backward.index] = _backward(backward, mask, channels_last)
        saved_bytes += kept.nbytes - mask.nbytes
    graph.ops = [replaced.get(op.index, op) for op in graph.ops]
    count = len(replaced) // 2
    return f"{count} activations are kept as bits, {saved_bytes >> 20} MiB less" if replaced else None


def has_one_order(value: Value) -> bool:
    """Whether a mask can have a bit for each element in the order of memory."""
    is_dense = is_contiguous(value.shape, value.stride) or is_channels_last(value.shape, value.stride)
    return is_dense and math.prod(value.shape) > 0


def gives_layout_of(gradient: Value, output: Value) -> bool:
    """Whether what an operator makes of the gradient, laid out as that is, has the output's shape, strides and type."""
    if (gradient.shape, gradient.dtype) != (output.shape, output.dtype):
        return False
    strides = torch.empty_like(torch.empty_strided(gradient.shape, gradient.stride, device="meta")).stride()
    return same_layout(output.shape, strides, output.stride)


def _backward_readers(graph: TrainingGraph) -> dict[int, list[Op]]:
    """Storage -> the ops of the backward pass that read its data."""
    found: dict[int, list[Op]] = {}
    for op in graph.ops:
        if op.phase == "backward":
            for base in {graph.values[value].base for value in op.reads}:
                found.setdefault(base, []).append(op)
    return found


def _is_backward_of(op: Op, clamp: Op) -> bool:
    if clamp.target == _RELU:
        return op.target == _RELU_BACKWARD and list(op.args[1:]) == [Ref(clamp.results[0]), 0]
    return op.target == _HARDTANH_BACKWARD and op.args[1] == clamp.args[0] and tuple(op.args[2:]) == _bounds(clamp)


def _bounds(clamp: Op) -> tuple[float, float | None]:
    """The clamp's lower bound, and its upper one if it has one."""
    if clamp.target == _RELU:
        return 0.0, None
    low, high = clamp.args[1:] + (-1.0, 1.0)[len(clamp.args) - 1 :]
    return float(low), float(high)


def _takes(graph: TrainingGraph, clamp: Op, backward: Op) -> bool:
    """Whether the operators take this type, and give the layouts of the ops that they replace."""
    output, gradient = graph.values[clamp.results[0]], graph.values[backward.args[0].value]
    alike = (clamp.args[0].value, *backward.results)
    return (
        output.dtype in ("float32", "float64", "bfloat16")
        and gives_layout_of(gradient, output)
        and has_one_order(output)
        and all(_layout(graph.values[value]) == _layout(output) for value in alike)
        and all(_is_exact(bound, output.dtype) for bound in _bounds(clamp) if bound is not None)
    )


def _layout(value: Value) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    return value.shape, value.stride, value.dtype


def _is_exact(bound: float, dtype: str) -> bool:
    """Whether the type holds the bound as it is: ATen's ops do not agree on when to round it."""
    return dtype != "bfloat16" or torch.tensor(bound, dtype=torch.bfloat16).item() == bound


def _add_mask(graph: TrainingGraph, op: Op) -> Value:
    output = graph.values[op.results[0]]
    nbytes = (math.prod(output.shape) + 7) // 8
    index = len(graph.values)
    mask = Value(index, f"{output.name}_mask", (nbytes,), (1,), "uint8", nbytes, "computed", index, producer=op.index)
    graph.values.append(mask)
    return mask


def _forward(op: Op, mask: Value, channels_last: bool) -> Op:
    args = (op.args[0], *_bounds(op), channels_last)
    return replace(op, target=CLAMP, args=args, kwargs={}, writes=(op.results[0], mask.index))


def _backward(op: Op, mask: Value, channels_last: bool) -> Op:
    args = (op.args[0], Ref(mask.index), channels_last)
    return replace(op, target=CLAMP_BACKWARD, args=args, reads=(op.args[0].value, mask.index), shape_reads=())
