"""`TrainStep`: one object that takes a batch and trains on it inside a number of bytes."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from torch_odt import memory
from torch_odt.cache import Cache, CacheOption
from torch_odt.capture.update_in_backward import update_in_backward
from torch_odt.errors import NonFiniteLossWarning, OdtWarning
from torch_odt.execute.accounting import held_by_process, make_room
from torch_odt.execute.gradients import has_gradient_hooks, run_gradient_hooks
from torch_odt.execute.loss import make_compute
from torch_odt.execute.named_tensors import named_buffers, named_parameters
from torch_odt.execute.optimizer_cost import optimizer_cost
from torch_odt.execute.optimizer_updates import OptimizerUpdates
from torch_odt.execute.page_file import PageFile, open_page_file
from torch_odt.execute.planned import GivenPlan
from torch_odt.execute.prepared import Prepared
from torch_odt.execute.request import StepRequest
from torch_odt.execute.step_checks import (
    check_batch,
    check_roles,
    check_trainable,
    require_accumulation_steps,
    require_planning_seconds,
)
from torch_odt.planning.plan import Plan
from torch_odt.runtime.budget import Budget, format_bytes

if TYPE_CHECKING:
    from torch_odt.capture.trace import TracedStep

# Batches of so many kinds keep their plans.
_MOST_PREPARED = 8
_MANY_CAPTURES = 16

NonFinite = Literal["warn", "raise", "ignore"]


class TrainStep:
    """Forward, loss, backward and optimizer step of a model, inside a budget.

    Choose it when the loop is yours to change by one line: it sees the loss and the optimizer, so it can plan the whole
    step and cut the batch where that is exact. Where the loop must stay as it is, use `wrap`.

    The step is captured and planned at the first call, and again whenever the batch's shape, the model's mode, its
    trainable parameters or plain Python values that its code reads change. Every number it computes is plain PyTorch's
    but for rounding; what is planned is when each tensor exists. With `planner="keep-all"`, or with the
    rewrites that round differently switched off, what is not cut into micro-batches has plain PyTorch's very bits.

    `torch.optim`'s SGD, Adam and AdamW update each parameter in the backward pass, as soon as its gradient is complete,
    with the bits of their own step; the gradient is gone then, and `.grad` is None after a call. What needs all
    gradients (`clip_grad_norm`, accumulation, micro-batches, hooks, other optimizers) makes the optimizer wait, and the
    plan says so; `disable_rewrites=["update_in_backward"]` does, too. An exception that ends a backward pass (an
    interrupt) leaves some parameters updated and others not.

    Args:
        model: any `nn.Module` on the CPU. It stays as it is: same parameters, same `state_dict()`.
        loss_fn: `loss_fn(model(*inputs), target)` for positional batches; `loss_fn(outputs, batch)` for keyword
            batches, or None to take the outputs' own `loss`.
        optimizer: any `torch.optim.Optimizer` whose `step()` takes no closure.
        budget: bytes, as `Budget` takes them ("512MiB", "80%", "auto", an int, or a `Budget`). It must be given, but
            that with `plan` the plan's budget is the default.
        plan: a plan that was made before, or the path of its file (see `Plan.save`); nothing is measured or planned
            then: `planner`, `disable_rewrites` and `micro_batch` are the plan's, and `planning_seconds` must be 0. A
            plan that carries its graph is the program: neither the model's code nor `loss_fn` is run or compared, and
            nothing is traced. The model's parameters, buffers and modes and every batch must be as those that the plan
            was made for.
        planner: "auto", or the name of one planner.
        disable_rewrites: names of rewrites that are not to be made ("fuse_batch_norm"); the plan names those that are.
        page_to: a folder on a disk, or a `PageFile`, to which tensors may be moved while the step does not need them;
            None never pages. Where a plan pages, the optimizer makes its step after the backward pass: a transfer that
            fails must not leave some parameters updated. A given `plan` that pages needs it.
        micro_batch: samples to a micro-batch; None lets the planner choose. A step whose samples influence each other
            (BatchNorm in training mode) is never cut.
        planning_seconds: how long the first call may look for a faster plan than the one that it finds at once; more
            never gives a slower one. What is found is remembered in `cache`, also for later starts that look less.
        accumulation_steps: optimizer steps are taken every so many calls, over the mean of all their samples.
        clip_grad_norm: clip the gradients' global norm to this before each optimizer step.
        cache: folder for plans and measurements, None for the default one, False for none.
        nonfinite: what to do when a loss is NaN or infinite: "warn" and go on as plain PyTorch does, "raise"
            `FloatingPointError` before the optimizer steps, or "ignore".

    Raises:
        InfeasibleBudget: at the first call, when no plan fits, or the given one does not; it names the smallest budget
            that does.
        PlanError: `plan` is no plan or cannot be executed; at a call, when it is for another step, and what differs. Or
            there is no planner of that name.
        OSError: the file of `plan` cannot be read.
        CaptureError: at the first call, when `micro_batch` is given and micro-batches would not add up to the step.
        ValueError: the model has nothing to train, or lies on another device, or the optimizer needs a closure, or
            there is no rewrite of that name, or an option is given that `plan` decides.
        TypeError: the model has been compiled by torch.compile, or an argument is none of what it should be.
        PagingError: at a call, when a transfer failed; parameters, buffers and the optimizer are as before it, and an
            accumulation begins anew.

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
        budget: int | str | Budget | None = None,
        plan: str | Path | Plan | None = None,
        planner: str = "auto",
        disable_rewrites: Iterable[str] = (),
        page_to: str | Path | PageFile | None = None,
        micro_batch: int | None = None,
        planning_seconds: float = 0.0,
        accumulation_steps: int = 1,
        clip_grad_norm: float | None = None,
        cache: CacheOption = None,
        nonfinite: NonFinite = "warn",
    ) -> None:
        check_trainable(model)
        check_roles(model, loss_fn, optimizer)
        require_accumulation_steps(accumulation_steps)
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch must be at least 1, not {micro_batch}")
        require_planning_seconds(planning_seconds)
        if nonfinite not in ("warn", "raise", "ignore"):
            raise ValueError(f'nonfinite is "warn", "raise" or "ignore", not {nonfinite!r}')
        if plan is None:
            disabled_rewrites = _disabled_rewrites(planner, disable_rewrites)
        elif planner != "auto" or micro_batch is not None or tuple(disable_rewrites) or planning_seconds:
            raise ValueError(
                "with plan= the planner, the micro-batch and the rewrites are those of the plan, and nothing is "
                "planned: leave out planner=, micro_batch=, disable_rewrites= and planning_seconds="
            )
        page_file = PageFile.of_value(page_to)
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.clip_grad_norm = clip_grad_norm
        self.accumulation_steps = accumulation_steps
        self._nonfinite = nonfinite
        memory.install()
        for parameter in model.parameters():
            memory.tag(parameter, "parameter")
        # To look for garbage takes longer than all else that a start from a plan does.
        level_bytes = held_by_process() if plan is None else memory.process_bytes()
        self._given = None if plan is None else GivenPlan.of_value(plan)
        if self._given is not None:
            disabled_rewrites = self._given.program.disabled
        if budget is None:
            if self._given is None:
                raise TypeError("a step takes a budget=, or a plan= that was made for one")
            budget = self._given.plan.given_budget
        self._request = StepRequest(
            model=model,
            loss_fn=loss_fn,
            compute=make_compute(loss_fn),
            budget=Budget.of_value(budget),
            level_bytes=level_bytes,
            optimizer_cost=optimizer_cost(optimizer),
            planner=planner,
            disabled_rewrites=disabled_rewrites,
            micro_batch=micro_batch,
            accumulates=accumulation_steps > 1,
            cache=Cache.of_value(cache),
            planning_seconds=planning_seconds,
            page_file=None if page_file is None else open_page_file(page_file),
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

    def release(self) -> None:
        """Give memory back until the next call, as while training waits; the plans stay."""
        if self._request.arena is not None:
            self._request.arena.release()

    def close(self) -> None:
        """Return the memory that the plans hold. The next call plans anew."""
        self._prepared.clear()
        self._traces.clear()
        self._current = None
        self._request.release()

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, want_results: bool) -> tuple[torch.Tensor, Any]:
        check_batch(self.model, self.loss_fn, args, kwargs)
        if self._calls_in_group == 0:
            self.optimizer.zero_grad(set_to_none=True)
        prepared = self._prepare(args, kwargs, want_results)
        if prepared.plan.budget is not None:
            make_room(self._request.arena, prepared.plan.budget.total_bytes, prepared.steps)
        prepared.steps += 1
        try:
            with self._undone_on_failure(prepared):
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

    def _prepare_given(
        self, given: GivenPlan, args: tuple[Any, ...], kwargs: dict[str, Any], want_results: bool
    ) -> Prepared:
        """As the given plan says: whatever it is not for is refused."""
        given.require(self.model, self.loss_fn, args, kwargs)
        updates = self._updates() if given.program.makes_updates else None
        key: Hashable = (want_results, None if updates is None else updates.signature)
        if key not in self._prepared:
            self._forget_oldest()
            self._request.renew(optimizer_cost(self.optimizer), updates)
            self._prepared[key] = given.prepare(self._request, args, kwargs, want_results=want_results)
            _warn_if_scarce(self._prepared[key].plan)
        self._current = self._prepared[key]
        return self._current

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], want_results: bool) -> Prepared:
        """What runs for a batch like this one, made when the first of its kind comes."""
        if self._given is not None:
            return self._prepare_given(self._given, args, kwargs, want_results)
        # What traces, measures and plans; a start from a plan does without.
        from torch_odt.execute.prepare import prepare
        from torch_odt.execute.signature import step_outline, step_values

        updates = self._updates()
        signature = None if updates is None else updates.signature
        outline = (want_results, signature, step_outline(self.model, self.loss_fn, args, kwargs))
        values = step_values(self.model, self.loss_fn)
        key: Hashable = (outline, values)
        if key not in self._prepared and outline in self._prepared and not self._is_worth_a_try(outline, values):
            key = outline
        prepared = self._prepared.get(key)
        if prepared is None:
            self._forget_oldest()
            self._request.renew(optimizer_cost(self.optimizer), updates)
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

    def _updates(self) -> OptimizerUpdates | None:
        """What the optimizer can do before all gradients exist; None if it is not to."""
        needs_all = why_all_gradients(self.accumulation_steps, self.clip_grad_norm)
        disabled = self._request.disabled_rewrites
        return updates_of(self.optimizer, self.model, self.loss_fn, disabled, needs_all)

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

    def _undone_on_failure(self, prepared: Prepared) -> contextlib.AbstractContextManager[None]:
        """A step that pages may fail at any time, and is to be called again then."""
        if not prepared.pages or prepared.program is None:
            return contextlib.nullcontext()
        # A start from a plan that does not page does without what undoes steps.
        from torch_odt.execute.fallback import buffers_undone_on_failure

        graph = prepared.program.parts[prepared.program.sizes[0]].graph
        changed = {str(output.target) for output in graph.outputs_of("mutation")}
        buffers = named_buffers(self.model, self.loss_fn)
        return buffers_undone_on_failure(self.model, [tensor for name, tensor in buffers.items() if name in changed])

    def _differentiate(
        self, prepared: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, Any]:
        """Forward and backward; gradients are in `.grad` afterwards, hooks called."""
        parameters = named_parameters(self.model, self.loss_fn)
        share = self._enter_group(parameters, prepared.samples)
        earlier = self._set_aside_gradients(parameters)
        exist = any(p.grad is not None for p in parameters.values())
        buffers = named_buffers(self.model, self.loss_fn)
        try:
            loss, results = prepared.run(
                args,
                kwargs,
                parameters,
                buffers,
                gradients_exist=exist,
                gradient_scale=share,
                check_loss=self._refuse_nonfinite if self._nonfinite == "raise" else None,
            )
            if prepared.plan.captured:
                run_gradient_hooks(parameters)
        finally:
            for parameter, gradient in earlier.items():
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._request.report_misses(prepared.plan)
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
        if any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"]):
            with self._request.scratch(), memory.category("optimizer"):
                self.optimizer.step()
            self._request.check_scratch()
        else:
            # Everything has been updated in the backward pass; schedulers look whether the optimizer was called.
            self.optimizer.step()
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
        if self._nonfinite == "raise":
            self._refuse_nonfinite(loss)
        elif self._nonfinite == "warn" and not bool(torch.isfinite(loss)):
            warnings.warn(_nonfinite_text(loss), NonFiniteLossWarning, stacklevel=4)

    def _refuse_nonfinite(self, loss: torch.Tensor) -> None:
        if not bool(torch.isfinite(loss)):
            raise FloatingPointError(_nonfinite_text(loss))


