"""Micro-batches and recomputation together: the fastest way wins, whichever half it takes; and planners compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_odt as odt
from torch_odt import memory
from torch_odt.cache import Cache
from torch_odt.execute.candidates import Candidates
from torch_odt.execute.compare import Comparison, compare
from torch_odt.planning.objective import Goal

needs_arena = pytest.mark.skipif(not memory.install(), reason="torch_odt._memory is not built")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Deep(nn.Module):
    """A chain whose activations are most of what a step holds."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(6):
            layers += [nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8) if norm else nn.Tanh(), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def images(count: int = 8, size: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, size, size), torch.arange(count) % 5


def compared(model: nn.Module, cache: Path, *planners: str, share: float, **options: Any) -> list[Comparison]:
    """With measurements that are made once, so that seconds can be compared."""
    budgets = [lambda nbytes: int(share * nbytes)]
    return compare(model, F.cross_entropy, images(), planners=planners, budgets=budgets, cache=cache, **options)


@dataclass
class Way:
    """What `Candidates.fastest` looks at of a candidate."""

    total_bytes: int
    seconds: float
    recomputes: bool
    joules: float | None = None
    pages: bool = False


class Table(Candidates):
    """Candidates that are known already: by micro-batch size, with and without recomputation."""

    ways: dict[int, tuple[Way, Way]]

    def make(self, sizes: tuple[int, ...], limit_bytes: int | None, **_: Any) -> Any:
        assert limit_bytes is not None
        kept, recomputed = self.ways[sizes[0]]
        return kept if kept.total_bytes <= limit_bytes else recomputed


@given(st.data(), st.integers(1, 100))
def test_the_fastest_micro_batch_and_recomputation_win_together(data: st.DataObject, limit_bytes: int) -> None:
    """As long as smaller micro-batches are no faster by themselves, nothing that fits is faster than what is chosen."""
    numbers = st.integers(1, 100)
    table = Table(8, None, None, None, "sage", False, Cache(enabled=False))  # type: ignore[arg-type]
    table.ways = {}
    seconds = 0
    for size in (8, 4, 2, 1):
        seconds += data.draw(numbers)
        kept_bytes, recomputed_bytes = data.draw(numbers), data.draw(numbers)
        recomputed = Way(recomputed_bytes, seconds + data.draw(numbers), True)
        table.ways[size] = (Way(kept_bytes, seconds, False), recomputed)
    feasible = [way for ways in table.ways.values() for way in ways if way.total_bytes <= limit_bytes]
    found: Any = table.fastest(limit_bytes)
    assert (found is None) == (not feasible)
    assert not feasible or found.seconds == min(way.seconds for way in feasible)


class Hurried(Candidates):
    """Whose frugal parts are each in time and not so together."""

    def make(self, sizes: tuple[int, ...], limit_bytes: int | None, **_: Any) -> Any:
        is_frugal = self.goal.objective == "joules"
        return Way(1, 2.0 if is_frugal else 1.0, True, 1.0 if is_frugal else 3.0)


@pytest.mark.parametrize(("deadline", "seconds"), [(2.5, 2.0), (1.5, 1.0), (0.5, 1.0)])
def test_what_is_late_gives_way_to_what_is_fastest(deadline: float, seconds: float) -> None:
    goal = Goal("joules", deadline)
    hurried = Hurried(1, None, None, None, "sage", False, Cache(enabled=False), goal=goal)  # type: ignore[arg-type]
    found: Any = hurried.fastest(1)
    assert found.seconds == seconds


def test_either_half_can_be_had_alone(tmp_path: Path) -> None:
    """Accumulation is "keep-all", recomputation is a micro-batch of the whole batch; both are at most as fast."""
    model = Deep()
    both, accumulation = compared(model, tmp_path, "sage", "keep-all", share=0.8)
    (recomputation,) = compared(model, tmp_path, "sage", share=0.8, micro_batch=8)
    assert accumulation.micro_batch in (1, 2, 4) and accumulation.recomputed_ops == 0
    assert recomputation.micro_batch is None and recomputation.recomputed_ops
    for half in (accumulation, recomputation):
        assert both.step_seconds is not None and half.step_seconds is not None
        assert both.step_seconds <= 1.000001 * half.step_seconds


