"""One cell, measured in this process: open `measure_cell`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

import torch_odt as odt
from torch_odt import memory
from torch_odt.errors import InfeasibleBudget, OdtWarning
from torch_odt.measure.devices import synchronize
from torch_odt.measure.ending import is_out_of_memory
from torch_odt.measure.energy import StatedPower
from torch_odt.measure.executorch_step import ExecuTorchStep, NotTrainable
from torch_odt.measure.flops import count_flops
from torch_odt.measure.job import How, Job
from torch_odt.measure.largest_batch import largest_batch
from torch_odt.measure.layers import layer_memory
from torch_odt.measure.long_run import long_run
from torch_odt.measure.memory import levels, memory_window
from torch_odt.measure.meter import Meter
from torch_odt.measure.neighbour import beside_neighbour
from torch_odt.measure.operators import operator_times
from torch_odt.measure.record import Cell, Prediction
from torch_odt.measure.step_memory import StepMemory, follow_operators, sample
from torch_odt.measure.steps import Inference, PlainStep, Work
from torch_odt.measure.window import Window, find_meters
from torch_odt.memory._units import format_bytes

WorkOf = Callable[[int], Work]
"""Makes the work of a cell for a number of samples."""
Step = Callable[[], Any]
_NO_LAYERS = "memory by layer is plain PyTorch's: a plan keeps tensors of its own choice, which belong to no layer"
_LONG_STEP_SECONDS, _PROFILED_SECONDS, _PROFILED_STEPS = 1.0, 0.5, 10


class PlanAgain(Exception):
    """A budget was refused: what planning in vain leaves in this process is not to be measured.

    Attributes:
        job: what another process is to do.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(f"{job.cell.budget} was refused, and is to be planned again")
        self.job = job


def measure_cell(job: Job, work_of: WorkOf) -> Cell:
    """Measures a cell; what does not fit into memory is an outcome, other errors raise.

    The process should be a fresh one: the tracking allocator counts what is allocated after its installation, and
    a limit holds for the whole process.

    Raises:
        PlanAgain: another process is to go on.
    """
    memory.install()
    torch.set_num_threads(job.cell.threads)
    limit = job.how.limit_bytes
    cell = replace(job.cell, limit_bytes=limit or 0, notes=[*job.cell.notes, *_taken(job)])
    try:
        with _capped(limit):
            return _measure(job, cell, work_of)
    except NotTrainable as error:
        return replace(cell, outcome="skipped", reason=_first_line(error))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return replace(cell, outcome="out of memory", reason=_first_line(error))


def _measure(job: Job, cell: Cell, work_of: WorkOf) -> Cell:
    def made_step() -> Step:
        return _first_step(job, work_of(cell.batch_size))[0]

    match cell.experiment:
        case "step":
            return _measure_steps(job, cell, work_of(cell.batch_size))
        case "largest batch":
            return largest_batch(job, cell, work_of)
        case "long run":
            measured = long_run(job, replace(cell, notes=()), made_step())
        case "neighbour":
            measured = beside_neighbour(job, replace(cell, notes=()), made_step)
        case other:
            raise ValueError(f"there is no experiment {other!r}")
    return replace(measured, notes=[*cell.notes, *measured.notes])


def make_step(job: Job, work: Work) -> tuple[Step, odt.TrainStep | None]:
    """What makes one step of a cell and waits for its device, and the `TrainStep` in it, if there is one."""
    device = job.cell.device
    if job.cell.engine == "executorch":
        return ExecuTorchStep(work), None
    if job.cell.engine == "torch_odt":
        budget_bytes = job.how.smallest_bytes or job.how.budget_bytes
        if budget_bytes is None:
            raise ValueError("torch_odt needs a budget")
        step = odt.TrainStep(work.model, work.loss_fn, work.optimizer, budget=odt.Budget(budget_bytes, of="training"))
        return lambda: step(*work.batch), step
    plain: Step = Inference(work) if job.cell.mode == "inference" else PlainStep(work)

    def waited() -> Any:
        result = plain()
        synchronize(device)
        return result

    return (plain if device == "cpu" else waited), None


def _measure_steps(job: Job, cell: Cell, work: Work) -> Cell:
    how = job.how
    idle = _idle(job)
    notes: list[str] = []
    with memory_window() as before:
        step, planned, first_seconds = _first_step(job, work)
        for _ in range(how.warmup_steps - 1):
            step()
    seconds: list[float] = []
    with Window(_meters(job)) as window, memory_window() as during:
        began = now = time.perf_counter()
        while not seconds or (now - began < how.most_seconds and _is_worth_one_more(how, len(seconds), now - began)):
            step()
            seconds.append(time.perf_counter() - now)
            now = time.perf_counter()
    base_bytes, first_peak_bytes = levels(before)
    _, peak_bytes = levels(during)
    if isinstance(step, ExecuTorchStep):
        base_bytes = step.base_bytes
        notes.extend(step.notes)
    measured = replace(
        cell,
        step_seconds=seconds,
        first_seconds=first_seconds,
        window_steps=len(seconds),
        quantities=window.record(),
        idle=idle,
        base_bytes=base_bytes,
        peak_bytes=peak_bytes,
        whole_peak_bytes=max(first_peak_bytes, peak_bytes),
        parameters=sum(parameter.numel() for parameter in work.model.parameters()),
        prediction=None if planned is None else _prediction(planned),
    )
    measured = _looked_into(job, measured, work, step, planned)
    return replace(measured, notes=[*notes, *measured.notes])


def _is_worth_one_more(how: How, steps: int, passed_seconds: float) -> bool:
    """A handful of short steps may all lie in a moment in which the system had not yet spread the threads."""
    return steps < how.repetitions or passed_seconds < how.least_seconds


