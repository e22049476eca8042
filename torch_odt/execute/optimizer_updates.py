"""The part of an optimizer's step that is made inside of the backward pass.

The optimizer stays the user's: hyperparameters are read from its groups at every update, and its state is where
`torch.optim` keeps it, so that schedulers and `state_dict()` see what they always see.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from torch_odt import memory
from torch_odt.capture.fused_updates import FUSED_UPDATE, chosen
from torch_odt.capture.graph import Op, TrainingGraph
from torch_odt.capture.parameter_updates import update
from torch_odt.capture.update_in_backward import UpdateRule, counter_dtype, update_in_backward
from torch_odt.execute.gradients import USED_UP, has_gradient_hooks
from torch_odt.execute.named_tensors import StepTensors, note_changed
from torch_odt.execute.one_operator import Number, OneOperator, OperatorUse
from torch_odt.execute.profiler_marks import UPDATE, marked

# The attribute of optimizers that have ways of their own with some gradients: `InStep` by a parameter's identity.
IN_STEP = "_torch_odt_in_step"
# Whose updates are made one by one.
_KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_SHARED = "other tensors lie in the parameter's memory"
_FLOATING = (torch.float32, torch.float64, torch.bfloat16)


class InStep(Protocol):
    """What becomes of a parameter's gradient, where the optimizer has a way of its own with it.

    Attributes:
        parameter: that takes the gradient.
    """

    parameter: torch.Tensor

    def changed(self) -> list[torch.Tensor]:
        """What changes, in the parameter's place or the parameter itself."""

    def rule(self, parameter: str) -> UpdateRule | None:
        """How the gradient is used up, as of now; None where the optimizer's step is to do it."""

    def update(self, gradient: torch.Tensor) -> None:
        """Use it up."""

    def fused(self, *arguments: Any) -> Sequence[torch.Tensor | None]:
        """Use it up as it is computed, see `FusedUpdate`: an operator's results, with None for the gradient."""

    def fused_operator(self, arguments: tuple[Any, ...], number: Callable[[str], Number]) -> OperatorUse:
        """The same as a call; its results are the positions of those of `fused`.

        Args:
            arguments: of a graph.
            number: an option of the optimizer, by its name.
        """


@dataclass(frozen=True)
class _Member:
    """A parameter in the optimizer."""

    parameter: nn.Parameter
    group: int
    rule: UpdateRule
    in_step: InStep | None = None


@dataclass(frozen=True)
class _FoundOf:
    """What decides which parameters can be updated one by one.

    Attributes:
        tensors: identities of parameters and buffers.
        places: their forms, with addresses.
        members: identities of the parameters of each of the optimizer's groups.
        hooked: parameters with hooks.
        in_step: parameters whose gradients the optimizer uses up in its own way.
    """

    tensors: Hashable
    places: Hashable
    members: tuple[tuple[int, ...], ...]
    hooked: tuple[str, ...]
    in_step: tuple[int, ...]

    @classmethod
    def now(cls, optimizer: torch.optim.Optimizer, tensors: StepTensors) -> _FoundOf:
        return cls(
            tensors=tensors.identities,
            places=tensors.places(),
            members=tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups),
            hooked=tuple(name for name, p in tensors.parameters.items() if p.requires_grad and _is_seen_by_hooks(p)),
            in_step=tuple(vars(optimizer).get(IN_STEP, ())),
        )


@dataclass(frozen=True, eq=False)
class StepNotice:
    """A hook of an optimizer's step that looks at no gradient."""

    notify: Callable[[], None]

    def __call__(self, *_: Any) -> None:
        self.notify()


