"""A run that is killed again and again, at any moment, ends with the bits of one that nobody disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
import killed_worker as worker

KILLS, WHILE_WRITING = 100, 20
generator = random.Random(0)
expected = worker.uninterrupted()
kills = while_writing = runs = acknowledged = 0
longest_seconds = 1.2 * worker.seconds_of_writing(Path(sys.argv[1]) / "probe")
while kills < KILLS or while_writing < WHILE_WRITING:
    folder = Path(sys.argv[1]) / str(runs)
    child, reports = worker.begin(folder)
    # Half of the kills come at some moment of a step, the others at some moment of the writing of some checkpoint.
    writes_until = generator.randrange(1, 4) if kills % 2 else 0
    seen = b""
    with os.fdopen(reports, "rb", buffering=0) as stream:
        while chunk := stream.read(65536):
            seen += chunk
            if writes_until and seen.count(b"writing") >= writes_until:
                time.sleep(generator.uniform(0, longest_seconds))
                break
            if not writes_until and b"resumed" in seen:
                time.sleep(generator.uniform(0, 0.3))
                break
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        while chunk := stream.read(65536):
            seen += chunk
    lines = seen.decode().splitlines()
    assert os.WIFSIGNALED(status) or (folder / "bits").exists(), (runs, lines)
    for line in lines:
        word, *number = line.split()
        if word == "resumed":
            assert int(number[0]) >= acknowledged, (runs, int(number[0]), acknowledged)
        elif word == "saved":
            acknowledged = int(number[0])
    if os.WIFSIGNALED(status):
        kills += 1
        while_writing += any(folder.glob("*.partial"))
    if (folder / "bits").exists():
        found = (folder / "bits").read_bytes()
        assert found == expected, (runs, len(found), len(expected), lines)
        runs, acknowledged = runs + 1, 0
print(kills, while_writing, runs)
"""


@pytest.mark.slow
def test_killed_at_any_moment_nothing_that_was_acknowledged_is_lost(tmp_path: Path) -> None:
    """A hundred kills, at least twenty of them while a checkpoint is being written."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert outcome.returncode == 0, outcome.stderr
    kills, while_writing, runs = map(int, outcome.stdout.split())
    assert kills >= 100 and while_writing >= 20 and runs >= 3
