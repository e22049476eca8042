"""Runs cells, each in a process of its own, and adds each to a record as it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch_odt.measure.ending import Shortage, says_out_of_memory
from torch_odt.measure.governors import governor
from torch_odt.measure.job import GO_ON, Job
from torch_odt.measure.long_run import start_celsius
from torch_odt.measure.record import Cell, Machine, Record, append_line
from torch_odt.memory._units import parse_bytes

Measure = Callable[[Job], Cell]
# What planning adds to the time of a cell, about, for the guess of the time that is left.
_STEPS_WEIGHT, _PLANNED_WEIGHT = 6.0, 3.0
# How often a share that is too small is replaced by the smallest budget that a refusal names.
_SMALLEST_TRIES = 3
# What is available differs a little each time: so much more is another limit.
_HIGHER = 1.05


@dataclass
class Run:
    """Cells that are measured one after the other.

    Args:
        jobs: in order.
        machine: that they are measured on.
        out: the record; where it exists, its cells are not measured again, unless they failed, or ran out of
            memory below a lower limit.
        measure: measures one, such as `in_process`.

    Attributes:
        cells: of this run so far, those that were there before included.
    """

    jobs: Sequence[Job]
    machine: Machine
    out: Path
    measure: Measure
    cells: dict[str, Cell] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.out.exists() and self.out.stat().st_size:
            before = Record.read(self.out)
            _check_same(before.machine, self.machine, self.out)
            self.cells = {cell.key: cell for cell in before.cells}

    @property
    def waiting(self) -> list[Job]:
        """What is still to be measured."""
        return [job for job in self.jobs if _is_waiting(job, self.cells.get(job.cell.key))]

    @property
    def seconds_left(self) -> float | None:
        """A guess by what cells took that are in the record, of earlier runs included; None before there is one."""
        done = [(cell.measuring_seconds, _weight(job)) for job in self.jobs if (cell := self.cells.get(job.cell.key))]
        spent = [(seconds, weight) for seconds, weight in done if seconds is not None and weight]
        if not spent:
            return None
        for_each = sum(seconds for seconds, _ in spent) / sum(weight for _, weight in spent)
        return for_each * sum(map(_weight, self.waiting))

    def go(self, *, done: Callable[[Cell], None] = lambda cell: None) -> Record:
        """Measures what is waiting.

        An interrupt ends the cell that runs and is raised; the cells before it are in the record, and another run with
        the same `out` goes on with that one.

        Args:
            done: called after each cell.
        """
        append_line(self.out, self.machine)
        for job in self.waiting:
            begin = time.monotonic()
            cell = self._measured(job)
            cell = replace(cell, measuring_seconds=time.monotonic() - begin)
            append_line(self.out, cell)
            self.cells[cell.key] = cell
            done(cell)
        return Record(self.machine, [self.cells[job.cell.key] for job in self.jobs if job.cell.key in self.cells])

    def _measured(self, job: Job) -> Cell:
        if job.cell.outcome != "ok":
            return job.cell
        ready = self._with_budget(self._as_cool(job))
        if isinstance(ready, Cell):
            return ready
        with governor(job.cell.governor) as refused:
            if refused is not None:
                return replace(job.cell, outcome="skipped", reason=refused.reason)
            return self.measure(ready)

    def _as_cool(self, job: Job) -> Job:
        """A long run begins as cool as plain PyTorch's did, which is measured first."""
        plain = self.cells.get(replace(job.cell, engine="torch", budget="").key)
        if job.cell.experiment != "long run" or job.cell.engine == "torch" or plain is None:
            return job
        return Job(job.cell, replace(job.how, start_celsius=start_celsius(plain)))

    def _with_budget(self, job: Job) -> Job | Cell:
        """The job with torch_odt's budget in bytes; the cell itself where there is nothing to take a share of."""
        cell = job.cell
        if cell.engine != "torch_odt" or job.how.budget_bytes is not None:
            return job
        share = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", cell.budget)
        if share is None:
            return Job(cell, replace(job.how, budget_bytes=parse_bytes(cell.budget)))
        plain = self.cells.get(_plain_steps(cell).key)
        if plain is None or plain.outcome == "failed":
            return replace(cell, outcome="skipped", reason=f"{cell.budget} of what plain PyTorch took is not known")
        if plain.outcome == "skipped":
            return replace(cell, outcome="skipped", reason=plain.reason)
        whole = plain.training_bytes if plain.outcome == "ok" else plain.limit_bytes
        if not whole:
            return replace(cell, outcome="skipped", reason=f"{cell.budget} of nothing: plain PyTorch took no memory")
        budget_bytes = max(1, int(float(share[1]) / 100 * whole))
        return Job(cell, replace(job.how, budget_bytes=budget_bytes, smallest_tries=_SMALLEST_TRIES))


