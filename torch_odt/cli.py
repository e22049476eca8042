"""The command `torch-odt`: reads words, calls a command, turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch_odt import __version__
from torch_odt.commands import bench, demo, doctor, measure, options, plan, profile, train, watch
from torch_odt.commands.errors import UserError
from torch_odt.errors import CaptureError, InfeasibleBudget, OdtWarning, PagingError

COMMANDS: tuple[Any, ...] = (demo, train, plan, profile, measure, bench, watch, doctor)

DONE, UNEXPECTED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments, unknown = make_parser().parse_known_args(argv)
    if unknown:
        # By the command's own parser: the usage of all commands does not tell what this one takes.
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.owns_process = argv is None
    with warnings.catch_warnings():
        if not arguments.debug:
            _show_only_our_warnings()
        return _guarded(arguments.run, arguments)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="torch-odt", description="Train PyTorch models inside a number of bytes.")
    parser.add_argument("--version", action="version", version=f"torch_odt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = commands.add_parser(command.NAME, help=command.SUMMARY, description=_sentence(command.SUMMARY))
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser


def _guarded(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    try:
        return command(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not try to flush to them at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (UserError, InfeasibleBudget, CaptureError, PagingError) as error:
        if arguments.debug:
            raise
        return _report(error, str(error), USER_ERROR, as_json=arguments.json)
    except Exception as error:
        if arguments.debug:
            raise
        text = f"{type(error).__name__}: {error} (--debug shows where)"
        return _report(error, text, UNEXPECTED, as_json=arguments.json)


def _report(error: Exception, text: str, code: int, *, as_json: bool) -> int:
    print(f"torch-odt: error: {' '.join(text.split())}", file=sys.stderr)
    if as_json:
        document: dict[str, Any] = {"error": type(error).__name__, "message": str(error)}
        if isinstance(error, InfeasibleBudget):
            document["smallest_feasible_bytes"] = error.smallest_feasible_bytes
        options.print_json(document)
    return code


def _show_only_our_warnings() -> None:
    """Ours as one line each; what libraries warn their developers of is not the user's business."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("default", OdtWarning)
    warnings.showwarning = _show_warning


def _show_warning(message: Warning | str, *details: Any, **more: Any) -> None:
    print(f"torch-odt: note: {' '.join(str(message).split())}", file=sys.stderr)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
