"""A hard limit of the kernel: MobileNetV2 trains where plain PyTorch is killed.

The limit is what the idle process holds (imports, model and data in memory; anonymous and shared memory as the group's
own statistics count it, without page cache, which the kernel takes back) plus a share of what plain PyTorch takes
above: 35% in memory alone, 20% with a folder to page to. It is in force from import to exit: tracing, profiling and
planning included.

TORCH_ODT_DATA_DIR names a folder that holds FashionMNIST/; without it scikit-learn's digits are used.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from control_group import ControlGroup
from exactness import assert_identical
from limit_runs import Task, mib, run_worker

from torch_odt._extensions import memory_module
from torch_odt.capture.rewrite import REWRITES

STEPS = int(os.environ.get("TORCH_ODT_LIMIT_STEPS", "50"))
SHARE = 0.35
LOSS_TOLERANCE = 1e-3

PAGING_STEPS = 3
PAGING_SHARE = 0.2

# The rest is for what is not the plan's: the interpreter's own objects, thread stacks, freed pages kept by malloc.
BUDGET_SHARE = 0.9

pytestmark = [pytest.mark.cgroup, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _groups() -> None:
    try:
        ControlGroup().close()
    except OSError as error:
        pytest.skip(f"no memory control group can be made ({error}); this test needs root")


def test_trains_inside_a_limit_that_kills_plain_pytorch(tmp_path: Path) -> None:
    plain = run_worker(tmp_path, Task(STEPS))
    assert plain.return_code == 0, plain.errors
    headroom = int(SHARE * (plain.highest_bytes - plain.level_bytes))
    print(f"torch {plain.torch_version}: idle {mib(plain.level_bytes)}, plain takes {mib(plain.highest_bytes)}")

    killed = run_worker(tmp_path, Task(2), plain.level_bytes + headroom)
    assert killed.is_killed, f"plain PyTorch survived: {killed}"
    assert killed.level_bytes > 0, "it was killed while it trained, not before"

    # Losses are compared over a training that doubles every difference within a few steps: plain PyTorch's first
    # loss is 5e-4 away from float64's in this memory format, and at the end any other rounding is 0.4 off.
    rounded = [name for name, rewrite in REWRITES.items() if not rewrite.is_exact]
    disabled = [word for name in rounded for word in ("--disable-rewrite", name)]
    task = Task(STEPS, int(BUDGET_SHARE * headroom), tuple(disabled))
    idle = run_worker(tmp_path, replace(task, trains=False))
    ours = run_worker(tmp_path, task, idle.level_bytes + headroom)
    print(f"limit {mib(headroom)} above idle {mib(idle.level_bytes)}; last losses {ours.losses[-3:]}")
    assert ours.return_code == 0, f"exit code {ours.return_code}: {ours.errors}"
    assert len(ours.losses) == STEPS
    worst = max(abs(a - b) for a, b in zip(ours.losses, plain.losses, strict=True))
    assert worst <= LOSS_TOLERANCE, f"losses differ by {worst}: {ours.losses} against {plain.losses}"


@pytest.mark.skipif(memory_module is None, reason="torch_odt._memory, and with it the pager, is not built")
def test_pages_inside_a_limit_that_kills_plain_pytorch(tmp_path: Path) -> None:
    """What is in the file does not count, as nothing of it stays in the system's cache.

    Every bit is that of a step which pages nothing. Plain PyTorch's losses are no measure: three steps of an
    untrained network multiply a difference in rounding, such as another number of threads makes, by thousands.
    """
    folder = tmp_path / "pages"
    folder.mkdir()
    plain_task = Task(PAGING_STEPS)
    plain = run_worker(tmp_path, plain_task)
    assert plain.return_code == 0, plain.errors
    headroom = int(PAGING_SHARE * (plain.highest_bytes - plain.level_bytes))
    print(f"torch {plain.torch_version}: idle {mib(plain.level_bytes)}, plain takes {mib(plain.highest_bytes)}")
    killed = run_worker(tmp_path, plain_task, plain.level_bytes + headroom)
    assert killed.is_killed and killed.level_bytes > 0, f"plain PyTorch survived: {killed}"

    # This one pages before it recomputes; "auto" does not page on this device, as recomputing is faster.
    pager = ("--planner", "capuchin")
    in_memory = run_worker(tmp_path, Task(PAGING_STEPS, 2 * (plain.highest_bytes - plain.level_bytes), pager))
    task = Task(PAGING_STEPS, int(BUDGET_SHARE * headroom), (*pager, "--page-to", str(folder)))
    roomy = run_worker(tmp_path, task)
    assert in_memory.return_code == roomy.return_code == 0, in_memory.errors + roomy.errors
    ours = run_worker(tmp_path, task, roomy.level_bytes + headroom)
    print(f"limit {mib(headroom)} above idle {mib(roomy.level_bytes)}; {mib(ours.written_bytes)} written")
    assert ours.return_code == 0, f"exit code {ours.return_code}: {ours.errors}"
    assert not list(folder.iterdir())
    assert ours.written_bytes > PAGING_STEPS * headroom
    assert ours.outcome and in_memory.outcome
    assert ours.losses[0] == pytest.approx(plain.losses[0], abs=LOSS_TOLERANCE)
    assert_identical(ours.outcome, in_memory.outcome)
    # Files of libraries are read while the first step is traced.
    cached = roomy.cached_bytes[-1] - roomy.cached_bytes[1]
    assert cached < 0.05 * roomy.written_bytes, f"{mib(cached)} of {mib(roomy.written_bytes)} are in the cache"