def _disabled_rewrites(planner: str, names: Iterable[str]) -> frozenset[str]:
    """What a plan is to be made without; raises where there is no such planner or rewrite."""
    from torch_odt.capture.rewrite import switched_off
    from torch_odt.planning.registry import get_planner

    get_planner(planner)
    return switched_off(names, planner)


def _nonfinite_text(loss: torch.Tensor) -> str:
    return f"the loss is {loss.item()}; a lower learning rate or clip_grad_norm may help"


def why_all_gradients(accumulation_steps: int, clip_grad_norm: float | None) -> str:
    """Why the optimizer has to wait for all gradients; empty if it need not."""
    if accumulation_steps > 1:
        return f"gradients of {accumulation_steps} calls are accumulated"
    return "" if clip_grad_norm is None else "clipping needs the norm of all gradients"


def updates_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, loss_fn: Any, disabled: Container[str], needs_all: str = ""
) -> OptimizerUpdates | None:
    """What an optimizer can do in the backward pass; None where that is switched off.

    Args:
        disabled: names of rewrites that are not to be made.
        needs_all: why all gradients have to exist before it makes its step; empty if they need not.
    """
    if update_in_backward.__name__ in disabled:
        return None
    parameters, buffers = named_parameters(model, loss_fn), named_buffers(model, loss_fn)
    return OptimizerUpdates(optimizer, parameters, buffers.values(), needs_all)


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
