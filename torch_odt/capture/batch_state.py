"""What a value of a micro-batch's graph is to the value of the full batch's graph, and how such states combine.

Every state says how the full value is made of the values that the micro-batches compute. A state carries a scale, a
product of powers of micro-batch shares: a mean over the batch is a *part* whose micro values count with
their share of the samples, `full = sum(share * micro)`; a gradient in the backward pass of a mean is a *slice* of which
`full = share * micro`. So sums, means, division by the batch size and their gradients follow one algebra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import Any, Literal

from torch_odt.capture.graph import Op, Value
from torch_odt.capture.separation import NotSeparable

Kind = Literal["same", "slice", "part", "index", "opaque"]


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """What the share of a micro-batch is counted in.

    Attributes:
        target: the micro graph's value of class indices of which only those that are not `ignore_index` count; -1 where
            every sample counts.
        ignore_index: see `target`.
    """

    target: int = -1
    ignore_index: int = 0

    @property
    def counts_targets(self) -> bool:
        return self.target >= 0


SAMPLES = Unit()
Scale = tuple[tuple[Unit, int], ...]


def scaled(scale: Scale, other: Scale, power: int = 1) -> Scale:
    """The product of a scale and the `power` of another one."""
    total = dict(scale)
    for unit, exponent in other:
        total[unit] = total.get(unit, 0) + power * exponent
    return tuple(sorted((unit, exponent) for unit, exponent in total.items() if exponent))


@dataclass(frozen=True, slots=True)
class State:
    """How the value of the full batch follows from the values of the micro-batches.

    Attributes:
        kind: "same": each micro-batch has the full value. "slice": each has its slice along `dim`. "part": the full
            value is the sum of all of them. "index": consecutive numbers along `dim` that start at 0 in each.
            "opaque": an operator's private notes, good for its backward operator alone.
        dim: the batch axis.
        outer: the batch may be merged with axes before it; their size. The axis is then `outer` runs of all samples.
        scale: the factor between full and micro values.
        zero: all elements are known to be zero, which any scale and any kind can absorb.
    """

    kind: Kind
    dim: int = -1
    scale: Scale = ()
    zero: bool = False
    outer: int = 1


SAME = State("same")


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument: its state, and its value in both graphs.

    `root` is the micro graph's value of which it is a mere copy or view; its own index if there is none.
    """

    state: State
    full: Value
    micro: Value
    root: int = -1

    @property
    def ndim(self) -> int:
        return len(self.full.shape)

    @property
    def kind(self) -> Kind:
        return self.state.kind

    @property
    def dim(self) -> int:
        return self.state.dim

    @property
    def axis(self) -> tuple[int, int]:
        """What operands whose samples belong together have in common."""
        return self.state.dim, self.state.outer


@dataclass(frozen=True, slots=True)
class Counterpart:
    """A tensor argument in the full graph; `source` is the value that it was copied from."""

    value: Value
    source: int


@dataclass(slots=True)
class Call:
    """One operator call of the program in both graphs, with arguments by their names in the schema."""

    full_op: Op
    micro_op: Op
    full: dict[str, Any]
    micro: dict[str, Any]
    results: list[tuple[Value, Value] | None]
    batch: int
    micro_batch: int
    count_unit: Callable[[Operand], Unit | None]

    @property
    def name(self) -> str:
        return self.micro_op.target.removeprefix("aten.").rsplit(".", 1)[0]

    def operand(self, name: str) -> Operand:
        operand = self.micro[name]
        if not isinstance(operand, Operand):
            raise NotSeparable(f"{self.name} is called in a way that is not known ({name} is no tensor)")
        return operand

    @property
    def operands(self) -> list[Operand]:
        return list(operands_in(self.micro))

    @property
    def first_result(self) -> tuple[Value, Value]:
        return next(result for result in self.results if result is not None)

    def refuse(self, reason: str) -> NotSeparable:
        return NotSeparable(f"{self.name} {reason}")

    def number(self, name: str) -> State:
        """The state of a number among the arguments: it may grow with the batch."""
        full, micro = self.full[name], self.micro[name]
        if full == micro:
            return State("same", zero=micro == 0)
        if isinstance(full, (int, float)) and isinstance(micro, (int, float)):
            if isclose(full * self.micro_batch, micro * self.batch, rel_tol=1e-12):
                return State("same", scale=((SAMPLES, -1),))
            if isclose(full * self.batch, micro * self.micro_batch, rel_tol=1e-12):
                return State("same", scale=((SAMPLES, 1),))
        raise self.refuse(f"takes a constant that depends on the batch ({full} for {self.batch} samples)")


