"""`torch-odt measure`: what training costs on this device, and what torch_odt changes."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch_odt.commands import options
from torch_odt.commands.errors import UserError, as_user_errors
from torch_odt.commands.measure_check import look
from torch_odt.commands.optimizers import NAMES
from torch_odt.commands.progress import Progress
from torch_odt.commands.table import seconds_text
from torch_odt.measure.record import Cell, Record
from torch_odt.memory._units import format_bytes, parse_bytes

NAME = "measure"
SUMMARY = "measure what training costs on this device, with plain PyTorch and with torch_odt"

SUITE_NAMES = ("ubiquitous", "architectures", "breakdown")
WORKER = "torch_odt.commands.measure_worker"
DEFAULT_BUDGET = "50%"
LIMIT_SHARE = 0.9
LEAST_SPARE_BYTES = 64 << 20
QUICK_REPETITIONS, REPETITIONS = 5, 20
QUICK_SECONDS, MOST_SECONDS = 3.0, 60.0
QUICK_RUN_SECONDS, RUN_SECONDS = 8.0, 600.0
QUICK_SEARCH_SECONDS, SEARCH_SECONDS = 30.0, 600.0
IDLE_SECONDS = {True: 0.3, False: 5.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    what = parser.add_argument_group("what is measured")
    what.add_argument("--suite", choices=SUITE_NAMES, default="ubiquitous", help="(default: ubiquitous, of Cai et al.)")
    what.add_argument("--quick", action="store_true", help="fewer and smaller cells: some minutes on two cores")
    what.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help=f"{options.MODEL_HELP}; repeatable; in the place of the suite's networks, beside whose sweeps it stands",
    )
    what.add_argument("--sample", type=options.shape, default=(), metavar="SHAPE", help="of one sample: 3x224x224")
    what.add_argument("--batch-sizes", type=_numbers, default=(), metavar="LIST", help="such as 1,4,16")
    what.add_argument("--threads", type=_numbers, default=(), metavar="LIST", help="such as 1,2,4")
    what.add_argument(
        "--governors", type=_words, default=(), metavar="LIST", help="of frequencies, to be set; needs privileges"
    )
    what.add_argument("--device", default="cpu", help="measure there as well, beside the CPU: cuda, mps (default: cpu)")
    what.add_argument("--executorch", action="store_true", help="measure ExecuTorch's training beside torch's, too")
    what.add_argument(
        "--budget", type=_words, action="extend", metavar="LIST",
        help="of torch_odt, a cell for each: bytes, or shares of plain PyTorch's, such as 30%%,50%% (default: 50%%); "
        "repeatable",
    )  # fmt: skip
    what.add_argument("--fit", metavar="BYTES", help="into which the largest batch is to fit (default: 512MiB)")
    what.add_argument("--optimizer", choices=NAMES, default="sgd", help="(default: sgd)")
    how = parser.add_argument_group("how it is measured")
    how.add_argument("--repetitions", type=options.positive_int, help=f"of a step, at least (default: {REPETITIONS})")
    how.add_argument(
        "--idle-seconds", type=options.positive_float, metavar="SECONDS",
        help="that meters measure while nothing runs, before steps (default: 5); a battery takes a minute or more",
    )  # fmt: skip
    how.add_argument("--run-seconds", type=options.positive_float, help="of the long run (default: 600)")
    how.add_argument("--limit", metavar="BYTES", help="that a cell may hold (default: 90%% of what is available)")
    how.add_argument(
        "--watts", type=_watts, metavar="BUSY[,IDLE]",
        help="of a busy core, and of the machine: a model of energy where there is no sensor",
    )  # fmt: skip
    results = parser.add_argument_group("what becomes of it")
    results.add_argument("--name", default="", help="of this device in the reports (default: its host name)")
    results.add_argument(
        "--out", type=Path, metavar="FILE.jsonl", help="the record; what is in it is not measured again"
    )
    results.add_argument("--html", type=Path, metavar="FILE.html", help="write a page with all figures")
    results.add_argument("--chrome-trace", type=Path, metavar="FILE.json", help="write traces for Perfetto")
    results.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="write scalars for TensorBoard")
    results.add_argument(
        "--report", type=Path, metavar="FILE.jsonl", help="measure nothing: report on a record, also an unfinished one"
    )
    results.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar="FILE.jsonl",
        help="measure nothing: set two records side by side; with --json one row for each cell and quantity, with both "
        "values and their ratio",
    )
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, or read what was measured, and report."""
    for option, path in (
        ("--out", arguments.out),
        ("--html", arguments.html),
        ("--chrome-trace", arguments.chrome_trace),
    ):
        options.check_folder(option, path)
        if path is not None and path.is_dir():
            raise UserError(f"{option} {path}: this is a folder; give a file in it")
    if arguments.tensorboard is not None:
        from torch_odt.integrations.tensorboard import require_tensorboard

        with as_user_errors(ImportError):
            require_tensorboard()
    if arguments.compare:
        return _compare(arguments)
    record = _measured(arguments) if arguments.report is None else _read(arguments.report)
    _write(arguments, record)
    if arguments.json:
        options.print_json({"machine": record.machine.to_dict(), "cells": [cell.to_dict() for cell in record.cells]})
    else:
        from torch_odt.measure.report import table

        print(table(record))
    return 1 if any(cell.outcome == "failed" for cell in record.cells) else 0


