"""Where the seconds of a step go, operator by operator."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from torch_odt.execute.profiler_marks import BACKWARD
from torch_odt.measure.record import Direction, OperatorTime

OUTSIDE = "outside operators"
_STEP = "torch_odt measured step"
_OPTIMIZER, _ENGINE = "Optimizer.step", "autograd::engine"
# What one thing is called from where it is called.
_SAME = {
    "conv1d": "convolution", "conv2d": "convolution", "conv3d": "convolution", "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm", "_native_batch_norm_legit_functional": "batch_norm",
}  # fmt: skip


@dataclass(frozen=True)
class StepOperators:
    """Where the seconds of a step go.

    Attributes:
        rows: those that take most first.
        profiled_seconds: of a step while operators were counted: the rows' sum.
        unprofiled_seconds: of a step at the same time without that; the difference is what counting costs.
    """

    rows: Sequence[OperatorTime]
    profiled_seconds: float
    unprofiled_seconds: float


def operator_times(step: Callable[[], Any], *, steps: int = 3) -> StepOperators:
    """Profiles some steps, and shares their time out among the operators that they call.

    An operator's time is its own and that of what it calls itself. What is left of a step (Python, autograd's
    bookkeeping) is a row "outside operators", so that the rows' sum is the profiled step. How fast a machine is
    changes: before and after each profiled step one is timed that is not.

    Args:
        step: makes one step; it has been made before.
        steps: to take the mean of.

    Example:
        >>> import torch
        >>> found = operator_times(lambda: torch.ones(100, 100).mm(torch.ones(100, 100)))
        >>> abs(sum(row.seconds for row in found.rows) - found.profiled_seconds) < 1e-6
        True
    """
    totals: dict[tuple[str, Direction], list[float]] = defaultdict(lambda: [0.0, 0.0])
    whole, unprofiled = 0.0, []
    for _ in range(steps):
        unprofiled.append(_timed(step))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            # The first one makes room for what is recorded.
            step()
            with record_function(_STEP):
                step()
        unprofiled.append(_timed(step))
        for event in profiler.events() or ():
            if event.name == _STEP:
                whole += event.cpu_time_total
                _share_out(event, "forward", totals)
    named = sum(microseconds for microseconds, _ in totals.values())
    totals[OUTSIDE, "outside"] = [whole - named, steps]
    rows = [
        OperatorTime(op=op, direction=direction, seconds=microseconds / 1e6 / steps, calls=calls / steps)
        for (op, direction), (microseconds, calls) in totals.items()
    ]
    return StepOperators(sorted(rows, key=lambda row: -row.seconds), whole / 1e6 / steps, mean(unprofiled))


def _timed(step: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _share_out(event: Any, direction: Direction, totals: dict[tuple[str, Direction], list[float]]) -> None:
    """Adds the operators that an event calls directly, and goes on in those that are none themselves."""
    for child in event.cpu_children:
        if "::" in child.name and not child.name.startswith((_ENGINE, "torch::autograd")):
            op = child.name.removeprefix("aten::")
            total = totals[_SAME.get(op, op), direction]
            total[0] += child.cpu_time_total
            total[1] += 1
        elif child.name.startswith(_OPTIMIZER):
            _share_out(child, "optimizer", totals)
        elif child.name.startswith((_ENGINE, BACKWARD)):
            _share_out(child, "backward", totals)
        else:
            _share_out(child, direction, totals)
