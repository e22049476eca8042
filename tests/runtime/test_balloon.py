"""Training beside a process that takes memory and gives it back, in one control group: no kill, no bit lost."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from control_group import ControlGroup

from tests.runtime.balloon_worker import MIB, RESERVE_BYTES
from torch_odt import memory

WORKER = Path(__file__).with_name("balloon_worker.py")
STEPS = 40
CHANGES = 6
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built")]


@dataclass
class Told:
    """What a trainer has said."""

    losses: list[float] = field(default_factory=list)
    plan_bytes: list[int] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    return_code: int | None = None


@contextmanager
def worker(group: ControlGroup, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(WORKER), *map(str, arguments)]
    joined = ["sh", "-c", f'echo $$ > "{group.path}/cgroup.procs" && exec "$@"', "sh", *command]
    process = subprocess.Popen(joined, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def say(process: subprocess.Popen[str], word: object) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def follow(group: ControlGroup, cache: Path, *arguments: object, script: dict[int, int] | None = None) -> Told:
    """Train; with a script, beside a balloon that is told at a step how much to leave above the level of all."""
    told = Told()
    with (
        worker(group, "--group", group.path) as balloon,
        worker(group, "--steps", STEPS, "--cache", cache, *arguments) as trainer,
    ):
        assert balloon.stdout is not None and trainer.stdout is not None
        assert json.loads(balloon.stdout.readline())["ready"]
        assert json.loads(trainer.stdout.readline())["level_bytes"]
        most = max(script.values()) if script else 0
        if script:
            group.limit(group.unreclaimable_bytes() + most)
        say(trainer, "go")
        for line in trainer.stdout:
            message = json.loads(line)
            if "loss" in message:
                told.losses.append(message["loss"])
                told.plan_bytes.append(message["plan_bytes"])
                if script and (left := script.get(len(told.losses))) is not None:
                    say(balloon, most - left)
            else:
                told.end = message
        told.return_code = trainer.wait()
        assert balloon.poll() is None
    return told


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    try:
        group = ControlGroup()
    except OSError as reason:
        pytest.skip(str(reason))
    yield group
    group.close()


def test_a_neighbour_takes_memory_and_gives_it_back(group: ControlGroup, tmp_path: Path) -> None:
    smallest = follow(group, tmp_path, "--budget", "1MiB").end["smallest_bytes"]
    alone = follow(group, tmp_path, "--budget", "4GiB")
    kept = alone.plan_bytes[0]
    low, high = int(1.05 * smallest) + RESERVE_BYTES, int(1.2 * kept) + RESERVE_BYTES
    assert high - low > 64 * MIB
    chance = random.Random(4)
    places = sorted(chance.sample(range(5, STEPS - 5), CHANGES))
    lefts = [chance.randint(low, high) if index % 3 else low for index in range(CHANGES)]
    script = {1: high} | dict(zip(places, lefts, strict=True))

    disturbed = follow(group, tmp_path, script=script)
    assert disturbed.return_code == 0
    assert disturbed.losses == alone.losses
    assert disturbed.end["parameters"] == alone.end["parameters"]
    actions = Counter(decision["action"] for decision in disturbed.end["decisions"])
    assert actions["shrink"] >= 2 and actions["grow"] >= 1
    assert min(disturbed.plan_bytes) < 0.8 * kept <= max(disturbed.plan_bytes)
