"""The seconds of a training step by cause: kernels, page faults, Python, recomputation; before and after.

    python benchmarks/causes.py --out results                           # all models, on a quiet machine
    python benchmarks/causes.py --models mobilenet_v2 --steps 5         # a look

A process per configuration, one after the other: plain eager, plain eager with a tuned malloc, torch_odt in several
shares of plain eager's peak. How time is told apart: step_profile.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from frontier import Worker, WorkerFailed, describe_machine
from peers import TUNED_MALLOC, Configuration
from step_profile import GROUPS
from workloads import MODELS

CONFIGURATIONS = (
    Configuration("eager"),
    Configuration("eager, tuned malloc", environment=TUNED_MALLOC),
    *(Configuration("torch_odt", share) for share in (1.0, 0.5, 0.25)),
)
CAUSES = {
    "kernels": "kernel_seconds",
    "page faults": "fault_seconds",
    "Python": "python_seconds",
    "recomputation": "recomputation_seconds",
}


def main() -> int:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": describe_machine(options), "models": []}
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            result["models"].append(measure(model, options, Path(folder)))
        print_model(result["models"][-1])
        (options.out / "causes.json").write_text(json.dumps(result, indent=1))
    print_legend()
    print(f"\nwritten: {options.out / 'causes.json'}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument("--steps", type=int, default=5, help="without the profiler, and again with it (5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD (0.9)")
    parser.add_argument("--memory-format", choices=("channels_last", "contiguous"), default="channels_last")
    parser.add_argument("--data-dir", type=Path, help="folder that holds FashionMNIST/; random images otherwise")
    parser.add_argument("--out", type=Path, default=Path("causes"))
    return parser.parse_args()


def measure(model: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rows of a model; a budget that no plan fits into is a row with an error."""
    request = {
        "model": model,
        "batch_size": options.batch_size,
        "image_size": options.image_size,
        "channels_last": options.memory_format == "channels_last" and model != "bert_small",
        "threads": options.threads,
        "momentum": options.momentum,
        "data_dir": str(options.data_dir) if options.data_dir else None,
        "cache": str(folder),
    }
    rows = []
    for configuration in CONFIGURATIONS:
        row = configuration.to_json()
        try:
            row |= measure_one(configuration, request, options.steps)
        except (WorkerFailed, BrokenPipeError) as failure:
            row["error"] = str(failure).splitlines()[-1]
        rows.append(row)
        if configuration.method == "eager" and "memory" in row:
            request["eager_bytes"] = row["memory"]["peak_bytes"]
    return {"model": model, "channels_last": request["channels_last"], "rows": rows}


def measure_one(configuration: Configuration, request: dict[str, Any], steps: int) -> dict[str, Any]:
    worker = Worker(configuration, request)
    try:
        return {**worker.description, **worker.causes(steps)}
    finally:
        worker.stop()


def print_model(model: dict[str, Any]) -> None:
    """One line per configuration: the causes, then the kernels by group."""
    layout = ", channels_last" if model["channels_last"] else ""
    print(f"\n{model['model']}{layout}; milliseconds of a step")
    heads = (
        "peak",
        "step",
        "profiled",
        "|",
        *CAUSES,
        "|",
        *(_short(group) for group in GROUPS),
        "|",
        "faults",
        "system",
    )
    print(f"  {'configuration':22s}" + "".join(f"{head:>{_width(head)}s}" for head in heads))
    for row in model["rows"]:
        if "error" in row:
            print(f"  {row['label']:22s} failed: {row['error'][:90]}")
            continue
        causes = row["causes"]
        cells = [
            f"{row['memory']['peak_bytes'] / 2**20:.0f}",
            *(f"{1e3 * causes[name]:.0f}" for name in ("seconds", "profiled_seconds")),
            "|",
            *(f"{1e3 * causes[name]:.0f}" for name in CAUSES.values()),
            "|",
            *(f"{1e3 * causes['group_seconds'][group]:.0f}" for group in GROUPS),
            "|",
            f"{causes['faults']:.0f}",
            f"{1e3 * causes['system_seconds']:.0f}",
        ]
        pairs = zip(heads, cells, strict=True)
        print(f"  {row['label']:22s}" + "".join(f"{cell:>{_width(head)}s}" for head, cell in pairs), flush=True)
    _print_attribution(model["rows"])


def _print_attribution(rows: list[dict[str, Any]]) -> None:
    """Whether what is called page faults is what page faults take."""
    ratios = [
        row["attribution"]["system_seconds"] / row["attribution"]["seconds"] for row in rows if "error" not in row
    ]
    if ratios:
        print(
            f"  system seconds over what fresh pages add to an operator's wall: {min(ratios):.2f} to {max(ratios):.2f}"
        )


def print_legend() -> None:
    print("\npeak: MiB above the idle process. step: the median without the profiler; profiled: the mean with it,")
    print("which is kernels + page faults + Python + recomputation. Then the operators of kernels by group, their page")
    print("faults included. faults: pages that the calling thread was given in a step; system: milliseconds that it")
    print("was inside the operating system, page faults and whatever else.")


def _short(head: str) -> str:
    return head.partition(",")[0].removesuffix(" operators")


def _width(head: str) -> int:
    return len(head) + 2


if __name__ == "__main__":
    sys.exit(main())
