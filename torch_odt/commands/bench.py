"""`torch-odt bench`: planners against each other on one model, at several budgets."""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from torch_odt.commands import options
from torch_odt.commands.errors import UserError, as_user_errors
from torch_odt.commands.models import task_of
from torch_odt.commands.optimizers import NAMES, make_optimizer
from torch_odt.commands.plan import read_costs
from torch_odt.commands.progress import Progress
from torch_odt.commands.table import ABSENT, bytes_text, render, seconds_text
from torch_odt.errors import PlanError
from torch_odt.memory._units import parse_bytes

if TYPE_CHECKING:
    from torch_odt.capture.device import Device
    from torch_odt.execute.compare import BudgetBytes, Comparison

NAME = "bench"
SUMMARY = "compare planners on a model: bytes and seconds at several budgets, predicted or measured"

PLANNERS = "keep-all,chen,min-cut,melon,dtr,sage,auto"
BUDGETS = "20%..100%"
RANGE_POINTS = 5
MEASURED_STEPS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    options.add_model(parser, default=None)
    options.add_input(parser)
    parser.add_argument(
        "--planners",
        default=PLANNERS,
        metavar="NAMES",
        help=f"separated by commas, or {options.ALL_PLANNERS} (default: {PLANNERS})",
    )
    parser.add_argument(
        "--budgets",
        default=BUDGETS,
        metavar="LIST",
        help=f"separated by commas: shares of what keeping everything takes, bytes such as 300MiB, or a range of "
        f"{RANGE_POINTS} shares (default: {BUDGETS})",
    )
    parser.add_argument(
        "--micro-batch",
        type=options.positive_int,
        metavar="SAMPLES",
        help="that run at once; as many as the batch has forbid cutting it (default: each planner chooses)",
    )
    parser.add_argument(
        "--run", action="store_true", dest="measured", help=f"execute and measure {MEASURED_STEPS} steps of each plan"
    )
    parser.add_argument("--optimizer", choices=NAMES, help="count its state as well")
    options.add_page_to(parser)
    options.add_goal(parser)
    options.add_planning_seconds(parser)
    parser.add_argument("--costs", type=Path, metavar="FILE", help="from `torch-odt profile`, maybe on another machine")
    options.add_rewrites(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there as CSV")
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan with everyone, print, write."""
    from torch_odt.execute.compare import compare

    options.check_folder("--out", arguments.out)
    options.check_rewrites(arguments)
    device = options.device_of(arguments)
    _check_measuring(arguments, device)
    planners = options.planners_of(arguments.planners)
    if not planners:
        raise UserError("--planners names none")
    budgets = budgets_of(arguments.budgets)
    costs = read_costs(arguments.costs)
    task = task_of(arguments)
    with (
        Progress("planning", len(planners) * len(budgets), quiet=arguments.json) as progress,
        as_user_errors(ValueError, PlanError),
    ):
        found = compare(
            task.model,
            task.loss_fn,
            task.batch,
            planners=planners,
            budgets=budgets,
            optimizer=make_optimizer(arguments.optimizer, task.model, None) if arguments.optimizer else None,
            page_to=arguments.page_to,
            device=arguments.device if device is None else device,
            objective=arguments.objective,
            deadline_seconds=arguments.deadline,
            micro_batch=arguments.micro_batch,
            planning_seconds=arguments.planning_seconds,
            steps=MEASURED_STEPS if arguments.measured else 0,
            disable_rewrites=arguments.disable_rewrite,
            costs=costs,
            report=lambda comparison: progress.advance(comparison.planner),
        )
    if arguments.out is not None:
        write_csv(arguments.out, found)
    if arguments.json:
        options.print_json({"model": task.name, "comparisons": [asdict(each) for each in found]})
        return 0
    optimizer = f"with the state of {arguments.optimizer}" if arguments.optimizer else "without the optimizer"
    print(f"{task.name}, forward and backward pass, {optimizer}:\n")
    print(_table(found, measured=arguments.measured))
    for note in dict.fromkeys(note for each in found for note in each.notes):
        print(f"note: {note}")
    if arguments.out is not None:
        print(f"\nWritten to {arguments.out}")
    return 0


def budgets_of(text: str) -> list[BudgetBytes]:
    """What a list such as "300MiB,50%" or a range such as "20%..100%" stands for, the largest shares last.

    Raises:
        UserError: it is neither.
    """
    bounds = [_share(word) for word in text.split("..")] if ".." in text else []
    if not bounds:
        return [_budget(word) for word in text.split(",")]
    if len(bounds) != 2 or None in bounds:
        raise UserError(f"--budgets {text}: a range is written as {BUDGETS}")
    low, high = sorted(bound for bound in bounds if bound is not None)
    step = (high - low) / (RANGE_POINTS - 1)
    return [_of_all(low + position * step) for position in range(RANGE_POINTS)]


def _budget(text: str) -> BudgetBytes:
    share = _share(text)
    if share is not None:
        return _of_all(share)
    try:
        nbytes = parse_bytes(text)
    except ValueError as error:
        raise UserError(f"--budgets: {error}") from None
    return lambda _: nbytes


def _share(text: str) -> float | None:
    """The share that "80%" stands for; None if it is no share above zero."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text)
    return float(match[1]) / 100 if match is not None and float(match[1]) > 0 else None


def _of_all(share: float) -> BudgetBytes:
    return lambda keep_all_bytes: round(share * keep_all_bytes)


def _check_measuring(arguments: argparse.Namespace, device: Device | None) -> None:
    if arguments.measured and device is not None:
        raise UserError("--run measures on this machine: leave out --device")
    if arguments.measured and arguments.optimizer is not None:
        raise UserError("--run measures steps that train nothing: leave out --optimizer")


def write_csv(path: Path, found: list[Comparison]) -> None:
    """One line for each comparison, bytes and seconds as plain numbers; what is not known is empty.

    Raises:
        UserError: the file cannot be written.
    """
    from torch_odt.execute.compare import Comparison

    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Comparison)])
            writer.writeheader()
            writer.writerows(asdict(each) | {"notes": "; ".join(each.notes)} for each in found)
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror or error}") from error


