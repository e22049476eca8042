"""What a step costs in joules on small devices as memory shrinks: POET beside what its paper compares it with.

    python recipes/poet_energy.py                                  # ResNet-18 on a Cortex-A72
    python recipes/poet_energy.py --models resnet18 vgg16 bert_small --devices cortex-a72 jetson-tx2 --out results
    python recipes/poet_energy.py --devices my-board.toml --deadlines 1.02 1.05

Nothing is executed and no data is needed: a step is traced, every operator costs what the device's file says, and
schedules are simulated. Budgets lie between what keeping everything takes (100 %) and the fewest bytes that any planner
knows (0 %); gradients count, parameters and the optimizer's state lie outside. Joules are counted as in POET's code:
the processor's watts while it computes and the storage's while it transfers; a processor that waits draws nothing.
Unlike there, the seconds of transfers count against a deadline, too. Capuchin and POFO minimise seconds, as in their
papers; the others minimise joules. The figures of POET's paper stand beside the measured ones, and the exit status is
1 where one of them is missed, or none can be judged.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_odt.capture.costs import Costs
from torch_odt.capture.device import costs_on, load_device
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.rewrite import rewrite
from torch_odt.capture.trace import trace_step
from torch_odt.commands.table import bytes_text, render
from torch_odt.planning import checkmate, poet
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.objective import schedule_for
from torch_odt.planning.optimized import Optimized
from torch_odt.planning.registry import get_planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.simulate import Simulation, simulate
from torch_odt.planning.smallest import smallest

CLASSES = 10
TOKENS = 128
# A model, and the images (or sequences) of a batch with which what can be given up is more than the gradients.
MODELS = {"resnet18": (16, 112), "vgg16": (32, 224), "bert_small": (16, TOKENS)}
POETS: dict[str, poet.Means] = {"poet": "both", "poet-paging": "paging", "poet-remat": "rematerialization"}
PLANNERS = (*POETS, "pofo", "capuchin", "checkmate", "auto")
# They know nothing of energy: their papers minimise the seconds of a step.
BY_SECONDS = ("pofo", "capuchin")
# What POET's paper names: its own extra joules, Capuchin's, and what it saves of those of each means alone.
POET_SHARE = 0.01
CAPUCHIN_SHARES = (0.73, 1.41)
SAVED_SHARE = 0.40
SLACK = 1 + 1e-6


@dataclass(frozen=True)
class Cell:
    """A planner on a model and a device, at one budget. What is not known is None.

    Attributes:
        budget_share: where the budget lies between the fewest bytes and keeping everything.
        deadline_share: what a step may take, as a share of the seconds of keeping everything.
        fits: within the budget and the deadline.
        extra_joules_share, extra_seconds_share: above keeping everything.
        gap_share: of its joules, what the best schedule may save, where the planner proves that.
    """

    model: str
    device: str
    planner: str
    budget_share: float
    budget_bytes: int
    deadline_share: float | None
    fits: bool
    peak_bytes: int
    joules: float
    extra_joules_share: float
    seconds: float
    extra_seconds_share: float
    recompute_seconds: float
    written_bytes: int
    read_bytes: int
    planning_seconds: float
    gap_share: float | None = None


@dataclass(frozen=True)
class Verdict:
    """A figure of the paper, and what was measured in its place.

    Attributes:
        measured: in words; what is missing where nothing could be measured.
        is_met: None where nothing could be measured.
    """

    model: str
    device: str
    target: str
    measured: str
    is_met: bool | None


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    cells: list[Cell] = []
    for model in options.models:
        graph = trace(model, options.batch_size, options.image_size)
        for device in options.devices:
            before = len(cells)
            for cell in compare(graph, model, device, options):
                cells.append(cell)
                print(f"{cell.planner} at {cell.budget_share:.0%}: {text(cell)}", file=sys.stderr, flush=True)
                if options.out is not None:
                    write(options.out, cells)
            print_tables(cells[before:])
    return print_verdicts(cells)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18"], choices=MODELS)
    parser.add_argument(
        "--devices", nargs="+", default=["cortex-a72"], metavar="NAME", help="or files that end in .toml"
    )
    parser.add_argument("--planners", nargs="+", default=list(PLANNERS), choices=PLANNERS)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.75, 0.5, 0.25, 0.1, 0.0], help="budgets")
    parser.add_argument(
        "--deadlines",
        nargs="*",
        type=float,
        default=[1.03],
        help="seconds of a step, times those of keeping everything",
    )
    parser.add_argument("--batch-size", type=int, help="each model has its own by default")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="of each integer program")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write poet_energy.csv and poet_energy.json there")
    return parser.parse_args(arguments)


def trace(name: str, batch_size: int | None, image_size: int | None) -> TrainingGraph:
    """The graph of a step, without running it."""
    samples, size = MODELS[name]
    samples, size = batch_size or samples, image_size or size
    labels = torch.zeros(samples, dtype=torch.long)
    if name == "bert_small":
        model, inputs = make_bert(), torch.zeros(samples, TOKENS, dtype=torch.long)
    else:
        import torchvision

        model, inputs = torchvision.models.get_model(name, num_classes=CLASSES), torch.zeros(samples, 3, size, size)

    def compute(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        scores = module(args[0])
        return nn.functional.cross_entropy(getattr(scores, "logits", scores), args[1]), ()

    return rewrite(trace_step(model, nn.functional.cross_entropy, compute, ((inputs, labels), {})).graph)


def make_bert() -> nn.Module:
    """BERT of 4 layers, hidden size 512 and 8 heads, classifying sequences."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=2048,
        num_labels=CLASSES,
        problem_type="single_label_classification",
    )
    return BertForSequenceClassification(config)


