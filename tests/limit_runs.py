"""Runs of `limit_worker.py` in control groups of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from control_group import ControlGroup
from exactness import Outcome

WORKER = Path(__file__).with_name("limit_worker.py")


@dataclass(frozen=True)
class Task:
    """What a worker is to do.

    Attributes:
        budget: bytes above its level; 0 for plain PyTorch.
        options: other options of the worker.
        trains: otherwise it ends when its level has been taken.
    """

    steps: int
    budget: int = 0
    options: tuple[str, ...] = ()
    trains: bool = True


@dataclass
class Run:
    """What became of one worker.

    Attributes:
        level_bytes: what the group held when model and data were in memory.
        highest_bytes: the highest anonymous memory while it trained, sampled by the worker itself.
        cached_bytes: what the system kept of files for the group: when model and data were in memory, and after each
            step.
        written_bytes: what was paged out.
        return_code: negative for a signal.
    """

    torch_version: str = ""
    level_bytes: int = 0
    highest_bytes: int = 0
    cached_bytes: list[int] = field(default_factory=list)
    written_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    outcome: Outcome | None = None
    return_code: int | None = None
    errors: str = ""

    @property
    def is_killed(self) -> bool:
        return self.return_code == -signal.SIGKILL


def run_worker(folder: Path, task: Task, limit: int | None = None) -> Run:
    """Run a worker in a group that may hold `limit` bytes from the worker's first page on."""
    group = ControlGroup()
    errors, outcome = folder / "errors.txt", folder / "outcome.npz"
    outcome.unlink(missing_ok=True)
    try:
        if limit is not None:
            group.limit(limit)
        with errors.open("w") as error_file:
            process = _start(group, task, outcome, error_file)
            run = _follow(process, group, task.trains)
        run.errors = errors.read_text()[-2000:]
        run.outcome = _read(outcome) if outcome.exists() else None
        return run
    finally:
        group.close()


def _start(group: ControlGroup, task: Task, outcome: Path, error_file: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), "--steps", str(task.steps), "--budget", str(task.budget)]
    command += ["--out", str(outcome), *task.options]
    if data_dir := os.environ.get("TORCH_ODT_DATA_DIR"):
        command += ["--data-dir", data_dir]
    # A shell joins the group and becomes the worker, so that the worker's first page is counted already.
    joined = ["sh", "-c", f'echo $$ > "{group.path}/cgroup.procs" && exec "$@"', "sh", *command]
    return subprocess.Popen(joined, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=error_file, text=True)


def _follow(process: subprocess.Popen[str], group: ControlGroup, trains: bool) -> Run:
    """Take the level when the worker is idle, let it go, and collect what it says."""
    run = Run()
    assert process.stdin is not None and process.stdout is not None
    try:
        idle = json.loads(process.stdout.readline() or "{}")
        run.torch_version = idle.get("torch", "")
        run.level_bytes = group.unreclaimable_bytes() if idle else 0
        run.cached_bytes = [group.cached_bytes()]
        if not trains:
            return run
        process.stdin.write("go\n")
        process.stdin.flush()
        for line in process.stdout:
            message = json.loads(line)
            if "loss" in message:
                run.losses.append(message["loss"])
                run.cached_bytes.append(group.cached_bytes())
            run.highest_bytes = max(run.highest_bytes, message.get("highest_anonymous_bytes", 0))
            run.written_bytes = message.get("written_bytes", 0)
        run.return_code = process.wait()
        return run
    finally:
        process.kill()
        process.communicate()


def _read(path: Path) -> Outcome:
    outcome = Outcome()
    with np.load(path) as arrays:
        for key, array in arrays.items():
            group, name = key.split("/", 1)
            outcome.tensors.setdefault(group, {})[name] = array
    return outcome


def mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