def test_with_time_auto_is_no_slower_than_anyone(tmp_path: Path) -> None:
    planners = ("auto", "melon", "dtr", "min-cut", "capuchin")
    auto, *others = compared(Deep(norm=True), tmp_path, *planners, share=0.6, planning_seconds=3.0)
    assert auto.feasible and auto.step_seconds is not None
    for other in others:
        assert not other.feasible or auto.step_seconds <= 1.000001 * (other.step_seconds or 0.0), other.planner


def test_another_budget_is_decided_anew_between_two_batches(tmp_path: Path) -> None:
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    roomy = odt.Budget("1GiB", of="training")
    step = odt.TrainStep(model, F.cross_entropy, optimizer, budget=roomy, planner="sage", cache=tmp_path)
    batch = images(16, 64)
    step(*batch)
    assert step.plan.passes == 1 and step.plan.recomputed_ops == 0
    step.budget = odt.Budget(step.plan.peak_bytes - step.plan.arena_bytes // 2, of="training")
    step(*batch)
    assert step.plan.passes > 1 or step.plan.recomputed_ops > 0
    step.budget = roomy
    step(*batch)
    assert step.plan.passes == 1 and step.plan.recomputed_ops == 0


def test_planners_are_compared_at_every_budget(tmp_path: Path) -> None:
    told: list[Comparison] = []
    budgets = [lambda nbytes, share=share: int(share * nbytes) for share in (0.01, 0.7, 1.0)]
    found = compare(
        Deep(norm=True),
        F.cross_entropy,
        images(),
        planners=("keep-all", "melon"),
        budgets=budgets,
        cache=tmp_path,
        report=told.append,
    )
    assert told == found
    assert [(each.planner, each.feasible) for each in found] == [
        ("keep-all", False),
        ("melon", False),
        ("keep-all", False),
        ("melon", True),
        ("keep-all", True),
        ("melon", True),
    ]
    melon = found[3]
    assert melon.peak_bytes is not None and melon.peak_bytes <= melon.budget_bytes
    assert melon.slowdown is not None and melon.slowdown > 1.0 and melon.recomputed_ops
    assert found[4].slowdown == found[5].slowdown == 1.0


@needs_arena
def test_steps_are_executed_within_what_was_predicted(tmp_path: Path) -> None:
    model = Deep()
    for each in compared(model, tmp_path, "sage", "keep-all", share=0.6, steps=2):
        assert each.peak_bytes is not None and each.measured_peak_bytes is not None
        assert 0.5 * each.peak_bytes < each.measured_peak_bytes <= each.peak_bytes
        assert each.measured_step_seconds is not None and each.measured_step_seconds > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_frontier_has_micro_batches_in_it(tmp_path: Path) -> None:
    found = odt.frontier(Deep(), F.cross_entropy, images(), rungs=2, time_limit_seconds=1.0, cache=tmp_path)
    assert all(more.peak_bytes > less.peak_bytes for more, less in pairwise(found))
    assert all(more.step_seconds < less.step_seconds for more, less in pairwise(found))
    assert found.plans[0].micro_batch is None
    assert any(plan.micro_batch for plan in found)
    assert found.within(found.plans[0].peak_bytes) is found.plans[0]
    assert found.within(found.plans[0].peak_bytes - 1) is found.plans[1]
    with pytest.raises(odt.InfeasibleBudget) as refusal:
        found.within(found.plans[-1].peak_bytes - 1)
    assert refusal.value.smallest_feasible_bytes == found.plans[-1].peak_bytes
    assert len(str(found).splitlines()) == 1 + len(found)


def test_the_frontier_of_one_size(tmp_path: Path) -> None:
    found = odt.frontier(
        Deep(),
        F.cross_entropy,
        images(),
        planner="sage",
        micro_batch=3,
        rungs=2,
        time_limit_seconds=1.0,
        cache=tmp_path,
    )
    assert {plan.micro_batch for plan in found} == {3}


def test_what_cannot_be_cut_has_a_frontier_of_the_whole_batch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rungs": 2, "time_limit_seconds": 1.0, "cache": tmp_path}
    found = odt.frontier(Deep(norm=True), F.cross_entropy, images(), **options)
    assert {plan.micro_batch for plan in found} == {None}
    assert len(found) > 1
    with pytest.raises(odt.CaptureError, match="BatchNorm"):
        odt.frontier(Deep(norm=True), F.cross_entropy, images(), micro_batch=2, **options)
