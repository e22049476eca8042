"""`TrainStep`: one object that takes a batch and trains on it inside a number of bytes."""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from torch_odt import memory
from torch_odt.cache import Cache, CacheOption
from torch_odt.capture.loss_modules import loss_module
from torch_odt.capture.rewrite import switched_off
from torch_odt.capture.trace import TracedStep
from torch_odt.errors import NonFiniteLossWarning, OdtWarning
from torch_odt.execute.accounting import held_by_process, make_room
from torch_odt.execute.compiled import refuse_compiled
from torch_odt.execute.gradients import has_gradient_hooks, run_gradient_hooks
from torch_odt.execute.loss import make_compute
from torch_odt.execute.optimizer_cost import optimizer_cost
from torch_odt.execute.prepare import Prepared, prepare
from torch_odt.execute.request import StepRequest
from torch_odt.execute.signature import step_outline, step_values
from torch_odt.planning.plan import Plan
from torch_odt.planning.registry import get_planner
from torch_odt.runtime.budget import Budget, format_bytes

# Batches of so many kinds keep their plans.
_MOST_PREPARED = 8
_MANY_CAPTURES = 16

T = TypeVar("T")
NonFinite = Literal["warn", "raise", "ignore"]


class TrainStep:
    """Forward, loss, backward and optimizer step of a model, inside a budget.

    Choose it when the loop is yours to change by one line: it sees the loss and the optimizer, so it can plan the whole
    step and cut the batch where that is exact. Where the loop must stay as it is, use `wrap`.

    The step is captured and planned at the first call, and again whenever the batch's shape, the model's mode, its
    trainable parameters or plain Python values that its code reads change. Every number it computes is plain PyTorch's
    but for rounding; what is planned is when each tensor exists. With `planner="keep-all"`, or with the
    rewrites that round differently switched off, what is not cut into micro-batches has plain PyTorch's very bits.

    Args:
        model: any `nn.Module` on the CPU. It stays as it is: same parameters, same `state_dict()`.
        loss_fn: `loss_fn(model(*inputs), target)` for positional batches; `loss_fn(outputs, batch)` for keyword
            batches, or None to take the outputs' own `loss`.
        optimizer: any `torch.optim.Optimizer` whose `step()` takes no closure.
        budget: bytes, as `Budget` takes them ("512MiB", "80%", "auto", an int, or a `Budget`).
        planner: "auto", or the name of one planner.
        disable_rewrites: names of rewrites that are not to be made ("fuse_batch_norm"); the plan names those that are.
        micro_batch: samples to a micro-batch; None lets the planner choose. A step whose samples influence each other
            (BatchNorm in training mode) is never cut.
        accumulation_steps: optimizer steps are taken every so many calls, over the mean of all their samples.
        clip_grad_norm: clip the gradients' global norm to this before each optimizer step.
        cache: folder for plans and measurements, None for the default one, False for none.
        nonfinite: what to do when a loss is NaN or infinite: "warn" and go on as plain PyTorch does, "raise"
            `FloatingPointError` before the optimizer steps, or "ignore".

    Raises:
        InfeasibleBudget: at the first call, when no plan fits; it names the smallest budget that does.
        CaptureError: at the first call, when `micro_batch` is given and micro-batches would not add up to the step.
        ValueError: the model has nothing to train, or lies on another device, or the optimizer needs a closure, or
            there is no rewrite of that name.
        PlanError: there is no planner of that name.
        TypeError: the model has been compiled by torch.compile, or an argument is none of what it should be.

    Example:
        >>> import torch, torch_odt as odt
        >>> model = torch.nn.Linear(4, 2)
        >>> step = odt.TrainStep(model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1),
        ...                      budget=odt.Budget("64MiB", of="training"), cache=False)
        >>> step(torch.ones(3, 4), torch.tensor([0, 1, 1])).shape
        torch.Size([])
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: torch.optim.Optimizer,
        *,
        budget: int | str | Budget,
        planner: str = "auto",
        disable_rewrites: Iterable[str] = (),
        micro_batch: int | None = None,
        accumulation_steps: int = 1,
        clip_grad_norm: float | None = None,
        cache: CacheOption = None,
        nonfinite: NonFinite = "warn",
    ) -> None:
        check_trainable(model)
        _check_roles(model, loss_fn, optimizer)
        if accumulation_steps < 1:
            raise ValueError(f"accumulation_steps must be at least 1, not {accumulation_steps}")
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch must be at least 1, not {micro_batch}")
        if nonfinite not in ("warn", "raise", "ignore"):
            raise ValueError(f'nonfinite is "warn", "raise" or "ignore", not {nonfinite!r}')
        get_planner(planner)
        disabled_rewrites = switched_off(disable_rewrites, planner)
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.clip_grad_norm = clip_grad_norm
        self.accumulation_steps = accumulation_steps
        self._nonfinite = nonfinite
        memory.install()
        for parameter in model.parameters():
            memory.tag(parameter, "parameter")
        self._request = StepRequest(
            model=model,
            loss_fn=loss_fn,
            compute=make_compute(loss_fn),
            budget=Budget.of_value(budget),
            level_bytes=held_by_process(),
            optimizer_cost=optimizer_cost(optimizer),
            planner=planner,
            disabled_rewrites=disabled_rewrites,
            micro_batch=micro_batch,
            accumulates=accumulation_steps > 1,
            cache=Cache.of_value(cache),
        )
        self._prepared: OrderedDict[Hashable, Prepared] = OrderedDict()
        # Of steps whose budget was refused, or has been changed since.
        self._traces: dict[Hashable, dict[int, TracedStep]] = {}
        self._captures = 0
        self._has_told = self._has_told_of_captures = False
        # Of steps that were not captured: the values that their code could read then, and at the last call.
        self._refused: dict[Hashable, Hashable] = {}
        self._last_values: Hashable = None
        self._current: Prepared | None = None
        self._calls_in_group = 0
        self._samples_in_group = 0
        self._group: set[nn.Parameter] = set()

    @property
    def budget(self) -> Budget:
        """The budget; setting another one makes the next call plan anew, from what has been captured before."""
        return self._request.budget

    @budget.setter
    def budget(self, budget: int | str | Budget) -> None:
        self._request.budget = Budget.of_value(budget)
        traces = self._traces | {key: prepared.traces for key, prepared in self._prepared.items() if prepared.traces}
        self.close()
        self._traces = traces

    @property
    def plan(self) -> Plan:
        """The plan of the last call.

        Raises:
            RuntimeError: nothing has been run yet.
        """
        if self._current is None:
            raise RuntimeError("there is no plan before the first call; use torch_odt.plan() to plan without running")
        return self._current.plan

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on a batch: positional inputs and the target last, or the model's keyword arguments.

        Returns:
            The loss, detached.
        """
        return self._step(args, kwargs, want_results=False)[0]

    def with_outputs(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Train on a batch as a plain call does; returns the loss and the model's outputs, detached."""
        return self._step(args, kwargs, want_results=True)

    def flush(self) -> None:
        """Take the optimizer step of an accumulation that the end of an epoch has left incomplete."""
        if self._calls_in_group:
            self._update()

    def close(self) -> None:
        """Return the memory that the plans hold. The next call plans anew."""
        self._prepared.clear()
        self._traces.clear()
        self._current = None
        self._request.release()

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, want_results: bool) -> tuple[torch.Tensor, Any]:
        _check_batch(self.model, self.loss_fn, args, kwargs)
        if self._calls_in_group == 0:
            self.optimizer.zero_grad(set_to_none=True)
        prepared = self._prepare(args, kwargs, want_results)
        if prepared.plan.budget is not None:
            make_room(self._request.arena, prepared.plan.budget.total_bytes, prepared.steps)
        prepared.steps += 1
        try:
            loss, results = self._differentiate(prepared, args, kwargs)
            self._tell_of_fallback(prepared.plan)
            self._check_finite(loss)
        except BaseException:
            # The gradients are no longer the mean over the group: the next call begins another one.
            self._calls_in_group = self._samples_in_group = 0
            raise
        self._calls_in_group += 1
        if self._calls_in_group == self.accumulation_steps:
            self._update()
        if prepared.plan.budget is not None:
            # What libraries have freed is kept by malloc: it is not to stand above the budget until the next step.
            make_room(self._request.arena, prepared.plan.budget.total_bytes)
        return loss, results

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], want_results: bool) -> Prepared:
        outline = (want_results, step_outline(self.model, self.loss_fn, args, kwargs))
        values = step_values(self.model, self.loss_fn)
        key: Hashable = (outline, values)
        if key not in self._prepared and outline in self._prepared and not self._is_worth_a_try(outline, values):
            key = outline
        prepared = self._prepared.get(key)
        if prepared is None:
            self._forget_oldest()
            self._request.renew(optimizer_cost(self.optimizer))
            traces = self._traces.setdefault(key, {})
            self._captures += not traces
            self._warn_of_many_captures()
            prepared = prepare(self._request, args, kwargs, want_results=want_results, traces=traces)
            del self._traces[key]
            if prepared.plan.captured:
                _warn_if_scarce(prepared.plan)
            else:
                key = outline
                self._refused[outline] = values
            self._prepared[key] = prepared
        self._prepared.move_to_end(key)
        self._current = prepared
        return prepared

    def _is_worth_a_try(self, outline: Hashable, values: Hashable) -> bool:
        """Whether a step that was not captured may be by now: what its first run has set up has settled."""
        previous, self._last_values = self._last_values, values
        return values == previous and values != self._refused[outline]

    def _warn_of_many_captures(self) -> None:
        if self._captures < _MANY_CAPTURES or self._has_told_of_captures:
            return
        self._has_told_of_captures = True
        warnings.warn(
            f"the step has been captured {self._captures} times: shapes, modes or plain Python values that "
            "the model or the loss reads keep changing, and each change is captured and planned anew",
            OdtWarning,
            stacklevel=5,
        )

    def _forget_oldest(self) -> None:
        """Plans of batches that do not come any more must not pile up."""
        while len(self._prepared) >= _MOST_PREPARED:
            _, oldest = self._prepared.popitem(last=False)
            self._request.unload(oldest.tables)
        while len(self._traces) > _MOST_PREPARED:
            del self._traces[next(iter(self._traces))]

    def _differentiate(
        self, prepared: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, Any]:
        """Forward and backward; gradients are in `.grad` afterwards, hooks called."""
        parameters = named_parameters(self.model, self.loss_fn)
        share = self._enter_group(parameters, prepared.samples)
        earlier = self._set_aside_gradients(parameters)
        exist = any(p.grad is not None for p in parameters.values())
        buffers = named_buffers(self.model, self.loss_fn)
        loss, results = prepared.run(args, kwargs, parameters, buffers, gradients_exist=exist, gradient_scale=share)
        if prepared.plan.captured:
            run_gradient_hooks(parameters)
        self._request.report_misses(prepared.plan)
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return loss, results

    def _enter_group(self, parameters: dict[str, nn.Parameter], samples: int) -> float:
        """Make `.grad` the mean over all samples of the accumulation so far; returns the share of the new ones."""
        before, self._samples_in_group = self._samples_in_group, self._samples_in_group + samples
        if before:
            for parameter in self._group:
                if parameter.grad is not None:
                    parameter.grad.mul_(before / self._samples_in_group)
        else:
            # What the optimizer does not reset has gradients of its own, which are no part of this mean.
            self._group = {p for p in parameters.values() if p.grad is None}
        return samples / self._samples_in_group if samples else 1.0

    def _set_aside_gradients(self, parameters: dict[str, nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Hooks see the gradient of one backward pass, not the sum of several."""
        if not any(has_gradient_hooks(p) for p in parameters.values()):
            return {}
        found = {p: p.grad for p in parameters.values() if p.grad is not None}
        for parameter in found:
            parameter.grad = None
        return found

    def _update(self) -> None:
        if self.clip_grad_norm is not None:
            trained = dict.fromkeys(named_parameters(self.model, self.loss_fn).values())
            nn.utils.clip_grad_norm_([p for p in trained if p.grad is not None], self.clip_grad_norm)
        with self._request.scratch(), memory.category("optimizer"):
            self.optimizer.step()
        self._request.check_scratch()
        self._calls_in_group = self._samples_in_group = 0

    def _tell_of_fallback(self, plan: Plan) -> None:
        """Once, and not before a step has worked: what is wrong with a batch is no reason to speak of graphs."""
        if not plan.captured and not self._has_told:
            self._has_told = True
            warnings.warn(
                f"{plan.notes[0]}. The step runs as plain PyTorch, with submodules checkpointed where the budget asks "
                "for it",
                OdtWarning,
                stacklevel=4,
            )

    def _check_finite(self, loss: torch.Tensor) -> None:
        if self._nonfinite == "ignore" or bool(torch.isfinite(loss)):
            return
        text = f"the loss is {loss.item()}; a lower learning rate or clip_grad_norm may help"
        if self._nonfinite == "raise":
            raise FloatingPointError(text)
        warnings.warn(text, NonFiniteLossWarning, stacklevel=4)


def check_trainable(model: nn.Module) -> None:
    """Raises ValueError when there is nothing to train, or not on the CPU; TypeError when torch.compile was here."""
    refuse_compiled(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("the model has no trainable parameter: set requires_grad on those that are to learn")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name} is on {tensor.device}; torch_odt trains on the CPU in this version: use model.cpu()"
            )


def _check_roles(model: nn.Module, loss_fn: Any, optimizer: Any) -> None:
    """Raises TypeError or ValueError when the parts of a step are mixed up, or do not belong together."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"the optimizer is a {type(optimizer).__name__}; TrainStep takes model, loss_fn, optimizer")
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, torch.optim.Optimizer)):
        raise TypeError(f"the loss_fn is a {type(loss_fn).__name__}; TrainStep takes model, loss_fn, optimizer")
    own = set(named_parameters(model, loss_fn).values())
    if not any(parameter in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "the optimizer holds no parameter of this model: make it from model.parameters() as they are now"
        )


