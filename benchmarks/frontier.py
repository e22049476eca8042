"""Seconds per step against bytes: torch_odt beside plain PyTorch and what PyTorch offers to train in less memory.

    python benchmarks/frontier.py --out results                       # everything; hours
    python benchmarks/frontier.py --models mobilenet_v2 --quick       # a look; minutes

A process per configuration. A plain eager process stays alive beside it, and the two take turns; every ratio is of two
neighbours in time. How memory is measured: README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import Configuration, configurations
from report import print_table, write_plot
from targets import print_targets
from workloads import BLOCKS, MODELS

HERE = Path(__file__).resolve().parent
# Of the budget that a refusal names.
SMALLEST_SHARES = (0.8, 0.85, 0.9, 0.95)


class WorkerFailed(RuntimeError):
    """A worker ended without an answer; the text is the end of what it wrote."""


class Worker:
    """A process that trains one configuration, on request."""

    def __init__(self, configuration: Configuration, request: dict[str, Any]) -> None:
        message = json.dumps(request | {"method": configuration.method, "value": configuration.value})
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), message],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | configuration.environment,
        )
        self.description = self._answer()

    def seconds(self, steps: int) -> list[float]:
        """Runs so many steps; returns the seconds of each."""
        self._say(f"steps {steps}")
        return self._answer()["seconds"]

    def causes(self, steps: int) -> dict[str, Any]:
        """Where the time of so many steps goes; see `step_profile.Causes` and `Attribution`."""
        self._say(f"observe {steps}")
        return self._answer()

    def finish(self) -> dict[str, Any]:
        """The check of its gradients, made after all timing; ends the process."""
        try:
            self._say("finish")
            return self._answer()
        finally:
            self.stop()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _say(self, text: str) -> None:
        print(text, file=self._process.stdin, flush=True)

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._log.seek(0)
        raise WorkerFailed(f"exit code {code}: {self._log.read()[-1500:].strip()}")


@dataclass
class Frontier:
    """All measurements of one model."""

    options: argparse.Namespace
    model: str
    folder: Path

    def measure(self) -> dict[str, Any]:
        request = self._request(self._channels_last())
        Worker(Configuration("float64"), request).stop()
        partner = Worker(Configuration("eager"), request)
        try:
            rows = self._measure_all(request, partner)
        finally:
            partner.stop()
        return {"model": self.model, "channels_last": request["channels_last"], "rows": rows}

    def _measure_all(self, request: dict[str, Any], partner: Worker) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        cells = configurations(self.model, self.options.batch_size, BLOCKS[self.model], self.options.quick)
        wanted = [c for c in cells if c.method == "eager" or _is_wanted(c, self.options.only)]
        for configuration in wanted:
            row = self._measure_one(configuration, request, partner)
            rows.append(row)
            if configuration.method == "eager" and "error" not in row:
                request["eager_bytes"] = row["memory"]["peak_bytes"]
            _print_progress(self.model, row)
        first = next((c for c in wanted if c.method == "torch_odt"), None)
        if first is not None:
            rows.append(self._measure_second_start(first, request))
        return rows

    def _measure_one(self, configuration: Configuration, request: dict[str, Any], partner: Worker) -> dict[str, Any]:
        row: dict[str, Any] = configuration.to_json()
        try:
            is_smallest = configuration.method == "torch_odt" and configuration.value == 0
            worker = self._smallest_worker(configuration, request) if is_smallest else Worker(configuration, request)
            try:
                rounds = self.options.rounds if configuration.headline else max(2, self.options.rounds // 2)
                pairs = [
                    (partner.seconds(self.options.steps), worker.seconds(self.options.steps)) for _ in range(rounds)
                ]
            except BaseException:
                worker.stop()
                raise
            row |= worker.description | {"check": worker.finish()}
        except (WorkerFailed, BrokenPipeError) as failure:
            return row | {"error": _reason(failure)}
        ratios = [statistics.median(ours) / statistics.median(plain) for plain, ours in pairs]
        return row | {
            "pairs": pairs,
            "ratios": ratios,
            "ratio": statistics.median(ratios),
            "seconds": statistics.median(s for _, ours in pairs for s in ours),
        }

    def _smallest_worker(self, configuration: Configuration, request: dict[str, Any]) -> Worker:
        """A worker in the smallest budget that is accepted: the one that a refusal names allows for unlucky starts."""
        probe = Worker(Configuration("find smallest"), request)
        probe.stop()
        named = probe.description["smallest_feasible_bytes"]
        for share in SMALLEST_SHARES:
            try:
                return Worker(configuration, request | {"smallest_feasible_bytes": int(share * named)})
            except WorkerFailed:
                continue
        return Worker(configuration, request | {"smallest_feasible_bytes": named})

    def _measure_second_start(self, configuration: Configuration, request: dict[str, Any]) -> dict[str, Any]:
        row: dict[str, Any] = configuration.to_json() | {"label": f"{configuration.label}, second start"}
        try:
            worker = Worker(configuration, request)
            row |= worker.description | {"check": worker.finish()}
        except (WorkerFailed, BrokenPipeError) as failure:
            return row | {"error": _reason(failure)}
        return row | {"second_start": True}

    def _channels_last(self) -> bool:
        """Whether plain eager is faster that way; decided by measuring both, step by step in turn."""
        if self.model == "bert_small" or self.options.memory_format == "contiguous":
            return False
        if self.options.memory_format == "channels_last":
            return True
        Worker(Configuration("float64"), self._request(False)).stop()
        workers = [Worker(Configuration("eager"), self._request(flag)) for flag in (False, True)]
        try:
            seconds = [[statistics.median(w.seconds(3)) for w in workers] for _ in range(3)]
        finally:
            for worker in workers:
                worker.stop()
        return statistics.median(row[1] / row[0] for row in seconds) < 1

    def _request(self, channels_last: bool) -> dict[str, Any]:
        return {
            "model": self.model,
            "batch_size": self.options.batch_size,
            "image_size": self.options.image_size,
            "channels_last": channels_last,
            "threads": self.options.threads,
            "momentum": self.options.momentum,
            "data_dir": str(self.options.data_dir) if self.options.data_dir else None,
            "gradients": str(self.folder / f"{self.model}.pt"),
            "cache": str(self.folder / f"cache-{self.model}"),
        }


def main() -> int:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": describe_machine(options), "models": []}
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            result["models"].append(Frontier(options, model, Path(folder)).measure())
        (options.out / "frontier.json").write_text(json.dumps(result, indent=1))
        write_plot(result, options.out / "frontier.png")
    print_table(result)
    print_targets(result)
    print(f"\nwritten: {options.out / 'frontier.json'}, {options.out / 'frontier.png'}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument(
        "--only", action="append", metavar="METHOD", help="methods whose name contains this; eager always"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cells, two rounds of two steps")
    parser.add_argument("--rounds", type=int, default=None, help="turns of a headline cell (5); others take half")
    parser.add_argument("--steps", type=int, default=None, help="timed steps in a turn (6)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD, which trains everywhere (0.9)")
    parser.add_argument("--memory-format", choices=("auto", "channels_last", "contiguous"), default="auto")
    parser.add_argument("--data-dir", type=Path, help="folder that holds FashionMNIST/; random images otherwise")
    parser.add_argument("--out", type=Path, default=Path("frontier"))
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.steps = options.steps or (2 if options.quick else 6)
    return options


def describe_machine(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    # Where the files lay says nothing of what was measured.
    chosen = {key: str(value) for key, value in vars(options).items() if key not in ("out", "data_dir", "cache")}
    chosen["data"] = "random images" if vars(options).get("data_dir") is None else "Fashion-MNIST"
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "time": time.strftime("%Y-%m-%d %H:%M"),
        "options": chosen,
    }


def _is_wanted(configuration: Configuration, only: list[str] | None) -> bool:
    return not only or any(word in configuration.label for word in only)


def _reason(failure: Exception) -> str:
    """What a worker said last; the whole of it is for the person who looks on."""
    print(failure, file=sys.stderr, flush=True)
    return str(failure).splitlines()[-1]


def _print_progress(model: str, row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{model:14s} {row['label']:34s} failed: {row['error'].splitlines()[-1][:100]}", flush=True)
        return
    peak = row["memory"]["peak_bytes"] / 2**20
    print(f"{model:14s} {row['label']:34s} {peak:7.0f} MiB {row['seconds']:7.3f} s {row['ratio']:5.2f}x", flush=True)


if __name__ == "__main__":
    sys.exit(main())
