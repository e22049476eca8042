"""A hard limit of the kernel: MobileNetV2 trains where plain PyTorch is killed.

The limit is what the idle process holds (imports, model and data in memory; anonymous and shared memory as the group's
own statistics count it, without page cache, which the kernel takes back) plus 35% of what plain PyTorch takes above.
It is in force from import to exit: tracing, profiling and planning included.

TORCH_ODT_DATA_DIR names a folder that holds FashionMNIST/; without it scikit-learn's digits are used.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from control_group import ControlGroup

WORKER = Path(__file__).with_name("limit_worker.py")
STEPS = int(os.environ.get("TORCH_ODT_LIMIT_STEPS", "50"))
SHARE = 0.35
LOSS_TOLERANCE = 1e-3

pytestmark = [pytest.mark.cgroup, pytest.mark.slow]


@dataclass
class Run:
    """What became of one worker.

    Attributes:
        level_bytes: what the group held when model and data were in memory.
        highest_bytes: the highest anonymous memory while it trained, sampled by the worker itself.
        return_code: negative for a signal.
    """

    torch_version: str = ""
    level_bytes: int = 0
    highest_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    return_code: int | None = None
    errors: str = ""


@pytest.fixture
def group() -> Iterator[type[ControlGroup]]:
    try:
        ControlGroup().close()
    except OSError as error:
        pytest.skip(f"no memory control group can be made ({error}); this test needs root")
    yield ControlGroup


def test_trains_inside_a_limit_that_kills_plain_pytorch(group: type[ControlGroup], tmp_path: Path) -> None:
    plain = run_worker(group, tmp_path, steps=STEPS)
    assert plain.return_code == 0, plain.errors
    headroom = int(SHARE * (plain.highest_bytes - plain.level_bytes))
    print(f"torch {plain.torch_version}: idle {mib(plain.level_bytes)}, plain takes {mib(plain.highest_bytes)}")

    killed = run_worker(group, tmp_path, steps=2, limit=plain.level_bytes + headroom)
    assert killed.return_code == -signal.SIGKILL, f"plain PyTorch survived: {killed}"
    assert killed.level_bytes > 0, "it was killed while it trained, not before"

    # The rest is for what is not the plan's: the interpreter's own objects, thread stacks, freed pages kept by malloc.
    budget = int(0.9 * headroom)
    idle = run_worker(group, tmp_path, steps=STEPS, budget=budget, trains=False)
    ours = run_worker(group, tmp_path, steps=STEPS, limit=idle.level_bytes + headroom, budget=budget)
    print(f"limit {mib(headroom)} above idle {mib(idle.level_bytes)}; last losses {ours.losses[-3:]}")
    assert ours.return_code == 0, f"exit code {ours.return_code}: {ours.errors}"
    assert len(ours.losses) == STEPS
    worst = max(abs(a - b) for a, b in zip(ours.losses, plain.losses, strict=True))
    assert worst <= LOSS_TOLERANCE, f"losses differ by {worst}: {ours.losses} against {plain.losses}"


def run_worker(
    group_type: type[ControlGroup],
    folder: Path,
    *,
    steps: int,
    limit: int | None = None,
    budget: int = 0,
    trains: bool = True,
) -> Run:
    """Run a worker in a group of its own that may hold `limit` bytes from the worker's first page on.

    Args:
        trains: otherwise it ends when its level has been taken.
    """
    group = group_type()
    errors = folder / "errors.txt"
    try:
        if limit is not None:
            group.limit(limit)
        with errors.open("w") as error_file:
            process = start_worker(group, steps, budget, error_file)
            run = follow(process, group, trains)
        run.errors = errors.read_text()[-2000:]
        return run
    finally:
        group.close()


def start_worker(group: ControlGroup, steps: int, budget: int, error_file: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), "--steps", str(steps), "--budget", str(budget)]
    if data_dir := os.environ.get("TORCH_ODT_DATA_DIR"):
        command += ["--data-dir", data_dir]
    # A shell joins the group and becomes the worker, so that the worker's first page is counted already.
    joined = ["sh", "-c", f'echo $$ > "{group.path}/cgroup.procs" && exec "$@"', "sh", *command]
    return subprocess.Popen(joined, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=error_file, text=True)


def follow(process: subprocess.Popen[str], group: ControlGroup, trains: bool) -> Run:
    """Take the level when the worker is idle, let it go, and collect what it says."""
    run = Run()
    assert process.stdin is not None and process.stdout is not None
    try:
        idle = json.loads(process.stdout.readline() or "{}")
        run.torch_version = idle.get("torch", "")
        run.level_bytes = group.unreclaimable_bytes() if idle else 0
        if not trains:
            return run
        process.stdin.write("go\n")
        process.stdin.flush()
        for line in process.stdout:
            message = json.loads(line)
            run.losses += [message["loss"]] if "loss" in message else []
            run.highest_bytes = max(run.highest_bytes, message.get("highest_anonymous_bytes", 0))
        run.return_code = process.wait()
        return run
    finally:
        process.kill()
        process.communicate()


def mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
