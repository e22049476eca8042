"""How far `checkmate` proves its schedules to be from the best, with the graph condensed to 50 and to 100 nodes.

    python benchmarks/optimality.py                      # all models; up to half an hour
    python benchmarks/optimality.py --models resnet18 --out results

Nothing is trained: each operator is measured once (and remembered), then the integer program is solved at shares of
what the step takes without recomputation, a minute each, on two threads. Its bound is that of the condensed graph; the
schedule is counted operator by operator. SGD with momentum updates the parameters in the backward pass. Promised are
gaps of 1 % at 50 nodes and 3 % at 100, for budgets of at least 1.5 times the widest operator; below that they are only
reported. Exits with 1 where a gap is larger.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from frontier import describe_machine
from placement import measure
from workloads import MODELS

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.checkmate import optimize
from torch_odt.planning.explore import lower_bound_bytes
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.problem import problem_of
from torch_odt.planning.simulate import simulate

SHARES = (0.6, 0.4, 0.3)
PROMISED_GAPS = {50: 0.01, 100: 0.03}
PROMISED_ROOM = 1.5


@dataclass(frozen=True)
class Proof:
    """What was proved about one model at one budget.

    Attributes:
        model, budget_share, budget_bytes: where; the share is of what keeping everything takes.
        room: the budget over what the widest operator needs beside what always stays.
        max_nodes: to which the graph was to be condensed.
        stages, units: to which it was.
        is_exact: it had not to be condensed.
        fits: a schedule within the budget was found.
        step_seconds: of that schedule, as predicted.
        bound_seconds: that no schedule of the condensed graph goes below.
        gap: the share of the step that the best schedule may save.
        solve_seconds: spent in the solver.
    """

    model: str
    budget_share: float
    budget_bytes: int
    room: float
    max_nodes: int
    stages: int
    units: int
    is_exact: bool
    fits: bool
    step_seconds: float
    bound_seconds: float
    gap: float
    solve_seconds: float

    @property
    def is_promised(self) -> bool:
        return self.room >= PROMISED_ROOM

    @property
    def is_kept(self) -> bool:
        return not self.is_promised or self.gap <= PROMISED_GAPS[self.max_nodes]

    def __str__(self) -> str:
        size = f"{self.stages} stages, {self.units} units"
        found = f"{1000 * self.step_seconds:.0f} ms, gap {self.gap:.2%}" if self.fits else "nothing fits"
        end = "" if self.is_promised else " (nothing promised)"
        head = f"{self.model:14s} {self.budget_share:4.0%} {self.room:5.2f}x {self.max_nodes:4d} nodes"
        return f"{head}: {size}: {found} after {self.solve_seconds:.1f} s{end}"


def main() -> int:
    options = parse_options()
    torch.set_num_threads(options.threads)
    proofs = []
    for model in options.models:
        graph, costs = measure(model, options)
        for proof in prove(model, graph, costs, options):
            proofs.append(proof)
            print(proof, flush=True)
            if options.out is not None:
                write(proofs, options)
    misses = [proof for proof in proofs if not proof.is_kept]
    promised = sum(proof.is_promised for proof in proofs)
    print(f"\n{promised} gaps of at most 1 % and 3 % are promised, {len(misses)} are larger")
    return 1 if misses else 0


def prove(model: str, graph: TrainingGraph, costs: Costs, options: argparse.Namespace) -> Iterator[Proof]:
    """Both sizes at every budget."""
    everything_bytes = simulate(graph, costs, keep_all(graph, costs)).peak_bytes
    widest_bytes = lower_bound_bytes(problem_of(graph, costs))
    for share in SHARES:
        budget_bytes = int(share * everything_bytes)
        for max_nodes in PROMISED_GAPS:
            found = optimize(
                graph,
                costs,
                budget_bytes,
                max_nodes=max_nodes,
                time_limit_seconds=options.planning_seconds,
                threads=options.threads,
            )
            yield Proof(
                model,
                share,
                budget_bytes,
                budget_bytes / widest_bytes,
                max_nodes,
                found.stages,
                found.units,
                found.is_exact,
                found.fits,
                found.seconds,
                found.bound_seconds,
                found.gap,
                found.solve_seconds,
            )


def write(proofs: list[Proof], options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"machine": describe_machine(options), "proofs": [asdict(proof) for proof in proofs]}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "optimality.json").write_text(json.dumps(result, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument("--planning-seconds", type=float, default=60.0, help="for each budget and size (60)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--cache", type=Path, help="folder for measurements; the default one otherwise")
    parser.add_argument("--out", type=Path, help="a folder for optimality.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
