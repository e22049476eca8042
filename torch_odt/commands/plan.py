"""`torch-odt plan`: what a budget would mean for a model, without training it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch_odt as odt
from torch_odt.capture.cost_table import CostTable, costs_from_json
from torch_odt.commands import options, plan_page
from torch_odt.commands.errors import UserError, as_user_errors
from torch_odt.commands.models import Task, task_of
from torch_odt.commands.optimizers import NAMES, make_optimizer
from torch_odt.commands.table import bytes_text, render, seconds_text
from torch_odt.errors import InfeasibleBudget, PlanError

if TYPE_CHECKING:
    from torch_odt.planning.plan import Plan

NAME = "plan"
SUMMARY = "show the plan for a model and a budget; exit code 2 if there is none"

WITHOUT_LIMIT = odt.Budget(1 << 50, of="training")
SHARES = (0.75, 0.5, 0.35)
ATTEMPTS = 3
SLACK_BYTES = 256 << 10
DRAWN = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    options.add_model(parser, default=None)
    options.add_input(parser)
    options.add_budget(parser, default=None, absent="show the whole range")
    parser.add_argument("--optimizer", choices=NAMES, help="count its state as well")
    options.add_goal(parser)
    options.add_planning_seconds(parser)
    parser.add_argument("--costs", type=Path, metavar="FILE", help="from `torch-odt profile`, maybe on another machine")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw memory over the step, as PNG, SVG or PDF")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the plan to a file from which it can be run")
    plan_page.add_arguments(parser)
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan, print, draw."""
    options.device_of(arguments)
    options.check_planning(arguments)
    _check_plot(arguments.plot)
    _check_out(arguments)
    plan_page.check(arguments)
    costs = read_costs(arguments.costs)
    task = task_of(arguments)
    if arguments.budget is None:
        plan = _show_range(arguments, task, costs)
    else:
        plan = _plan(arguments, task, options.make_budget(arguments.budget, arguments.budget_of), costs)
        _show_plan(arguments, plan)
    _draw(plan, arguments.plot)
    _save(plan, arguments.out)
    plan_page.write(arguments, task, plan, costs)
    return 0


def _plan(arguments: argparse.Namespace, task: Task, budget: odt.Budget, costs: CostTable | None) -> Plan:
    from torch_odt.execute.dry_run import plan

    with as_user_errors(ValueError, PlanError):
        return plan(
            task.model,
            task.loss_fn,
            task.batch,
            budget=budget,
            planner=arguments.planner,
            disable_rewrites=arguments.disable_rewrite,
            page_to=arguments.page_to,
            device=arguments.device,
            objective=arguments.objective,
            deadline_seconds=arguments.deadline,
            planning_seconds=arguments.planning_seconds,
            optimizer=make_optimizer(arguments.optimizer, task.model, None) if arguments.optimizer else None,
            costs=costs,
        )


def _show_plan(arguments: argparse.Namespace, plan: Plan) -> None:
    if arguments.json:
        options.print_json(plan.to_dict())
    else:
        print(plan)


def _show_range(arguments: argparse.Namespace, task: Task, costs: CostTable | None) -> Plan:
    """Plans from everything kept, which is returned, down to the smallest feasible budget."""
    keep_all = _plan(arguments, task, WITHOUT_LIMIT, costs)
    keep_all.budget = None
    if keep_all.smallest_feasible_bytes is None:
        _show_plan(arguments, keep_all)
        return keep_all
    smallest, last = _smallest(arguments, task, costs, keep_all.smallest_feasible_bytes)
    limits = [limit for share in SHARES if (limit := int(share * keep_all.peak_bytes)) > smallest]
    between = [_plan(arguments, task, odt.Budget(limit, of="training"), costs) for limit in limits]
    plans = [keep_all, *between, last]
    if arguments.json:
        document = {
            "model": task.name,
            "keep_all_bytes": keep_all.peak_bytes,
            "smallest_feasible_bytes": smallest,
            "plans": [plan.to_dict() for plan in plans],
        }
        options.print_json(document)
    else:
        state = f"with {arguments.optimizer}" if arguments.optimizer else "without an optimizer (see --optimizer)"
        print(f"{task.name}, above the idle process, {state}:\n")
        names = ["none", *map(bytes_text, [*limits, smallest])]
        rows = [_row(name, plan, keep_all) for name, plan in zip(names, plans, strict=True)]
        print(render(rows, ["budget", "peak", "of all", "time per step", "micro-batch", "recomputed"]))
        # Rounded up: what is printed is to be accepted.
        budget = f"--budget {math.ceil(smallest / 2**20)}MiB --budget-of training"
        print(f"\nThe smallest feasible budget is {bytes_text(smallest)} above the idle process: {budget}")
        for note in dict.fromkeys(note for plan in plans for note in plan.notes):
            print(f"note: {note}")
    return keep_all


def _smallest(arguments: argparse.Namespace, task: Task, costs: CostTable | None, guess_bytes: int) -> tuple[int, Plan]:
    """The smallest feasible budget and its plan.

    What capture and measurement leave behind in this process differs a little from one plan to the next, and counts.
    """
    for _ in range(ATTEMPTS):
        try:
            return guess_bytes, _plan(arguments, task, odt.Budget(guess_bytes, of="training"), costs)
        except InfeasibleBudget as error:
            guess_bytes = error.smallest_feasible_bytes + SLACK_BYTES
    return guess_bytes, _plan(arguments, task, odt.Budget(guess_bytes, of="training"), costs)


def _row(text: str, plan: Plan, keep_all: Plan) -> list[str]:
    recomputed = f"{plan.recomputed_ops} calls"
    micro_batch = str(plan.micro_batch) if plan.micro_batch else "whole"
    share = f"{plan.peak_bytes / keep_all.peak_bytes:.0%}"
    return [text, bytes_text(plan.peak_bytes), share, seconds_text(plan.step_seconds), micro_batch, recomputed]


def read_costs(path: Path | None) -> CostTable | None:
    """What `--costs` names; None where it names nothing."""
    if path is None:
        return None
    try:
        return costs_from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, PlanError) as error:
        raise UserError(f"--costs {path}: {error}") from error


def _check_plot(path: Path | None) -> None:
    """Before the work, not after."""
    if path is None:
        return
    if path.suffix.lower() not in DRAWN:
        raise UserError(f"--plot {path}: the name must end in {', '.join(DRAWN)}")
    options.check_folder("--plot", path)


def _check_out(arguments: argparse.Namespace) -> None:
    if arguments.out is None:
        return
    if arguments.budget is None:
        raise UserError("--out needs --budget: without one there are several plans")
    options.check_folder("--out", arguments.out)


def _save(plan: Plan, path: Path | None) -> None:
    if path is None:
        return
    try:
        plan.save(path)
    except (OSError, PlanError) as error:
        raise UserError(f"--out {path}: {error}") from error


def _draw(plan: Plan, path: Path | None) -> None:
    if path is None:
        return
    try:
        plan.plot(path)
    except ImportError:
        raise UserError('--plot needs matplotlib: pip install "torch_odt[plot]"') from None
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}") from error
