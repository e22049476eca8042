"""BatchNorm and what follows it as one operator, forward and backward.

A BatchNorm in training mode whose output goes into ReLU, ReLU6, hardtanh, hardswish or SiLU and nowhere else becomes
`torch_odt.batch_norm_act`: two passes over memory in place of six, and the tensor between the two never exists. So it
is where a residual is added before a clamp, and where a residual is all that follows. The backward pass becomes
`torch_odt.batch_norm_act_backward`, which computes the activation function's input from BatchNorm's, so that neither
the normalised nor the activated tensor is kept for it. Behind a residual it becomes
`torch_odt.batch_norm_add_act_backward`, which reads the output instead: that is the next block's residual, and kept
anyway. A residual without an activation function leaves the backward pass as it is: the gradient of a sum is that of
its terms.

The new operators add in another order than ATen's: results agree within float32's rounding, not bit for bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_odt.capture.batch_norm_match import Match, find
from torch_odt.capture.graph import Op, Ref, TrainingGraph, refs
from torch_odt.capture.uses import Uses

FUSED = "torch_odt.batch_norm_act.default"
FUSED_NORMALIZE = "torch_odt.batch_norm_act_normalize.default"
FUSED_BACKWARD = "torch_odt.batch_norm_act_backward.default"
FUSED_ADD_BACKWARD = "torch_odt.batch_norm_add_act_backward.default"

_NO_ACTIVATION = ("clamp", -math.inf, math.inf)


def fuse_batch_norm(graph: TrainingGraph) -> str | None:
    """BatchNorm, what follows it and their backward ops become one operator for each half of the step."""
    uses = Uses(graph)
    matches = [match for op in graph.ops if (match := find(graph, uses, op)) is not None]
    fused: dict[int, Op] = {}
    for match in matches:
        _correct_statistics(graph, match)
        for op in _fused_ops(match):
            fused[op.index] = op
            for value in op.results:
                graph.values[value].producer = op.index
    gone = {op.index for match in matches for op in match.replaced} - set(fused)
    graph.ops = [fused.get(op.index, op) for op in graph.ops if op.index not in gone]
    return _note(matches) if matches else None


def _note(matches: Sequence[Match]) -> str:
    names = Counter(op.target.split(".")[1] for match in matches for op in match.followers)
    what = ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
    return f"{len(matches)} BatchNorms fused with what follows them: {what}"


def _fused_ops(match: Match) -> list[Op]:
    if match.backward is None:
        return [_forward(match)]
    return [_forward(match), _backward(match) if match.addition is None else _add_backward(match)]


def _forward(match: Match) -> Op:
    x, weight, bias, running_mean, running_var, _, momentum, eps = match.norm.args
    residual = match.addition.residual if match.addition else None
    args = (x, weight, bias, running_mean, running_var, float(momentum), float(eps), *_activation(match), residual)
    writes = (match.followers[-1].results[0], *match.norm.writes[1:])
    return replace(match.norm, target=FUSED, args=args, reads=_reads(args), writes=writes)


def _backward(match: Match) -> Op:
    """In the place of BatchNorm's backward op."""
    assert match.backward is not None
    x, weight, bias = match.norm.args[:3]
    norm = match.backward.norm
    mean, invstd, mask = norm.args[5], norm.args[6], norm.args[9]
    args = (match.backward.activation.args[0], x, mean, invstd, weight, bias, *_activation(match), list(mask))
    return replace(norm, target=FUSED_BACKWARD, args=args, reads=_reads(args), shape_reads=())


def _add_backward(match: Match) -> Op:
    """In the place of the activation function's backward op, whose result others may need before BatchNorm's runs."""
    assert match.backward is not None
    x, weight = match.norm.args[:2]
    norm, activation = match.backward.norm, match.backward.activation
    mean, invstd, mask = norm.args[5], norm.args[6], norm.args[9]
    output = Ref(match.followers[-1].results[0])
    _, low, high = _activation(match)
    args = (activation.args[0], output, x, mean, invstd, weight, low, high, list(mask))
    writes = (*norm.writes, *activation.writes)
    return replace(activation, target=FUSED_ADD_BACKWARD, args=args, reads=_reads(args), shape_reads=(), writes=writes)


def _activation(match: Match) -> tuple[str, float, float]:
    if match.activation is None:
        return _NO_ACTIVATION
    return match.activation.name, match.activation.low, match.activation.high


def _correct_statistics(graph: TrainingGraph, match: Match) -> None:
    """Tracing takes the statistics of a bfloat16 input for bfloat16; they are float32."""
    for value in match.norm.writes[1:3]:
        if value is not None and graph.values[value].dtype == "bfloat16":
            graph.values[value].dtype = "float32"
            graph.values[value].nbytes = 4 * math.prod(graph.values[value].shape)


def _reads(args: Sequence[Any]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(refs(list(args))))
