"""Training beside a process that takes memory and gives it back, in one control group.

    python benchmarks/balloon.py --data-dir DIR --out results     # on a machine with nothing else to do, as root
    python benchmarks/balloon.py --steps 40 --changes 4           # a look

A MobileNetV2 learns Fashion-MNIST. A second process, the balloon, takes memory and gives it back at so many steps, by
a script that is drawn once; what it leaves lies between 1.05 times the smallest budget that a step has a plan for and
1.2 times what plain PyTorch takes, both of the whole process. It takes no more at once than is there, so that what a
trainer holds is not taken from it; who wants more than is left is ended by the system. A trainer that gives nothing
back would have it easier than the oracle: how much of what it was to hold the balloon had is reported.

| way | what it is |
|---|---|
| torch_odt | `TrainStep(budget=Controller(ControlGroupHeadroom(reserve="32MiB")))` |
| static | `TrainStep` with the largest fixed budget that holds throughout: the least that is ever left |
| plain | plain PyTorch |
| accelerate | plain PyTorch in `find_executable_batch_size`, where accelerate is installed |

The oracle is a step within the fixed budget that is left in each stretch of the script, in a process outside of the
group, and is timed once it has been planned and run. How fast a machine is changes within minutes, so both take turns:
where the script changes, trainer and balloon wait, no time passes for them, and steps of the oracle for the stretch
that has just ended are measured. Exits with 1 where torch_odt is ended once, a loss is not
that of an undisturbed run, the balloon had less than 90 % of what it was to hold, or the median of the ratios of its
runs is above 1.15.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from control_group import ControlGroup

from torch_odt.capture.machine import machine_name

WORKER = Path(__file__).with_name("balloon_worker.py")
WAYS = ("torch_odt", "static", "plain", "accelerate")
MIB = 1 << 20
LEAST, MOST = 1.05, 1.2
PROMISED = 1.15
# A trainer that gives nothing back would keep the promise, too.
LEAST_SHARE = 0.9


@dataclass
class Run:
    """What a trainer has said.

    Attributes:
        steps: that it has made.
        seconds: from the first step's begin to the last one's end.
        end: what it said last; empty where it was ended.
        balloon_share: how much the balloon had of what it was to hold, as a share of all byte seconds;
            None where it was ended with the trainer.
        oracle_seconds: that the oracle takes for the same steps, by stretch; empty where there is none.
    """

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    plan_bytes: list[int] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    return_code: int | None = None
    balloon_share: float | None = None
    oracle_seconds: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """Of its time to the oracle's; None where it did not finish, or beside none."""
        return self.seconds / sum(self.oracle_seconds) if self.fate == "finished" and self.oracle_seconds else None

    @property
    def seconds(self) -> float:
        return sum(self.step_seconds)

    @property
    def fate(self) -> str:
        if self.end.get("missing"):
            return "not installed"
        if self.return_code == 0:
            return "finished"
        return f"ended by the system after {len(self.losses)} steps"


