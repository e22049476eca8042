"""The optimizer's step inside of a wrapped model's backward pass: which parameters are updated there, and which wait.

The loop is the user's, so that other graphs, or operators outside of all graphs, may add to a gradient. A parameter is
updated only where one captured graph computes all of its gradient: nothing else holds the node by which autograd adds
to it. This is looked up in every backward pass, before anything is changed. Where it does not hold, the gradient is
delivered as ever, and so it is planned from then on.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_odt._extensions import memory_module
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.partition import GraphPiece
from torch_odt.capture.update_in_backward import UPDATE
from torch_odt.errors import OdtWarning
from torch_odt.execute.executor import Executor
from torch_odt.execute.gradients import has_gradient_hooks
from torch_odt.execute.graph_calls import Call, Collector, Rules
from torch_odt.execute.optimizer_updates import OptimizerUpdates, StepNotice
from torch_odt.memory._units import format_bytes

# A parameter's name, by the target that it has in a graph.
Names = Mapping[str, str]


class WrapUpdates:
    """Makes an optimizer's updates in the backward passes of a wrapped model.

    Args:
        model: the wrapped model.
        optimizer: makes its step for whatever has a gradient afterwards.
        needs_all: why all gradients have to exist before that; empty if they need not.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, needs_all: str = "") -> None:
        self._optimizer = optimizer
        self._model = model
        # Why parameters keep their gradients, by name; what has happened once is planned for.
        self._keeping: dict[str, str] = {}
        self._told: set[str] = set()
        # Since the optimizer's last step.
        self._updated: set[str] = set()
        self._calls: list[Names] = []
        self._call_counts: Counter[str] = Counter()
        self._collector = Collector()
        self._accepted: dict[int, str] = {}
        if not memory_module:
            needs_all = "torch_odt._memory, which tells who adds to a gradient, is not built"
        self._needs_all = needs_all
        self._handle = optimizer.register_step_post_hook(StepNotice(self._updated.clear))
        self._renew()

    def close(self) -> None:
        """Leave the optimizer as it was; graphs whose backward passes have yet to come deliver their gradients."""
        self._handle.remove()
        self._needs_all = "the model is not wrapped any more"
        self._renew()

    def _renew(self) -> None:
        """Look at the optimizer and at the parameters as they are now."""
        parameters = dict(self._model.named_parameters())
        buffers = self._model.buffers()
        self._updates = OptimizerUpdates(self._optimizer, parameters, buffers, self._needs_all, uses_up=False)
        self._names = {id(parameter): name for name, parameter in parameters.items()}

    def forget(self) -> None:
        """Try again what has had to wait."""
        self._keeping.clear()

    def notes(self, *, is_captured: bool) -> list[str]:
        """What is not updated in the backward pass, and why."""
        reason = self._updates.waits_for if is_captured else "there is no graph"
        if reason:
            return [f"the optimizer makes its step after the backward pass: {reason}"]
        reasons = Counter(self._keeping.values()) + self._updates.kept
        return [f"{count} gradients are kept for the optimizer's step: {reason}" for reason, count in reasons.items()]

    # Which updates are planned.

    def begin_step(self) -> None:
        self._calls = []
        self._call_counts = Counter()
        self._renew()

    def note_call(self, piece: GraphPiece, args: Sequence[Any]) -> None:
        """A graph is about to run on these arguments."""
        names = self._names_in(piece, args)
        self._calls.append(names)
        self._call_counts.update(set(names.values()))

    @property
    def calls(self) -> tuple[Names, ...]:
        """The parameters of each call in this step so far."""
        return tuple(self._calls)

    def rules(self, calls: Sequence[Names]) -> list[Rules]:
        """For each call of a step, how it updates parameters: those that no other call of the step has."""
        counts = Counter(name for names in calls for name in set(names.values()))
        return [tuple(self._rules_of(names, counts)) for names in calls]

    def rules_of_last_call(self) -> Rules:
        """How the call noted last updates parameters, as far as can be told before the next ones."""
        return tuple(self._rules_of(self._calls[-1], self._call_counts))

    def _rules_of(self, names: Names, counts: Counter[str]) -> Iterable[tuple[str, Any]]:
        times_in_call = Counter(names.values())
        for target, name in names.items():
            rule = self._updates.rule_of(name)
            if rule is not None and counts[name] == times_in_call[name] == 1 and name not in self._keeping:
                yield target, rule

    def _names_in(self, piece: GraphPiece, args: Sequence[Any]) -> Names:
        found = zip(piece.forward_inputs, args, strict=True)
        mutated = {str(output.target) for output in piece.graph.outputs_of("mutation")}
        return {
            str(position): self._names[id(argument)]
            for position, (value, argument) in enumerate(found)
            if value is not None and id(argument) in self._names and str(position) not in mutated
        }

    # Backward passes.

    def operators(self, graph: TrainingGraph) -> dict[int, Callable[..., tuple[()]]]:
        """What an executor calls for the updates of a graph."""
        targets = {op.index: int(graph.values[op.reads[0]].target or 0) for op in graph.program if op.target == UPDATE}
        return {index: functools.partial(self._update_or_deliver, target) for index, target in targets.items()}

    def _update_or_deliver(
        self, target: int, rule: str, parameter: torch.Tensor, gradient: torch.Tensor, *state: torch.Tensor
    ) -> tuple[()]:
        name = self._accepted.get(id(parameter))
        if name is None:
            self._collector.tensors[target] = gradient
            return ()
        self._updated.add(name)
        return self._updates.update(name, rule, parameter, gradient, *state)

    @contextlib.contextmanager
    def backward(
        self, call: Call, collector: Collector, waiting: Iterable[Call], *, is_kept: bool
    ) -> Iterator[Executor]:
        """Yields what runs the backward half of a call; state of the optimizer is in the call's table then.

        Args:
            collector: takes the gradients of parameters that are not updated.
            waiting: the calls whose backward passes have yet to come.
            is_kept: the values of the call are kept for another backward pass.

        Raises:
            RuntimeError: there were updates, and no step of the optimizer after them.
        """
        self._refuse_accumulation(id(call.table[index]) for index in call.executor.graph.inputs)
        if not self._updates.is_current:
            self._renew()
        self._collector = collector
        self._accepted = {}
        try:
            yield self._ready(call, waiting, is_kept=is_kept)
        finally:
            # Autograd takes over a gradient without a copy only if nobody else has it.
            self._collector = Collector()

    def _ready(self, call: Call, waiting: Iterable[Call], *, is_kept: bool) -> Executor:
        executor, table = call.executor, call.table
        graph = executor.graph
        updates = [op for op in graph.program if op.target == UPDATE]
        why_all = _reason_to_keep_all(is_kept=is_kept)
        read_later = _read_by(waiting)
        refused: Counter[str] = Counter()
        refused_bytes = 0
        for op in updates:
            parameter = table[op.reads[0]]
            name = self._names.get(id(parameter), "")
            rule = self._updates.rule_of(name)
            if parameter is None or rule is None or rule.text != op.args[0]:
                # It was planned for another tensor, or before something was changed.
                continue
            reason = why_all or _reason_to_keep(parameter, read_later)
            if reason:
                self._keeping.setdefault(name, reason)
                refused[reason] += 1
                refused_bytes += parameter.untyped_storage().nbytes()
                continue
            self._accepted[id(parameter)] = name
            for index, key in zip(op.reads[2:], rule.state, strict=True):
                table[index] = self._updates.state_tensor(name, key)
        if len(self._accepted) == len(updates):
            return executor
        for reason, count in refused.items():
            self._tell_of_refusal(reason, count, refused_bytes)
        # Delivered gradients would stand in the way of what is planned for the same places in the arena.
        return Executor(graph, executor.schedule, operators=self.operators(graph))

    def _tell_of_refusal(self, reason: str, count: int, nbytes: int) -> None:
        """Say once for each reason that a backward pass takes more than was planned."""
        if reason in self._told:
            return
        self._told.add(reason)
        warnings.warn(
            f"{count} parameters could not be updated in the backward pass: {reason}. Their gradients are kept for "
            f"the optimizer's step, up to {format_bytes(nbytes)} beside what was planned. Later backward passes are "
            "planned to keep them, until the budget is set anew",
            OdtWarning,
            stacklevel=2,
        )

    def _refuse_accumulation(self, inputs: Iterable[int]) -> None:
        again = self._updated.intersection(self._names.get(identity, "") for identity in inputs)
        if again:
            raise RuntimeError(
                f"another backward pass before optimizer.step(): {min(again)} and others have been updated in the last "
                "one, and their gradients are gone. With optimizer= every backward pass through the model trains it. "
                "To accumulate gradients, or to differentiate for another reason, drop optimizer= from wrap; "
                "otherwise call optimizer.step() after each backward()"
            )


def _reason_to_keep_all(*, is_kept: bool) -> str:
    """Why this backward pass must not update anything; empty if it may."""
    if is_kept:
        return "the graph is retained"
    if not torch.autograd.Variable._execution_engine.is_checkpoint_valid():
        return "some gradients are asked for alone, by torch.autograd.grad or backward(inputs=...)"
    return ""


def _reason_to_keep(parameter: torch.Tensor, read_later: Container[int]) -> str:
    """Why a parameter must not be updated now; empty if it may be."""
    if has_gradient_hooks(parameter):
        return "a hook looks at them"
    if parameter.grad is not None:
        return "there were gradients already, to which a backward pass adds"
    if _address(parameter) in read_later:
        return "another part of the model reads the parameter afterwards"
    assert memory_module is not None
    if memory_module.accumulator_holders(parameter._cdata) != 1:
        return "a graph besides the model's, or another call of the model, leads to the parameter as well"
    return ""


def _read_by(calls: Iterable[Call]) -> set[int]:
    """The addresses of what calls will read in their backward passes and do not own."""
    tensors = (call.table[index] for call in calls for index, _ in call.versions)
    return {_address(tensor) for tensor in tensors if tensor is not None}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
