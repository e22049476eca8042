"""BatchNorm and the clamp behind it as one operator, forward and backward.

A BatchNorm in training mode whose output goes into ReLU, ReLU6 or hardtanh and nowhere else becomes
`torch_odt.batch_norm_act`: two passes over memory in place of six, and the tensor between the two never exists. The
backward pass becomes `torch_odt.batch_norm_act_backward`, which computes the clamp's mask from BatchNorm's input, so
that neither the normalised nor the activated tensor is kept for it.

The new operators add in another order than ATen's: results agree within float32's rounding, not bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_odt.capture.graph import Op, Ref, TrainingGraph, refs

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
BATCH_NORM_BACKWARD = "aten.native_batch_norm_backward.default"
FUSED = "torch_odt.batch_norm_act.default"
FUSED_NORMALIZE = "torch_odt.batch_norm_act_normalize.default"
FUSED_BACKWARD = "torch_odt.batch_norm_act_backward.default"

_BACKWARD_OF = {
    "aten.relu.default": "aten.threshold_backward.default",
    "aten.hardtanh.default": "aten.hardtanh_backward.default",
}


@dataclass(frozen=True)
class _Match:
    """The ops of one BatchNorm with its clamp; the last two are absent where nothing is differentiated."""

    norm: Op
    clamp: Op
    bounds: tuple[float, float]
    clamp_backward: Op | None
    norm_backward: Op | None


def fuse_batch_norm(graph: TrainingGraph) -> str | None:
    """BatchNorm, the clamp behind it and both their backward ops become one operator for each half of the step."""
    uses = _Uses(graph)
    replaced: dict[int, Op | None] = {}
    count = 0
    for op in graph.ops:
        match = _find(graph, uses, op)
        if match is None:
            continue
        count += 1
        _correct_statistics(graph, match)
        replaced |= {match.clamp.index: None, op.index: _forward(match)}
        graph.values[match.clamp.results[0]].producer = op.index
        if match.clamp_backward is not None and match.norm_backward is not None:
            replaced |= {match.clamp_backward.index: None, match.norm_backward.index: _backward(match)}
    graph.ops = [new for op in graph.ops if (new := replaced.get(op.index, op)) is not None]
    return f"{count} BatchNorms fused with the ReLU or hardtanh behind them" if count else None


class _Uses:
    """Who reads a value, and whether anybody outside of the ops can see it."""

    def __init__(self, graph: TrainingGraph) -> None:
        self._readers: dict[int, list[Op]] = {}
        self._producers: dict[int, Op] = {}
        for op in graph.ops:
            for value in (*op.reads, *op.shape_reads):
                self._readers.setdefault(value, []).append(op)
            for value in op.results:
                self._producers[value] = op
        views = [value for value in map(graph.values.__getitem__, self._producers) if value.is_view]
        # What leaves the graph, and what a view looks into, cannot go.
        self._seen = set(graph.output_values) | {value.base for value in views}

    def readers(self, value: int) -> list[Op]:
        return self._readers.get(value, [])

    def producer(self, value: int) -> Op | None:
        return self._producers.get(value)

    def is_between(self, value: int, *ops: Op) -> bool:
        """Whether these ops are all that a value is for."""
        return value not in self._seen and {op.index for op in self.readers(value)} == {op.index for op in ops}


def _find(graph: TrainingGraph, uses: _Uses, norm: Op) -> _Match | None:
    if norm.target != BATCH_NORM or norm.writes[0] is None or not norm.args[5]:
        return None
    normalised = norm.writes[0]
    clamps = [op for op in uses.readers(normalised) if op.target in _BACKWARD_OF]
    if len(clamps) != 1 or len(clamps[0].results) != 1:
        return None
    clamp = clamps[0]
    match = _with_backward(uses, norm, clamp)
    if match is None or not _takes(graph, match):
        return None
    needed_by = [
        op for op in (clamp, match.clamp_backward) if op is not None and normalised in (*op.reads, *op.shape_reads)
    ]
    return match if uses.is_between(normalised, *needed_by) else None


def _with_backward(uses: _Uses, norm: Op, clamp: Op) -> _Match | None:
    """The match with its backward ops; None where a BatchNorm's backward op does not follow its clamp's."""
    x, mean, invstd = norm.args[0], norm.writes[1], norm.writes[2]
    bounds = _bounds(clamp)
    found = [op for value in (mean, invstd) if value is not None for op in uses.readers(value)]
    if not found:
        return _Match(norm, clamp, bounds, None, None)
    if any(op is not found[0] for op in found) or found[0].target != BATCH_NORM_BACKWARD:
        return None
    if found[0].args[1] != x or not found[0].args[7]:
        return None
    norm_backward = found[0]
    gradient = norm_backward.args[0].value
    clamp_backward = uses.producer(gradient)
    if clamp_backward is None or not uses.is_between(gradient, norm_backward):
        return None
    if not _is_backward_of(clamp_backward, clamp):
        return None
    return _Match(norm, clamp, bounds, clamp_backward, norm_backward)


def _is_backward_of(op: Op, clamp: Op) -> bool:
    if op.target != _BACKWARD_OF[clamp.target]:
        return False
    if clamp.target == "aten.relu.default":
        return list(op.args[1:]) == [Ref(clamp.results[0]), 0]
    return op.args[1] == clamp.args[0] and (float(op.args[2]), float(op.args[3])) == _bounds(clamp)


def _bounds(clamp: Op) -> tuple[float, float]:
    if clamp.target == "aten.relu.default":
        return 0.0, math.inf
    low, high = clamp.args[1:] + (-1.0, 1.0)[len(clamp.args) - 1 :]
    return float(low), float(high)


def _takes(graph: TrainingGraph, match: _Match) -> bool:
    """Whether the fused operators take these types and give the layouts of the ops that they replace."""
    x = graph.values[match.norm.args[0].value]
    like_x = [match.norm.writes[0], match.clamp.results[0]]
    if match.clamp_backward is not None and match.norm_backward is not None:
        like_x += [*match.clamp_backward.results, match.norm_backward.writes[0]]
        gradient = graph.values[match.clamp_backward.args[0].value]
        if (gradient.shape, gradient.dtype) != (x.shape, x.dtype):
            return False
    results = [graph.values[value] for value in like_x if value is not None]
    parameters = "float64" if x.dtype == "float64" else "float32"
    per_channel = [*refs(match.norm.args[1:5]), *match.norm.writes[3:]]
    if match.norm_backward is not None:
        per_channel += match.norm_backward.writes[1:]
    return (
        x.dtype in ("float32", "float64", "bfloat16")
        and math.prod(x.shape) > 0
        and all((value.shape, value.stride, value.dtype) == (x.shape, x.stride, x.dtype) for value in results)
        and all(graph.values[value].dtype == parameters for value in per_channel if value is not None)
    )


def _correct_statistics(graph: TrainingGraph, match: _Match) -> None:
    """Tracing takes the statistics of a bfloat16 input for bfloat16; they are float32."""
    for value in match.norm.writes[1:3]:
        if value is not None and graph.values[value].dtype == "bfloat16":
            graph.values[value].dtype = "float32"
            graph.values[value].nbytes = 4 * math.prod(graph.values[value].shape)


def _forward(match: _Match) -> Op:
    x, weight, bias, running_mean, running_var, _, momentum, eps = match.norm.args
    args = (x, weight, bias, running_mean, running_var, float(momentum), float(eps), *match.bounds)
    return replace(match.norm, target=FUSED, args=args, writes=(match.clamp.results[0], *match.norm.writes[1:]))


def _backward(match: _Match) -> Op:
    assert match.clamp_backward is not None and match.norm_backward is not None
    x, weight, bias = match.norm.args[:3]
    mean, invstd, mask = match.norm_backward.args[5], match.norm_backward.args[6], match.norm_backward.args[9]
    args = (match.clamp_backward.args[0], x, mean, invstd, weight, bias, *match.bounds, list(mask))
    return replace(match.norm_backward, target=FUSED_BACKWARD, args=args, reads=_reads(args), shape_reads=())


def _reads(args: Sequence[Any]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(refs(list(args))))