class OptimizerUpdates:
    """Which parameters of a step its optimizer can update one by one, and how.

    Args:
        optimizer: SGD, Adam or AdamW of `torch.optim`; any other one makes its step after the backward pass.
        parameters: of the step, by the names that the graph uses.
        buffers: of the step: a parameter that shares memory with one is not updated.
        needs_all: why all gradients must exist before the optimizer's step; empty if nothing needs them.
        uses_up: whether gradients may be used up in the optimizer's own way, see `InStep`.

    Attributes:
        waits_for: why the optimizer makes its step after the backward pass; empty if it does not.
        kept: how many of its parameters keep their gradients for that all the same, by reason.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        buffers: Iterable[torch.Tensor] = (),
        needs_all: str = "",
        *,
        uses_up: bool = True,
    ) -> None:
        self._uses_up = uses_up
        self._optimizer = optimizer
        self._members: dict[str, _Member] = {}
        self._fresh: dict[str, torch.Tensor] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._numbers: dict[tuple[int, str, float], Number] = {}
        self._changed: dict[str, list[torch.Tensor]] = {}
        self._group_rules: list[UpdateRule | None] = []
        for name, parameter in parameters.items():
            # Nearly all have one name, and a tuple of one takes half as much as a list.
            self._names[id(parameter)] = (*self._names.get(id(parameter), ()), name)
        self.waits_for = needs_all or _reason_to_wait(optimizer)
        self.kept: Counter[str] = Counter()
        self._found_of: _FoundOf | None = None
        if not self.waits_for:
            self._find_members(parameters, list(buffers))

    def _find_members(self, parameters: Mapping[str, nn.Parameter], buffers: Iterable[torch.Tensor]) -> None:
        groups = self._optimizer.param_groups
        self._group_rules = [_rule_of(self._optimizer, group) for group in groups]
        named = [*parameters.values(), *buffers]
        owners = Counter(t.untyped_storage().data_ptr() for t in {id(t): t for t in named}.values())
        uses = Counter(tensor.untyped_storage().data_ptr() for tensor in named)
        for number, (group, rule) in enumerate(zip(groups, self._group_rules, strict=True)):
            for parameter in group["params"]:
                names = self._names.get(id(parameter), ()) if parameter.requires_grad else ()
                in_step = _in_step(self._optimizer, parameter)
                if in_step is not None:
                    self._find_in_step(in_step, parameter, number, names, uses)
                    continue
                reason = _reason_to_keep(parameter, owners) if names else ""
                if names and rule is None:
                    reason = f"{type(self._optimizer).__name__} makes its step as a whole"
                if reason:
                    self.kept[reason] += 1
                elif rule is not None:
                    self._members |= {name: _Member(parameters[name], number, rule) for name in names}

    def _find_in_step(
        self, in_step: InStep, parameter: nn.Parameter, group: int, names: Sequence[str], uses: Counter[int]
    ) -> None:
        is_shared = any(uses[tensor.untyped_storage().data_ptr()] > len(names) for tensor in in_step.changed())
        for name in names:
            rule = in_step.rule(name)
            if not self._uses_up:
                self.kept["it does not change its parameter as torch.optim does"] += 1
            elif is_shared:
                self.kept[_SHARED] += 1
            elif rule is None:
                self.kept["the optimizer's step does more with it than descend"] += 1
            elif _is_seen_by_hooks(parameter):
                self.kept["a hook looks at it"] += 1
            else:
                self._members[name] = _Member(parameter, group, rule, in_step)

    @functools.cached_property
    def signature(self) -> Hashable:
        """What the graph with these updates depends on."""
        members = tuple(
            (name, id(m.parameter), m.group, m.rule, m.in_step and tuple(map(id, m.in_step.changed())))
            for name, m in self._members.items()
        )
        return self.waits_for, id(self._optimizer), members

    @property
    def is_current(self) -> bool:
        """Whether the optimizer still makes the updates that were found."""
        if self.waits_for:
            return True
        return self._rules_are_as_found() and not _reason_to_wait(self._optimizer)

    def found_of(self, tensors: StepTensors) -> None:
        """Note what these updates have been found of, for `is_still`."""
        self._found_of = None if self.waits_for else _FoundOf.now(self._optimizer, tensors)

    def is_still(self, optimizer: torch.optim.Optimizer, tensors: StepTensors, needs_all: str) -> bool:
        """Whether these updates would be found again."""
        if optimizer is not self._optimizer or self.waits_for != (needs_all or _reason_to_wait(optimizer)):
            return False
        if self.waits_for:
            return True
        return self._rules_are_as_found() and self._found_of == _FoundOf.now(optimizer, tensors)

    def _rules_are_as_found(self) -> bool:
        return self._group_rules == [_rule_of(self._optimizer, group) for group in self._optimizer.param_groups]

    def rule_of(self, name: str) -> UpdateRule | None:
        """How to update a parameter; None if its gradient is to be delivered."""
        return self._members[name].rule if name in self._members else None

    def rules_for(self, graph: TrainingGraph) -> dict[str, UpdateRule]:
        """How to update the parameters of a graph; those that it holds under several names are left out."""
        present = {str(value.target) for value in graph.values if value.kind == "parameter"}
        return {
            name: member.rule
            for name, member in self._members.items()
            if len(present.intersection(self._names[id(member.parameter)])) == 1
        }

    def state(self, graph: TrainingGraph) -> dict[str, torch.Tensor]:
        """The optimizer's tensors that a graph takes, by target; those that do not exist yet are made."""
        targets = [target for _, kind, target in graph.named_inputs if kind == "state"]
        return {target: self.state_tensor(*target.rsplit("/", 1)) for target in targets}

    def state_tensor(self, name: str, key: str) -> torch.Tensor:
        """What the optimizer keeps for a parameter under a key; made if it does not exist yet."""
        parameter = self._members[name].parameter
        tensor = self._optimizer.state.get(parameter, {}).get(key)
        # A step that was interrupted may have left one behind, and the optimizer may have its own by now.
        self._fresh.pop(f"{name}/{key}", None)
        if tensor is None:
            with memory.category("optimizer"):
                is_counter = key == "step"
                tensor = torch.tensor(0.0, dtype=counter_dtype()) if is_counter else torch.zeros_like(parameter)
            # It becomes the optimizer's when it is filled: an interrupted step must not leave half a state behind.
            self._fresh[f"{name}/{key}"] = tensor
        return tensor

    def bind(self, op: Op, name: str) -> Callable[..., Any]:
        """What updates one parameter of a graph, in the place of `UPDATE` or `FUSED_UPDATE`."""
        python = functools.partial(self._fused_update if op.target == FUSED_UPDATE else self.update, name)
        use = self._operator_of(op, self._members[name])
        if use is None:
            return python
        member = self._members[name]
        self._changed[name] = [member.parameter] if member.in_step is None else member.in_step.changed()
        return OneOperator(use, python)

    def _operator_of(self, op: Op, member: _Member) -> OperatorUse | None:
        """The one operator that an update comes to; None where it is more than that."""
        if op.target == FUSED_UPDATE:
            assert member.in_step is not None
            _, _, returned, _, *arguments = op.args
            use = member.in_step.fused_operator(tuple(arguments), functools.partial(self._number, member.group))
            values = dict(zip(returned, op.writes, strict=True))
            return use._replace(results=tuple(None if i is None else values.get(i) for i in use.results))
        if member.in_step is not None or member.rule.text != "sgd":
            return None
        descent = (*op.args[1:], self._number(member.group, "lr", sign=-1.0))
        return OperatorUse(torch.ops.aten.add_.Tensor, descent, (None,), alike=(0, 1), mark=UPDATE)

    def _number(self, group: int, option: str, sign: float = 1.0) -> Number:
        """An option of a group, so many times."""
        return self._numbers.setdefault(
            (group, option, sign), Number(torch.zeros(1, dtype=torch.float64, device="cpu"))
        )

    def read_options(self) -> None:
        """Before a step: the optimizer's options are as they are now."""
        for (group, option, sign), number in self._numbers.items():
            number.cell.fill_(sign * float(self._optimizer.param_groups[group][option]))

    def note_changes(self) -> None:
        """After a step: autograd, and whoever has packed a weight, know of changes that compiled code has made."""
        note_changed([tensor for changed in self._changed.values() for tensor in changed])

    def update(
        self, name: str, rule: str, parameter: torch.Tensor, gradient: torch.Tensor, *state: torch.Tensor
    ) -> tuple[()]:
        """Make a parameter's part of the optimizer's step."""
        member = self._members[name]
        options = self._optimizer.param_groups[member.group]
        if member.in_step is not None:
            with marked(UPDATE):
                member.in_step.update(gradient)
            return ()
        if not state:
            with marked(UPDATE):
                update(rule, options, parameter, gradient)
            return ()
        targets = {key: f"{name}/{key}" for key in member.rule.state}
        is_first = not self._fresh.keys().isdisjoint(targets.values())
        with marked(UPDATE):
            update(rule, options, parameter, gradient, *state, is_first=is_first)
        for key, target in targets.items():
            if target in self._fresh:
                self._optimizer.state[member.parameter][key] = self._fresh.pop(target)
        return ()

    def _fused_update(
        self, name: str, rule: str, target: str, returned: Sequence[int], parameter: torch.Tensor, *arguments: Any
    ) -> Any:
        in_step = self._members[name].in_step
        assert in_step is not None
        return chosen(in_step.fused(*arguments), returned)