def _measured(arguments: argparse.Namespace) -> Record:
    from torch_odt.measure.executorch_step import executorch_reason
    from torch_odt.measure.machine import describe_machine
    from torch_odt.measure.run import Run, in_process
    from torch_odt.measure.suites import SUITES

    if arguments.owns_process:
        # As an interrupt: the cell that runs must not outlive this process.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments.executorch and (reason := executorch_reason()):
        raise UserError(f"--executorch: {reason}")
    machine = describe_machine(arguments.name)
    choices = _checked(arguments, _choices(arguments, machine.cores))
    with ExitStack() as stack:
        if arguments.out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torch_odt_"))) / "record.jsonl"
        else:
            out = arguments.out
        with as_user_errors(ValueError, OSError):
            going = Run(list(SUITES[arguments.suite](choices)), machine, out, in_process(WORKER))
        waiting = len(going.waiting)
        progress = stack.enter_context(Progress("measuring", waiting, quiet=arguments.json))
        if not arguments.json and waiting < len(going.jobs):
            progress.say(f"{len(going.jobs) - waiting} of {len(going.jobs)} cells are in {out} already")
        try:
            return going.go(done=lambda cell: progress.advance(_status(cell, going.seconds_left)))
        except KeyboardInterrupt:
            if arguments.out is not None:
                # With --json, standard output is for the document alone.
                print(f"Interrupted: the same command with --out {out} goes on from here", file=sys.stderr)
            raise


def _choices(arguments: argparse.Namespace, cores: int) -> Any:
    from torch_odt import memory
    from torch_odt.measure.job import How
    from torch_odt.measure.suites import Choices

    quick = arguments.quick
    budgets = tuple(dict.fromkeys(arguments.budget or [DEFAULT_BUDGET]))
    for budget in budgets:
        _check_budget(budget)
    limit = _bytes("--limit", arguments.limit)
    how = How(
        repetitions=arguments.repetitions or (QUICK_REPETITIONS if quick else REPETITIONS),
        most_seconds=QUICK_SECONDS if quick else MOST_SECONDS,
        idle_seconds=arguments.idle_seconds or IDLE_SECONDS[quick],
        run_seconds=arguments.run_seconds or (QUICK_RUN_SECONDS if quick else RUN_SECONDS),
        limit_bytes=limit or int(LIMIT_SHARE * memory.available()),
        search_seconds=QUICK_SEARCH_SECONDS if quick else SEARCH_SECONDS,
        watts=arguments.watts,
        optimizer=arguments.optimizer,
    )
    return Choices(
        quick=quick,
        models=arguments.model,
        sample_shape=arguments.sample,
        batch_sizes=arguments.batch_sizes,
        threads=arguments.threads,
        governors=arguments.governors,
        cores=cores,
        device=arguments.device,
        executorch=arguments.executorch,
        budgets=budgets,
        largest_batch_bytes=_bytes("--fit", arguments.fit) or 0,
        how=how,
    )