def compare(graph: TrainingGraph, model: str, device: str, options: argparse.Namespace) -> Iterator[Cell]:
    """Every planner at every budget, without a deadline and with each."""
    costs = costs_on(graph, load_device(device))
    everything = simulate(graph, costs, keep_all(graph, costs))
    _, least_bytes = smallest(graph, costs)
    print(
        f"{model} on {costs.machine}: keeping everything takes {bytes_text(everything.peak_bytes)}, "
        f"{everything.seconds:.3g} s and {everything.joules:.3g} J; the fewest bytes are {bytes_text(least_bytes)}",
        flush=True,
    )
    for deadline_share in (None, *options.deadlines):
        for share in options.shares:
            budget_bytes = least_bytes + math.floor(share * (everything.peak_bytes - least_bytes))
            for planner in options.planners:
                clock = time.perf_counter()
                deadline_seconds = math.inf if deadline_share is None else deadline_share * everything.seconds
                schedule, gap = plan(planner, graph, costs, budget_bytes, deadline_seconds, options.time_limit)
                planning_seconds = time.perf_counter() - clock
                simulation = simulate(graph, costs, schedule)
                yield Cell(
                    model=model,
                    device=device,
                    planner=planner,
                    budget_share=share,
                    budget_bytes=budget_bytes,
                    deadline_share=deadline_share,
                    fits=simulation.peak_bytes <= budget_bytes and simulation.seconds <= deadline_seconds * SLACK,
                    planning_seconds=planning_seconds,
                    gap_share=gap,
                    **measures(simulation, everything),
                )


def measures(simulation: Simulation, everything: Simulation) -> dict[str, Any]:
    return {
        "peak_bytes": simulation.peak_bytes,
        "joules": simulation.joules,
        "extra_joules_share": simulation.joules / everything.joules - 1,
        "seconds": simulation.seconds,
        "extra_seconds_share": simulation.seconds / everything.seconds - 1,
        "recompute_seconds": simulation.recompute_seconds,
        "written_bytes": simulation.written_bytes,
        "read_bytes": simulation.read_bytes,
    }


def plan(
    planner: str, graph: TrainingGraph, costs: Costs, budget_bytes: int, deadline_seconds: float, time_limit: float
) -> tuple[Schedule, float | None]:
    """The schedule of the fewest joules, and its gap where the planner proves one."""
    limits: dict[str, Any] = {"time_limit_seconds": time_limit}
    if planner in POETS:
        found = poet.optimize(
            graph,
            costs,
            budget_bytes,
            objective="joules",
            deadline_seconds=deadline_seconds,
            means=POETS[planner],
            **limits,
        )
        return found.schedule, found.gap
    if planner == "checkmate":
        # Its joules are its seconds: it only computes. So no deadline changes what is best.
        solved: Optimized = checkmate.optimize(graph, replace(costs, transfers=None), budget_bytes, **limits)
        return solved.schedule, solved.gap
    make = get_planner(planner)
    if planner in BY_SECONDS:
        return make(graph, costs, budget_bytes), None
    return schedule_for(make, graph, costs, budget_bytes, objective="joules", deadline_seconds=deadline_seconds), None


def print_tables(cells: Sequence[Cell]) -> None:
    """Extra joules by budget and planner; a table without a deadline and one for each."""
    planners = list(dict.fromkeys(cell.planner for cell in cells))
    for deadline in dict.fromkeys(cell.deadline_share for cell in cells):
        limit = "no deadline" if deadline is None else f"within {deadline:g} times the seconds of keeping everything"
        print(f"\nExtra joules, {limit} (in brackets extra seconds; a dash: nothing that fits):\n")
        rows = []
        for share in dict.fromkeys(cell.budget_share for cell in cells):
            row = {c.planner: c for c in cells if c.budget_share == share and c.deadline_share == deadline}
            budget = bytes_text(next(iter(row.values())).budget_bytes)
            rows.append([f"{share:.0%} ({budget})", *(text(row[planner]) for planner in planners)])
        print(render(rows, ["budget", *planners]), flush=True)
    print()


