"""Predicted against measured seconds per step, for each planner at three budgets.

    python benchmarks/predicted.py                                                # on a quiet machine
    python benchmarks/predicted.py --models mobilenet_v2 --planners auto melon    # a look

Forward and backward pass without the optimizer, as `torch-odt bench --run` executes them. Exits with 1 where a
prediction is more than 15 % off.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from frontier import describe_machine
from workloads import MODELS, make_workload

from torch_odt.commands.bench import budgets_of
from torch_odt.execute.compare import Comparison, compare
from torch_odt.planning.registry import planner_names

PROMISED_ERROR = 0.15
PREDICTED = ("mobilenet_v2", "resnet50", "bert_small")
BUDGETS = ("100%", "60%", "40%")
# Other integer programs than `checkmate` look for a plan for minutes, which is then executed as any other.
SLOW = ("checkmate-lp", "poet", "poet-paging", "poet-remat")


def main() -> int:
    options = parse_options()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": describe_machine(options), "rows": []}
    worst = 0.0
    print(f"{'model':15s}{'planner':14s}{'budget':>8s}{'predicted':>12s}{'measured':>12s}{'ratio':>8s}")
    for model in options.models:
        for each in measure(model, options):
            row = to_json(model, each)
            result["rows"].append(row)
            ratio = row["ratio"]
            worst = worst if ratio is None else max(worst, abs(ratio - 1))
            print_row(row)
        (options.out / "predicted.json").write_text(json.dumps(result, indent=1))
    if not any(row["ratio"] is not None for row in result["rows"]):
        print("\nno plan fits anywhere: nothing was measured")
        return 1
    is_kept = worst <= PROMISED_ERROR
    print(f"\nat most {worst:.0%} off; promised are {PROMISED_ERROR:.0%}: {'kept' if is_kept else 'missed'}")
    return 0 if is_kept else 1


def measure(model: str, options: argparse.Namespace) -> list[Comparison]:
    workload = make_workload(model, options.batch_size, image_size=options.image_size, channels_last=True)
    loss_fn, batch = workload.task()
    return compare(
        workload.model,
        loss_fn,
        batch,
        planners=options.planners,
        budgets=budgets_of(",".join(options.budgets)),
        page_to=options.page_to,
        planning_seconds=options.planning_seconds,
        steps=options.steps,
        cache=options.cache,
    )


def to_json(model: str, each: Comparison) -> dict[str, Any]:
    predicted, measured = each.step_seconds, each.measured_step_seconds
    return {
        "model": model,
        "planner": each.planner,
        "budget_share": each.budget_share,
        "budget_bytes": each.budget_bytes,
        "micro_batch": each.micro_batch,
        "recomputed_ops": each.recomputed_ops,
        "predicted_seconds": predicted,
        "measured_seconds": measured,
        "ratio": None if predicted is None or measured is None else measured / predicted,
    }


def print_row(row: dict[str, Any]) -> None:
    start = f"{row['model']:15s}{row['planner']:14s}{row['budget_share']:>8.0%}"
    if row["ratio"] is None:
        print(f"{start}  no plan fits")
        return
    print(
        f"{start}{row['predicted_seconds']:>10.3f} s{row['measured_seconds']:>10.3f} s{row['ratio']:>8.2f}", flush=True
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quick = [name for name in planner_names() if name not in SLOW]
    parser.add_argument(
        "--models", nargs="+", default=list(PREDICTED), choices=MODELS, metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument("--planners", nargs="+", default=quick, metavar="NAME", help=" ".join(quick))
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), metavar="SHARE", help=" ".join(BUDGETS))
    parser.add_argument("--steps", type=int, default=7, help="measured for each plan (7)")
    parser.add_argument("--planning-seconds", type=float, default=10.0, help="for each planner that can use them (10)")
    parser.add_argument("--page-to", type=Path, metavar="FOLDER", help="planners may page to there, too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--cache", type=Path, help="folder for measurements; the default one otherwise")
    parser.add_argument("--out", type=Path, default=Path("predicted"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
