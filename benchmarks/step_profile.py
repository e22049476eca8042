"""Where the seconds of a step go: torch's profiler and the system's own count, for plain PyTorch and torch_odt alike.

- **Operators** are the outermost calls that torch's profiler records: what an eager step calls, and what a planned one
  does. A planned step marks those calls that bring back what was dropped.
- **Page faults** are those of the calling thread in steps without profiler, times what one takes: `attribute` fills
  fresh pages, and pages that are there, with the same operator. The calling thread's are wall time. Those of all
  threads would count twice with two threads: of a parallel operator each touches its share of the pages at once, and
  the caller waits no longer than for its own. That the thread's system seconds are what the wall shows is checked by
  the same experiment, and a step's system seconds are reported beside the column, which is never more.
- **Python** is what lies between operators: the interpreter, autograd, what an executor or an optimizer does, and
  giving memory back to the system, where that is done. The profiler adds some microseconds to each call, most of them
  here; both walls are reported.
"""

from __future__ import annotations

import mmap
import re
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

OTHERS = "other operators"
OPTIMIZER = "optimizer"
RECOMPUTATION = "recomputation"

_MEMBERS = {
    "convolution, matmul": """conv2d convolution convolution_backward linear matmul mm addmm bmm
        scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward""",
    "normalisation, activation": """batch_norm native_batch_norm native_batch_norm_backward _native_batch_norm_legit
        _native_batch_norm_legit_functional batch_norm_act batch_norm_act_backward batch_norm_act_backward_
        batch_norm_add_act_backward batch_norm_add_act_backward_ batch_norm_act_normalize batch_norm_normalize
        layer_norm native_layer_norm native_layer_norm_backward relu relu_ threshold_backward hardtanh hardtanh_
        hardtanh_backward hardswish hardswish_ hardswish_backward silu silu_ silu_backward gelu gelu_backward tanh
        tanh_backward clamp_with_mask clamp_with_mask_backward""",
    "pooling": """max_pool2d max_pool2d_with_indices max_pool2d_with_indices_backward max_pool2d_with_offsets
        max_pool2d_with_offsets_backward avg_pool2d avg_pool2d_backward adaptive_avg_pool2d _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward mean""",
    "dropout": "dropout native_dropout native_dropout_backward draw_bits bernoulli_ scale_masked pack_bits unpack_bits",
    "copies, filling": """cat copy_ clone contiguous to _to_copy slice_backward narrow zeros zeros_like new_zeros zero_
        ones_like fill_ constant_pad_nd""",
}
GROUPS = (*_MEMBERS, OTHERS, OPTIMIZER)
_GROUP_OF = {name: group for group, names in _MEMBERS.items() for name in names.split()}
_OPERATOR = re.compile(r"\w+::(\w+)")

_ATTRIBUTION_BYTES = 256 << 20
_ATTRIBUTION_ROUNDS = 5
_MAP_POPULATE = 0x8000


@dataclass(frozen=True)
class Causes:
    """Seconds of a step by cause; the first four add up to `profiled_seconds`.

    Attributes:
        kernel_seconds: operators, the optimizer's among them, without page faults and without recomputation.
        fault_seconds: of the calling thread's page faults.
        python_seconds: between operators.
        recomputation_seconds: operators that bring back what was dropped.
        group_seconds: the operators of `kernel_seconds` by group, their page faults included.
        faults: pages that the calling thread was given.
        system_seconds: of the calling thread, inside the operating system for whatever reason.
        profiled_seconds: of the wall, with the profiler.
        seconds: of the wall, without it: the median.
    """

    kernel_seconds: float
    fault_seconds: float
    python_seconds: float
    recomputation_seconds: float
    group_seconds: dict[str, float]
    faults: float
    system_seconds: float
    profiled_seconds: float
    seconds: float


@dataclass(frozen=True)
class Attribution:
    """What fresh pages add to an operator, as the wall and as the calling thread's system seconds have it.

    Attributes:
        seconds, system_seconds: for all its pages.
        faults: of the calling thread.
    """

    seconds: float
    system_seconds: float
    faults: int


@dataclass(frozen=True)
class _Usage:
    seconds: float
    system_seconds: float
    faults: int


