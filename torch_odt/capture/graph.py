"""The training graph: one training step as data.

A `TrainingGraph` is the joint forward and backward graph of a step, as plain data: operators by name, values with their
bytes, and which value is what to the model. It holds no code object and no autograd state, so that planners can work on
it anywhere, and so that it can be made in one process and executed in another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import is_
from typing import Any, Literal, TypeVar

T = TypeVar("T")
ValueKind = Literal["parameter", "buffer", "gradient", "state", "input", "tangent", "constant", "computed"]
_NAMED = ("parameter", "buffer", "gradient", "state")
OutputKind = Literal["loss", "result", "gradient", "mutation"]


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a value inside an operator's arguments."""

    value: int


def refs(arguments: Any) -> Iterator[int]:
    """The values that stand in an operator's (nested) arguments, in order."""
    if isinstance(arguments, Ref):
        yield arguments.value
    elif isinstance(arguments, (list, tuple)):
        for item in arguments:
            yield from refs(item)
    elif isinstance(arguments, dict):
        yield from refs(list(arguments.values()))


def map_refs(arguments: Any, function: Callable[[int], Any]) -> Any:
    """The same nested arguments with `function(value)` in the place of each `Ref`; what holds none is not copied."""
    if isinstance(arguments, Ref):
        return function(arguments.value)
    if isinstance(arguments, (list, tuple)):
        items = [map_refs(item, function) for item in arguments]
        return arguments if all(map(is_, items, arguments)) else type(arguments)(items)
    if isinstance(arguments, dict) and arguments:
        return {key: map_refs(item, function) for key, item in arguments.items()}
    return arguments


