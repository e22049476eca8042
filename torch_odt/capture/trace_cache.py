"""Traces that are remembered from one process to the next.

A stale graph would train another model without a word, so an entry is found by a description of everything in the step
that is data (settings, modules and their attributes, shapes, the loss), and is taken only while all code that ran when
it was traced, and everything that this code reads besides, is still the same. Whatever cannot be described like that is
traced anew in every process: `describe.py` and `describe_code.py` say what.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_odt.cache import Cache
from torch_odt.capture.child import ChildFailed, run_in_child
from torch_odt.capture.describe import Describer, Undescribable
from torch_odt.capture.describe_code import describe_executed
from torch_odt.capture.describe_step import describe_step
from torch_odt.capture.graph_data import step_from_data, step_to_data
from torch_odt.capture.recorder import run_recorded
from torch_odt.capture.trace import Batch, Compute, TracedStep, trace_step
from torch_odt.errors import CaptureError, OdtWarning


def remembered_trace(cache: Cache, model: nn.Module, loss_fn: Any, compute: Compute, batch: Batch) -> TracedStep:
    """The step's trace from an earlier process, or else a new one, made in a child process where that is possible.

    Args:
        cache: where to look, and where to keep a new trace.
        model, loss_fn, compute, batch: as for `trace_step`.

    Raises:
        CaptureError: the step has no graph.
    """
    step = _Step(model, loss_fn, batch)
    key = step.key() if cache.enabled else None
    found = None if key is None else step.restore(cache.load_trace(key))
    if found is not None:
        return found
    try:
        recorded = run_in_child(lambda: _trace_recorded(model, loss_fn, compute, batch, key is not None))
    except ChildFailed:
        # What runs here may leave its marks on what would have to be described as it was before.
        return trace_step(model, loss_fn, compute, batch)
    entry = step.entry(recorded)
    if key is not None and entry is not None:
        cache.save_trace(key, entry)
    return recorded.step


@dataclass
class _Recorded:
    """A new trace, and the user's code that has run for it; None when it must not be remembered."""

    step: TracedStep
    executed: frozenset[str] | None


def _trace_recorded(model: nn.Module, loss_fn: Any, compute: Compute, batch: Batch, is_wanted: bool) -> _Recorded:
    if not is_wanted:
        return _Recorded(trace_step(model, loss_fn, compute, batch), None)
    step, executed = run_recorded(lambda: trace_step(model, loss_fn, compute, batch))
    roots = [root for root in (model, loss_fn) if isinstance(root, nn.Module)]
    state = [tensor for root in roots for tensor in (*root.parameters(), *root.buffers())]
    return _Recorded(step, None if _shares_storage(step.graph.constants.values(), state) else executed)


def _shares_storage(constants: Iterable[torch.Tensor], state: Iterable[torch.Tensor]) -> bool:
    """Whether numbers that training changes have become constants of the graph."""
    storages = {tensor.untyped_storage()._cdata for tensor in state}
    return any(constant.untyped_storage()._cdata in storages for constant in constants)


@dataclass(frozen=True)
class _Step:
    """A step as it is in this process, before it is traced."""

    model: nn.Module
    loss_fn: Any
    batch: Batch

    def key(self) -> str | None:
        """What an entry is found by; None for a step that must be traced in every process."""
        describer = self._describe()
        return None if describer is None else describer.data.hexdigest()

    def restore(self, entry: Any) -> TracedStep | None:
        """The trace of an entry, if it is what tracing would give."""
        if entry is None:
            return None
        try:
            executed, digest = frozenset(map(str, entry["executed"])), str(entry["digest"])
            return step_from_data(entry["step"]) if self._digest(executed) == digest else None
        except NotImplementedError:
            # The outputs' class is registered by a module that this process has not imported yet.
            return None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            text = f"a trace in the cache is damaged ({error}); it is ignored and will be overwritten"
            warnings.warn(text, OdtWarning, stacklevel=3)
            return None

    def entry(self, recorded: _Recorded) -> dict[str, Any] | None:
        """What to keep of a new trace; None when it must not be kept."""
        digest = None if recorded.executed is None else self._digest(recorded.executed)
        if recorded.executed is None or digest is None:
            return None
        try:
            data = step_to_data(recorded.step)
        except (TypeError, NotImplementedError):
            return None
        return {"executed": sorted(recorded.executed), "digest": digest, "step": data}

    def _digest(self, executed: frozenset[str]) -> str | None:
        """A digest of this code and of all that it reads besides the step; None when that cannot be told."""
        describer = self._describe()
        try:
            return None if describer is None else describe_executed(describer, executed)
        except (Undescribable, RecursionError):
            return None

    def _describe(self) -> Describer | None:
        try:
            return describe_step(self.model, self.loss_fn, self.batch)
        except (Undescribable, CaptureError, RecursionError):
            return None
