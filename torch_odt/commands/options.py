"""Arguments that several commands take, and how their texts are read."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_odt.commands.errors import UserError, as_user_errors
from torch_odt.errors import PlanError

if TYPE_CHECKING:
    from torch_odt.capture.device import Device
    from torch_odt.runtime.budget import Budget

MODEL_HELP = "a torchvision classifier by name, timm/NAME, or your own: FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"
DEFAULT_INPUT = "16x3x224x224"
ALL_PLANNERS = "all"


def add_output(parser: argparse.ArgumentParser) -> None:
    """What every command takes."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and every warning")


def add_model(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    """Which model, and how it lies in memory."""
    parser.add_argument("--model", required=default is None, default=default, metavar="NAME", help=MODEL_HELP)
    parser.add_argument("--channels-last", action="store_true", help="lay images and weights out channels last")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")


def add_input(parser: argparse.ArgumentParser) -> None:
    """The batch of a command that needs no data."""
    parser.add_argument(
        "--input", type=shape, metavar="SHAPE", help=f"batch x channels x height x width (default: {DEFAULT_INPUT})"
    )
    parser.add_argument("--classes", type=positive_int, default=10, help="of a torchvision classifier (default: 10)")


def add_budget(parser: argparse.ArgumentParser, *, default: str | None, absent: str) -> None:
    """How many bytes, and of what."""
    parser.add_argument(
        "--budget", default=default, metavar="BYTES", help=f'such as 512MiB, 80%% or "auto" (default: {absent})'
    )
    parser.add_argument(
        "--budget-of",
        choices=("process", "training"),
        default="process",
        help="count the whole process, or what training adds to it (default: process)",
    )
    parser.add_argument("--planner", default="auto", help="who makes the plan (default: auto)")
    add_page_to(parser)
    add_rewrites(parser)


def add_page_to(parser: argparse.ArgumentParser) -> None:
    """What tensors may be moved to."""
    parser.add_argument(
        "--page-to",
        type=Path,
        metavar="FOLDER",
        help="tensors may be moved to a file there while the step does not need them; a disk, not memory (default: no)",
    )


def add_goal(parser: argparse.ArgumentParser) -> None:
    """What a plan is for, and what it is to spend least of."""
    from torch_odt.capture.device import device_names

    parser.add_argument(
        "--device",
        default="this",
        metavar="NAME",
        help=f"plan for another machine: {', '.join(device_names())}, or a .toml file that describes one; nothing is "
        'measured then (default: "this" machine, measured)',
    )
    parser.add_argument(
        "--objective",
        choices=("seconds", "joules"),
        default="seconds",
        help="what to spend least of (default: seconds)",
    )
    parser.add_argument(
        "--deadline",
        type=positive_float,
        default=math.inf,
        metavar="SECONDS",
        help="that a step may take at most (default: no limit)",
    )


def add_planning_seconds(parser: argparse.ArgumentParser) -> None:
    """How long may be planned."""
    parser.add_argument(
        "--planning-seconds",
        type=positive_float,
        default=0.0,
        metavar="SECONDS",
        help="to look for a better plan than the one that is found at once, by integer programs too where their "
        "solver is installed (default: 0)",
    )


def add_rewrites(parser: argparse.ArgumentParser) -> None:
    """Which rewrites of the graph are not to be made."""
    parser.add_argument(
        "--disable-rewrite",
        action="append",
        default=[],
        metavar="NAME",
        help="do not rewrite the graph so; plans name their rewrites in parentheses (fuse_batch_norm); may be repeated",
    )


def check_folder(option: str, path: Path | None) -> None:
    """That a file can be written there: before hours of work, not after."""
    if path is not None and not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}")


def positive_int(text: str) -> int:
    """An int above zero."""
    value = int(text) if text.strip().isdigit() else 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def positive_float(text: str) -> float:
    """A finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def shape(text: str) -> tuple[int, ...]:
    """A shape such as 16x3x224x224, the batch first."""
    words = text.lower().split("x")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: write it as {DEFAULT_INPUT}")
    return tuple(int(word) for word in words)


def make_budget(text: str, of: str) -> Budget:
    """The budget that the user asks for."""
    from torch_odt.runtime.budget import Budget

    try:
        return Budget(text, of="training" if of == "training" else "process")
    except ValueError as error:
        raise UserError(f"--budget: {error}") from None


def device_of(arguments: argparse.Namespace) -> Device | None:
    """The device of `--device`; None for this machine.

    Raises:
        UserError: there is none, or its file describes none; or there is no folder to page to on this machine.
    """
    from torch_odt.capture.device import Device

    with as_user_errors(ValueError, OSError):
        device = Device.of_value(arguments.device)
    if device is None:
        check_page_to(arguments)
    return device


def check_page_to(arguments: argparse.Namespace) -> None:
    """Raises UserError unless there is the folder to page to."""
    if arguments.page_to is not None and not arguments.page_to.is_dir():
        raise UserError(f"--page-to {arguments.page_to}: there is no such folder")


def check_planning(arguments: argparse.Namespace) -> None:
    """Raises UserError unless there are a planner and rewrites of these names."""
    from torch_odt.planning.registry import planner_names

    names = ("auto", *(known for known in planner_names() if known != "auto"))
    if arguments.planner not in names:
        raise UserError(f"--planner {arguments.planner}: there is no such planner; there are {', '.join(names)}")
    check_rewrites(arguments)


def check_rewrites(arguments: argparse.Namespace) -> None:
    """Raises UserError unless there are rewrites of these names."""
    from torch_odt.capture.rewrite import switched_off

    try:
        switched_off(arguments.disable_rewrite, "auto")
    except ValueError as error:
        raise UserError(f"--disable-rewrite: {error}") from None


def print_json(document: dict[str, Any]) -> None:
    """The one document that `--json` promises; numbers that JSON does not have become null."""
    print(json.dumps(_plain(document), indent=2))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def planners_of(text: str) -> list[str]:
    """The names in `--planners`, separated by commas; `all` is everyone's.

    Raises:
        UserError: there is no planner of one of the names.
    """
    from torch_odt.planning.registry import get_planner, planner_names

    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == [ALL_PLANNERS]:
        return list(planner_names())
    for name in names:
        with as_user_errors(PlanError):
            get_planner(name)
    return names
