"""One cell of `torch-odt measure`, in a process of its own: a job on standard input, the cell on standard output."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from torch_odt.commands.models import load_task
from torch_odt.commands.optimizers import make_optimizer
from torch_odt.measure.cell import PlanAgain, measure_cell
from torch_odt.measure.devices import device_reason, moved
from torch_odt.measure.ending import end_with_parent
from torch_odt.measure.executorch_step import executorch_reason
from torch_odt.measure.job import GO_ON, Job
from torch_odt.measure.steps import Work


def work_of(job: Job, samples: int) -> Work:
    """The model of a cell with a random batch; a batch that a user's function brings is taken as it is."""
    cell, how = job.cell, job.how
    task = load_task(
        cell.model,
        shape=(samples, *cell.input_shape),
        classes=how.classes,
        channels_last=how.channels_last,
        seed=how.seed,
    )
    task.model.train().to(cell.device)
    optimizer = make_optimizer(how.optimizer, task.model, None)
    return Work(task.model, task.loss_fn, optimizer, moved(task.batch, cell.device))


def _reason(job: Job) -> str:
    """Why this cell cannot be measured on this machine; empty where it can."""
    if job.cell.engine == "executorch":
        # Its import is here, not in what the step takes.
        return executorch_reason()
    reason = "" if job.cell.device == "cpu" else device_reason(job.cell.device)
    return reason and f"torch cannot compute on {job.cell.device}: {reason}"


def main() -> int:
    """Do the job."""
    # Its session is its own, so that a terminal that is closed does not end it either.
    end_with_parent()
    job = Job.from_json(sys.stdin.read())
    reason = _reason(job)
    if reason:
        cell = replace(job.cell, outcome="skipped", reason=reason)
    else:
        torch.manual_seed(job.how.seed)
        try:
            cell = measure_cell(job, lambda samples: work_of(job, samples))
        except PlanAgain as again:
            print(again.job.to_json())
            return GO_ON
    print(Job(cell, job.how).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