_COLUMNS: dict[str, Callable[[Comparison], str]] = {
    "planner": lambda each: each.planner,
    "budget": lambda each: bytes_text(each.budget_bytes),
    "of all": lambda each: f"{each.budget_share:.0%}",
    "peak": lambda each: bytes_text(each.peak_bytes),
    "step": lambda each: seconds_text(each.step_seconds),
    "slowdown": lambda each: ABSENT if each.slowdown is None else f"{each.slowdown:.3f}",
    "micro-batch": lambda each: ABSENT if not each.feasible else str(each.micro_batch or "whole"),
    "recomputed": lambda each: ABSENT if each.recomputed_ops is None else str(each.recomputed_ops),
    "planning": lambda each: seconds_text(each.planning_seconds),
}
_JOULES: dict[str, Callable[[Comparison], str]] = {
    "joules": lambda each: ABSENT if each.energy_joules is None else f"{each.energy_joules:.3g} J",
}
_PAGED: dict[str, Callable[[Comparison], str]] = {
    "paged": lambda each: bytes_text(each.paged_bytes),
}
_MEASURED: dict[str, Callable[[Comparison], str]] = {
    "step, measured": lambda each: seconds_text(each.measured_step_seconds),
    "peak, measured": lambda each: bytes_text(each.measured_peak_bytes),
}


def _table(found: list[Comparison], *, measured: bool) -> str:
    columns = _COLUMNS | (_MEASURED if measured else {})
    columns |= _JOULES if any(each.energy_joules is not None for each in found) else {}
    columns |= _PAGED if any(each.paged_bytes for each in found) else {}
    return render([[text(each) for text in columns.values()] for each in found], list(columns))
