"""The arena over many steps: one mapping, larger with a larger plan, smaller with a smaller budget, gone at the end."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from small_steps import PLENTY, assert_equal_models, make_step, plain_step, sgd
from torch import Tensor, nn

import torch_odt as odt
from torch_odt import memory

pytestmark = pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built")


def chain() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(6):
        layers += [nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def images(count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 3, 96, 96, generator=generator), torch.arange(count) % 5


def arena_counts() -> tuple[int, int]:
    """Bytes that all arenas reserve, and those of them that are resident."""
    gc.collect()
    arena = memory.stats().arena
    assert arena is not None
    return arena.reserved_bytes, arena.resident_bytes


def test_steps_share_one_mapping() -> None:
    before = arena_counts()[0]
    step = make_step(chain())
    batch = images()
    # The optimizer's first step makes its state, for which the pages are given back once.
    step(*batch)
    seen = set()
    for _ in range(3):
        step(*batch)
        seen.add((id(step._request.arena), *arena_counts()))
    assert len(seen) == 1
    reserved_bytes = arena_counts()[0] - before
    assert step.plan.arena_bytes <= reserved_bytes < step.plan.arena_bytes + 2**16


def test_a_larger_batch_grows_the_arena_and_the_smaller_plan_stays() -> None:
    model = chain()
    plain = copy.deepcopy(model)
    step, optimizer = make_step(model), sgd(plain.parameters())
    reserved = []
    for count in (4, 8, 4):
        batch = images(count)
        step(*batch)
        plain_step(plain, batch, optimizer)
        reserved.append(arena_counts()[0])
    assert reserved[0] < reserved[1] == reserved[2]
    assert_equal_models(model, plain)
    arena = memory.stats().arena
    assert arena is not None and not any(arena.misses.values())


def test_a_smaller_budget_shrinks_the_arena() -> None:
    before = arena_counts()[0]
    step, batch = make_step(chain()), images()
    step(*batch)
    large_bytes, whole = arena_counts()[0] - before, step.plan
    step.budget = odt.Budget(int(0.6 * whole.peak_bytes), of="training")
    step(*batch)
    assert step.plan.recomputed_ops > 0
    assert arena_counts()[0] - before < 0.7 * large_bytes
    step.budget = PLENTY
    step(*batch)
    assert arena_counts()[0] - before == large_bytes


def test_closing_returns_the_arena_to_the_system() -> None:
    before = arena_counts()
    step, batch = make_step(chain()), images()
    for _ in range(2):
        step(*batch)
    held_bytes = memory.process_bytes()
    arena_bytes = step.plan.arena_bytes
    assert arena_counts()[1] > before[1]
    step.close()
    assert arena_counts() == before
    assert memory.process_bytes() <= held_bytes - 0.9 * arena_bytes
