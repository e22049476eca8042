"""What checkpointing a submodule saves and costs, measured, and the choice of submodules that fits a number of bytes.

Measuring runs forward without keeping anything for the backward pass, so that it needs no more memory than inference.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torch_odt.execute.checkpointing import overridden_forward, rehearsal

# So many limits on the size of a checkpointed submodule are tried between the smallest and the largest submodule.
_LIMITS_TRIED = 16


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """The cost of one submodule in one step.

    Attributes:
        name: its qualified name.
        saved_bytes: what its forward keeps for the backward pass, by storage, parameters and buffers excluded.
        input_bytes: what a checkpoint keeps instead.
        forward_seconds: what a checkpoint costs.
        calls: how often the step calls it; bytes and seconds are the sum over the calls.
    """

    name: str
    saved_bytes: int
    input_bytes: int
    forward_seconds: float
    calls: int


@dataclass
class Call:
    """One call of a submodule. Storages are numbered; `saved` are those that it packed itself, not in a submodule."""

    name: str
    inputs: frozenset[int] = frozenset()
    saved: set[int] = field(default_factory=set)
    children: list[Call] = field(default_factory=list)
    seconds: float = 0.0
    writes_before: int = 0

    def walk(self) -> Iterator[Call]:
        yield self
        for child in self.children:
            yield from child.walk()

    @functools.cached_property
    def all_saved(self) -> frozenset[int]:
        return frozenset(self.saved).union(*(child.all_saved for child in self.children))


@dataclass
class ModuleCosts:
    """The calls of one step as a tree below the whole step, the bytes of every storage, and what was found unfit.

    Attributes:
        root: the whole step.
        storage_bytes: bytes by storage number.
        unfit: submodules that must not be checkpointed, with the reason.
    """

    root: Call
    storage_bytes: list[int]
    unfit: dict[str, str]

    @functools.cached_property
    def modules(self) -> dict[str, ModuleCost]:
        calls: dict[str, list[Call]] = {}
        for call in self.root.walk():
            calls.setdefault(call.name, []).append(call)
        return {
            name: ModuleCost(
                name=name,
                saved_bytes=sum(self.nbytes(call.all_saved) for call in its),
                input_bytes=sum(self.nbytes(call.inputs) for call in its),
                forward_seconds=sum(call.seconds for call in its),
                calls=len(its),
            )
            for name, its in calls.items()
            if its[0] is not self.root
        }

    def nbytes(self, storages: frozenset[int] | set[int]) -> int:
        return sum(self.storage_bytes[s] for s in storages)

    def estimate(self, chosen: Sequence[str]) -> int:
        """Bytes that a step keeps at its worst moment when these submodules are checkpointed.

        What is kept from forward to backward, plus what the largest recomputed call keeps while it is differentiated.
        """
        names = frozenset(chosen)
        kept: set[int] = set()
        recomputed: list[Call] = []

        def visit(call: Call) -> None:
            if call.name in names:
                kept.update(call.inputs)
                recomputed.append(call)
                return
            kept.update(call.saved)
            for child in call.children:
                visit(child)

        visit(self.root)
        working = max((self.nbytes(call.all_saved - kept) for call in recomputed), default=0)
        return self.nbytes(kept) + working

    def candidates(self, limit_bytes: int) -> list[str]:
        """The outermost submodules that keep at most `limit_bytes` in a call and gain from a checkpoint."""
        found: dict[str, None] = {}

        def visit(call: Call) -> None:
            saved, inputs = self.nbytes(call.all_saved), self.nbytes(call.inputs)
            if call is not self.root and call.name not in self.unfit and inputs < saved <= limit_bytes:
                found[call.name] = None
                return
            for child in call.children:
                visit(child)

        visit(self.root)
        return list(found)

    @functools.cached_property
    def limits(self) -> list[int]:
        sizes = sorted({self.nbytes(call.all_saved) for call in self.root.walk()})
        if len(sizes) <= _LIMITS_TRIED:
            return sizes
        return sorted({sizes[round(i * (len(sizes) - 1) / (_LIMITS_TRIED - 1))] for i in range(_LIMITS_TRIED)})


def choose(costs: ModuleCosts, budget_bytes: int) -> list[str]:
    """The submodules to checkpoint: the least recomputation whose estimate fits the budget.

    For each of several limits on the size of a submodule, the submodules below it are taken by bytes saved per second
    of recomputation until the estimate fits. When nothing fits, the choice with the smallest estimate is returned.
    """
    if costs.estimate([]) <= budget_bytes:
        return []
    best: tuple[float, list[str]] | None = None
    for limit in costs.limits:
        ranked = sorted(costs.candidates(limit), key=lambda name: -_bytes_per_second(costs.modules[name]))
        count = _fewest_that_fit(costs, ranked, budget_bytes)
        if count is None:
            continue
        chosen = ranked[:count]
        seconds = sum(costs.modules[name].forward_seconds for name in chosen)
        if best is None or seconds < best[0]:
            best = (seconds, chosen)
    return best[1] if best is not None else smallest(costs)


def smallest(costs: ModuleCosts) -> list[str]:
    """The choice with the smallest estimate."""
    return min((costs.candidates(limit) for limit in costs.limits), key=costs.estimate, default=[])


def _bytes_per_second(cost: ModuleCost) -> float:
    return (cost.saved_bytes - cost.input_bytes) / max(cost.forward_seconds, 1e-9)


def _fewest_that_fit(costs: ModuleCosts, ranked: list[str], budget_bytes: int) -> int | None:
    if costs.estimate(ranked) > budget_bytes:
        return None
    low, high = 0, len(ranked)
    while low < high:
        middle = (low + high) // 2
        if costs.estimate(ranked[:middle]) <= budget_bytes:
            high = middle
        else:
            low = middle + 1
    return low


def measure(model: nn.Module, run_forward: Callable[[], Any]) -> ModuleCosts:
    """Measure every submodule that `run_forward` calls.

    Forward runs twice: once to see what each submodule keeps and what is changed in place, once for the time. The
    model's buffers, its plain attributes and the random number generators are afterwards as before.

    Args:
        model: the model whose submodules are measured.
        run_forward: runs forward and loss of a step; what it returns is dropped.

    Raises:
        RuntimeError: the step computes gradients inside its forward pass.
    """
    recorder = _Recorder(model)
    with rehearsal(model), recorder.recording(), _WriteRecorder(recorder):
        run_forward()
    timer = _Recorder(model)
    with rehearsal(model), timer.recording():
        run_forward()
    for call, timed in zip(recorder.root.walk(), timer.root.walk(), strict=False):
        call.seconds = timed.seconds
    return ModuleCosts(recorder.root, recorder.storage_bytes, recorder.unfit())


class _Recorder:
    """Follows the calls of a step and what is packed for the backward pass in each of them."""

    def __init__(self, model: nn.Module) -> None:
        self.root = Call("the whole step")
        self.storage_bytes: list[int] = []
        self._model = model
        self._stack = [self.root]
        self._numbers: dict[StorageWeakRef, int] = {}
        self._writes: dict[int, int] = {}
        self._write_count = 0
        self._own: set[StorageWeakRef] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        tensors = (*self._model.parameters(), *self._model.buffers())
        self._own = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}
        started = time.perf_counter()
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    stack.enter_context(overridden_forward(module, functools.partial(self._followed, name)))
            stack.enter_context(saved_tensors_hooks(self._pack, _unpack))
            stack.enter_context(torch.enable_grad())
            yield
        self.root.seconds = time.perf_counter() - started

    def note_write(self, tensor: torch.Tensor) -> None:
        self._write_count += 1
        for number in self._number(tensor):
            self._writes[number] = self._write_count

    def unfit(self) -> dict[str, str]:
        return {
            call.name: "one of its inputs is changed in place by it or after it"
            for call in self.root.walk()
            if any(self._writes.get(number, -1) > call.writes_before for number in call.inputs)
        }

    def _followed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            inputs = frozenset(number for tensor in tensors for number in self._number(tensor))
            call = Call(name, inputs, writes_before=self._write_count)
            self._stack[-1].children.append(call)
            self._stack.append(call)
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                call.seconds = time.perf_counter() - started
                self._stack.pop()

        return forward

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
        self._stack[-1].saved.update(self._number(tensor))
        return tensor.shape, tensor.dtype

    def _number(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The number of the tensor's storage; nothing for the model's own and for tensors that have none."""
        if tensor.layout != torch.strided:
            return ()
        storage = tensor.untyped_storage()
        # A weak reference keeps the identity from being given to another storage, not the memory.
        reference = StorageWeakRef(storage)
        if reference in self._own:
            return ()
        if reference not in self._numbers:
            self._numbers[reference] = len(self.storage_bytes)
            self.storage_bytes.append(storage.nbytes())
        return (self._numbers[reference],)


def _unpack(_: Any) -> torch.Tensor:
    raise RuntimeError("the step computes gradients inside its forward pass; its submodules cannot be measured")


class _WriteRecorder(TorchDispatchMode):
    """Reports every tensor that an operator changes in place."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._note(value)
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
                    self._note(kwargs[argument.name])
        return func(*args, **kwargs)

    def _note(self, value: Any) -> None:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                self._recorder.note_write(leaf)
