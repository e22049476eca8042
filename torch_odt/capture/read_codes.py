"""Pointwise convolutions read weights in 8 bits as they are stored.

`torch_odt.ops.stored_pointwise_conv2d` decodes what it is about to multiply, a few lines at a time: the weight that the
codes stand for is never there as a whole, and takes no operator. Every bit stays.
"""

from __future__ import annotations

from dataclasses import replace

from torch_odt.capture import direct_pointwise
from torch_odt.capture.decode_again import is_decoding, is_held
from torch_odt.capture.graph import Op, Ref, TrainingGraph, refs
from torch_odt.capture.uses import Uses

FORWARD = "torch_odt.stored_pointwise_conv2d.default"
GRAD_INPUT = "torch_odt.stored_pointwise_conv2d_grad_input.default"
_STORED = {direct_pointwise.FORWARD: FORWARD, direct_pointwise.GRAD_INPUT: GRAD_INPUT}


def read_codes(graph: TrainingGraph) -> str | None:
    """Weights in 8 bits that pointwise convolutions alone read are not decoded before."""
    uses = Uses(graph)
    mutated = {output.target for output in graph.outputs_of("mutation")}
    changed: dict[int, list[Op]] = {}
    for op in graph.ops:
        if not is_decoding(graph, op) or not all(is_held(graph, uses, value, mutated) for value in op.reads):
            continue
        readers = uses.readers(op.results[0])
        are_pointwise = all(_is_window_of(each, op.results[0]) for each in readers)
        if readers and are_pointwise and uses.is_for(op.results[0], readers) and _has_scales(graph, op):
            changed[op.index] = []
            changed |= {each.index: [_reading_codes(each, op)] for each in readers}
    graph.ops = [new for op in graph.ops for new in changed.get(op.index, [op])]
    count = sum(map(len, changed.values()))
    return f"{count} pointwise convolutions and gradients read codes of 8 bits" if count else None


def _is_window_of(op: Op, weight: int) -> bool:
    """Whether an op is a pointwise convolution by a weight, of which it reads nothing else."""
    return op.target in _STORED and op.args[1] == Ref(weight) and list(refs(op.args)).count(weight) == 1


def _has_scales(graph: TrainingGraph, decoding: Op) -> bool:
    """Whether codes have one scale for each output."""
    codes, scale = (graph.values[argument.value] for argument in decoding.args)
    return scale.dtype == "float32" and tuple(scale.shape) == (codes.shape[0], 1, 1, 1)


def _reading_codes(op: Op, decoding: Op) -> Op:
    args = (op.args[0], *decoding.args, *op.args[2:])
    return replace(op, target=_STORED[op.target], args=args, reads=tuple(dict.fromkeys(refs(args))))
