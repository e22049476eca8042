"""Blocks in depth: together they are the model, and each trains as plain PyTorch trains that block alone."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from adapted_steps import assert_trained_alike, train_both
from models import case_named
from torch import nn

import torch_odt as odt
from torch_odt.adapt.chain import Chain


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
    for stage in blocks:
        assert stage.bytes <= blocks.largest_bytes
        before = copy.deepcopy(None if stage.frozen is None else stage.frozen.state_dict())
        assert_trained_alike(train_both(stage.module, [(stage.inputs(batch[0]), batch[1])]))
        if stage.frozen is not None:
            assert all(torch.equal(value, before[name]) for name, value in stage.frozen.state_dict().items())
    assert list(model.state_dict()) == keys
    assert not any(torch.equal(parameter, start[name]) for name, parameter in model.named_parameters() if "0.w" in name)


def test_a_budget_that_no_block_fits_names_the_smallest() -> None:
    batch = (torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3]))
    with pytest.raises(odt.InfeasibleBudget) as refusal:
        odt.adapt.blockwise(_network(), F.cross_entropy, batch, budget=odt.Budget(10, of="training"), cache=False)
    budget = odt.Budget(refusal.value.smallest_feasible_bytes, of="training")
    assert odt.adapt.blockwise(_network(), F.cross_entropy, batch, budget=budget, cache=False).stages


def test_what_is_no_chain_is_named() -> None:
    with pytest.raises(ValueError, match=r"Linear.*is no chain"):
        Chain(nn.Linear(3, 2), torch.ones(2, 3))


def _network() -> nn.Module:
    widths = (3, 8, 8)
    layers = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).train()
