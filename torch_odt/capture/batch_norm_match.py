"""Where a BatchNorm in training mode can be one operator with what follows it.

What follows is the addition of a residual, an activation function, or the one and then the other. The tensors between
them must be for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch_odt.capture.graph import Op, Ref, TrainingGraph, refs
from torch_odt.capture.uses import Uses

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
BATCH_NORM_BACKWARD = "aten.native_batch_norm_backward.default"

_BACKWARD_OF = {
    "aten.relu.default": "aten.threshold_backward.default",
    "aten.hardtanh.default": "aten.hardtanh_backward.default",
    "aten.hardswish.default": "aten.hardswish_backward.default",
    "aten.silu.default": "aten.silu_backward.default",
}


@dataclass(frozen=True)
class Addition:
    """The op that adds a residual."""

    op: Op
    residual: Ref


@dataclass(frozen=True)
class Activation:
    """An activation function's op; its name and bounds as `torch_odt.ops.batch_norm_act` takes them."""

    op: Op
    name: str
    low: float
    high: float


@dataclass(frozen=True)
class Backward:
    """The backward ops of an activation function and of the BatchNorm before it."""

    activation: Op
    norm: Op


@dataclass(frozen=True)
class Match:
    """The ops of one BatchNorm with what follows it.

    Attributes:
        backward: None where nothing is differentiated, and where the backward ops stay what they are.
    """

    norm: Op
    addition: Addition | None = None
    activation: Activation | None = None
    backward: Backward | None = None

    @property
    def followers(self) -> tuple[Op, ...]:
        """The ops behind BatchNorm, in order."""
        return tuple(part.op for part in (self.addition, self.activation) if part is not None)

    @property
    def replaced(self) -> tuple[Op, ...]:
        """All ops whose place the fused ones take."""
        backward = (self.backward.activation, self.backward.norm) if self.backward else ()
        return (self.norm, *self.followers, *backward)


def find(graph: TrainingGraph, uses: Uses, norm: Op) -> Match | None:
    """As much of what follows a BatchNorm as can be fused with it."""
    if norm.target != BATCH_NORM or norm.writes[0] is None or not norm.args[5]:
        return None
    return next((match for match in _candidates(graph, uses, norm) if _is_fusible(graph, uses, match)), None)


def _candidates(graph: TrainingGraph, uses: Uses, norm: Op) -> Iterator[Match]:
    """What may be fused, the most first."""
    addition = _addition(uses, norm)
    activation = _activation(uses, addition.op if addition else norm)
    if activation is not None:
        backward = _backward(uses, norm, activation)
        # Behind a residual there is a backward op for clamps alone.
        if backward is not None and (addition is None or activation.name == "clamp"):
            yield Match(norm, addition, activation, backward)
        yield Match(norm, addition, activation)
    if addition is not None:
        yield Match(norm, addition)


def _addition(uses: Uses, norm: Op) -> Addition | None:
    """The one op that adds to BatchNorm's output, of something that is there before it."""
    assert norm.writes[0] is not None
    normalised = Ref(norm.writes[0])
    adding = [op for op in uses.readers(normalised.value) if op.target == "aten.add.Tensor" and not op.kwargs]
    residuals = [argument for op in adding for argument in op.args if argument != normalised]
    if len(adding) != 1 or len(residuals) != 1 or not isinstance(residuals[0], Ref):
        return None
    return Addition(adding[0], residuals[0]) if uses.exists_before(residuals[0].value, norm) else None


def _activation(uses: Uses, op: Op) -> Activation | None:
    """The one activation function of an op's first result."""
    assert op.writes[0] is not None
    found = [reader for reader in uses.readers(op.writes[0]) if reader.target in _BACKWARD_OF]
    return _as_activation(found[0]) if len(found) == 1 and len(found[0].results) == 1 else None


def _as_activation(op: Op) -> Activation:
    name = op.target.split(".")[1]
    if name == "relu":
        return Activation(op, "clamp", 0.0, math.inf)
    if name == "hardtanh":
        low, high = op.args[1:] + (-1.0, 1.0)[len(op.args) - 1 :]
        return Activation(op, "clamp", float(low), float(high))
    return Activation(op, name, -math.inf, math.inf)


def _backward(uses: Uses, norm: Op, activation: Activation) -> Backward | None:
    """The backward ops, where BatchNorm's is the only one that reads the statistics and follows the other."""
    statistics = [value for value in norm.writes[1:3] if value is not None]
    readers = {op.index: op for value in statistics for op in uses.readers(value)}
    if len(readers) != 1:
        return None
    (norm_backward,) = readers.values()
    if (
        norm_backward.target != BATCH_NORM_BACKWARD
        or norm_backward.args[1] != norm.args[0]
        or not norm_backward.args[7]
    ):
        return None
    activation_backward = uses.producer(norm_backward.args[0].value)
    if activation_backward is None or not _is_backward_of(activation_backward, activation):
        return None
    return Backward(activation_backward, norm_backward)


def _is_backward_of(op: Op, activation: Activation) -> bool:
    if op.target != _BACKWARD_OF[activation.op.target]:
        return False
    if op.target == "aten.threshold_backward.default":
        return list(op.args[1:]) == [Ref(activation.op.results[0]), 0]
    bounds = [activation.low, activation.high] if op.target == "aten.hardtanh_backward.default" else []
    return op.args[1] == activation.op.args[0] and list(map(float, op.args[2:])) == bounds


def _is_fusible(graph: TrainingGraph, uses: Uses, match: Match) -> bool:
    return _has_nothing_in_between(uses, match) and _is_taken(graph, match)


def _has_nothing_in_between(uses: Uses, match: Match) -> bool:
    """Whether the tensors that would not exist are for the fused ops alone."""
    gone = [op.writes[0] for op in (match.norm, *match.followers)[:-1]]
    if match.backward is not None and match.addition is None:
        gone.append(match.backward.activation.writes[0])
    return all(value is None or uses.is_for(value, match.replaced) for value in gone)


def _is_taken(graph: TrainingGraph, match: Match) -> bool:
    """Whether the fused operators take these types and give the layouts of the ops that they replace."""
    x = graph.values[match.norm.args[0].value]
    like_x = [op.writes[0] for op in (match.norm, *match.followers)]
    per_channel = [*refs(match.norm.args[1:5]), *match.norm.writes[3:]]
    if match.addition is not None:
        like_x.append(match.addition.residual.value)
    if match.backward is not None:
        like_x += [match.backward.activation.writes[0], match.backward.norm.writes[0]]
        per_channel += match.backward.norm.writes[1:]
        gradient = graph.values[match.backward.activation.args[0].value]
        if (gradient.shape, gradient.dtype) != (x.shape, x.dtype):
            return False
    parameters = "float64" if x.dtype == "float64" else "float32"
    tensors = [graph.values[value] for value in like_x if value is not None]
    return (
        x.dtype in ("float32", "float64", "bfloat16")
        and math.prod(x.shape) > 0
        and all((value.shape, value.stride, value.dtype) == (x.shape, x.stride, x.dtype) for value in tensors)
        and all(graph.values[value].dtype == parameters for value in per_channel if value is not None)
    )
