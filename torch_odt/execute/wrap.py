"""`wrap`: the door for loops that stay as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx, nn

from torch_odt.cache import Cache, CacheOption
from torch_odt.capture.partition import GraphPiece, inference_piece, partition
from torch_odt.capture.rewrite import switched_off
from torch_odt.capture.trace import eager_operators
from torch_odt.errors import CaptureError, InfeasibleBudget, OdtWarning, first_line
from torch_odt.execute.accounting import make_room
from torch_odt.execute.allotted import PLAN_FOR_ONE_BUDGET, controller_of
from torch_odt.execute.checkpointing import checkpointed
from torch_odt.execute.compiled import refuse_compiled
from torch_odt.execute.fallback import (
    NEXT_ESTIMATE,
    batch_signature,
    capped,
    forward_bytes_beyond,
    measured_inside,
    step_line,
    undone_on_failure,
    with_temporaries,
    without_temporaries,
)
from torch_odt.execute.graph_calls import GraphRunner, boxed
from torch_odt.execute.module_costs import ModuleCosts, choose
from torch_odt.execute.optimizer_updates import require_own_parameters
from torch_odt.execute.page_file import PageFile, open_page_file
from torch_odt.execute.step_checks import left_out, require_planning_seconds
from torch_odt.execute.wrap_given import GivenSchedule
from torch_odt.execute.wrap_session import WrapSession
from torch_odt.planning.plan import Plan
from torch_odt.planning.registry import get_planner
from torch_odt.runtime.budget import ResolvedBudget

if TYPE_CHECKING:
    from torch_odt.runtime.controller import BudgetValue

Model = TypeVar("Model", bound=nn.Module)

# Every batch shape and every mode of the model is compiled once; beyond so many the shapes are not really fixed.
_RECOMPILE_LIMIT = 64


def wrap(
    model: Model,
    *,
    budget: BudgetValue | None = None,
    plan: str | Path | Plan | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    planner: str = "auto",
    disable_rewrites: Iterable[str] = (),
    page_to: str | Path | PageFile | None = None,
    planning_seconds: float = 0.0,
    cache: CacheOption = None,
) -> Model:
    """Keep a model's training inside a budget while the loop stays as it is.

    Choose it when forward, loss, `backward()` and optimizer are called by code that should not change. Where the loop
    is yours, `TrainStep` needs less memory: it sees the loss and the optimizer.

    The model is changed in place and returned: it remains the same object of the same class with the same
    `state_dict()`, and copies of it are plain models. Every number it computes is plain PyTorch's but for rounding
    (not even that under `planner="keep-all"`). The first step runs with the fewest bytes; then the whole step
    is planned. `plan_of(model)` tells the plan, `unwrap(model)` undoes it.

    Args:
        model: any `nn.Module` on the CPU.
        budget: bytes, as `Budget` takes them ("512MiB", "80%", "auto", an int, or a `Budget`); or what changes while
            training runs: a policy, a function of a `Reading`, or a `Controller`, asked before each step. It must be
            given, but that with `plan` the plan's budget is the default.
        plan: what `plan_of` told of a model wrapped like this one after its second step, or the path of its file (see
            `Plan.save`): nothing is measured or planned then. The loop is captured as ever, must give the same graphs,
            and follows the plan in every training step; `planner` and `disable_rewrites` are the plan's. `TrainStep`
            need not capture.
        optimizer: the one whose `step()` the loop calls after each `backward()`. `backward()` then updates parameters
            itself, each as soon as its gradient is complete, with the hyperparameters of that moment: their `.grad`
            stays None, and `step()` finds nothing left to do for them. Choose it for less memory where nothing looks at
            gradients or changes them: they cannot be clipped, accumulated, or scaled by a `GradScaler`, and every
            backward pass through the model trains it, whatever it was made for. Gradients are delivered as ever where
            the optimizer is not SGD, Adam or AdamW of `torch.optim`, where it or a parameter has hooks, and where more
            than one graph of the model adds to a gradient, or may; the plan says why.
        planner: "auto", or the name of one planner.
        disable_rewrites: names of rewrites that are not to be made ("fuse_batch_norm"); the plan names those that are.
        page_to: a folder on a disk, or a `PageFile`, to which tensors may be moved while the step does not need them;
            None never pages. Parameters are not updated in the backward pass then: a transfer that fails must not leave
            some of them updated. A given `plan` that pages needs it.
        planning_seconds: how long to look for a faster plan than the one that is found at once, whenever the step is
            planned: before the second step, and again when much less or more room is left; more never gives a slower
            one. A named planner that stops when it is told to takes so long at most, instead of its own limit.
        cache: folder for measurements, None for the default one, False for none.

    Raises:
        PagingError: at a forward or backward pass, when a transfer failed; parameters, buffers and random generators
            are as before the forward pass.
        InfeasibleBudget: at a forward pass, before the first operator that cannot fit.
        RuntimeError: at a second backward pass before `optimizer.step()`, where `optimizer` was given.
        ValueError: a parameter is not on the CPU, or the optimizer holds none of the model's, or there is no rewrite
            of that name, or `planning_seconds` is no length of time, or an option is given that `plan` decides.
        PlanError: there is no planner of that name, or `plan` is none that can be followed; in a step, when it is for
            another graph, and what differs.
        OSError: the file of `plan` cannot be read.
        TypeError: `model` is no `nn.Module`, or has been compiled by torch.compile already; or the optimizer is
            none of torch's.

    Warns:
        OdtWarning: the model cannot be captured; checkpointed submodules take the place of planned graphs.

    Example:
        >>> import torch, torch_odt as odt
        >>> model = odt.wrap(torch.nn.Linear(4, 2), budget=odt.Budget("1GiB", of="training"), cache=False)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> model.weight.grad.shape
        torch.Size([2, 4])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"wrap takes an nn.Module, not a {type(model).__name__}")
    if not isinstance(model._compiled_call_impl, _WrappedCall):
        refuse_compiled(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name} is on {tensor.device}; torch_odt trains on the CPU in this version: use model.cpu()"
            )
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"the optimizer is a {type(optimizer).__name__}")
        require_own_parameters(optimizer, model.parameters())
        left_out(optimizer, dict(model.named_parameters()), stacklevel=3)
    get_planner(planner)
    require_planning_seconds(planning_seconds)
    disabled = switched_off(disable_rewrites, planner)
    if plan is not None and (planner != "auto" or tuple(disable_rewrites) or planning_seconds):
        raise ValueError(
            "with plan= the planner and the rewrites are those of the plan, and nothing is planned: leave out "
            "planner=, disable_rewrites= and planning_seconds="
        )
    page_file = PageFile.of_value(page_to)
    opened = None if page_file is None else open_page_file(page_file)
    given = None if plan is None else GivenSchedule.of_value(plan, opened)
    if given is not None:
        disabled = given.disabled
    if budget is None:
        if given is None:
            raise TypeError("wrap takes a budget=, or a plan= that was made for one")
        budget = given.plan.given_budget
    elif given is not None and controller_of(budget) is not None:
        raise ValueError(PLAN_FOR_ONE_BUDGET)
    unwrap(model)
    session = WrapSession(
        model,
        budget,
        planner,
        disabled,
        Cache.of_value(cache),
        optimizer,
        opened,
        given,
        planning_seconds,
    )
    model._compiled_call_impl = _WrappedCall(model, session)
    return model


