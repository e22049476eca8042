"""How much an arena wastes: its bytes beside the most that live in it at once, and the seconds that placing takes.

    python benchmarks/placement.py                       # all models
    python benchmarks/placement.py --models resnet18

Nothing is trained: each operator is measured once (and remembered), then schedules are made for shares of what the
step takes without recomputation, and for the fewest bytes, and each is placed. SGD with momentum updates the parameters
in the backward pass. Exits with 1 where an arena wastes more than is promised.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from workloads import MODELS, make_workload

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.execute.dry_run import measured
from torch_odt.planning.auto import auto
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.pool import pack
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.simulate import simulate
from torch_odt.planning.smallest import smallest

SHARES = (0.5, 0.25)
PROMISED_EXCESS = 0.03


@dataclass(frozen=True)
class Placement:
    """A schedule's arena.

    Attributes:
        budget: what the schedule was made for.
        live_bytes: the most that lives in the arena at once, as the simulator counts it.
        arena_bytes: what the arena takes.
        planning_seconds: to find the schedule, all placements tried on the way included.
        seconds: to place it once.
    """

    budget: str
    live_bytes: int
    arena_bytes: int
    planning_seconds: float
    seconds: float

    @property
    def excess(self) -> float:
        return self.arena_bytes / self.live_bytes - 1


def main() -> int:
    options = parse_options()
    heads = ("live MiB", "arena MiB", "excess", "placed in", "planned in")
    print(f"{'model':15s}{'budget':>10s}" + "".join(f"{head:>12s}" for head in heads))
    worst = 0.0
    for model in options.models:
        for found in placements(*measure(model, options)):
            worst = max(worst, found.excess)
            cells = (
                f"{found.live_bytes / 2**20:.1f}",
                f"{found.arena_bytes / 2**20:.1f}",
                f"{found.excess:.2%}",
                f"{found.seconds:.2f} s",
                f"{found.planning_seconds:.2f} s",
            )
            print(f"{model:15s}{found.budget:>10s}" + "".join(f"{cell:>12s}" for cell in cells), flush=True)
    is_kept = worst <= PROMISED_EXCESS
    verdict = "kept" if is_kept else "missed"
    print(f"\nat most {worst:.2%} above what lives at once; promised are {PROMISED_EXCESS:.0%}: {verdict}")
    return 0 if is_kept else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--cache", type=Path, help="folder for measurements; the default one otherwise")
    return parser.parse_args()


def measure(model: str, options: argparse.Namespace) -> tuple[TrainingGraph, Costs]:
    """The step's graph and what its operators cost."""
    workload = make_workload(model, options.batch_size, image_size=options.image_size, channels_last=True)
    batch = workload.batches[0]
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.01, momentum=0.9)
    if "images" in batch:
        loss_fn, args = nn.functional.cross_entropy, tuple(batch.values())
        return measured(workload.model, loss_fn, args, optimizer=optimizer, cache=options.cache)
    return measured(workload.model, None, batch, optimizer=optimizer, cache=options.cache)


def placements(graph: TrainingGraph, costs: Costs) -> Iterator[Placement]:
    """From the whole step without recomputation down to the fewest bytes."""

    def footprint(schedule: Schedule) -> int:
        return pack(graph, costs, schedule).total_bytes

    whole_bytes = footprint(keep_all(graph, costs))
    start = time.perf_counter()
    yield place("100%", graph, costs, keep_all(graph, costs), start)
    for share in SHARES:
        start = time.perf_counter()
        room_bytes = int(share * whole_bytes)
        schedule = auto(graph, costs, room_bytes, footprint=footprint)
        if footprint(schedule) <= room_bytes:
            yield place(f"{share:.0%}", graph, costs, schedule, start)
    start = time.perf_counter()
    yield place("smallest", graph, costs, smallest(graph, costs, footprint=footprint)[0], start)


def place(budget: str, graph: TrainingGraph, costs: Costs, schedule: Schedule, started: float) -> Placement:
    planned = time.perf_counter()
    layout = pack(graph, costs, schedule)
    seconds = time.perf_counter() - planned
    live_bytes = simulate(graph, costs, schedule).arena_peak_bytes
    return Placement(budget, live_bytes, layout.address_peak_bytes, planned - started, seconds)


if __name__ == "__main__":
    sys.exit(main())