def _checked(arguments: argparse.Namespace, choices: Any) -> Any:
    """The choices with the batches that models bring; what no cell could be measured with is refused."""
    if not (arguments.model or arguments.limit or arguments.device != "cpu"):
        return choices
    seen = look({model: choices.shape_of(model) for model in arguments.model}, arguments.device)
    if arguments.limit and choices.how.limit_bytes <= seen.held_bytes:
        smallest = format_bytes(seen.held_bytes + LEAST_SPARE_BYTES)
        raise UserError(
            f"--limit {arguments.limit}: a cell's process holds {format_bytes(seen.held_bytes)} before it begins; the "
            f"smallest useful limit is about {smallest}"
        )
    for model, own in seen.own_batches.items():
        if set(arguments.batch_sizes) - {own.batch_size}:
            raise UserError(
                f"--batch-sizes: --model {model} brings a batch of its own, of {own.batch_size}: leave --batch-sizes "
                "out, or let the function return the module alone"
            )
    own_batches = {model: (own.batch_size, own.input_shape) for model, own in seen.own_batches.items()}
    return replace(choices, own_batches=own_batches)


def _status(cell: Cell, seconds_left: float | None) -> str:
    from torch_odt.measure.report.selection import threads_text
    from torch_odt.measure.report.ways import way_of

    median = cell.median_seconds
    result = cell.outcome if cell.outcome != "ok" else (seconds_text(median) if median is not None else "done")
    left = "" if seconds_left is None else f", {_duration(seconds_left)} left"
    batch = f" batch {cell.batch_size}" if cell.batch_size else ""
    what = cell.mode if cell.experiment == "step" else cell.experiment
    return f"{cell.model}{batch} {what}, {way_of(cell).name}, {threads_text(cell.threads)}: {result}{left}"


def _duration(seconds: float) -> str:
    return f"{math.ceil(seconds)} s" if seconds < 90 else f"{math.ceil(seconds / 60)} min"


def _write(arguments: argparse.Namespace, record: Record) -> None:
    from torch_odt.measure.report import write_chrome_trace, write_page

    for option, write, path in (
        ("--html", write_page, arguments.html),
        ("--chrome-trace", write_chrome_trace, arguments.chrome_trace),
        ("--tensorboard", _log, arguments.tensorboard),
    ):
        if path is not None:
            _write_file(arguments, option, path, partial(write, record, path))


def _write_file(arguments: argparse.Namespace, option: str, path: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror or error}") from error
    if not arguments.json:
        print(f"Written to {path}")


def _log(record: Record, folder: Path) -> None:
    from torch_odt.integrations.tensorboard import log_record

    log_record(record, folder)


def _compare(arguments: argparse.Namespace) -> int:
    from torch_odt.measure.report import compare

    first, second = (_read(path) for path in arguments.compare)
    paths = [path.stem for path in arguments.compare]
    has_one_name = first.machine.name == second.machine.name and paths[0] != paths[1]
    comparison = compare(first, second, names=(paths[0], paths[1]) if has_one_name else None)
    if arguments.html is not None:
        _write_file(arguments, "--html", arguments.html, partial(comparison.write_page, arguments.html))
    if arguments.json:
        options.print_json(comparison.to_dict())
    else:
        print(comparison)
    return 0


def _read(path: Path) -> Record:
    with as_user_errors(ValueError):
        try:
            return Record.read(path)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from error


def _check_budget(text: str) -> None:
    if not text.strip().endswith("%"):
        _bytes("--budget", text)
        return
    try:
        share = float(text.strip().removesuffix("%"))
    except ValueError:
        share = math.nan
    if share <= 0:
        raise UserError(f"--budget {text}: it must be above 0")
    if not math.isfinite(share):
        raise UserError(f"--budget {text}: a share is written as 50%")


def _bytes(option: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(options.positive_int(word) for word in _words(text))


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing: write a list such as 1,4")
    return words


def _watts(text: str) -> tuple[float, float]:
    numbers = [options.positive_float(word) for word in _words(text)]
    if not 1 <= len(numbers) <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not BUSY or BUSY,IDLE")
    return numbers[0], numbers[1] if len(numbers) == 2 else 0.0
