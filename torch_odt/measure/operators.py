"""Where the seconds of a step go, operator by operator."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, TypeVar

from torch.profiler import ProfilerActivity, profile, record_function

from torch_odt.execute.profiler_marks import BACKWARD
from torch_odt.measure.record import Direction, OperatorTime

_T = TypeVar("_T")
_Row = tuple[str, Direction]

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
        profiled_seconds: of the same steps by the clock: the rows' sum, unless operators together took longer than it.
        unprofiled_seconds: of steps between them whose operators were not counted: the difference is what that costs.
    """

    rows: Sequence[OperatorTime]
    profiled_seconds: float
    unprofiled_seconds: float


def operator_times(step: Callable[[], Any], *, steps: int = 3) -> StepOperators:
    """Profiles some steps, and shares their time out among the operators that they call.

    An operator's time is its own and that of what it calls itself. What is left of a step by the clock (Python,
    autograd's bookkeeping) is a row "outside operators". How fast a machine is changes: before and after each profiled
    step one is timed that is not, and of both kinds the faster half counts, for what other programs take from a machine
    meanwhile is not the step's.

    Args:
        step: makes one step; it has been made before.
        steps: to be profiled.

    Example:
        >>> import torch
        >>> found = operator_times(lambda: torch.ones(100, 100).mm(torch.ones(100, 100)))
        >>> abs(sum(row.seconds for row in found.rows) / found.profiled_seconds - 1) < 0.05
        True
    """
    profiled, unprofiled = [], []
    for _ in range(steps):
        unprofiled.append(_timed(step))
        profiled.append(_profiled(step))
        unprofiled.append(_timed(step))
    counted = _faster_half(profiled, lambda each: each[0])
    totals: dict[_Row, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for _, shares in counted:
        for row, (microseconds, calls) in shares.items():
            totals[row][0] += microseconds
            totals[row][1] += calls
    rows = [
        OperatorTime(op=op, direction=direction, seconds=each[0] / 1e6 / len(counted), calls=each[1] / len(counted))
        for (op, direction), each in totals.items()
    ]
    return StepOperators(
        sorted(rows, key=lambda row: -row.seconds),
        mean(seconds for seconds, _ in counted),
        mean(_faster_half(unprofiled, lambda seconds: seconds)),
    )


def _profiled(step: Callable[[], Any]) -> tuple[float, dict[_Row, list[float]]]:
    """Seconds of a step by the clock, and microseconds and calls of its operators."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        # The first one makes room for what is recorded.
        step()
        with record_function(_STEP):
            seconds = _timed(step)
    totals: dict[_Row, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiler.events() or ():
        if event.name == _STEP:
            _share_out(event, "forward", totals)
            named = sum(microseconds for microseconds, _ in totals.values())
            # Never below 0: operators that were counted twice are to be seen in the sum.
            totals[OUTSIDE, "outside"] = [max(0.0, 1e6 * seconds - named), 1]
    return seconds, totals


def _timed(step: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _faster_half(timed: Sequence[_T], seconds: Callable[[_T], float]) -> Sequence[_T]:
    return sorted(timed, key=seconds)[: (len(timed) + 1) // 2]


def _share_out(event: Any, direction: Direction, totals: dict[_Row, list[float]]) -> None:
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
