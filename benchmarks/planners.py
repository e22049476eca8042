"""Every planner at every budget: predicted seconds per step, and how far each is from what is proved to be possible.

    python benchmarks/planners.py                                            # all models; hours
    python benchmarks/planners.py --models mobilenet_v2 --budgets 60% 40% --planning-seconds 10
    python benchmarks/planners.py --page-to /data/pages                      # a column more: poet with paging

Nothing is trained: each operator is measured once (and remembered). Batches are not cut, so that all planners work on
one graph; budgets are shares of what keeping everything takes there. The bound is that of `checkmate`'s integer
program, for a graph that may be condensed: a planner that works on the whole graph can be below it. It holds without
paging: a planner that has a file to page to stands in a column of its own, without a gap, and `auto` is not measured by
it. A planner takes `--planning-seconds` at each budget at most; checkmate and poet look for a first schedule in
four fifths of them, for it may have to be made smaller. Exits with 1
where `auto` is more than 3 % slower than the best planner of a cell, or finds nothing where another planner does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from frontier import describe_machine
from workloads import MODELS, make_workload

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.commands.bench import budgets_of
from torch_odt.execute.compare import Comparison, compare
from torch_odt.planning import checkmate
from torch_odt.planning.registry import planner, planner_names
from torch_odt.planning.schedule import Schedule

PROMISED_EXCESS = 0.03
BUDGETS = ("80%", "60%", "50%", "40%", "30%")
# Without a file it keeps everything; or it takes a minute for each of several tries without a bound to show for it.
LEFT_OUT = ("checkmate-lp", "poet-paging")
PAGING = "poet"
PAGING_COLUMN = "poet, paging"


@dataclass(frozen=True)
class Bounds:
    """`checkmate`; what it has proved is kept in a file, for it may plan in a process of its own.

    Attributes:
        path: of the file; a line for each proof.
    """

    path: Path
    threads: int

    def plan(
        self, graph: TrainingGraph, costs: Costs, budget_bytes: int, *, time_limit_seconds: float = 60.0
    ) -> Schedule:
        found = checkmate.optimize(
            graph, costs, budget_bytes, time_limit_seconds=time_limit_seconds, threads=self.threads
        )
        with self.path.open("a") as file:
            file.write(f"{budget_bytes} {found.bound_seconds!r}\n")
        return found.schedule

    def read(self) -> dict[int, float]:
        """The seconds of a step that no schedule is faster than, by budget."""
        seconds: dict[int, float] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            budget_bytes, bound_seconds = int(line.split()[0]), float(line.split()[1])
            seconds[budget_bytes] = max(bound_seconds, seconds.get(budget_bytes, 0.0))
        return seconds


@dataclass(frozen=True)
class Cell:
    """One planner at one budget, beside the bound and the best planner there; None where there is none."""

    comparison: Comparison
    bound_seconds: float | None
    best_seconds: float | None

    @property
    def gap(self) -> float | None:
        """How much slower than the bound."""
        seconds = self.comparison.step_seconds
        return None if seconds is None or not self.bound_seconds else seconds / self.bound_seconds - 1

    @property
    def excess(self) -> float | None:
        """How much slower than the best planner; infinite where only others fit."""
        if self.best_seconds is None:
            return None
        seconds = self.comparison.step_seconds
        return float("inf") if seconds is None else seconds / self.best_seconds - 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self.comparison) | {"bound_seconds": self.bound_seconds, "gap": self.gap}


def main() -> int:
    options = parse_options()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": describe_machine(options), "models": []}
    tables, misses = [], []
    for model in options.models:
        cells = measure(model, options)
        result["models"].append({"model": model, "cells": [cell.to_json() for cell in cells]})
        (options.out / "planners.json").write_text(json.dumps(result, indent=1))
        columns = [*options.planners, *([] if options.page_to is None else [PAGING_COLUMN])]
        tables.append(table(model, cells, columns))
        print(tables[-1], flush=True)
        misses += [f"{model} at {cell.comparison.budget_share:.0%}: {cell.excess:.1%}" for cell in misses_of(cells)]
    (options.out / "planners.md").write_text("\n\n".join(tables) + "\n")
    print("\n".join(["", "auto against the best planner:", *(misses or ["at most 3 % slower everywhere"])]))
    return 1 if misses else 0


def measure(model: str, options: argparse.Namespace) -> list[Cell]:
    """All planners at all budgets on one model."""
    workload = make_workload(model, options.batch_size, image_size=options.image_size, channels_last=True)
    loss_fn, batch = workload.task()
    proofs = tempfile.TemporaryDirectory()
    bounds = Bounds(Path(proofs.name) / "bounds", options.threads)
    planner("checkmate")(bounds.plan)
    compare_with = partial(
        compare,
        workload.model,
        loss_fn,
        batch,
        budgets=budgets_of(",".join(options.budgets)),
        micro_batch=options.batch_size,
        planning_seconds=options.planning_seconds,
        cache=options.cache,
        report=lambda each: print(f"{model} {each.budget_share:.0%} {each.planner}", file=sys.stderr, flush=True),
    )
    with proofs:
        found = compare_with(planners=options.planners)
        proved = bounds.read()
    cells = [Cell(each, proved.get(each.budget_bytes), best_seconds(found, each.budget_bytes)) for each in found]
    if options.page_to is None:
        return cells
    paging = compare_with(planners=[PAGING], page_to=options.page_to)
    return [*cells, *(Cell(replace(each, planner=PAGING_COLUMN), None, None) for each in paging)]


def best_seconds(found: Iterable[Comparison], budget_bytes: int) -> float | None:
    seconds = [each.step_seconds for each in found if each.budget_bytes == budget_bytes]
    return min((each for each in seconds if each is not None), default=None)


def misses_of(cells: Iterable[Cell]) -> list[Cell]:
    return [
        cell
        for cell in cells
        if cell.comparison.planner == "auto" and cell.excess is not None and cell.excess > PROMISED_EXCESS
    ]


def table(model: str, cells: list[Cell], planners: list[str]) -> str:
    """A line for each budget: milliseconds of a step of each planner, and by how much it is above the bound."""
    lines = [f"| {model} | bound | " + " | ".join(planners) + " |", "|---" * (len(planners) + 2) + "|"]
    for budget_bytes in dict.fromkeys(cell.comparison.budget_bytes for cell in cells):
        row = {cell.comparison.planner: cell for cell in cells if cell.comparison.budget_bytes == budget_bytes}
        first = next(iter(row.values()))
        bound = "" if first.bound_seconds is None else f"{1000 * first.bound_seconds:.0f}"
        share = f"{first.comparison.budget_share:.0%}, {budget_bytes / 2**20:.0f} MiB"
        lines.append(f"| {share} | {bound} | " + " | ".join(_text(row[name]) for name in planners) + " |")
    return "\n".join(lines)


def _text(cell: Cell) -> str:
    seconds = cell.comparison.step_seconds
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f}" + ("" if cell.gap is None else f" ({cell.gap:+.1%})")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument("--planners", nargs="+", metavar="NAME", help="(all); auto and checkmate always")
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), metavar="SHARE", help=" ".join(BUDGETS))
    parser.add_argument("--planning-seconds", type=float, default=60.0, help="for each planner that can use them (60)")
    parser.add_argument("--page-to", type=Path, metavar="FOLDER", help="compare poet with paging to there, too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--cache", type=Path, help="folder for measurements; the default one otherwise")
    parser.add_argument("--out", type=Path, default=Path("planners"))
    options = parser.parse_args()
    chosen = options.planners or [name for name in planner_names() if name not in LEFT_OUT]
    options.planners = list(dict.fromkeys([*(name for name in chosen if name != "auto"), "checkmate", "auto"]))
    return options


if __name__ == "__main__":
    sys.exit(main())