def _first_step(job: Job, work: Work) -> tuple[Step, odt.TrainStep | None, float]:
    """The step, made once.

    Raises:
        PlanAgain: the budget is refused, and what was learned of it is for another process.
    """
    begin = time.perf_counter()
    step, planned = make_step(job, work)
    try:
        step()
    except InfeasibleBudget as refusal:
        raise PlanAgain(_after(refusal, job, work)) from refusal
    return step, planned, time.perf_counter() - begin


def _after(refusal: InfeasibleBudget, job: Job, work: Work) -> Job:
    """What another process is to do when a budget was refused.

    A first plan rests on estimates of what is too large to measure in its budget, and may refuse one that suffices. So
    a step is made within the smallest that it names, in which that is measured, before the given one is tried again.

    Raises:
        InfeasibleBudget: it is refused for good.
    """
    cell, how, smallest_bytes = job.cell, job.how, refusal.smallest_feasible_bytes
    if not how.was_refused:
        step, _ = make_step(Job(cell, replace(how, smallest_bytes=smallest_bytes)), work)
        # What was measured before it was refused, too, counts from now on.
        with suppress(InfeasibleBudget):
            step()
        return Job(cell, replace(how, was_refused=True))
    if not how.smallest_tries:
        raise refusal
    return Job(cell, replace(how, smallest_bytes=smallest_bytes, smallest_tries=how.smallest_tries - 1))


def _taken(job: Job) -> list[str]:
    """A note of the budget that has taken the place of the given one."""
    how = job.how
    if how.smallest_bytes is None:
        return []
    given, smallest = format_bytes(how.budget_bytes or 0), format_bytes(how.smallest_bytes)
    return [f"{job.cell.budget} is {given}, which is too small: the smallest budget was taken, {smallest}"]


def _looked_into(job: Job, cell: Cell, work: Work, step: Step, planned: odt.TrainStep | None) -> Cell:
    """What takes steps of their own: operators, memory over a step, layers, floating-point operations."""
    how = job.how
    if cell.engine == "executorch":
        return replace(cell, notes=[*cell.notes, "operators, tensors and layers of ExecuTorch's are not looked into"])
    if cell.device != "cpu":
        cell = replace(cell, notes=[*cell.notes, "operators and tensors are looked into on the CPU alone"])
    # Before the profiler, which leaves the process larger.
    if how.follow and cell.device == "cpu":
        found: StepMemory | None = follow_operators(step) if planned is None else sample(step)
        if found is None:
            cell = replace(cell, notes=[*cell.notes, "memory by category is absent: nothing is tracked"])
        else:
            cell = replace(
                cell, categories=found.at_peak, traces=[*cell.traces, *found.traces(base_bytes=cell.base_bytes or 0)],
                notes=[*cell.notes, *found.notes],
            )  # fmt: skip
    if how.operators and cell.device == "cpu":
        profiled = operator_times(step, steps=_steps_to_profile(cell.median_seconds or 0.0))
        cell = replace(
            cell, operators=profiled.rows, profiled_seconds=profiled.profiled_seconds,
            unprofiled_seconds=profiled.unprofiled_seconds,
        )  # fmt: skip
    with warnings.catch_warnings():
        # Operators that are watched allocate otherwise than planned, of which a step warns; its memory was read before.
        warnings.simplefilter("ignore", OdtWarning)
        cell = replace(cell, flops=count_flops(step))
    if how.layers and planned is not None:
        cell = replace(cell, notes=[*cell.notes, _NO_LAYERS])
    elif how.layers and cell.mode == "training":
        cell = replace(cell, layers=layer_memory(work))
    return cell


def _steps_to_profile(step_seconds: float) -> int:
    """More of short ones, whose times differ most."""
    if step_seconds > _LONG_STEP_SECONDS:
        return 1
    return min(_PROFILED_STEPS, max(3, int(_PROFILED_SECONDS / max(step_seconds, 1e-6))))


def _idle(job: Job) -> Any:
    with Window(_meters(job)) as window:
        time.sleep(job.how.idle_seconds)
    return window.record()


def _meters(job: Job) -> list[Meter]:
    meters = find_meters(device=job.cell.device)
    return meters if job.how.watts is None else [*meters, StatedPower(*job.how.watts)]


def _capped(limit_bytes: int | None) -> AbstractContextManager[None]:
    """What the process holds already is no tensor's, and counts against the limit."""
    if limit_bytes is None or not memory.is_tracking():
        return nullcontext()
    left = limit_bytes - memory.process_bytes() + (memory.stats().allocated_bytes or 0)
    if left <= 0:
        raise torch.OutOfMemoryError(f"the process holds more than {format_bytes(limit_bytes)} before it begins")
    return memory.cap(left)


def _prediction(step: odt.TrainStep) -> Prediction:
    plan = step.plan
    timeline = plan.timeline
    arena = next((line.nbytes for line in plan.lines if line.label.startswith("activations")), 0)
    passes = -(-plan.batch // plan.micro_batch) if plan.batch and plan.micro_batch else 1
    found = Prediction(
        peak_bytes=plan.peak_bytes,
        step_seconds=plan.step_seconds,
        resident_bytes=plan.peak_bytes - arena,
        passes=passes,
        planner=plan.planner,
    )
    if timeline is None:
        return found
    kinds = ("kept", "recomputed", "returned", "moving", "workspace")
    return replace(
        found,
        at_seconds=[round(second, 6) for second in timeline.start_seconds],
        bytes={kind: getattr(timeline, f"{kind}_bytes") for kind in kinds},
        recomputed_seconds=timeline.recompute_seconds,
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