def _check_batch(model: nn.Module, loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises TypeError when a batch is not laid out as a step takes it."""
    if not args and not kwargs:
        raise TypeError("a step takes a batch: step(x, y), or step(**batch) for batches by keyword")
    if kwargs or loss_fn is None or len(args) > 1:
        return
    if isinstance(args[0], dict):
        raise TypeError("a batch in a dict is handed over by keyword: step(**batch)")
    if isinstance(args[0], (tuple, list)):
        raise TypeError("inputs and target are handed over one by one: step(*batch)")
    required = [p for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty]
    if any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in required):
        raise TypeError("there is no target: a step takes the model's inputs and then the target, step(x, y)")


def named_parameters(model: nn.Module, loss_fn: Any) -> dict[str, nn.Parameter]:
    """All parameters under the names that the graph uses, tied ones under each of theirs."""
    return _named(nn.Module.named_parameters, model, loss_fn)


def named_buffers(model: nn.Module, loss_fn: Any) -> dict[str, torch.Tensor]:
    """All buffers under the names that the graph uses."""
    return _named(nn.Module.named_buffers, model, loss_fn)


def _named(tensors_of: Callable[..., Iterable[tuple[str, T]]], model: nn.Module, loss_fn: Any) -> dict[str, T]:
    found = dict(tensors_of(model, remove_duplicate=False))
    own = loss_module(model, loss_fn)
    if own is not None:
        found |= {f"loss_fn:{name}": tensor for name, tensor in tensors_of(own, remove_duplicate=False)}
    return found


def _warn_if_scarce(plan: Plan) -> None:
    """A budget says what a step may take, not that it is there."""
    assert plan.budget is not None
    missing_bytes = plan.budget.level_bytes + plan.peak_bytes - memory.process_bytes()
    available_bytes = memory.available()
    if missing_bytes > available_bytes:
        warnings.warn(
            f"the step takes {format_bytes(missing_bytes)} more, and {format_bytes(available_bytes)} are available: "
            'the system may end the process. The budget "auto" takes what is available',
            OdtWarning,
            stacklevel=5,
        )
