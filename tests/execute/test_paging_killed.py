"""A process that is killed while it pages leaves nothing on the disk, and training goes on from its last checkpoint."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import paging_worker
import pytest
import torch
import torch.nn.functional as F
from exactness import WITH_GRADIENTS

import torch_odt as odt
from torch_odt._extensions import memory_module
from torch_odt.capture.costs import TransferCosts
from torch_odt.execute import page_file
from torch_odt.planning.schedule import PageIn, PageOut

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(memory_module is None, reason="torch_odt._memory, and with it the pager, is not built"),
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are seen in /proc"),
]

KILLS = 10
# Each process that is killed makes one step at most: the last one has something left to do.
STEPS = KILLS + 2


def save_plan(file: Path, folder: Path) -> int:
    """A plan that pages whatever it can; returns how many transfers a step makes."""
    model, optimizer = paging_worker.make_training()

    def plan(budget: int | str) -> odt.Plan:
        return odt.plan(
            model,
            F.cross_entropy,
            paging_worker.make_batch(0),
            budget=odt.Budget(budget, of="training"),
            optimizer=optimizer,
            planner="capuchin",
            disable_rewrites=WITH_GRADIENTS,
            page_to=folder,
            cache=False,
        )

    least = plan("1GiB").smallest_feasible_bytes
    assert least is not None
    made = plan(least)
    made.save(file)
    assert made.schedule is not None
    return sum(isinstance(instruction, (PageOut, PageIn)) for instruction in made.schedule.instructions)


def run_worker(folder: Path, checkpoint: str, kill_at: int = 0, kill_later: float = 0.0) -> dict[str, Any]:
    """A process that trains until it is done or killed; the checkpoint that it leaves, if there is one."""
    command = [sys.executable, "-W", "error", paging_worker.__file__, "--plan", str(folder / "plan.json")]
    command += ["--page-to", str(folder / "pages"), "--checkpoint", str(folder / checkpoint), "--steps", str(STEPS)]
    command += ["--kill-at", str(kill_at), "--kill-later", str(kill_later)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == (-signal.SIGKILL if kill_at else 0), ended.stderr
    return torch.load(folder / checkpoint) if (folder / checkpoint).exists() else {"steps": 0}


def open_files_in(folder: Path) -> list[str]:
    """Files of a folder that any process holds open, without a name too."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = link.readlink()
        except OSError:
            continue
        if target.parent == folder:
            found.append(f"{link}: {target}")
    return found


def test_a_killed_process_leaves_no_pages_and_training_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_file, "_measure", lambda _, limit: TransferCosts(0.0, 1e15, 0.0, 1e15, limit))
    pages = tmp_path / "pages"
    pages.mkdir()
    with torch.random.fork_rng(devices=[]):
        transfers = save_plan(tmp_path / "plan.json", pages)
    assert transfers >= 8
    # The file that was planned with is closed.
    gc.collect()
    undisturbed = run_worker(tmp_path, "undisturbed.pt")
    chance = random.Random(17)
    done = 0
    for _ in range(KILLS):
        moment = chance.randrange(1, 2 * transfers)
        left = run_worker(tmp_path, "killed.pt", moment, chance.uniform(0.0, 0.003))
        assert not list(pages.iterdir()), "a file that was paged to has a name"
        assert not open_files_in(pages)
        assert left["steps"] == done + (moment > transfers)
        done = left["steps"]
    finished = run_worker(tmp_path, "killed.pt")
    assert finished["steps"] == undisturbed["steps"] == STEPS > done
    _assert_equal(finished, undisturbed)


def _assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["model"].keys() == wanted["model"].keys()
    for name, tensor in wanted["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    for index, state in wanted["optimizer"]["state"].items():
        assert torch.equal(found["optimizer"]["state"][index]["momentum_buffer"], state["momentum_buffer"]), index
    assert torch.equal(found["random_state"], wanted["random_state"])