def unwrap(model: Model) -> Model:
    """Make a wrapped model plain again; does nothing to a plain one."""
    if isinstance(model._compiled_call_impl, _WrappedCall):
        model._compiled_call_impl.session.close()
        model._compiled_call_impl = None
    return model


def plan_of(model: nn.Module) -> Plan:
    """The plan of a wrapped model as it stands.

    Raises:
        ValueError: the model is not wrapped.
    """
    return session_of(model).plan


def set_budget(model: nn.Module, budget: BudgetValue) -> None:
    """Give a wrapped model another budget, or a policy, from its next step on; nothing is compiled again.

    Raises:
        ValueError: the model is not wrapped.
    """
    session_of(model).set_budget(budget)


def session_of(model: nn.Module) -> WrapSession:
    """What keeps a wrapped model inside its budget.

    Raises:
        ValueError: the model is not wrapped.
    """
    call = model._compiled_call_impl
    if not isinstance(call, _WrappedCall):
        raise ValueError("the model is not wrapped (or is a copy of a wrapped one, which is plain): use torch_odt.wrap")
    return call.session


class _WrappedCall:
    """Takes the place of `nn.Module`'s call: compiles, counts, and steps in where nothing can be compiled."""

    def __init__(self, model: nn.Module, session: WrapSession) -> None:
        self.session = session
        self._model = model
        self._compiled = torch.compile(model._call_impl, backend=self._backend, dynamic=False)
        self._costs: dict[Any, ModuleCosts] = {}
        self._checkpoints: dict[Any, tuple[list[str], ResolvedBudget]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.session.ledger.fallback:
            return self._call_checkpointed(args, kwargs)
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        session = self.session
        ran = session.run_count
        try:
            with self._dynamo_settings:
                outputs = self._compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            if session.run_count > ran:
                # A graph has run: running everything again would update buffers and draw random numbers twice.
                raise
            reason = f"{type(error).__name__}: {first_line(error)}"
        except InfeasibleBudget as error:
            # How torch.compile has called the graph that was refused says nothing of the budget.
            raise error.with_traceback(None) from None
        else:
            if not session.runner_count and torch.is_grad_enabled():
                session.fall_back("torch.compile found no graph in it")
                self._warn_uncaptured()
            return outputs
        return self._call_uncaptured(reason, args, kwargs)

    @cached_property
    def _dynamo_settings(self) -> Any:
        import torch._dynamo

        # Made once: torch keeps something of each patch for as long as the thread lives.
        return torch._dynamo.config.patch(
            recompile_limit=_RECOMPILE_LIMIT,
            accumulated_recompile_limit=16 * _RECOMPILE_LIMIT,
            fail_on_recompile_limit_hit=True,
            allow_rnn=True,
        )

    def _backend(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _note_graph_break(self.session, module)
        return _Compilation(self.session)(module, inputs)

    def _call_uncaptured(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first call after a failed capture: an error of the model's own surfaces here as it is."""
        self.session.fall_back(reason)
        try:
            outputs = self._call_checkpointed(args, kwargs)
        except BaseException:
            self.session.resume()
            raise
        self._warn_uncaptured()
        return outputs

    def _warn_uncaptured(self) -> None:
        reason = self.session.ledger.fallback
        text = f"the model cannot be captured ({reason}); from now on submodules of it are checkpointed instead"
        warnings.warn(text, OdtWarning, stacklevel=5)

    def _call_checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._model._call_impl
        if not torch.is_grad_enabled():
            return self._call_inside(self.session.room_bytes(), args, kwargs)
        self.session.ask_controller()
        return self.session.in_the_fewest(partial(self._call_trained, call, args, kwargs))

    def _call_trained(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = (batch_signature(args, kwargs), tuple(module.training for module in self._model.modules()))
        room = self.session.room_bytes()
        gradients = sum(p.nbytes for p in self._model.parameters() if p.requires_grad)
        if key not in self._costs:
            self._costs[key] = self._measure_checkpoints(lambda: call(*args, **kwargs), room, gradients)
        costs = self._costs[key]
        names, budget = self._checkpoints.get(key, ([], None))
        if budget is not self.session.budget or with_temporaries(costs.estimate(names)) + gradients > room:
            names = choose(costs, without_temporaries(room - gradients))
        while True:
            self._checkpoints[key] = names, self.session.budget
            needed = with_temporaries(costs.estimate(names)) + gradients
            self.session.check(needed, room, "nothing more to checkpoint")
            self.session.ledger.fallback_line = step_line(names, needed, "estimated, new gradients included")
            make_room(None, needed, self.session.budget.total_bytes)
            try:
                with undone_on_failure(self._model), capped(room), checkpointed(self._model, names):
                    return call(*args, **kwargs)
            except (torch.OutOfMemoryError, MemoryError):
                estimate = costs.estimate(names)
            # Outside the handler: while it ran, the traceback held the activations of the failed attempt.
            frugal = choose(costs, int(estimate * NEXT_ESTIMATE))
            if costs.estimate(frugal) >= estimate:
                self.session.check(room + max(1, gradients), room, "nothing more to checkpoint")
            names = frugal

    def _call_inside(self, room: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call whose values nobody keeps."""
        try:
            with capped(room):
                return self._model._call_impl(*args, **kwargs)
        except (torch.OutOfMemoryError, MemoryError):
            pass
        needed = forward_bytes_beyond(self._model, lambda: self._model._call_impl(*args, **kwargs), max(1, room))
        self.session.check(needed, room, "a forward pass that keeps nothing does not fit")

    def _measure_checkpoints(self, run_forward: Callable[[], Any], room: int, gradients: int) -> ModuleCosts:
        costs = measured_inside(self._model, run_forward, max(1, room))
        if costs is None:
            needed = gradients + forward_bytes_beyond(self._model, run_forward, max(1, room))
            self.session.check(needed, room, "not even a forward pass that keeps nothing fits")
        assert costs is not None
        return costs


class _Compilation:
    """Compiles one graph that torch.compile found: the functions that AOTAutograd asks for, in the order it does."""

    def __init__(self, session: WrapSession) -> None:
        self._session = session
        self._runner: GraphRunner | None = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd

        compiler = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=self._backward,
            inference_compiler=self._inference,
            partition_fn=self._partition,
        )
        with eager_operators():
            return compiler(module, inputs)

    def _partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch.partitioners import default_partition

        try:
            with _real_tensors():
                piece, forward, backward = partition(joint, num_fwd_outputs, self._session.disabled_rewrites)
        except CaptureError as error:
            self._session.ledger.note(f"a graph runs without a plan: {error}")
            return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        self._runner = self._session.new_runner(piece)
        return forward, backward

    def _forward(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return _interpreted(module) if self._runner is None else boxed(self._runner.forward)

    def _backward(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return _interpreted(module) if self._runner is None else boxed(self._runner.backward)

    def _inference(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        try:
            with _real_tensors():
                piece: GraphPiece = inference_piece(module, self._session.disabled_rewrites)
        except CaptureError as error:
            self._session.ledger.note(f"a graph runs without a plan: {error}")
            return _interpreted(module)
        return boxed(self._session.new_inference_runner(piece).inference)


def _interpreted(module: fx.GraphModule) -> Callable[..., Any]:
    return boxed(lambda args: module(*args))


def _real_tensors() -> Any:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def _note_graph_break(session: WrapSession, module: fx.GraphModule) -> None:
    """Enters into the plan why torch.compile ended a graph before the model's end."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return
    text = next((line for line in str(reason.reason).splitlines() if line.strip()), "unknown")
    if reason.user_stack:
        frame = reason.user_stack[-1]
        text = f"{text.strip()} ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"
    if text not in session.ledger.graph_breaks:
        session.ledger.graph_breaks.append(text)
