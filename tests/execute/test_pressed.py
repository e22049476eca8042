"""Training in a real control group, beside a process that takes what is free and gives it back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from control_group import ControlGroup
from scripted_budgets import make_net, plainly

from torch_odt import memory

MIB = 1 << 20
WORKER = Path(__file__).with_name("pressed_worker.py")
STEPS_AT_EACH = 16
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built"),
]


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    try:
        made = ControlGroup()
    except OSError as reason:
        pytest.skip(str(reason))
    yield made
    made.close()


@contextmanager
def worker(group: ControlGroup, *words: object) -> Iterator[Callable[..., dict[str, Any]]]:
    """A process in the group; called with a word, which it is told, it returns what the process says next."""
    command = [sys.executable, str(WORKER), *map(str, words)]
    joined = ["sh", "-c", f'echo $$ > "{group.path}/cgroup.procs" && exec "$@"', "sh", *command]
    process = subprocess.Popen(joined, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    to, of = process.stdin, process.stdout

    def ask(word: object = None, *, answers: bool = True) -> dict[str, Any]:
        if word is not None:
            to.write(f"{word}\n")
            to.flush()
        line = of.readline() if answers else "{}"
        assert line, f"ended by {process.wait()}"
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    try:
        yield ask
    finally:
        process.kill()
        process.communicate()


def test_who_takes_what_is_free_ends_no_training(group: ControlGroup) -> None:
    torch.set_num_threads(1)
    wanted = [0, 120 * MIB, 0]
    steps = len(wanted) * STEPS_AT_EACH
    losses, plans = [], []
    with worker(group, "train", steps) as trainer, worker(group, "hold", group.path) as neighbour:
        trainer(), neighbour()
        for position, nbytes in enumerate(wanted):
            neighbour(nbytes, answers=False)
            for _ in range(STEPS_AT_EACH):
                made = trainer("go")
                losses.append(made["loss"])
                plans.append(made["plan_bytes"])
                # What is given back is taken between two steps.
                time.sleep(0.05)
            if position == 0:
                # What is traced by a child process is counted in the group as well.
                group.limit(group.unreclaimable_bytes() + 100 * MIB)
        actions = trainer()["actions"]
    assert losses == plainly(make_net(), steps)
    # Which of them it is depends on whether a step runs when the neighbour takes, and on what the smallest plan takes.
    gives_back = {"shrink", "evict", "overtaken", "scarce"}
    assert {"begin", "grow"} <= set(actions) and gives_back & set(actions)
    assert plans[2 * STEPS_AT_EACH - 1] < 0.8 * plans[0] < plans[3 * STEPS_AT_EACH - 1]