@dataclass(slots=True)
class Value:
    """A tensor of the step.

    Attributes:
        index: its position in `TrainingGraph.values`.
        name: a readable name, unique in the graph.
        shape, stride, dtype: as the operator returns it; `dtype` is torch's name without the prefix ("float32").
        nbytes: bytes of the storage that it lives in.
        kind: "computed" when an operator produces it; otherwise what it is to the step. Only computed values
            are planned: the others belong to the caller and stay where they are.
        base: index of the value that owns the storage; its own index unless it is a view.
        producer: index of the program op that computes it, None for what the caller gives.
        target: the qualified name of a parameter or buffer (of a gradient: its parameter; of the optimizer's state:
            "<parameter>/<state>"), the position of an input.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    nbytes: int
    kind: ValueKind
    base: int
    producer: int | None = None
    target: str | int | None = None

    @property
    def is_view(self) -> bool:
        return self.base != self.index


@dataclass(slots=True)
class Op:
    """One operator call.

    Attributes:
        index: its position in `TrainingGraph.ops`.
        target: what to call ("aten.convolution.default", "odt.batch_norm_normalize").
        args, kwargs: the call's arguments, with `Ref` where a value stands.
        reads: the values whose data it reads, each once.
        shape_reads: the values of which it uses shape and strides alone; they need not be in memory.
        writes: its results in order; None for a result that nobody uses. An op that has none changes what it
            reads, and always runs.
        is_view: its results share the storage of its first read and cost nothing.
        is_random: it draws random numbers, so it runs exactly once.
        overwrites: the value in whose memory one of its results lies: nothing else reads that value.
        phase: the half of the step it belongs to.
    """

    index: int
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    shape_reads: tuple[int, ...]
    writes: tuple[int | None, ...]
    is_view: bool = False
    is_random: bool = False
    is_pinned: bool = False
    overwrites: int | None = None
    phase: Literal["forward", "backward"] = "forward"

    @property
    def may_rerun(self) -> bool:
        """Whether running it again gives the same bits and has no other effect."""
        return not (self.is_random or self.is_pinned)

    @property
    def results(self) -> tuple[int, ...]:
        return tuple(v for v in self.writes if v is not None)


@dataclass(frozen=True, slots=True)
class Output:
    """What leaves the graph: a loss, another result of the model, a gradient, or the new content of a buffer.

    `target` is the parameter's or buffer's qualified name, the position of an input whose gradient it is,
    or the position among the results.
    """

    value: int
    kind: OutputKind
    target: str | int


@dataclass
class TrainingGraph:
    """The joint forward and backward graph of one training step.

    Attributes:
        ops: the program in an order that can be executed, `program_length` ops of it; behind them stand the
            rematerializers, which only a schedule that recomputes something runs.
        values: all values; `ops` and `outputs` name them by index.
        inputs: what the caller gives, in the order in which it is given.
        outputs: what leaves the graph.
        boundary: how many of the program's ops belong to the forward pass.
        rematerializers: value -> op that recomputes it more cheaply than its producer (BatchNorm's output from the
            saved mean and invstd, without a second statistics pass).
        constants: tensors that tracing found inside the model, by value.
        notes: what the capture and the rewrites did, and what was not possible and why.
    """

    ops: list[Op]
    values: list[Value]
    inputs: list[int]
    outputs: list[Output]
    boundary: int
    program_length: int
    rematerializers: dict[int, int] = field(default_factory=dict)
    constants: dict[int, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def program(self) -> list[Op]:
        return self.ops[: self.program_length]

    @cached_property
    def consumers(self) -> list[tuple[int, ...]]:
        """For each value, the program ops that read its data, in program order."""
        found: list[list[int]] = [[] for _ in self.values]
        for op in self.program:
            for value in op.reads:
                found[value].append(op.index)
        return [tuple(ops) for ops in found]

    @cached_property
    def named_inputs(self) -> tuple[tuple[int, ValueKind, str], ...]:
        """The inputs that have names, with kind and target: parameters, buffers, gradients, the optimizer's state."""
        values = (self.values[index] for index in self.inputs)
        return tuple((value.index, value.kind, str(value.target)) for value in values if value.kind in _NAMED)

    @cached_property
    def unnamed_inputs(self) -> tuple[Value, ...]:
        """The others: what the batch gives, and the loss's gradient."""
        values = (self.values[index] for index in self.inputs)
        return tuple(value for value in values if value.kind not in _NAMED)

    @cached_property
    def aliases(self) -> dict[int, tuple[int, ...]]:
        """For each storage (named by its base value), the values that live in it, the base first."""
        found: dict[int, list[int]] = {}
        for value in self.values:
            found.setdefault(value.base, []).append(value.index)
        return {base: tuple(sorted(members, key=lambda v: v != base)) for base, members in found.items()}

    @property
    def output_values(self) -> frozenset[int]:
        return frozenset(output.value for output in self.outputs)

    def add_value(self, like: Value, base: int | None = None) -> Value:
        """A further computed value that is as another one, but for its name.

        Args:
            base: whose storage it looks into, where it is a view.
        """
        index = len(self.values)
        base = index if base is None else base
        name = f"{like.name}_{index}"
        self.values.append(replace(like, index=index, name=name, kind="computed", base=base, target=None))
        return self.values[-1]

    def sharing(self, other: TrainingGraph) -> TrainingGraph:
        """The same graph with another one's ops and values where they are equal: both together hold those once.

        Neither may be changed any more.
        """

        def shared(own: Sequence[T], others: Sequence[T]) -> list[T]:
            same = (old if old == new else new for new, old in zip(own, others, strict=False))
            return [*same, *own[len(others) :]]

        return replace(self, ops=shared(self.ops, other.ops), values=shared(self.values, other.values))

    def recompute_op(self, value: int) -> Op | None:
        """The op that brings back an evicted value; None when it must not be computed twice."""
        index = self.rematerializers.get(value, self.values[value].producer)
        if index is None or not self.ops[index].may_rerun:
            return None
        return self.ops[index]

    def outputs_of(self, kind: OutputKind) -> Iterator[Output]:
        return (output for output in self.outputs if output.kind == kind)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that a plan depends on: the ops, their arguments, shapes, strides and dtypes."""
        digest = hashlib.sha256()
        for value in self.values:
            digest.update(
                f"{value.shape}{value.stride}{value.dtype}{value.nbytes}{value.kind}{value.base}{value.target}".encode()
            )
        for op in self.ops:
            digest.update(f"{op.target}{op.args}{sorted(op.kwargs.items())}{op.writes}{op.shape_reads}".encode())
            digest.update(f"{op.is_pinned}{op.overwrites}".encode())
        digest.update(f"{self.inputs}{self.outputs}{self.boundary}{sorted(self.rematerializers.items())}".encode())
        return digest.hexdigest()
