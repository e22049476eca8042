"""`TrainStep`: one object that takes a batch and trains on it inside a number of bytes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_odt import memory
from torch_odt.cache import Cache, CacheOption
from torch_odt.capture.loss_modules import all_modules
from torch_odt.errors import OdtWarning
from torch_odt.execute.accounting import held_by_process, make_room
from torch_odt.execute.accumulation import Accumulation, Shares
from torch_odt.execute.allotted import PLAN_FOR_ONE_BUDGET, controller_of, first_budget, heed, prepare_now
from torch_odt.execute.beside import Beside
from torch_odt.execute.gradients import require_gradients_stay, run_gradient_hooks, set_aside_hooked
from torch_odt.execute.loss import make_compute
from torch_odt.execute.named_tensors import StepTensors, named_buffers, named_parameters
from torch_odt.execute.optimizer_cost import optimizer_cost
from torch_odt.execute.optimizer_updates import why_all_gradients
from torch_odt.execute.page_file import PageFile, open_page_file
from torch_odt.execute.planned import GivenPlan
from torch_odt.execute.prepared import Prepared
from torch_odt.execute.prepared_steps import PreparedSteps
from torch_odt.execute.request import StepRequest
from torch_odt.execute.step_checks import (
    NonFinite,
    check_batch,
    check_choices,
    check_finite,
    check_roles,
    check_trainable,
    disabled_rewrites_of,
    refuse_nonfinite,
)
from torch_odt.planning.plan import Plan
from torch_odt.runtime.budget import Allotment, Budget

if TYPE_CHECKING:
    from torch_odt.execute.retries import Lowered, Retries, Retry
    from torch_odt.execute.transaction import Transaction
    from torch_odt.runtime.background import Background, BackgroundRun
    from torch_odt.runtime.controller import BudgetValue, Controller


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
    plan says so; `disable_rewrites=["update_in_backward"]` does, too. An exception in a backward pass (an interrupt, an
    int8 update that is not finite) leaves some parameters updated and others not, unless the step is `transactional`.

    Args:
        model: any `nn.Module` on the CPU. It stays as it is: same parameters, same `state_dict()`.
        loss_fn: `loss_fn(model(*inputs), target)` for positional batches; `loss_fn(outputs, batch)` for keyword
            batches, or None to take the outputs' own `loss`.
        optimizer: any `torch.optim.Optimizer` whose `step()` takes no closure.
        budget: bytes, as `Budget` takes them ("512MiB", "80%", "auto", an int, or a `Budget`). It must be given, but
            that with `plan` the plan's budget is the default. Or what changes while training runs: a policy of
            `torch_odt.runtime`, a function from a `Reading` to bytes, or a `Controller`; plans are switched between
            calls then, calls evict what they may no longer hold, and less than the smallest plan is only a warning.
        plan: a plan that was made before, or the path of its file (see `Plan.save`); nothing is measured or planned
            then: `planner`, `disable_rewrites` and `micro_batch` are the plan's, and `planning_seconds` must be 0. A
            plan that carries its graph is the program: no code of the model or `loss_fn` is run, compared or traced.
            Parameters, buffers, modes and settings (a dropout's rate) and every batch must be as the plan's.
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
        background: True, or a `torch_odt.runtime.Background`: from the first call to `close()`, this process gives way
            to others. The number of threads may change, and with it the last bits, unless `Background` fixes it.
        transactional: a call that fails, for want of memory, by an interrupt or by whatever raises, leaves parameters,
            gradients, the optimizer, buffers, plain attributes of modules and random generators bit for bit as they
            were before it, and an accumulation goes on as if there had been no such call. For want of memory, or when a
            transfer fails, it is tried again first: after giving back what can be given back, by smaller plans, without
            paging; see `last_retries`. The optimizer waits for the backward pass, and `.grad` is None after its step.
            What it costs is a part of the plan: copies of changed buffers and, during the optimizer's step, of
            parameters and optimizer state, in the idle arena as far as they fit; while accumulating, gradients twice.

    Attributes:
        last_retries: what was tried in the last call of a transactional step before it succeeded or failed, a `Retry`
            for each time; empty where its first attempt succeeded. The next call begins with the ordinary budget.

    Raises:
        InfeasibleBudget: at the first call, when no plan fits, or the given one does not; it names the smallest budget
            that does.
        PlanError: `plan` is no plan or cannot be executed; at a call, when it is for another step, and what differs. Or
            there is no planner of that name.
        OSError: the file of `plan` cannot be read.
        CaptureError: at the first call, when `micro_batch` is given and micro-batches would not add up to the step.
        ValueError: the model has nothing to train, or lies on another device, or the optimizer needs a closure, or
            there is no rewrite of that name, or an option is given that `plan` decides, or `transactional` with a
            plan that updates parameters in the backward pass.
        TypeError: the model has been compiled by torch.compile, or an argument is none of what it should be.
        PagingError: at a call, when a transfer failed; parameters, buffers and the optimizer are as before it, and an
            accumulation begins anew unless the step is `transactional`.

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
        budget: BudgetValue | None = None,
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
        background: bool | Background = False,
        transactional: bool = False,
    ) -> None:
        check_trainable(model)
        check_roles(model, loss_fn, optimizer)
        check_choices(accumulation_steps, micro_batch, planning_seconds, nonfinite, clip_grad_norm)
        if plan is None:
            disabled_rewrites = disabled_rewrites_of(planner, disable_rewrites)
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
        self.transactional = transactional
        self.last_retries: tuple[Retry, ...] = ()
        self._nonfinite = nonfinite
        self._background = Beside.of_value(background, self)
        memory.install()
        for parameter in model.parameters():
            memory.tag(parameter, "parameter")
        # To look for garbage takes longer than all else that a start from a plan does.
        level_bytes = held_by_process() if plan is None else memory.process_bytes()
        self._controller = controller_of(budget)
        if self._controller is not None and plan is not None:
            raise ValueError(PLAN_FOR_ONE_BUDGET)
        self._given = None if plan is None else GivenPlan.of_value(plan)
        if self._given is not None and transactional and self._given.program.makes_updates:
            raise ValueError(
                "the plan updates parameters in the backward pass, which cannot be undone: make it with "
                'disable_rewrites=["update_in_backward"], or leave out transactional=True'
            )
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
            budget=first_budget(budget, self._controller, level_bytes),
            level_bytes=level_bytes,
            optimizer_cost=optimizer_cost(optimizer),
            planner=planner,
            disabled_rewrites=disabled_rewrites,
            micro_batch=micro_batch,
            accumulates=accumulation_steps > 1,
            cache=Cache.of_value(cache),
            transactional=transactional,
            planning_seconds=planning_seconds,
            page_file=None if page_file is None else open_page_file(page_file),
        )
        self._prepared = PreparedSteps(self._request, self._given)
        self._has_told = self._has_told_of_retries = False
        self._current: Prepared | None = None
        self._tensors: StepTensors | None = None
        self._group = Accumulation()

    @property
    def budget(self) -> Budget | Allotment:
        """The budget, or what a controller has decided last; setting another one, or a policy, makes the next call plan
        anew, from what has been captured before.
        """
        return self._request.budget

    @budget.setter
    def budget(self, budget: BudgetValue) -> None:
        self._controller = controller_of(budget)
        self._request.budget = first_budget(budget, self._controller, self._request.level_bytes)
        self._forget_plans()
        self._request.release()

    @property
    def controller(self) -> Controller | None:
        """What decides while training runs; None where the budget is fixed."""
        return self._controller

    @property
    def background(self) -> BackgroundRun | None:
        """What is done to give way to others; None in the foreground and before the first call."""
        return None if self._background is None else self._background.run

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
        with self._beside():
            return self._step(args, kwargs, want_results=False)[0]

    def with_outputs(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Train on a batch as a plain call does; returns the loss and the model's outputs, detached."""
        with self._beside():
            return self._step(args, kwargs, want_results=True)

    def flush(self) -> None:
        """Take the optimizer step of an accumulation that the end of an epoch has left incomplete."""
        if not self._group.calls:
            return
        if not self.transactional:
            self._update()
            return
        # What does not act in transactions starts without what does.
        from torch_odt.execute.retries import Retries, made_in_attempts

        retries = Retries(can_plan=False)
        try:
            made_in_attempts(retries, self._request, self._flush_or_nothing, self._tell_of_retry)
        finally:
            self.last_retries = retries.close()

    def _flush_or_nothing(self) -> None:
        from torch_odt.runtime.signals import SignalGate

        transaction = self._transaction()
        with SignalGate(), transaction, transaction:
            transaction.set_gradients_aside()
            transaction.add_gradients((), Shares())
            self._commit(transaction)
            transaction.complete()

    def release(self) -> None:
        """Give memory back until the next call, as while training waits; the plans stay."""
        if self._request.arena is not None:
            self._request.arena.release()

    def close(self) -> None:
        """Return the memory that the plans hold, and from the background. The next call plans anew."""
        if self._background is not None:
            self._background.close()
        self._prepared.clear()
        self._current = None
        self._request.release()

    def _beside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._background is None else self._background.one_step()

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, want_results: bool) -> tuple[torch.Tensor, Any]:
        check_batch(self.model, self.loss_fn, args, kwargs)
        if self.transactional:
            return self._step_or_nothing(args, kwargs, want_results)
        looked = self._look()
        if self._group.calls == 0:
            self.optimizer.zero_grad(set_to_none=True)
        prepared, tensors = self._prepare(args, kwargs, want_results, *looked)
        self._make_room(prepared, prepared.steps)
        prepared.steps += 1
        try:
            with self._undone_on_failure(prepared):
                shares = self._group.enter(prepared.samples, tensors.parameters.values())
                self._group.scale_earlier(shares)
                loss, results = self._differentiate(prepared, args, kwargs, shares.new, tensors)
            self._tell_of_fallback(prepared.plan)
            check_finite(loss, self._nonfinite)
        except BaseException:
            # The gradients are no longer the mean over the group: the next call begins another one.
            self._group = Accumulation()
            raise
        self._group.calls += 1
        if self._group.calls == self.accumulation_steps:
            self._update()
        # What libraries have freed is kept by malloc: it is not to stand above the budget until the next step.
        self._make_room(prepared)
        return loss, results

    def _step_or_nothing(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], want_results: bool
    ) -> tuple[torch.Tensor, Any]:
        """A step that is undone when it fails, and tried again where that may help."""
        from torch_odt.execute.retries import Retries, made_in_attempts

        retries = Retries(can_plan=self._given is None)
        attempt = partial(self._transact, args, kwargs, want_results, retries)
        try:
            return made_in_attempts(retries, self._request, attempt, self._tell_of_retry)
        finally:
            self.last_retries = retries.close()
            if self._controller is not None:
                heed(retries.lowered, self._controller, self._request)

    def _transact(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], want_results: bool, retries: Retries
    ) -> tuple[torch.Tensor, Any]:
        """One attempt of a step, as a whole or not at all."""
        from torch_odt.runtime.signals import SignalGate

        gate, transaction = SignalGate(), self._transaction()
        with gate, transaction, transaction:
            gate.open()
            looked = self._look()
            if self._group.calls == 0:
                self.optimizer.zero_grad(set_to_none=True)
            prepared, tensors = self._prepare(args, kwargs, want_results, *looked, retries.lowered)
            retries.describe_in(prepared.plan)
            self._make_room(prepared, prepared.steps)
            prepared.steps += 1
            transaction.save_modules(all_modules(self.model, self.loss_fn), self._changed_buffers(prepared))
            shares = self._group.enter(prepared.samples, tensors.parameters.values())
            transaction.set_gradients_aside()
            loss, results = self._differentiate(prepared, args, kwargs, shares.new, tensors)
            self._tell_of_fallback(prepared.plan)
            check_finite(loss, self._nonfinite)
            gate.close()
            transaction.add_gradients(self._group.members, shares)
            self._group.calls += 1
            if self._group.calls == self.accumulation_steps:
                self._commit(transaction)
            self._make_room(prepared)
            transaction.complete()
        return loss, results

    def _transaction(self) -> Transaction:
        from torch_odt.execute.transaction import Transaction

        parameters = named_parameters(self.model, self.loss_fn).values()
        undo = partial(setattr, self, "_group", replace(self._group))
        return Transaction(parameters, self.optimizer, self._request, undo)

    def _commit(self, transaction: Transaction) -> None:
        """The optimizer's step; there are no gradients afterwards, which the next call would have to keep."""
        transaction.save_update()
        self._update()
        self.optimizer.zero_grad(set_to_none=True)

    def _make_room(self, prepared: Prepared, step: int | None = None) -> None:
        if (plan := prepared.plan).budget is not None:
            make_room(self._request.arena, plan.arena_bytes, plan.budget.total_bytes, step)

    def _look(self) -> tuple[StepTensors, str]:
        """The step's tensors as they are now, and why all gradients must be there behind the backward pass, if so."""
        self._tensors = tensors = StepTensors.current(self.model, self.loss_fn, self._tensors)
        why = why_all_gradients(self.accumulation_steps, self.clip_grad_norm, transactional=self.transactional)
        if why:
            adds = self.accumulation_steps > 1 or self.clip_grad_norm is not None
            require_gradients_stay(tensors.parameters, why, adds=adds)
        return tensors, why

    def _prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        want_results: bool,
        tensors: StepTensors,
        needs_all: str,
        lowered: Lowered | None = None,
    ) -> tuple[Prepared, StepTensors]:
        """What runs for a batch like this one, in as many bytes as there are now; and the tensors by then."""
        before = self._current
        find = partial(
            self._prepared.find, args, kwargs, self.optimizer, tensors, want_results=want_results, needs_all=needs_all
        )
        self._current = prepare_now(self._controller, self._request, before, find, self._forget_plans, lowered=lowered)
        current = tensors if self._current is before else StepTensors.current(self.model, self.loss_fn, tensors)
        return self._current, current

    def _forget_plans(self) -> None:
        """Give back what plans take beside the arena, but not what has been captured for them."""
        self._prepared.forget_plans()
        self._current = None

    def _undone_on_failure(self, prepared: Prepared) -> contextlib.AbstractContextManager[None]:
        """A step that pages may fail at any time, and is to be called again then."""
        if not prepared.pages or prepared.program is None:
            return contextlib.nullcontext()
        # A start from a plan that does not page does without what undoes steps.
        from torch_odt.execute.fallback import buffers_undone_on_failure

        return buffers_undone_on_failure(self.model, self._changed_buffers(prepared) or [])

    def _changed_buffers(self, prepared: Prepared) -> list[torch.Tensor] | None:
        """The buffers that a step changes; None where that is not known."""
        if prepared.program is None:
            return None
        changed = prepared.program.changed_buffers
        return [tensor for name, tensor in named_buffers(self.model, self.loss_fn).items() if name in changed]

    def _differentiate(
        self, prepared: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any], share: float, tensors: StepTensors
    ) -> tuple[torch.Tensor, Any]:
        """Forward and backward; gradients are in `.grad` afterwards, scaled by their share, hooks called."""
        parameters, buffers = tensors.parameters, tensors.buffers
        earlier = set_aside_hooked(parameters.values())
        exist = any(p.grad is not None for p in parameters.values())
        try:
            loss, results = prepared.run(
                args,
                kwargs,
                parameters,
                buffers,
                gradients_exist=exist,
                gradient_scale=share,
                check_loss=refuse_nonfinite if self._nonfinite == "raise" else None,
            )
            if prepared.plan.captured:
                run_gradient_hooks(parameters)
        finally:
            for parameter, gradient in earlier.items():
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._request.report_misses(prepared.plan)
        return loss, results

    def _update(self) -> None:
        self._group = Accumulation()
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

    def _tell_of_retry(self, retry: Retry) -> None:
        if not self._has_told_of_retries:
            self._has_told_of_retries = True
            warnings.warn(f"{retry}: {retry.error}", OdtWarning, stacklevel=6)
