"""Whole float32 steps as users get them, with every rewrite and with each one off: as near to float64 as plain PyTorch.

Activation functions are smooth: rounding carries no gradient over a kink, so that the distance is rounding's alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import exactness
import pytest
import torch
import torch.nn.functional as F
from models import Batch, ModelCase
from torch import Tensor, nn

import torch_odt as odt
from tests.execute.doors import open_door
from torch_odt.capture.rewrite import REWRITES

# Fused sums are added up in another order: their own rounding, at gradients of some thousand terms.
ROUNDING = 1e-5
PLENTY = odt.Budget("4GiB", of="training")


class Everything(nn.Module):
    """A residual network with pooling and dropout: most rewrites find something to do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.SiLU(), nn.MaxPool2d(2))
        self.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        self.depthwise = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.Hardswish()
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 8), nn.Tanh())
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.last(self.head(self.depthwise(self.block(x) + x)))


def make_batch(n: int, generator: torch.Generator) -> Batch:
    return (torch.randn(n, 3, 24, 24, generator=generator), torch.randint(5, (n,), generator=generator)), {}


CASE = ModelCase("everything", Everything, make_batch, loss_fn=F.cross_entropy, random=True, batch_size=6)


@pytest.fixture(scope="module")
def plain_and_exact() -> tuple[exactness.Outcome, exactness.Outcome]:
    return exactness.train_plainly(CASE), exactness.train_plainly(CASE, torch.float64)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("door", ["step", "wrap"])
@pytest.mark.parametrize("off", [None, *REWRITES])
def test_a_step_is_as_near_to_float64_as_plain_pytorchs(
    off: str | None, door: str, plain_and_exact: tuple[exactness.Outcome, exactness.Outcome]
) -> None:
    opened = open_door(door, CASE, PLENTY, disable_rewrites=[] if off is None else [off])
    outcome, plan = opened.train(PLENTY)
    made = {name for name in REWRITES for note in plan.notes if note.endswith(f"({name})")}
    assert off not in made and len(made) >= 4, plan.notes
    plain, exact = plain_and_exact
    if "update_in_backward" in made:
        plain, exact = (exactness.without_gradients(side) for side in (plain, exact))
    exactness.assert_as_exact(outcome, plain, exact, ROUNDING)
    exactness.assert_same_random_state(outcome, plain)