def observe(step: Callable[[Any], Any], batches: Sequence[Any], steps: int, attribution: Attribution) -> Causes:
    """Runs so many steps without the profiler and as many with it; means over them but for the median."""
    plain = [_usage_of(step, batches[index % len(batches)]) for index in range(steps)]
    with (
        _recomputation_marked(getattr(step, "train_step", None)),
        profile(activities=[ProfilerActivity.CPU]) as profiler,
    ):
        start = time.perf_counter()
        for index in range(steps):
            step(batches[index % len(batches)])
        profiled_seconds = (time.perf_counter() - start) / steps
    groups = {group: seconds / steps for group, seconds in _by_group(profiler.events()).items()}
    recomputation_seconds = groups.pop(RECOMPUTATION)
    faults = sum(usage.faults for usage in plain) / steps
    system_seconds = sum(usage.system_seconds for usage in plain) / steps
    fault_seconds = min(system_seconds, faults * attribution.system_seconds / attribution.faults)
    operator_seconds = sum(groups.values())
    return Causes(
        kernel_seconds=operator_seconds - fault_seconds,
        fault_seconds=fault_seconds,
        python_seconds=profiled_seconds - operator_seconds - recomputation_seconds,
        recomputation_seconds=recomputation_seconds,
        group_seconds=groups,
        faults=faults,
        system_seconds=system_seconds,
        profiled_seconds=profiled_seconds,
        seconds=statistics.median(usage.seconds for usage in plain),
    )


def attribute() -> Attribution:
    """Fills memory that is mapped but not there yet, and memory that is, in turn."""
    rounds = [(_fill(0), _fill(_MAP_POPULATE)) for _ in range(_ATTRIBUTION_ROUNDS)]
    return Attribution(
        seconds=statistics.median(fresh.seconds - present.seconds for fresh, present in rounds),
        system_seconds=statistics.median(fresh.system_seconds - present.system_seconds for fresh, present in rounds),
        faults=rounds[0][0].faults - rounds[0][1].faults,
    )


def _fill(flags: int) -> _Usage:
    pages = mmap.mmap(-1, _ATTRIBUTION_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    return _usage_of(torch.frombuffer(pages, dtype=torch.float32).fill_, 1.0)


def _usage_of(function: Callable[[Any], Any], argument: Any) -> _Usage:
    before, start = resource.getrusage(resource.RUSAGE_THREAD), time.perf_counter()
    function(argument)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_THREAD)
    return _Usage(seconds, after.ru_stime - before.ru_stime, after.ru_minflt - before.ru_minflt)


def _by_group(events: Any) -> dict[str, float]:
    """Seconds of the outermost operators."""
    seconds = dict.fromkeys((*GROUPS, RECOMPUTATION), 0.0)
    for event in events:
        operator = _OPERATOR.fullmatch(event.name)
        outer = _names_around(event)
        if operator is None or any(_OPERATOR.fullmatch(name) for name in outer):
            continue
        if RECOMPUTATION in outer:
            group = RECOMPUTATION
        elif any(name.startswith("Optimizer.step") for name in outer):
            group = OPTIMIZER
        else:
            group = _GROUP_OF.get(operator[1], OTHERS)
        seconds[group] += event.cpu_time_total / 1e6
    return seconds


def _names_around(event: Any) -> list[str]:
    names = []
    while (event := event.cpu_parent) is not None:
        names.append(event.name)
    return names


@contextmanager
def _recomputation_marked(train_step: Any) -> Iterator[None]:
    """Makes a `TrainStep` tell the profiler which calls bring back what was dropped, and which are the optimizer's.

    Nothing is done to other steps.
    """
    if train_step is None:
        yield
        return
    from torch_odt._extensions import memory_module
    from torch_odt.capture.update_in_backward import UPDATE
    from torch_odt.planning.schedule import Run
    from torch_odt.planning.timeline import recomputing_runs

    def marked(call: Callable[[Any], None], mark: str) -> Callable[[Any], None]:
        def run(table: Any) -> None:
            with record_function(mark):
                call(table)

        return run

    parts = train_step._current.program.parts.values()
    executors = list({id(executor): executor for part in parts for executor in (part.first, part.later)}.values())
    instructions = [executor._instructions for executor in executors]
    for executor in executors:
        marks = dict.fromkeys(recomputing_runs(executor.graph, executor.schedule), RECOMPUTATION)
        for position, instruction in enumerate(executor.schedule.instructions):
            if isinstance(instruction, Run) and executor.graph.ops[instruction.op].target == UPDATE:
                marks[position] = "Optimizer.step in the backward pass"
        executor._instructions = memory_module.Instructions(
            [
                (marked(call, marks[position]) if position in marks else call, value, output)
                for position, (call, value, output) in enumerate(executor._compile())
            ]
        )
    try:
        yield
    finally:
        for executor, own in zip(executors, instructions, strict=True):
            executor._instructions = own
