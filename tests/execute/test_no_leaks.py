"""Training for a long time takes no more than training for a short one: memory, open files, threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from exactness import WITH_GRADIENTS
from scripted_budgets import Scripted
from torch import Tensor, nn

import torch_odt as odt
from torch_odt import memory

pytestmark = [
    pytest.mark.slow,
    # torch.compile itself warns of this and that.
    pytest.mark.filterwarnings("default", "error::torch_odt.errors.OdtWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built"),
]
STEPS = 1000
# What a thousand steps leave, if they leave something, every thousand does: malloc's settling is not of that kind.
THOUSANDS = 5
NOISE_BYTES = 40 * 1024


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


BATCH = torch.randn(4, 3, 16, 16), torch.arange(4)


def train_step(**options: Any) -> Callable[[], object]:
    model = make_net()
    optimizer = torch.optim.Adam(model.parameters())
    step = odt.TrainStep(model, F.cross_entropy, optimizer, cache=False, **options)
    return lambda: step(*BATCH)


def transactional(tmp_path: Path) -> Callable[[], object]:
    return train_step(budget="2GiB", transactional=True)


def changing(tmp_path: Path) -> Callable[[], object]:
    """Plans change all the time."""
    growth = (10 * [2**26] + 10 * [2**24]) * (THOUSANDS * STEPS // 20 + 1)
    return train_step(budget=Scripted(*growth, grow_after_seconds=0))


def paging(tmp_path: Path) -> Callable[[], object]:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"disable_rewrites": WITH_GRADIENTS, "page_to": tmp_path, "cache": False}
    options |= {"planner": "capuchin", "micro_batch": 4}
    budget = odt.Budget("1GiB", of="training")
    least = odt.plan(model, F.cross_entropy, BATCH, optimizer=optimizer, budget=budget, **options)
    assert least.smallest_feasible_bytes is not None
    budget = odt.Budget(least.smallest_feasible_bytes, of="training")
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=budget, **options)
    return lambda: step(*BATCH)


def wrapped(tmp_path: Path) -> Callable[[], object]:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    odt.wrap(model, budget="2GiB", cache=False, optimizer=optimizer)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(BATCH[0]), BATCH[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def held() -> tuple[int, int, int, int]:
    """Bytes of tensors, bytes of the process, open files, threads."""
    gc.collect()
    memory.trim()
    process = psutil.Process()
    own_bytes = memory.process_bytes()
    return memory.stats().allocated_bytes or 0, own_bytes, process.num_fds(), threading.active_count()


@pytest.mark.parametrize("make", [transactional, changing, paging, wrapped], ids=lambda make: make.__name__)
def test_five_thousand_steps_hold_what_a_thousand_do(
    make: Callable[[Path], Callable[[], object]], tmp_path: Path
) -> None:
    step = make(tmp_path)
    counts = []
    for _ in range(THOUSANDS):
        for _ in range(STEPS):
            step()
        counts.append(held())
    tensors, process, files, threads = zip(*counts, strict=True)
    assert max(tensors) == tensors[0]
    # What malloc keeps varies up and down; what leaks grows every time.
    assert median(later - earlier for earlier, later in pairwise(process)) <= NOISE_BYTES, process
    assert max(files) == files[0] and max(threads) == threads[0]
