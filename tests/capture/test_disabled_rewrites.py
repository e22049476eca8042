"""Rewrites that are switched off by name: what a plan does not name has not been made, and the step is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import torch_odt as odt
from tests.capture.test_rewrite import capture, check_against_plain, execute
from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm
from torch_odt.adapt.stored_weights import StoredConv2d
from torch_odt.capture.rewrite import REWRITES, for_whole_batch, inexact_rewrites, switched_off

# Those of a graph by itself: parameters are updated where there is an optimizer.
OF_GRAPHS = [name for name, row in REWRITES.items() if row.stage != "optimizer"]
# What finds nothing to do where another one is not made.
BEHIND = {"direct_pointwise": {"read_codes"}}
PLENTY = odt.Budget("8GiB", of="training")


@pytest.fixture(autouse=True)
def _small_images_are_laid_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_odt.capture.choose_layouts.MOST_COPIED", 10.0)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class EveryRewrite(nn.Module):
    """Something for each rewrite to do."""

    def __init__(self) -> None:
        super().__init__()
        fixed = FrozenBatchNorm(nn.BatchNorm2d(3))
        wide = nn.Conv2d(3, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1, groups=32), nn.Conv2d(32, 3, 1)
        layers = nn.Conv2d(3, 3, 1), fixed, nn.Hardswish(), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.untrained = nn.Sequential(*wide, *layers).requires_grad_(False)
        with torch.no_grad():
            # So many layers make numbers small, and the first BatchNorm that trains makes rounding of small ones large.
            wide[-1].weight.mul_(30)
        self.first = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.frozen = nn.Conv2d(16, 4, 3)
        self.frozen.weight.requires_grad_(False)
        self.depthwise = nn.Conv2d(16, 16, 1, groups=16)
        self.pointwise = nn.Sequential(nn.Conv2d(16, 16, 1), StoredConv2d(nn.Conv2d(16, 16, 1)))
        stored = nn.Conv2d(4, 4, 1)
        stored.weight.requires_grad_(False)
        self.stored = StoredConv2d(stored)
        self.last = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(self.untrained(x)))).clone().mul_(2)
        x = self.depthwise(x.contiguous(memory_format=torch.channels_last))
        x = self.stored(self.frozen(self.pointwise(x)))
        x = torch.max_pool2d(x, 2, 1, 1, 2).flatten(1)
        x = x.as_strided(x.shape, x.stride())
        return torch.tanh(self.last(torch.dropout(torch.relu(x), 0.5, True)))


def images() -> Tensor:
    """A batch whose gradient autograd computes and no step delivers."""
    return torch.randn(2, 3, 16, 16).requires_grad_()


def names_in(notes: list[str]) -> set[str]:
    return {name for name in REWRITES for note in notes if note.endswith(f"({name})")}


def test_a_plan_names_every_rewrite() -> None:
    assert names_in(for_whole_batch(capture(EveryRewrite(), images(), torch.randn(2, 4))).notes) == set(OF_GRAPHS)


@pytest.mark.parametrize("name", OF_GRAPHS)
def test_each_can_be_switched_off(name: str) -> None:
    model, x, y = EveryRewrite(), images(), torch.randn(2, 4)
    graph = for_whole_batch(capture(model, x, y, disabled=[name]), [name])
    assert names_in(graph.notes) == set(OF_GRAPHS) - {name} - BEHIND.get(name, set())
    state = torch.get_rng_state()
    found = execute(graph, model, (x, y))
    torch.set_rng_state(state)
    expected = execute(capture(model, x, y), model, (x, y))
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor)


def test_without_inexact_ones_every_bit_is_plain_pytorchs() -> None:
    graph = check_against_plain(EveryRewrite(), images(), torch.randn(2, 4), disabled=inexact_rewrites())
    assert names_in(graph.notes).isdisjoint(inexact_rewrites())


def test_keep_all_makes_none_that_rounds_otherwise() -> None:
    model = EveryRewrite()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = odt.TrainStep(model, nn.MSELoss(), optimizer, budget=PLENTY, planner="keep-all", cache=False)
    step(images().detach(), torch.randn(2, 4))
    assert names_in(list(step.plan.notes)).isdisjoint(inexact_rewrites())


def open_step(names: object) -> None:
    model = nn.Linear(2, 2)
    odt.TrainStep(
        model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), budget=PLENTY, disable_rewrites=names
    )


def open_wrap(names: object) -> None:
    odt.wrap(nn.Linear(2, 2), budget=PLENTY, disable_rewrites=names)


def make_plan(names: object) -> None:
    batch = (torch.randn(2, 2), torch.randn(2, 2))
    odt.plan(nn.Linear(2, 2), nn.MSELoss(), batch, budget=PLENTY, disable_rewrites=names)


@pytest.mark.parametrize("attempt", [open_step, open_wrap, make_plan])
def test_wrong_names_are_refused(attempt: Callable[[object], None]) -> None:
    with pytest.raises(ValueError, match=r"no rewrite 'fuse_everything'; there are remove_copies, .*fuse_batch_norm"):
        attempt(["fuse_everything"])
    with pytest.raises(TypeError, match=r"several names: write \['fuse_batch_norm'\]"):
        attempt("fuse_batch_norm")
    with pytest.raises(TypeError, match=r"disable_rewrites takes names of rewrites, .* not None"):
        attempt(None)


def test_without_compiled_operators_nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_odt.capture.rewrite.has_kernels", False)
    assert switched_off((), "auto") == {name for name, row in REWRITES.items() if row.needs_kernels}
