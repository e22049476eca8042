"""Blocks in depth: together they are the model, and each trains as plain PyTorch trains that block alone."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from adapted_steps import assert_trained_alike, train_both
from models import case_named
from torch import nn

import torch_odt as odt
from torch_odt.adapt.blocks import Stage
from torch_odt.adapt.chain import Chain
from torch_odt.measure import Window
from torch_odt.measure.memory import AllocatedMemory


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18", "vit_b_16"])
def test_the_segments_of_a_chain_are_the_model(name: str) -> None:
    case = case_named(name)
    model = case.model().eval()
    x = case.batches(1)[0][0][0]
    bounds = [None, *Chain(model, x).cuts, None]
    chain, value = Chain(model, x), x
    with torch.no_grad():
        for start, end in pairwise(bounds):
            value = chain.segment(start, end, training=False)(value)
        assert torch.equal(value, model(x))


class _InPlace(nn.Module):
    """Its activations' results are never used: what counts is the tensor that they change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(6, 6) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.relu(x)
        x = self.second(x)
        x.mul_(3)
        x = self.third(x)
        F.relu(x, inplace=True)
        torch.neg_(x)
        result: torch.Tensor = self.last(x)
        return result


def test_what_changes_a_tensor_in_place_stays_in_the_chain() -> None:
    torch.manual_seed(0)
    model, x = _InPlace().eval(), torch.randn(5, 6)
    chain = Chain(model, x)
    for training in (False, True):
        value = x.clone()
        with torch.no_grad():
            for start, end in pairwise([None, *chain.cuts, None]):
                value = chain.segment(start, end, training=training)(value)
            assert torch.equal(value, model(x))


def test_each_block_trains_as_in_plain_pytorch_and_the_model_has_it() -> None:
    torch.manual_seed(0)
    model = _network()
    keys, start = list(model.state_dict()), copy.deepcopy(model.state_dict())
    batch = (torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3]))
    blocks = odt.adapt.blockwise(model, F.cross_entropy, batch, blocks=2, cache=False)
    assert len(blocks) == 2
    assert "Conv2d" not in repr(blocks)
    for stage in blocks:
        assert stage.bytes <= blocks.largest_bytes
        before = copy.deepcopy(None if stage.frozen is None else stage.frozen.state_dict())
        assert_trained_alike(train_both(stage.module, [(stage.inputs(batch[0]), batch[1])]))
        if stage.frozen is not None:
            assert all(torch.equal(value, before[name]) for name, value in stage.frozen.state_dict().items())
    assert list(model.state_dict()) == keys
    assert not any(torch.equal(parameter, start[name]) for name, parameter in model.named_parameters() if "0.w" in name)


def test_cuts_are_named_by_their_modules() -> None:
    model = case_named("mobilenet_v2").model()
    names = [cut.name for cut in Chain(model, torch.zeros(1, 3, 32, 32)).cuts]
    assert "features.3 (add)" in names and not any(name.startswith("add") for name in names)


def test_a_budget_that_no_block_fits_names_the_smallest() -> None:
    batch = (torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3]))
    with pytest.raises(odt.InfeasibleBudget) as refusal:
        odt.adapt.blockwise(_network(), F.cross_entropy, batch, budget=odt.Budget(10, of="training"), cache=False)
    budget = odt.Budget(refusal.value.smallest_feasible_bytes, of="training")
    assert odt.adapt.blockwise(_network(), F.cross_entropy, batch, budget=budget, cache=False).stages
    with pytest.raises(odt.InfeasibleBudget, match="that the process held before"):
        odt.adapt.blockwise(_network(), F.cross_entropy, batch, budget="1MiB", cache=False)


def test_norms_without_running_statistics_count_the_whole_batch(tmp_path: Path) -> None:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()]
    layers += [nn.Conv2d(4, 64, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4)).train()
    batch = (torch.randn(16, 3, 32, 32), torch.arange(16) % 4)
    blocks = odt.adapt.blockwise(model, F.cross_entropy, batch, blocks=3, cache=tmp_path)
    last = blocks.stages[-1]
    given, unlimited = (last.inputs(batch[0]), batch[1]), odt.Budget(1 << 40, of="training")
    made = odt.plan(last.module, F.cross_entropy, given, budget=unlimited, cache=tmp_path)
    assert made.smallest_feasible_bytes is not None
    beside_bytes = blocks.largest_bytes - int(last.budget.amount)
    assert beside_bytes > 16 * 64 * 32 * 32 * 4
    assert last.bytes - made.smallest_feasible_bytes == pytest.approx(beside_bytes, rel=0.2)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_inputs_are_held_once_as_their_parts_lie(memory_format: torch.memory_format) -> None:
    x = torch.randn(8, 32, 64, 64).to(memory_format=memory_format)
    stage = Stage("", nn.Identity(), nn.ReLU(), 0, odt.Budget(1 << 30, of="training"), 3)
    assert torch.equal(stage.inputs(x), x.relu())
    with Window([AllocatedMemory()]) as window:
        before = odt.memory.stats().allocated_bytes
        made = stage.inputs(x)
    assert made.is_contiguous(memory_format=memory_format)
    peak_bytes = window.quantities["allocator"]["peak_allocated_bytes"]
    if before is not None:
        # The whole and a part of 3 of 8, where parts and the whole would be twice as much.
        assert peak_bytes - before < 1.6 * made.nbytes  # type: ignore[operator]


def test_what_is_no_chain_is_named() -> None:
    with pytest.raises(ValueError, match=r"Linear.*is no chain"):
        Chain(nn.Linear(3, 2), torch.ones(2, 3))
    x, y = torch.ones(2, 3, 8, 8), torch.zeros(2).long()
    for batch, message in ((x, r"inputs and target, \(x, y\)"), ((x[:0], y[:0]), "the batch is empty")):
        with pytest.raises(ValueError, match=message):
            odt.adapt.blockwise(_network(), F.cross_entropy, batch, blocks=2)  # type: ignore[arg-type]


def _network() -> nn.Module:
    widths = (3, 8, 8)
    layers = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).train()