@dataclass
class Script:
    """How much is left above the trainer's level, by the step from which on it is."""

    left_bytes: dict[int, int]
    steps: int

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Steps, and what is left in them."""
        places = [*self.left_bytes, self.steps]
        for begin, end in pairwise(places):
            yield end - begin, self.left_bytes[begin]


def main() -> int:
    options = parse_options()
    with tempfile.TemporaryDirectory() as cache:
        bench = Bench(options, Path(cache))
        script = bench.draw()
        runs: dict[str, list[Run]] = {"undisturbed": [bench.follow("fixed", "--budget", 1 << 40)]}
        with bench.oracle() as oracle:
            for way in options.ways:
                for _ in range(options.repeats if way == "torch_odt" else 1):
                    runs.setdefault(way, []).append(bench.follow_anew(way, script, oracle))
    return report(options, script, runs)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3, help="of torch_odt (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the script (default: 0)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--data-dir", type=Path, help="with FashionMNIST in it; random images without")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write balloon.json there")
    return parser.parse_args()


class Bench:
    """Runs trainers in control groups of their own."""

    def __init__(self, options: argparse.Namespace, cache: Path) -> None:
        self.options = options
        self.cache = cache
        self.level_bytes = 0

    def draw(self) -> Script:
        """Places and amounts of the script; what bounds them is measured."""
        refused = self.follow("fixed", "--budget", 1)
        plain = self.follow("plain", steps=4)
        self.level_bytes = plain.end["level_bytes"]
        low = int(LEAST * (self.level_bytes + refused.end["smallest_bytes"])) - self.level_bytes
        high = int(MOST * (self.level_bytes + plain.end["growth_bytes"])) - self.level_bytes
        chance = random.Random(self.options.seed)
        places = sorted(chance.sample(range(5, self.options.steps - 4), self.options.changes))
        # By shares: the same script wherever the bounds lie.
        left = {0: high} | {place: low + int(chance.random() * (high - low)) for place in places}
        print(
            f"left is {low / MIB:.0f} to {high / MIB:.0f} MiB above a level of {self.level_bytes / MIB:.0f}", flush=True
        )
        return Script(left, self.options.steps)

    def arguments_of(self, way: str, script: Script) -> list[object]:
        return ["--budget", min(script.left_bytes.values())] if way == "static" else []

    @contextmanager
    def oracle(self) -> Iterator[Oracle]:
        """A process that makes steps within fixed budgets."""
        with own_group() as group, worker(group, self.words("oracle")) as process:
            assert process.stdout is not None
            process.stdout.readline()
            tell(process, "go")
            yield Oracle(process)

    def follow_anew(self, way: str, script: Script, oracle: Oracle) -> Run:
        """Train beside the balloon, as if no other run of that kind had left its plans."""
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(self.cache, copy, dirs_exist_ok=True)
            alone = Bench(self.options, Path(copy))
            run = alone.follow(way, *self.arguments_of(way, script), script=script, oracle=oracle)
        print(f"{way}: {run.fate}, {run.seconds:.1f} s", flush=True)
        return run

    def words(self, way: str, *arguments: object) -> list[object]:
        """What the trainer's worker is told."""
        options = self.options
        words = ["--way", way, "--cache", self.cache, *arguments]
        words += ["--batch-size", options.batch_size, "--image-size", options.image_size]
        return words + ([] if options.data_dir is None else ["--data-dir", options.data_dir])

    def follow(
        self,
        way: str,
        *arguments: object,
        script: Script | None = None,
        oracle: Oracle | None = None,
        steps: int | None = None,
    ) -> Run:
        """Train; with a script, beside a balloon that is told when to hold how much, and in turns with an oracle."""
        words = [*self.words(way, *arguments), "--steps", steps or self.options.steps]
        stretches: list[tuple[int, int]] = []
        if script is not None:
            stretches = [*script.stretches()]
            words += ["--stops", *[place for place in script.left_bytes if place]]
        run = Run()
        with own_group() as group, worker(group, words) as trainer, worker(group, ["--group", group.path]) as balloon:
            assert trainer.stdout is not None and balloon.stdout is not None
            run.end = json.loads(trainer.stdout.readline())
            balloon.stdout.readline()
            most = 0
            if script is not None:
                most = max(script.left_bytes.values())
                group.limit(group.unreclaimable_bytes() + most)
            tell(trainer, "go")
            for line in trainer.stdout:
                message = json.loads(line)
                if "loss" not in message:
                    run.end |= message
                    continue
                run.losses.append(message["loss"])
                run.step_seconds.append(message["seconds"])
                run.plan_bytes.append(message.get("plan_bytes", 0))
                if script is None:
                    continue
                left = script.left_bytes.get(len(run.losses))
                if left is not None or len(run.losses) == script.steps:
                    tell(balloon, "wait")
                    assert oracle is not None
                    run.oracle_seconds.append(oracle.seconds(*stretches[len(run.oracle_seconds)]))
                if left is not None:
                    tell(balloon, most - left)
                    with suppress(BrokenPipeError):  # it was ended while it waited
                        tell(trainer, "go")
            run.return_code = trainer.wait()
            # Where the trainer and the group's last bytes went together, the system may have ended both.
            with suppress(BrokenPipeError):
                tell(balloon, "end")
            answer = balloon.stdout.readline()
            run.balloon_share = json.loads(answer)["share"] if answer else None
        return run