def why_all_gradients(accumulation_steps: int, clip_grad_norm: float | None, *, transactional: bool = False) -> str:
    """Why the optimizer has to wait for all gradients; empty if it need not."""
    if accumulation_steps > 1:
        return f"gradients of {accumulation_steps} calls are accumulated"
    if clip_grad_norm is not None:
        return "clipping needs the norm of all gradients"
    return "a call that fails must leave all parameters as they were (transactional=True)" if transactional else ""


def updates_of(
    optimizer: torch.optim.Optimizer,
    tensors: StepTensors,
    disabled: Container[str],
    needs_all: str = "",
    before: OptimizerUpdates | None = None,
) -> OptimizerUpdates | None:
    """What an optimizer can do in the backward pass; None where that is switched off.

    Args:
        disabled: names of rewrites that are not to be made.
        needs_all: why all gradients have to exist before it makes its step; empty if they need not.
        before: what it was in an earlier call; it is returned where nothing has changed since.
    """
    if update_in_backward.__name__ in disabled:
        return None
    if before is not None and before.is_still(optimizer, tensors, needs_all):
        return before
    found = OptimizerUpdates(optimizer, tensors.parameters, tensors.buffers.values(), needs_all)
    found.found_of(tensors)
    return found


def require_own_parameters(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Raises ValueError when an optimizer was made for another model, or before the parameters were replaced."""
    own = set(parameters)
    if not any(parameter in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "the optimizer holds no parameter of this model: make it from model.parameters() as they are now, or an "
            "adaptation's parameters()"
        )


def _reason_to_wait(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer cannot update one parameter after the other; empty if it can."""
    kind = type(optimizer)
    if kind not in _KNOWN and not vars(optimizer).get(IN_STEP):
        return f"{kind.__name__} makes its step as a whole (SGD, Adam and AdamW of torch.optim are known)"
    if _has_hooks(optimizer):
        return "the optimizer has hooks, which see all gradients"
    if not _is_own_step(optimizer):
        return "the optimizer's step has been replaced"
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        return "a scaler has left its scale at the optimizer"
    for group in optimizer.param_groups:
        for option in ("foreach", "fused", "capturable", "differentiable"):
            if group.get(option):
                return f"the optimizer works on all parameters at once ({option}=True)"
        tensors = [name for name, value in group.items() if name != "params" and _holds_tensor(value)]
        if tensors:
            return f"a hyperparameter is a tensor ({tensors[0]})"
    return ""


def _is_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step is its class's, with nothing but the counter of schedulers around it."""
    own = vars(optimizer).get("step")
    if own is None:
        return True
    return hasattr(own, "_wrapped_by_lr_sched") and own.__wrapped__ is type(optimizer).step


def _holds_tensor(option: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in (option if isinstance(option, tuple) else (option,)))


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    own: Iterable[Mapping[int, Any]] = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    everyones = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    return any(not isinstance(hook, StepNotice) for hooks in (*own, *everyones) for hook in hooks.values())


def _rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> UpdateRule | None:
    if type(optimizer) not in _KNOWN:
        return None
    used = [name for name in ("weight_decay", "maximize", "nesterov", "amsgrad") if group.get(name)]
    if isinstance(optimizer, torch.optim.SGD):
        momentum = ("momentum",) if group["momentum"] else ()
        return UpdateRule(" ".join(("sgd", *momentum, *used)), ("momentum_buffer",) * len(momentum))
    decoupled = ("decoupled",) if group["decoupled_weight_decay"] else ()
    largest = ("max_exp_avg_sq",) if group["amsgrad"] else ()
    return UpdateRule(" ".join(("adam", *decoupled, *used)), ("step", "exp_avg", "exp_avg_sq", *largest))


def _reason_to_keep(parameter: nn.Parameter, owners: Mapping[int, int]) -> str:
    """Why a parameter's gradient must be there when the optimizer makes its step; empty if it need not."""
    storage = parameter.untyped_storage()
    if storage.nbytes() != parameter.nbytes or owners[storage.data_ptr()] > 1:
        return _SHARED
    if parameter.dtype not in _FLOATING:
        return "the parameter is of another type"
    return "a hook looks at it" if _is_seen_by_hooks(parameter) else ""


def _in_step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> InStep | None:
    found: InStep | None = vars(optimizer).get(IN_STEP, {}).get(id(parameter))
    return found


def _is_seen_by_hooks(parameter: nn.Parameter) -> bool:
    """Whether a hook looks at a parameter's gradient that does not use it up."""
    uses_up = getattr(parameter, USED_UP, None)
    return has_gradient_hooks(parameter) if uses_up is None else bool(uses_up.is_seen_by_hooks())