def operands_in(arguments: Any) -> Iterator[Operand]:
    if isinstance(arguments, Operand):
        yield arguments
    elif isinstance(arguments, (list, tuple)):
        for item in arguments:
            yield from operands_in(item)
    elif isinstance(arguments, dict):
        yield from operands_in(list(arguments.values()))


def differing_dim(full: Sequence[int], micro: Sequence[int], batch: int, micro_batch: int) -> int | None:
    """The one dimension that grows in proportion to the batch; None when the shapes are equal.

    Raises:
        NotSeparable: the shapes differ in another way.
    """
    if len(full) == len(micro):
        found = [d for d, (f, m) in enumerate(zip(full, micro, strict=True)) if f != m]
        if not found:
            return None
        if len(found) == 1 and full[found[0]] * micro_batch == micro[found[0]] * batch:
            return found[0]
    raise NotSeparable(
        f"a tensor of shape {tuple(full)} becomes {tuple(micro)} in a micro-batch, which is no slice of it"
    )


def state_by_shape(call: Call, *, zero: bool = False) -> State:
    """The state of a result that is the same everywhere, such as `zeros`, from its shape."""
    full, micro = call.first_result
    dim = differing_dim(full.shape, micro.shape, call.batch, call.micro_batch)
    return State("same", zero=zero) if dim is None else State("slice", dim, zero=zero)


def require_exact(call: Call, operands: Iterable[Operand]) -> None:
    """Operands of an operator that is not linear in them: they must be free of sums and scales."""
    for operand in operands:
        if operand.kind == "part":
            raise call.refuse("is not linear, and works on a sum or mean over the batch")
        if operand.kind == "index":
            raise call.refuse("uses the position of a sample in the batch")
        if operand.kind == "opaque":
            raise call.refuse("reads the private data of another operator")
        if operand.state.scale and not operand.state.zero:
            raise call.refuse("is not linear, and works on a value that depends on the size of the batch")


def align(call: Call, operands: Iterable[Operand], ndim: int | None = None) -> State:
    """Where the batch axis of broadcast operands lies in the result; "same" if none has one.

    Raises:
        NotSeparable: the operands' batch axes do not lie upon each other.
    """
    operands = list(operands)
    if ndim is None:
        ndim = len(call.first_result[0].shape)
    sliced = {
        (operand.dim + ndim - operand.ndim, operand.state.outer) for operand in operands if operand.kind == "slice"
    }
    if not sliced:
        return SAME
    if len(sliced) > 1:
        raise call.refuse("combines each sample with every other one")
    ((dim, outer),) = sliced
    for operand in operands:
        position = dim - (ndim - operand.ndim)
        if operand.kind != "slice" and position >= 0 and operand.full.shape[position] != 1:
            raise call.refuse("combines the samples with a tensor that is not divided with the batch")
    return State("slice", dim, outer=outer)


def common_scale(call: Call, states: Iterable[State]) -> Scale:
    """The scale that all operands of a sum must share."""
    scales = {state.scale for state in states if not state.zero}
    if len(scales) > 1:
        raise call.refuse("adds values that depend differently on the size of the batch")
    return next(iter(scales), ())