class Oracle:
    """A process that makes steps within fixed budgets, planned before they are timed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def seconds(self, steps: int, left_bytes: int) -> float:
        """That so many steps take with what is left, as fast as this machine is now."""
        tell(self._process, left_bytes)
        assert self._process.stdout is not None
        return steps * float(json.loads(self._process.stdout.readline())["seconds"])


@contextmanager
def own_group() -> Iterator[ControlGroup]:
    group = ControlGroup()
    try:
        yield group
    finally:
        group.close()


@contextmanager
def worker(group: ControlGroup, words: list[object]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(WORKER), *map(str, words)]
    joined = ["sh", "-c", f'echo $$ > "{group.path}/cgroup.procs" && exec "$@"', "sh", *command]
    process = subprocess.Popen(joined, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str], word: object) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def report(options: argparse.Namespace, script: Script, runs: dict[str, list[Run]]) -> int:
    print(f"\n{'':12}{'seconds':>9}{'oracle':>9}{'ratio':>7}{'median step':>13}  outcome")
    for way, made in runs.items():
        for run in made:
            print_row(way, run)
    is_kept = judge(runs["torch_odt"], runs["undisturbed"][0]) if "torch_odt" in runs else True
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        found = {
            "options": {name: value for name, value in vars(options).items() if name not in ("data_dir", "out")},
            "data": "random" if options.data_dir is None else "Fashion-MNIST",
            "machine": machine_name(),
            "page_reporting_order": page_reporting_order(),
            "left_bytes": script.left_bytes,
            "runs": {
                way: [asdict(run) | {"fate": run.fate, "ratio": run.ratio} for run in made]
                for way, made in runs.items()
            },
        }
        (options.out / "balloon.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if is_kept else 1


def page_reporting_order() -> int | None:
    """What of its free pages a virtual machine hands on to its host: blocks of 2^order pages; None where it cannot."""
    path = Path("/sys/module/page_reporting/parameters/page_reporting_order")
    return int(path.read_text()) if path.exists() else None


def print_row(way: str, run: Run) -> None:
    beside = f"{'':16}" if run.ratio is None else f"{sum(run.oracle_seconds):9.1f}{run.ratio:7.2f}"
    median = f"{statistics.median(run.step_seconds):13.3f}" if run.step_seconds else f"{'':13}"
    print(f"{way:12}{run.seconds:9.1f}{beside}{median}  {run.fate}")


def judge(runs: list[Run], undisturbed: Run) -> bool:
    """Whether all that is promised was kept in all runs."""
    is_kept = True
    for run in runs:
        actions = Counter(decision["action"] for decision in run.end.get("decisions", ()))
        is_same, share = run.losses == undisturbed.losses, run.balloon_share or 0.0
        print(
            f"losses {'equal' if is_same else 'NOT equal'} to the undisturbed run's; the balloon had {share:.0%} of "
            f"what it was to hold; decisions: {dict(actions)}"
        )
        is_kept = is_kept and run.return_code == 0 and is_same and share >= LEAST_SHARE
    ratio = statistics.median(math.inf if run.ratio is None else run.ratio for run in runs)
    is_kept = is_kept and ratio <= PROMISED
    print(
        f"{'kept' if is_kept else 'MISSED'}: nothing ended, equal losses, at most {PROMISED} times the oracle "
        f"(median {ratio:.2f})"
    )
    return is_kept


if __name__ == "__main__":
    raise SystemExit(main())