def text(cell: Cell) -> str:
    return f"{cell.extra_joules_share:.2%} ({cell.extra_seconds_share:.1%})" if cell.fits else "–"


def print_verdicts(cells: Sequence[Cell]) -> int:
    """Every figure beside what was measured; returns the exit status."""
    verdicts = [
        verdict
        for place in dict.fromkeys((cell.model, cell.device) for cell in cells)
        for verdict in judge(place, cells)
    ]
    words = {True: "met", False: "missed", None: "not judged"}
    rows = [[f"{v.model} on {v.device}", v.target, v.measured, words[v.is_met]] for v in verdicts]
    print(render(rows, ["", "target", "measured", ""]))
    judged = [verdict.is_met for verdict in verdicts if verdict.is_met is not None]
    if not judged:
        print("No target could be judged.")
    return int(not judged or not all(judged))


def judge(place: tuple[str, str], cells: Sequence[Cell]) -> Iterator[Verdict]:
    """The figures of the paper for a model on a device."""
    here = [cell for cell in cells if (cell.model, cell.device) == place]
    lowest, highest = CAPUCHIN_SHARES
    yield Verdict(*place, f"POET's extra joules below {POET_SHARE:.0%}", *judge_poet(here))
    yield Verdict(*place, f"Capuchin's from {lowest:.0%} up to {highest:.0%}", *judge_capuchin(here))
    for alone, means in (("poet-paging", "paging"), ("poet-remat", "recomputing")):
        target = f"up to {SAVED_SHARE:.0%} fewer than {means} alone, within a deadline"
        yield Verdict(*place, target, *judge_saved(here, alone))


def judge_poet(cells: Sequence[Cell]) -> tuple[str, bool | None]:
    """What was measured, and whether the target is met: at every budget without a deadline."""
    free = asked_of("poet", cells)
    fitting = [cell.extra_joules_share for cell in free if cell.fits]
    if not fitting:
        return nothing_of("poet", free)
    return f"at most {max(fitting):.2%}{unfitting(free)}", max(fitting) < POET_SHARE and len(fitting) == len(free)


def judge_capuchin(cells: Sequence[Cell]) -> tuple[str, bool | None]:
    """As `judge_poet`. It is met where the highest is in the paper's range or above it."""
    free = asked_of("capuchin", cells)
    fitting = [cell.extra_joules_share for cell in free if cell.fits]
    if not fitting:
        return nothing_of("capuchin", free)
    return f"{min(fitting):.1%} to {max(fitting):.1%}{unfitting(free)}", max(fitting) >= CAPUCHIN_SHARES[0]


def judge_saved(cells: Sequence[Cell], alone: str) -> tuple[str, bool | None]:
    """As `judge_poet`: what POET saves where both fit within the same deadline."""
    asked = asked_of("poet", cells, within_deadline=True)
    own = [cell for cell in asked if cell.fits]
    if not own:
        return nothing_of("poet", asked)
    others = [(cell, other) for cell in own if (other := twin(cell, alone, cells)) is not None]
    saved = [1 - cell.joules / other.joules for cell, other in others if other.fits]
    if not saved:
        return nothing_of(alone, [other for _, other in others])
    only = len(others) - len(saved)
    return f"at most {max(saved):.1%}; {only} of {len(others)} times only POET fits", max(saved) >= SAVED_SHARE


def asked_of(planner: str, cells: Sequence[Cell], *, within_deadline: bool = False) -> list[Cell]:
    return [c for c in cells if c.planner == planner and (c.deadline_share is not None) is within_deadline]


def nothing_of(planner: str, asked: Sequence[Cell]) -> tuple[str, bool | None]:
    """Where nothing fits there is no figure; POET is to fit."""
    if not asked:
        return f"{planner} was not asked for", None
    return f"{planner} fits at none of {len(asked)} budgets", False if planner == "poet" else None


def unfitting(cells: Sequence[Cell]) -> str:
    missing = sum(not cell.fits for cell in cells)
    return f"; at {missing} of {len(cells)} budgets it does not fit" if missing else ""


def twin(cell: Cell, planner: str, cells: Sequence[Cell]) -> Cell | None:
    """What another planner does in the same place."""
    wanted = replace(cell, planner=planner)
    names = ("model", "device", "planner", "budget_share", "deadline_share")
    return next((c for c in cells if all(getattr(c, name) == getattr(wanted, name) for name in names)), None)


def write(folder: Path, cells: Sequence[Cell]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "poet_energy.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Cell)])
        writer.writeheader()
        writer.writerows(asdict(cell) for cell in cells)
    (folder / "poet_energy.json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
