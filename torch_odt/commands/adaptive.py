"""`--adaptive`: a budget that follows what is available while training runs, and what to say of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch_odt as odt
from torch_odt.commands import options
from torch_odt.commands.errors import UserError
from torch_odt.commands.table import format_bytes
from torch_odt.runtime.controller import Controller, Decision
from torch_odt.runtime.policies import ShareOfAvailable, Smallest

RESERVE = "64MiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that belong to it."""
    parser.add_argument(
        "--adaptive",
        action="store_true",
        help="follow what is available while training runs; --budget is the most (--background does so where none is "
        "given)",
    )
    parser.add_argument(
        "--reserve", metavar="BYTES", help=f"with --adaptive: what stays free for others (default: {RESERVE})"
    )
    parser.add_argument(
        "--decisions", type=Path, metavar="FILE", help="with --adaptive: append each change of the budget, as JSON"
    )


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError for an option that means nothing without --adaptive.

    Who trains in the background and names no bytes gives way in memory as well.
    """
    arguments.adaptive |= arguments.background and arguments.budget == "auto"
    for name in ("reserve", "decisions"):
        if getattr(arguments, name) is not None and not arguments.adaptive:
            raise UserError(f"--{name} belongs to --adaptive, which is not given")
    options.check_folder("--decisions", arguments.decisions)


def controller_for(
    arguments: argparse.Namespace, budget: odt.Budget, on_decision: Callable[[Decision], object] | None
) -> Controller | None:
    """What decides while training runs; None where the budget stays as it is.

    Raises:
        ValueError: --reserve is no number of bytes.
    """
    if not arguments.adaptive:
        return None
    rest = ShareOfAvailable(1.0, reserve=arguments.reserve or RESERVE)
    return Controller(Smallest(budget, rest), log=arguments.decisions, on_decision=on_decision)


def changes_text(controller: Controller) -> str:
    """How often the budget has changed, and between what."""
    amounts = [decision.budget_bytes for decision in controller.decisions]
    if len(amounts) == 1:
        return "the budget has not changed"
    return (
        f"{len(amounts) - 1} changes of the budget, between {format_bytes(min(amounts))} and "
        f"{format_bytes(max(amounts))}"
    )
