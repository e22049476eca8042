"""`torch-odt demo`: the same training, plain and inside a budget, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
from typing import Any

from torch_odt.commands import options
from torch_odt.commands.demo_worker import Job, Result
from torch_odt.commands.errors import UserError
from torch_odt.commands.table import ABSENT, bytes_text, render, seconds_text
from torch_odt.errors import InfeasibleBudget

NAME = "demo"
SUMMARY = "train MobileNetV2 on handwritten digits in less than half the memory; needs no files"

PLAIN_STEPS = 8
SHARE = 0.45
# Threads that wait spin only briefly, so that a busy neighbour does not stall both sides.
QUIET_THREADS = {"GOMP_SPINCOUNT": "10000"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--model", default="mobilenet_v2", metavar="NAME", help=options.MODEL_HELP)
    parser.add_argument("--steps", type=options.positive_int, default=100, help="to train for (default: 100)")
    parser.add_argument("--batch-size", type=options.positive_int, default=32, help="(default: 32)")
    parser.add_argument("--image-size", type=options.positive_int, default=96, help="height and width (default: 96)")
    parser.add_argument(
        "--budget",
        metavar="BYTES",
        help=f"above the idle process, such as 200MiB (default: {SHARE:.0%} of what plain PyTorch takes)".replace(
            "%", "%%"
        ),
    )
    parser.add_argument("--lr", type=options.positive_float, default=0.05, help="learning rate (default: 0.05)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure plain PyTorch, train inside the budget, compare."""
    budget_bytes = _fixed_bytes(arguments.budget)
    job = Job(
        model=arguments.model,
        batch_size=arguments.batch_size,
        image_size=arguments.image_size,
        steps=arguments.steps,
        learning_rate=arguments.lr,
        seed=arguments.seed,
        quiet=arguments.json,
    )
    say = _silent if arguments.json else _say
    size = f"3x{job.image_size}x{job.image_size}"
    say(f"{job.model} learns scikit-learn's handwritten digits, scaled to {size}, in batches of {job.batch_size}.")

    say(f"\nPlain PyTorch, for comparison: {min(PLAIN_STEPS, job.steps)} steps")
    plain = _in_process(dataclasses.replace(job, steps=min(PLAIN_STEPS, job.steps), label="  plain PyTorch"))
    if budget_bytes is None:
        if plain is None:
            raise UserError("plain PyTorch was killed for want of memory: give a --budget")
        budget_bytes = int(SHARE * plain.peak_bytes)

    say(f"\ntorch_odt, with a budget of {bytes_text(budget_bytes)} above the idle process: {job.steps} steps")
    say("The first step captures the model, measures its operators and plans.")
    ours = _in_process(dataclasses.replace(job, budget_bytes=budget_bytes, label="  torch_odt"))
    if ours is None:
        raise UserError("the system killed the training for want of memory: give a smaller --budget")

    if arguments.json:
        options.print_json(_document(job, budget_bytes, plain, ours))
    else:
        print(f"\n{ours.plan_text}\n")
        print(_comparison(budget_bytes, plain, ours))
    return 0 if ours.peak_bytes <= budget_bytes else 1


def _in_process(job: Job) -> Result | None:
    """The job's result from a process of its own; None if the system killed it."""
    # -P: from a clone's root, -m would find the sources there, which have no compiled parts.
    command = [sys.executable, "-P", "-m", "torch_odt.commands.demo_worker", json.dumps(dataclasses.asdict(job))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=QUIET_THREADS | dict(os.environ), check=False)
    if done.returncode == -signal.SIGKILL:
        return None
    if done.returncode != 0:
        raise RuntimeError(f"the demo's worker process ended with exit code {done.returncode}")
    result = Result(**json.loads(done.stdout))
    if result.refusal:
        raise InfeasibleBudget(*result.refusal)
    if result.error:
        raise UserError(result.error)
    return result


def _comparison(budget_bytes: int, plain: Result | None, ours: Result) -> str:
    rows = [
        ["peak memory above idle", *_pair(plain, ours, "peak_bytes", bytes_text)],
        ["  with child processes", *_pair(plain, ours, "family_peak_bytes", bytes_text)],
        ["time per step", *_pair(plain, ours, "step_seconds", seconds_text)],
        # Later ones are those of two trainings: every difference in rounding grows from step to step.
        ["loss of the first step", f"{plain.losses[0]:.4f}" if plain else ABSENT, f"{ours.losses[0]:.4f}", ""],
    ]
    if ours.family_peak_bytes <= ours.peak_bytes:
        del rows[1]
    lines = [render(rows, ["", "plain PyTorch", "torch_odt", "ratio"])]
    if plain is None:
        lines.append("\nPlain PyTorch was killed by the system for want of memory.")
    lines.append(
        f"\nThe budget of {bytes_text(budget_bytes)} was {'kept' if ours.peak_bytes <= budget_bytes else 'exceeded'}. "
        f"Accuracy on digits never seen: {ours.validation_accuracy:.0%} after {len(ours.losses)} steps."
    )
    return "\n".join(lines)


def _pair(plain: Result | None, ours: Result, name: str, text: Any) -> list[str]:
    """Both values of a field, and ours as a share of the plain one."""
    there, here = getattr(plain, name, None), getattr(ours, name)
    return [text(there), text(here), f"{here / there:.2f}" if there and here else ABSENT]


def _document(job: Job, budget_bytes: int, plain: Result | None, ours: Result) -> dict[str, Any]:
    return {
        "model": job.model,
        "batch_size": job.batch_size,
        "image_size": job.image_size,
        "steps": job.steps,
        "budget_bytes": budget_bytes,
        "within_budget": ours.peak_bytes <= budget_bytes,
        "plain": None if plain is None else _public(plain),
        "torch_odt": _public(ours),
    }


def _public(result: Result) -> dict[str, Any]:
    hidden = ("error", "refusal", "plan_text")
    return {name: value for name, value in dataclasses.asdict(result).items() if name not in hidden}


def _fixed_bytes(text: str | None) -> int | None:
    from torch_odt.memory._units import parse_bytes

    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise UserError(f"--budget: {error}") from None


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    pass
