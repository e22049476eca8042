"""Frozen BatchNorms compute with the weight that there is, in the type of their input."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))


def _plain(norm: FrozenBatchNorm, x: Tensor) -> Tensor:
    return nn.functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)


def test_a_weight_that_has_trained_is_not_forgotten_when_it_is_frozen() -> None:
    model, x = _network(), torch.randn(2, 3, 8, 8)
    adaptation = odt.adapt.tinytl_(model, mode="norm+last")
    optimizer = torch.optim.SGD(adaptation.parameters(), lr=0.5)
    model(x).square().sum().backward()
    optimizer.step()
    assert not torch.allclose(model[1].weight, torch.ones(4), atol=1e-2)
    trained = model(x)
    model.requires_grad_(False)
    torch.testing.assert_close(model(x), trained)
    model[1].weight.requires_grad_(True)
    odt.adapt.bias_only_(model)
    assert not model[1].weight.requires_grad
    torch.testing.assert_close(model(x), trained)
    # From here on it is computed once again: with what is kept, and not with the weight.
    with torch.no_grad():
        model[1].weight.zero_()
    torch.testing.assert_close(model(x), trained)


def test_a_captured_step_trains_the_weight_and_freezing_by_hand_keeps_it() -> None:
    model, x, y = _network(), torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 0, 1])
    adaptation = odt.adapt.bias_only_(model)
    model[1].weight.requires_grad_(True)
    model.train()
    optimizer = torch.optim.SGD([*adaptation.parameters(), model[1].weight], lr=0.5)
    step = odt.TrainStep(model, nn.functional.cross_entropy, optimizer, budget=odt.Budget("64MiB", of="training"))
    for _ in range(2):
        step(x, y)
    assert not torch.allclose(model[1].weight, torch.ones(4), atol=1e-2)
    model[1].weight.requires_grad_(False)
    torch.testing.assert_close(model[1](x := torch.randn(2, 4, 3, 3)), _plain(model[1], x))


def test_refresh_takes_up_what_was_changed_in_place() -> None:
    norm, x = FrozenBatchNorm(nn.BatchNorm2d(3)).requires_grad_(False), torch.randn(2, 3, 4, 4)
    nn.init.normal_(norm.weight)
    norm.running_mean.normal_()
    norm.refresh()
    torch.testing.assert_close(norm(x), _plain(norm, x))


@pytest.mark.parametrize("trains", [False, True])
def test_under_autocast_the_result_has_the_type_that_batch_norms_has(trains: bool) -> None:
    norm = nn.BatchNorm2d(4).eval()
    nn.init.normal_(norm.weight)
    norm.weight.requires_grad_(trains)
    convolution, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = norm(convolution(x))
        found = FrozenBatchNorm(norm)(convolution(x))
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
