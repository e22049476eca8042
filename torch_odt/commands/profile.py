"""`torch-odt profile`: what every operator of a step costs on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from torch_odt.cache import Cache
from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.profile import costs_to_json, settings_name, table_of
from torch_odt.commands import options
from torch_odt.commands.errors import UserError
from torch_odt.commands.models import Task, task_of
from torch_odt.commands.progress import Progress
from torch_odt.commands.table import bytes_text, render, seconds_text

NAME = "profile"
SUMMARY = "measure every operator of a model's step, to plan with here or elsewhere"


@dataclass
class Total:
    """All calls of one operator.

    Attributes:
        target: its name.
        calls: how often a step calls it.
        seconds: of all calls.
        result_bytes: what all its results hold.
        peak_bytes: the most that one call holds at once.
    """

    target: str
    calls: int = 0
    seconds: float = 0.0
    result_bytes: int = 0
    peak_bytes: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    options.add_model(parser, default=None)
    options.add_input(parser)
    options.add_rewrites(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the costs there, for `torch-odt plan --costs`")
    parser.add_argument("--top", type=options.positive_int, default=12, help="how many operators to show (default: 12)")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured before")
    options.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Capture, measure, show, write."""
    options.check_folder("--out", arguments.out)
    options.check_rewrites(arguments)
    task = task_of(arguments)
    graph, costs = _measure(task, arguments.disable_rewrite, fresh=arguments.fresh, quiet=arguments.json)
    totals = sum_up(graph, costs)
    if arguments.out is not None:
        _write(arguments.out, costs_to_json(table_of(graph, costs, settings=settings_name())))
    if arguments.json:
        options.print_json(_document(task, costs, totals))
    else:
        print(_text(task, costs, totals, arguments.top))
        if arguments.out is not None:
            print(f"\nWritten to {arguments.out}")
    return 0


def sum_up(graph: TrainingGraph, costs: Costs) -> list[Total]:
    """The program's operators, the most expensive first."""
    totals: dict[str, Total] = {}
    for op in graph.program:
        if op.is_view:
            continue
        cost = costs.ops[op.index]
        total = totals.setdefault(op.target, Total(op.target))
        total.calls += 1
        total.seconds += cost.seconds
        blocks = cost.block_bytes
        results = {ordinal for ordinal in cost.result_ordinals if ordinal is not None}
        total.result_bytes += sum(blocks.get(ordinal, 0) for ordinal in results)
        total.peak_bytes = max(total.peak_bytes, cost.peak_bytes)
    return sorted(totals.values(), key=lambda total: -total.seconds)


def _measure(task: Task, disable_rewrites: list[str], *, fresh: bool, quiet: bool) -> tuple[TrainingGraph, Costs]:
    from torch_odt.execute.dry_run import measured

    with Progress("measuring", 1, quiet=quiet) as progress:
        cache = Cache(enabled=not fresh)
        graph, costs = measured(
            task.model,
            task.loss_fn,
            task.batch,
            disable_rewrites=disable_rewrites,
            cache=cache,
            progress=progress.report,
        )
        progress.report(len(costs.ops), len(costs.ops), "done")
        return graph, costs


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror or error}") from error


def _text(task: Task, costs: Costs, totals: list[Total], top: int) -> str:
    whole = sum(total.seconds for total in totals)
    rows = [_row(total, whole) for total in totals[:top]]
    if len(totals) > top:
        rows.append(_row(_merge(f"{len(totals) - top} others", totals[top:]), whole))
    rows.append(_row(_merge("all", totals), whole))
    lines = [f"{task.name} on {costs.machine}\n"]
    lines.append(render(rows, ["operator", "calls", "time", "of all", "results", "largest call"], indent=""))
    lines += [f"\nnote: {note}" for note in costs.notes]
    return "\n".join(lines)


def _row(total: Total, whole_seconds: float) -> list[str]:
    return [
        total.target.removesuffix(".default"),
        str(total.calls),
        seconds_text(total.seconds),
        f"{total.seconds / whole_seconds:.0%}" if whole_seconds else "",
        bytes_text(total.result_bytes),
        bytes_text(total.peak_bytes),
    ]


def _merge(name: str, totals: Iterable[Total]) -> Total:
    merged = Total(name)
    for total in totals:
        merged.calls += total.calls
        merged.seconds += total.seconds
        merged.result_bytes += total.result_bytes
        merged.peak_bytes = max(merged.peak_bytes, total.peak_bytes)
    return merged


def _document(task: Task, costs: Costs, totals: list[Total]) -> dict[str, object]:
    return {
        "model": task.name,
        "machine": costs.machine,
        "settings": settings_name(),
        "seconds": sum(total.seconds for total in totals),
        "operators": [asdict(total) for total in totals],
        "notes": list(costs.notes),
    }