def in_process(module: str) -> Measure:
    """Measures by `python -m MODULE`, which reads a job from standard input and prints the cell.

    One that ends with `GO_ON` prints a job that another process goes on with.
    A process that the system kills for want of memory ran out of it; one that fails otherwise is a failed cell. An
    interrupt ends the process and all that it has started.
    """

    def measure(job: Job) -> Cell:
        # -P: from a clone's root, -m would find the sources there, which have no compiled parts.
        command = [sys.executable, "-P", "-m", module]
        env = {"GOMP_SPINCOUNT": "10000", **os.environ, "OMP_NUM_THREADS": str(job.cell.threads)}
        shortage = Shortage()
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
            start_new_session=True,
        ) as worker:  # fmt: skip
            try:
                out, err = worker.communicate(job.to_json())
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
                # After an interrupt, leaving the block does not.
                worker.wait()
                raise
        if worker.returncode == GO_ON:
            return measure(Job.from_json(out.splitlines()[-1]))
        return _read(job, worker.returncode, out, err, shortage)

    return measure


def _read(job: Job, code: int, out: str, err: str, shortage: Shortage) -> Cell:
    lines = out.splitlines()
    if code == 0 and lines:
        return Job.from_json(lines[-1]).cell
    limit = job.how.limit_bytes or 0
    if code == -signal.SIGKILL and (evidence := shortage.evidence()):
        return replace(job.cell, outcome="out of memory", reason=evidence, limit_bytes=limit)
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), f"exit code {code}")[:500]
    # A library that cannot hand its std::bad_alloc on aborts the process.
    aborted = code == -signal.SIGABRT and "std::bad_alloc" in err
    if aborted or (code > 0 and says_out_of_memory(last)):
        reason = "std::bad_alloc" if aborted else last
        return replace(job.cell, outcome="out of memory", reason=reason, limit_bytes=limit)
    reason = f"the process was ended by {signal.Signals(-code).name}" if code < 0 else last
    return replace(job.cell, outcome="failed", reason=reason, limit_bytes=limit)


def _plain_steps(cell: Cell) -> Cell:
    """The steps of plain PyTorch of whose memory a share is meant, whatever the experiment."""
    factors = cell.factors if cell.experiment == "step" else {}
    return replace(cell, engine="torch", budget="", experiment="step", factors=factors)


def _is_waiting(job: Job, before: Cell | None) -> bool:
    if before is None or before.outcome == "failed":
        return True
    limit = job.how.limit_bytes
    is_higher = before.limit_bytes > 0 and (limit is None or limit > _HIGHER * before.limit_bytes)
    return before.outcome == "out of memory" and is_higher


def _weight(job: Job) -> float:
    """What a cell takes beside others, in seconds where it says so itself; nothing where it is skipped beforehand."""
    cell, how = job.cell, job.how
    if cell.outcome != "ok":
        return 0.0
    own_seconds = {"long run": how.run_seconds, "neighbour": how.run_seconds, "largest batch": how.search_seconds}
    weight = _STEPS_WEIGHT + own_seconds.get(cell.experiment, 0.0)
    return weight * (_PLANNED_WEIGHT if cell.engine == "torch_odt" and cell.experiment == "step" else 1.0)


def _check_same(before: Machine, now: Machine, path: Path) -> None:
    for name in ("processor", "cores", "versions"):
        old, new = getattr(before, name), getattr(now, name)
        if old != new:
            raise ValueError(
                f"{path} was measured with {name} {_words(old)}, and this is {_words(new)}: give another --out, and "
                "--compare the two"
            )


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {text}" for name, text in value.items())
    return str(value)
