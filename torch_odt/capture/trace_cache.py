"""Traces that are remembered from one process to the next.

A stale graph would train another model without a word, so an entry is found by a description of everything in the step
that is data (settings, modules and their attributes, shapes, the loss), and is taken only while all code that ran when
it was traced, and everything that this code reads besides, is still the same. Whatever cannot be described like that is
traced anew in every process: `describe.py` and `describe_code.py` say what.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from torch_odt.cache import Cache
from torch_odt.capture.child import ChildFailed, run_in_child
from torch_odt.capture.describe import Describer
from torch_odt.capture.describe_code import describe_executed
from torch_odt.capture.describe_step import describe_step, step_modules
from torch_odt.capture.recorder import run_recorded
from torch_odt.capture.step_data import step_from_text, step_to_text
from torch_odt.capture.trace import Batch, Compute, TracedStep, trace_step
from torch_odt.errors import OdtWarning

T = TypeVar("T")


def remembered_trace(cache: Cache, model: nn.Module, loss_fn: Any, compute: Compute, batch: Batch) -> TracedStep:
    """The step's trace from an earlier process, or else a new one, made in a child process where that is possible.

    Args:
        cache: where to look, and where to keep a new trace.
        model, loss_fn, compute, batch: as for `trace_step`.

    Raises:
        CaptureError: the step has no graph.
    """
    description = describe(model, loss_fn, batch) if cache.enabled else None
    if description is None:
        return _trace_apart(lambda: trace_step(model, loss_fn, compute, batch))
    key = description.data.hexdigest()
    found = restore(cache.load_trace(key), description)
    if found is not None:
        return found
    process = os.getpid()
    recorded = _trace_apart(lambda: _packed(trace_recorded(model, loss_fn, compute, batch), process))
    # What runs in this process may leave its marks on what has to be described as it was before.
    is_untouched = recorded.process != process
    entry = make_entry(recorded, describe(model, loss_fn, batch)) if is_untouched else None
    if entry is not None:
        cache.save_trace(key, entry)
    try:
        return recorded.step if isinstance(recorded.step, TracedStep) else step_from_text(recorded.step)
    except NotImplementedError:
        # The trace has imported the module that registers the outputs' class, in the child.
        return _trace_apart(lambda: trace_step(model, loss_fn, compute, batch))


def _trace_apart(trace: Callable[[], T]) -> T:
    try:
        return run_in_child(trace)
    except ChildFailed:
        return trace()


@dataclass
class RecordedTrace:
    """A new trace.

    Attributes:
        step: the trace; or its data as a text, where it comes from another process and is to be kept. A text is freed
            as a whole once it is written, while a trace's thousands of objects would lie among those that writing takes
            for a moment, so that the process kept the memory of both.
        executed: the user's code that has run for it (see `code_name`); None when it must not be remembered.
        process: where it was made.
    """

    step: TracedStep | str
    executed: frozenset[str] | None
    process: int


def trace_recorded(model: nn.Module, loss_fn: Any, compute: Compute, batch: Batch) -> RecordedTrace:
    """Trace a step and note whose code runs."""
    step, executed = run_recorded(lambda: trace_step(model, loss_fn, compute, batch))
    state = [t for module in step_modules(model, loss_fn) for t in (*module.parameters(), *module.buffers())]
    if _shares_storage(step.graph.constants.values(), state):
        executed = None
    return RecordedTrace(step, executed, os.getpid())


def _packed(recorded: RecordedTrace, receiver: int) -> RecordedTrace:
    """As a text where it goes to another process and is to be kept there."""
    if recorded.executed is None or isinstance(recorded.step, str) or recorded.process == receiver:
        return recorded
    try:
        return replace(recorded, step=step_to_text(recorded.step))
    except (TypeError, NotImplementedError):
        # It has no such form, and is not kept.
        return replace(recorded, executed=None)


def _shares_storage(constants: Iterable[torch.Tensor], state: Iterable[torch.Tensor]) -> bool:
    """Whether numbers that training changes have become constants of the graph."""
    storages = {tensor.untyped_storage()._cdata for tensor in state}
    return any(constant.untyped_storage()._cdata in storages for constant in constants)


def describe(model: nn.Module, loss_fn: Any, batch: Batch) -> Describer | None:
    """The step as it is in this process; None when that cannot be told."""
    try:
        return describe_step(model, loss_fn, batch)
    except Exception:
        # Mostly `Undescribable`; but objects can be stranger than we think, and then nothing is lost but time.
        return None


def make_entry(recorded: RecordedTrace, description: Describer | None) -> dict[str, Any] | None:
    """What to keep of a new trace; None when it must not be kept.

    Args:
        description: the step as it was before the trace, from `describe`.
    """
    if description is None or recorded.executed is None:
        return None
    try:
        digest = describe_executed(description, recorded.executed)
        text = recorded.step if isinstance(recorded.step, str) else step_to_text(recorded.step)
        return {"executed": sorted(recorded.executed), "digest": digest, "step": text}
    except Exception:
        # As in `describe`.
        return None


def restore(entry: Any, description: Describer) -> TracedStep | None:
    """The trace of an entry, if it is what tracing the described step would give."""
    if entry is None:
        return None
    try:
        executed, digest = frozenset(map(str, entry["executed"])), str(entry["digest"])
        return step_from_text(str(entry["step"])) if _is_unchanged(description, executed, digest) else None
    except NotImplementedError:
        # The outputs' class is registered by a module that this process has not imported yet.
        return None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        text = f"a trace in the cache is damaged ({error}); it is ignored and will be overwritten"
        warnings.warn(text, OdtWarning, stacklevel=3)
        return None


def _is_unchanged(description: Describer, executed: frozenset[str], digest: str) -> bool:
    try:
        return describe_executed(description, executed) == digest
    except Exception:
        # As in `describe`.
        return False
