"""`torch-odt plan --html`: the plan as a page, with the frontiers of several planners."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch_odt.capture.cost_table import CostTable
from torch_odt.commands import options
from torch_odt.commands.errors import UserError, as_user_errors
from torch_odt.commands.models import Task
from torch_odt.commands.optimizers import make_optimizer
from torch_odt.commands.progress import Progress
from torch_odt.errors import PlanError

if TYPE_CHECKING:
    from torch_odt.execute.frontier import Frontier
    from torch_odt.planning.plan import Plan

QUICK = "chen,min-cut,melon,dtr,sage,auto"
NOBODY = "none"
RUNGS = 6
LIMIT_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the page."""
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page: memory over the step, and what other budgets would cost; it needs no network",
    )
    parser.add_argument(
        "--planners",
        metavar="NAMES",
        help=f"whose frontiers the page shows, separated by commas, {options.ALL_PLANNERS} or {NOBODY} "
        f"(default: {QUICK})",
    )


def check(arguments: argparse.Namespace) -> None:
    """Before the work, not after.

    Raises:
        UserError: the page cannot be written there, or there is no planner of one of the names.
    """
    options.check_folder("--html", arguments.html)
    if arguments.planners is not None and arguments.html is None:
        raise UserError("--planners names what the page shows: it goes with --html")
    _planners(arguments)


def write(arguments: argparse.Namespace, task: Task, plan: Plan, costs: CostTable | None) -> None:
    """Find the frontiers and write the page; nothing where none was asked for.

    Raises:
        UserError: the file cannot be written.
    """
    if arguments.html is None:
        return
    from torch_odt.planning.page.document import write_page

    found: dict[str, Frontier] = {}
    try:
        found = _frontiers(arguments, task, costs)
        notes = [note for frontier in found.values() for note in frontier.notes]
    except PlanError as reason:
        notes = [f"no planner has a frontier: {reason}"]
    plan = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *notes))))
    plans = {name: frontier.plans for name, frontier in found.items()}
    try:
        write_page(arguments.html, plan, frontiers=plans, title=task.name)
    except OSError as error:
        raise UserError(f"--html {arguments.html}: {error.strerror or error}") from error


def _planners(arguments: argparse.Namespace) -> list[str]:
    text = QUICK if arguments.planners is None else arguments.planners
    return [] if text.strip() == NOBODY else options.planners_of(text)


def _frontiers(arguments: argparse.Namespace, task: Task, costs: CostTable | None) -> dict[str, Frontier]:
    from torch_odt.execute.frontier import frontiers

    planners = _planners(arguments)
    if not planners:
        return {}
    optimizer = make_optimizer(arguments.optimizer, task.model, None) if arguments.optimizer else None
    with Progress("frontiers", len(planners), quiet=arguments.json) as progress, as_user_errors(ValueError):
        return frontiers(
            task.model,
            task.loss_fn,
            task.batch,
            planners=planners,
            optimizer=optimizer,
            rungs=RUNGS,
            time_limit_seconds=LIMIT_SECONDS,
            disable_rewrites=arguments.disable_rewrite,
            page_to=arguments.page_to,
            device=arguments.device,
            objective=arguments.objective,
            deadline_seconds=arguments.deadline,
            costs=costs,
            report=progress.advance,
        )