def added(call: Call, terms: Sequence[Operand | State]) -> State:
    """The state of a sum of tensors and numbers."""
    states = [term.state if isinstance(term, Operand) else term for term in terms]
    operands = [term for term in terms if isinstance(term, Operand)]
    zero = all(state.zero for state in states)
    parts = [state for state in states if state.kind == "part" and not state.zero]
    if not parts:
        for operand in operands:
            require_exact(call, [replace(operand, state=replace(operand.state, scale=()))])
        return replace(align(call, operands), scale=common_scale(call, states), zero=zero)
    total = common_scale(call, parts)
    for state in states:
        if state.zero or state.kind == "part":
            continue
        if state.kind != "same":
            raise call.refuse("combines samples with a sum or mean over the batch")
        difference = scaled(total, state.scale, -1)
        if len(difference) != 1 or difference[0][1] != 1:
            raise call.refuse("adds a constant to a sum over the batch, which every micro-batch would add again")
    return State("part", scale=total)


def multiplied(call: Call, factors: Sequence[Operand | State], powers: Sequence[int]) -> State:
    """The state of a product of tensors and numbers, each to the power 1 or -1."""
    states = [factor.state if isinstance(factor, Operand) else factor for factor in factors]
    operands = [factor for factor in factors if isinstance(factor, Operand)]
    scale: Scale = ()
    for state, power in zip(states, powers, strict=True):
        scale = scaled(scale, state.scale, power)
        if state.kind == "part" and power < 0:
            raise call.refuse("divides by a sum or mean over the batch")
    zero = any(state.zero for state, power in zip(states, powers, strict=True) if power > 0)
    if any(state.kind == "part" for state in states):
        if sum(state.kind == "part" for state in states) > 1:
            raise call.refuse("multiplies sums or means over the batch")
        if any(state.kind not in ("part", "same") for state in states):
            raise call.refuse("combines samples with a sum or mean over the batch")
        return State("part", scale=scale, zero=zero)
    for operand in operands:
        require_exact(call, [replace(operand, state=replace(operand.state, scale=()))])
    return replace(align(call, operands), scale=scale, zero=zero)


def linear(call: Call, argument: Operand, others: Iterable[Operand | None], aligned: Callable[[], State]) -> State:
    """The state of a result that is linear in one argument, given where its batch axis lies (`aligned`)."""
    present = [other for other in others if other is not None]
    require_exact(call, present)
    if argument.kind == "part":
        if any(other.kind != "same" for other in present):
            raise call.refuse("combines samples with a sum or mean over the batch")
        return argument.state
    require_exact(call, [replace(argument, state=replace(argument.state, scale=()))])
    return replace(aligned(), scale=argument.state.scale, zero=argument.state.zero)


def contracted(call: Call, subscripts: str, operands: Sequence[Operand]) -> State:
    """The state of an einsum: the batch axis stays, or is summed over and leaves a part."""
    inputs, output = subscripts.split("->")
    letters = inputs.split(",")
    scale: Scale = ()
    for operand in operands:
        scale = scaled(scale, operand.state.scale)
        require_exact(
            call, [] if operand.kind == "part" else [replace(operand, state=replace(operand.state, scale=()))]
        )
    zero = any(operand.state.zero for operand in operands)
    parts = [operand for operand in operands if operand.kind == "part"]
    if parts:
        if len(parts) > 1 or any(operand.kind == "slice" for operand in operands):
            raise call.refuse("multiplies sums or means over the batch")
        return State("part", scale=scale, zero=zero)
    sliced = [(text, operand) for text, operand in zip(letters, operands, strict=True) if operand.kind == "slice"]
    found = {(text[operand.dim], operand.state.outer) for text, operand in sliced}
    if not found:
        return State("same", scale=scale, zero=zero)
    if len(found) > 1:
        raise call.refuse("combines each sample with every other one")
    ((letter, outer),) = found
    if any(letter in text and operand.kind != "slice" for text, operand in zip(letters, operands, strict=True)):
        raise call.refuse("combines the samples with a tensor that is not divided with the batch")
    if letter in output:
        return State("slice", output.index(letter), scale, zero, outer)
    return State("part", scale=scale, zero=zero)
