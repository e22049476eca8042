"""`--background` and what goes with it: a run of `torch-odt train` that gives way to other programs."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

from torch_odt.commands import options
from torch_odt.commands.errors import UserError, as_user_errors
from torch_odt.runtime.background import Background, BackgroundRun, Releasing
from torch_odt.runtime.wait_policy import reexecute_with_wait_policy

_OTHERS = ("threads", "cores", "least", "nice", "pause_signals", "pause_below_battery", "pause_above_temperature")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    group = parser.add_argument_group("beside other programs")
    group.add_argument("--background", action="store_true", help="give way to other programs, at a lower priority")
    group.add_argument(
        "--threads",
        type=options.positive_int,
        help="with --background: keep to so many; otherwise some counts are tried on the first steps",
    )
    group.add_argument(
        "--cores",
        type=_cores,
        metavar="big|little|0,1",
        help="with --background: keep to the big cores, to the little ones, or to those of these numbers",
    )
    group.add_argument(
        "--least",
        choices=("seconds", "joules"),
        help="with --background: what threads and cores are chosen by; joules need a sensor (default: seconds)",
    )
    group.add_argument("--nice", type=int, metavar="N", help="with --background: priority, 0 to 19 (default: 10)")
    group.add_argument(
        "--pause-signals",
        action="store_true",
        default=None,
        help="with --background: SIGUSR1 pauses between two steps, SIGUSR2 resumes",
    )
    group.add_argument(
        "--pause-below-battery", type=float, metavar="PERCENT", help="with --background: wait for a supply below that"
    )
    group.add_argument(
        "--pause-above-temperature", type=float, metavar="CELSIUS", help="with --background: wait above that"
    )


def begin(arguments: argparse.Namespace) -> None:
    """First thing in the command: OpenMP's wait policy can be set by another start of the process alone.

    Raises:
        UserError: an option is given that means nothing without `--background`.
    """
    given = [name for name in _OTHERS if getattr(arguments, name) is not None]
    if given and not arguments.background:
        raise UserError(f"--{given[0].replace('_', '-')} is an option of --background: give that, too")
    if arguments.background:
        make_background(arguments)
        # A program that calls the command line as a function is not to be started anew.
        if arguments.owns_process:
            reexecute_with_wait_policy()


def make_background(arguments: argparse.Namespace) -> Background:
    """The options as one object.

    Raises:
        UserError: one is out of its range.
    """
    with as_user_errors(ValueError):
        return Background(
            nice=Background.nice if arguments.nice is None else arguments.nice,
            threads=arguments.threads,
            cores=arguments.cores,
            least=Background.least if arguments.least is None else arguments.least,
            pause_signals=(signal.SIGUSR1, signal.SIGUSR2) if arguments.pause_signals else None,
            pause_below_battery_percent=arguments.pause_below_battery,
            pause_above_celsius=arguments.pause_above_temperature,
        )


def _cores(text: str) -> frozenset[int] | Literal["big", "little"]:
    kinds: dict[str, Literal["big", "little"]] = {"big": "big", "little": "little"}
    if text in kinds:
        return kinds[text]
    numbers = text.split(",")
    if not all(number.strip().isdigit() for number in numbers):
        raise argparse.ArgumentTypeError(f'{text!r} is neither "big", "little" nor numbers of cores, as "0,1"')
    return frozenset(map(int, numbers))


@contextmanager
def in_background(arguments: argparse.Namespace, step: Releasing) -> Iterator[BackgroundRun | None]:
    """Inside, the process is in the background if that is asked for; None where it is not."""
    if not arguments.background:
        yield None
        return
    with ExitStack() as entered:
        with as_user_errors(ValueError):
            background = entered.enter_context(make_background(arguments).applied(step))
        if not arguments.json:
            for note in background.notes:
                print(f"In the background: {note}", flush=True)
        yield background
