"""Whether a step may run in micro-batches, proved on its graph.

A batch run slice by slice, with the gradients added up, is the same step only if no sample influences another one. The
step is captured twice, with the full batch and with one micro-batch. Both programs must call the same operators, and
every value of the full one must follow from the micro-batches' values (see `batch_state`), the gradients included: a
custom backward or a gradient hook can couple samples that the forward pass keeps apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from torch_odt.capture import batch_indexing, batch_layers, batch_views  # noqa: F401  (they fill the table of rules)
from torch_odt.capture.batch_rules import Rule, rule_for, unknown
from torch_odt.capture.batch_state import (
    SAME,
    SAMPLES,
    Call,
    Counterpart,
    NotSeparable,
    Operand,
    Scale,
    State,
    Unit,
    differing_dim,
    scaled,
)
from torch_odt.capture.graph import Op, Output, TrainingGraph, Value, map_refs
from torch_odt.capture.separation import RandomPair, Separation, valid_targets

__all__ = ["NotSeparable", "RandomPair", "Separation", "analyse", "valid_targets"]


_MERE_VIEWS = frozenset(f"aten.{name}.default" for name in ("clone", "view", "_unsafe_view", "squeeze"))


def analyse(full: TrainingGraph, micro: TrainingGraph, batch: int, micro_batch: int) -> Separation:
    """Prove that `micro` run on the slices of a batch adds up to `full` run on all of it.

    Args:
        full, micro: the step captured with `batch` and with `micro_batch` samples, rewritten alike. Neither is changed.
        batch, micro_batch: `0 < micro_batch < batch`.

    Raises:
        NotSeparable: it does not, or an operator is in the way of which that is not known.
        ValueError: the sizes are not in order.
    """
    if not 0 < micro_batch < batch:
        raise ValueError(f"a micro-batch of {micro_batch} samples is no part of a batch of {batch}")
    for output in full.outputs_of("mutation"):
        raise NotSeparable(_explain_mutation(full, output))
    return _Analysis(full, micro, batch, micro_batch).run()


def _explain_mutation(graph: TrainingGraph, output: Output) -> str:
    module, _, buffer = str(output.target).rpartition(".")
    if buffer in ("running_mean", "running_var", "num_batches_tracked"):
        return f"BatchNorm in training mode takes its statistics over the whole batch ({module or 'the model'})"
    return f"the step changes the buffer {output.target!r}, which every micro-batch would change again"


class _Analysis:
    """States are kept by the micro graph's values; `partner` leads from there to the full graph's value."""

    def __init__(self, full: TrainingGraph, micro: TrainingGraph, batch: int, micro_batch: int) -> None:
        self.full, self.micro, self.batch, self.micro_batch = full, micro, batch, micro_batch
        self.states: dict[int, State] = {}
        self.partner: dict[int, int] = {}
        # A copy is needed or not depending on strides, which differ for a batch of one: both sides skip it.
        self.full_source: dict[int, int] = {}
        self.random: list[RandomPair] = []

    def run(self) -> Separation:
        self._pair_inputs()
        for full_op, micro_op in self._paired_ops():
            self._propagate(full_op, micro_op)
        loss_kind, unit = self._loss()
        self._check_gradients(((unit, 1),) if loss_kind == "mean" else ())
        self._check_results()
        return Separation(
            batch=self.batch,
            micro_batch=self.micro_batch,
            loss_kind=loss_kind,
            input_axes={v: self._axis(v) for v in self.micro.inputs if self.micro.values[v].kind == "input"},
            result_axes={int(o.target): self._result_axis(o.value) for o in self.micro.outputs_of("result")},
            count_value=unit.target if unit.counts_targets else None,
            ignore_index=unit.ignore_index if unit.counts_targets else None,
            random_ops=tuple(self.random),
        )

    def _pair_inputs(self) -> None:
        if len(self.full.inputs) != len(self.micro.inputs):
            raise NotSeparable("a micro-batch has other inputs than the batch")
        for f, m in zip(self.full.inputs, self.micro.inputs, strict=True):
            full, micro = self.full.values[f], self.micro.values[m]
            if (full.kind, full.target, full.dtype) != (micro.kind, micro.target, micro.dtype):
                raise NotSeparable(f"a micro-batch has other inputs than the batch ({full.name})")
            self._set(full, micro, self._input_state(full, micro))
        constants = list(self.full.constants.items()), list(self.micro.constants.items())
        if len(constants[0]) != len(constants[1]):
            raise NotSeparable("a micro-batch has other constants than the batch")
        for (f, a), (m, b) in zip(*constants, strict=True):
            if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a, b):
                raise NotSeparable("a constant inside the model depends on the batch")
            self._set(self.full.values[f], self.micro.values[m], State("same", zero=not bool(torch.any(b != 0))))

    def _input_state(self, full: Value, micro: Value) -> State:
        if full.kind != "input":
            return SAME
        different = [d for d, (f, m) in enumerate(zip(full.shape, micro.shape, strict=False)) if f != m]
        return State("slice", different[0]) if different else SAME

    def _paired_ops(self) -> Iterator[tuple[Op, Op]]:
        full_ops, micro_ops = self._without_copies(self.full, self.full_source), iter(self.micro.program)
        for micro_op in micro_ops:
            if _is_copy(micro_op):
                self._propagate_copy(micro_op)
                continue
            full_op = next(full_ops, None)
            if full_op is None or _same_call(full_op) != _same_call(micro_op):
                there = _short(full_op) if full_op else "nothing"
                raise NotSeparable(f"a micro-batch calls {_short(micro_op)} where the batch calls {there}")
            yield full_op, micro_op
        left = next(full_ops, None)
        if left is not None:
            raise NotSeparable(f"a micro-batch lacks the call of {_short(left)}")

    def _without_copies(self, graph: TrainingGraph, source: dict[int, int]) -> Iterator[Op]:
        for op in graph.program:
            if _is_copy(op):
                source[op.results[0]] = source.get(op.reads[0], op.reads[0])
            else:
                yield op

    def _propagate_copy(self, op: Op) -> None:
        result, source = op.results[0], op.reads[0]
        self.states[result], self.partner[result] = self.states[source], self.partner[source]

    def _propagate(self, full_op: Op, micro_op: Op) -> None:
        call = self._call(full_op, micro_op)
        rule = rule_for(micro_op.target, _operator(micro_op.target))
        free = rule.free if rule else frozenset()
        for name, argument in call.micro.items():
            if name not in free and not _equal(call.full[name], argument):
                _compare_operands(call, name)
                raise call.refuse(f"takes a constant that depends on the batch ({name})")
        states = self._states(call, rule)
        for state, results in zip(states, call.results, strict=True):
            if results is not None:
                self._set(*results, state)
        if micro_op.is_random and call.micro.get("dropout_p") != 0.0:
            dim = states[0].dim if states[0].kind == "slice" else None
            self.random.append(RandomPair(full_op.index, micro_op.index, dim, states[0].outer))

    def _states(self, call: Call, rule: Rule | None) -> list[State]:
        operands = call.operands
        plain = bool(operands) and all(operand.state == SAME for operand in operands)
        if plain and all(_equal(call.full[name], argument) for name, argument in call.micro.items()):
            return [SAME] * len(call.results)
        if rule is None:
            raise unknown(call.micro_op.target)
        try:
            found = rule.function(call)
        except NotSeparable as error:
            raise NotSeparable(f"{error}{self._place(call)}") from None
        return found if isinstance(found, list) else [found] * len(call.results)

    def _place(self, call: Call) -> str:
        """The nearest parameter among the arguments tells the user where in the model the operator stands."""
        for value in call.micro_op.reads:
            target = self.micro.values[self.micro.values[value].base].target
            if self.micro.values[self.micro.values[value].base].kind in ("parameter", "buffer"):
                return f" ({str(target).rpartition('.')[0] or target})"
        return ""

    def _call(self, full_op: Op, micro_op: Op) -> Call:
        full, micro = self._bind(full_op, self._full_operand), self._bind(micro_op, self._micro_operand)
        if len(full_op.writes) != len(micro_op.writes):
            raise NotSeparable(f"{_short(micro_op)} has another number of results in a micro-batch")
        results: list[tuple[Value, Value] | None] = []
        for f, m in zip(full_op.writes, micro_op.writes, strict=True):
            results.append(None if f is None or m is None else (self.full.values[f], self.micro.values[m]))
        return Call(full_op, micro_op, full, micro, results, self.batch, self.micro_batch, self._count_unit)

    def _bind(self, op: Op, operand: Any) -> dict[str, Any]:
        """The arguments by name, with what `operand` makes of a value in the place of each."""
        schema = _operator(op.target)._schema.arguments
        bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
        bound |= {argument.name: value for argument, value in zip(schema, op.args, strict=False)}
        return {name: _map(value, operand) for name, value in (bound | op.kwargs).items()}

    def _full_operand(self, value: int) -> Counterpart:
        return Counterpart(self.full.values[value], self.full_source.get(value, value))

    def _micro_operand(self, value: int) -> Operand:
        if value not in self.states:
            raise NotSeparable("a tensor of the micro-batch has no counterpart in the batch")
        full = self.full.values[self.partner[value]]
        return Operand(self.states[value], full, self.micro.values[value], self._root(value))

    def _root(self, value: int) -> int:
        producer = self.micro.values[value].producer
        while producer is not None and self.micro.ops[producer].target in _MERE_VIEWS:
            value = self.micro.ops[producer].reads[0]
            producer = self.micro.values[value].producer
        return value

    def _set(self, full: Value, micro: Value, state: State) -> None:
        """Note the state of a value, after a check that the shapes in both graphs agree with it."""
        if full.dtype != micro.dtype:
            raise NotSeparable(f"{micro.name} has another dtype in a micro-batch")
        if state.kind != "opaque":
            dim = differing_dim(full.shape, micro.shape, self.batch, self.micro_batch)
            if dim != (state.dim if state.kind in ("slice", "index") else None):
                raise NotSeparable(
                    f"{micro.name} has shape {full.shape} in the batch and {micro.shape} in a micro-batch"
                )
        self.states[micro.index] = state
        self.partner[micro.index] = full.index

    def _count_unit(self, operand: Operand) -> Unit | None:
        """The unit whose number in the micro-batch a value is: a sum over the mask of the targets that count."""
        op = _producer(self.micro, operand.micro)
        if op is None or op.target != "aten.sum.default":
            return None
        mask = _producer(self.micro, self.micro.values[op.reads[0]])
        if mask is not None and mask.target in ("aten.bitwise_not.default", "aten.logical_not.default"):
            mask, wanted = _producer(self.micro, self.micro.values[mask.reads[0]]), "aten.eq.Scalar"
        else:
            wanted = "aten.ne.Scalar"
        if mask is None or mask.target != wanted or not isinstance(mask.args[1], int):
            return None
        if self.states[mask.reads[0]].kind != "slice":
            return None
        return Unit(self._root(mask.reads[0]), mask.args[1])

    def _loss(self) -> tuple[Literal["mean", "sum"], Unit]:
        losses = list(self.micro.outputs_of("loss"))
        if len(losses) != 1 or self.micro.values[losses[0].value].shape:
            raise NotSeparable("the step has no single scalar loss")
        state = self.states[losses[0].value]
        if state.kind != "part":
            raise NotSeparable("the loss is no sum or mean over the samples of the batch")
        scale = state.scale
        if not scale:
            return "sum", SAMPLES
        if len(scale) == 1 and scale[0][1] == 1:
            return "mean", scale[0][0]
        raise NotSeparable("the loss is divided by a number that depends on the batch in another way than a mean")

    def _check_gradients(self, loss_scale: Scale) -> None:
        for output in self.micro.outputs_of("gradient"):
            state = self.states[output.value]
            if not isinstance(output.target, str):
                raise NotSeparable("the step returns the gradient of an input")
            powers = [power for _, power in scaled(loss_scale, state.scale, -1)]
            constant = state.kind == "same" and (state.zero or powers == [1])
            if not constant and not (state.kind == "part" and state.scale == loss_scale):
                raise NotSeparable(f"the gradient of {output.target} is no sum over the samples of the batch")

    def _axis(self, value: int) -> int | None:
        state = self.states[value]
        return state.dim if state.kind == "slice" else None

    def _check_results(self) -> None:
        for output in self.micro.outputs_of("result"):
            state = self.states[output.value]
            if self._result_axis(output.value) is None and (state.kind != "same" or state.scale):
                shape = self.micro.values[output.value].shape
                raise NotSeparable(f"an output of the model, of shape {shape}, is over the whole batch")

    def _result_axis(self, value: int) -> int | None:
        state = self.states[value]
        return state.dim if state.kind == "slice" and not state.scale and state.outer == 1 else None


def _producer(graph: TrainingGraph, value: Value) -> Op | None:
    """The op that computes a value, behind the casts and copies that do not change it."""
    op = None if value.producer is None else graph.ops[value.producer]
    while op is not None and (op.target in _MERE_VIEWS or op.target == "aten._to_copy.default"):
        before = graph.values[op.reads[0]].producer
        op = None if before is None else graph.ops[before]
    return op


def _operator(target: str) -> torch._ops.OpOverload:
    """Torch's operator, whatever calls it: a graph may call an equivalent of this package."""
    namespace, name, overload = target.split(".", 2)
    operator = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if not isinstance(operator, torch._ops.OpOverload):
        raise unknown(target)
    return operator


def _is_copy(op: Op) -> bool:
    return op.target == "aten.clone.default"


def _short(op: Op) -> str:
    return op.target.removeprefix("aten.").rsplit(".", 1)[0]


def _same_call(op: Op) -> tuple[str, str]:
    return "aten.view.default" if op.target == "aten._unsafe_view.default" else op.target, op.phase


def _map(argument: Any, function: Any) -> Any:
    return list(map_refs(argument, function)) if isinstance(argument, tuple) else map_refs(argument, function)


def _equal(full: Any, micro: Any) -> bool:
    """Whether two arguments are the same; an operand is equal to its partner."""
    if isinstance(micro, Operand):
        return isinstance(full, Counterpart) and full.source == micro.full.index
    if isinstance(micro, (list, tuple)):
        return isinstance(full, (list, tuple)) and len(full) == len(micro) and all(map(_equal, full, micro))
    return type(full) is type(micro) and (full == micro or (full != full and micro != micro))


def _compare_operands(call: Call, name: str) -> None:
    if isinstance(call.micro[name], Operand):
        raise call.refuse("is called with other tensors in a micro-batch")
