"""Detached BatchNorms compute and follow the batch as BatchNorm does; to the backward pass statistics are constants."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torch_odt as odt
from torch_odt.adapt import DetachedBatchNorm, FrozenBatchNorm
from torch_odt.adapt.fold_frozen_norms import FoldedBatchNorm
from torch_odt.capture.separation import NotSeparable

SIZE = 32
PLENTY = odt.Budget("1GiB", of="training")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _norm(dims: int, **options: Any) -> Any:
    norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims](3, **options)
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        if tensor is not None:
            nn.init.normal_(tensor)
    return norm


def _network() -> nn.Sequential:
    layers = (nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


@given(
    dims=st.integers(0, 3),
    samples=st.integers(2, 5),
    size=st.integers(1, 4),
    momentum=st.sampled_from([0.1, 0.0, 1.0, None]),
    affine=st.booleans(),
)
def test_it_computes_what_batch_norm_does(
    dims: int, samples: int, size: int, momentum: float | None, affine: bool
) -> None:
    plain = _norm(dims, momentum=momentum, affine=affine)
    ours = DetachedBatchNorm(copy.deepcopy(plain))
    for number, training in enumerate((True, True, False, True, False)):
        plain.train(training)
        if number < 3:
            ours.train(training)
        else:
            # As `estimate_batch_norm_`, and some training loops, give modules back the modes that they had.
            ours.training = training
        x = 2 + 3 * torch.randn(samples, 3, *([size] * dims))
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dict(ours.state_dict()), dict(plain.state_dict()))


def test_statistics_are_constants_of_the_backward_pass_and_no_input_is_kept() -> None:
    norm, x = DetachedBatchNorm(_norm(2)), torch.randn(4, 3, 5, 5, requires_grad=True)
    norm.weight.requires_grad_(False)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    gradient = torch.randn(4, 3, 5, 5)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm(x).backward(gradient)
    assert kept and max(tensor.numel() for tensor in kept) == 3
    scale = norm.weight / (x.var((0, 2, 3), correction=0) + norm.eps).sqrt()
    torch.testing.assert_close(x.grad, gradient * scale.view(1, 3, 1, 1))
    torch.testing.assert_close(norm.bias.grad, gradient.sum((0, 2, 3)))


def test_a_planned_step_follows_the_batch_as_a_plain_loop_does() -> None:
    from torchvision.models import mobilenet_v2

    model = mobilenet_v2(num_classes=4, width_mult=0.25)
    model.classifier[0].p = 0.0
    torch.manual_seed(1)
    odt.adapt.tinytl_(model, norm="detached", classes=2, input_size=SIZE)
    model.train()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, plain)]
    step = odt.TrainStep(model, cross_entropy, optimizers[0], budget=PLENTY)
    for _ in range(3):
        x, y = torch.randn(8, 3, SIZE, SIZE), torch.randint(2, (8,))
        loss = cross_entropy(plain(x), y)
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-4, atol=1e-5)
    assert step.plan.captured
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-3, atol=1e-4)
    model.eval()
    plain.eval()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-3, atol=1e-4)


def test_a_batch_is_not_cut() -> None:
    model = _network()
    adaptation = odt.adapt.tinytl_(model, mode="bias", norm="detached")
    optimizer = torch.optim.SGD(adaptation.parameters(), lr=0.1)
    step = odt.TrainStep(model.train(), cross_entropy, optimizer, budget=PLENTY, micro_batch=2)
    with pytest.raises(NotSeparable, match="statistics over the whole batch"):
        step(torch.randn(8, 3, SIZE, SIZE), torch.randint(2, (8,)))


def test_unloaded_it_is_the_batch_norm_that_there_was_with_what_it_has_followed() -> None:
    model = _network().train()
    norm, before = model[1], copy.deepcopy(model[1].running_mean)
    adaptation = odt.adapt.tinytl_(model, mode="bias", norm="detached")
    assert type(model[1]) is DetachedBatchNorm and model[1].training
    model(torch.randn(4, 3, SIZE, SIZE))
    adaptation.unload()
    assert model[1] is norm and not torch.equal(norm.running_mean, before)
    assert int(norm.num_batches_tracked) == 1


def test_a_later_verb_makes_of_it_what_is_asked_and_gives_it_back() -> None:
    model, x = _network().train(), torch.randn(4, 3, SIZE, SIZE)
    plain = copy.deepcopy(model)
    frozen = odt.adapt.bias_only_(model)
    detached = odt.adapt.tinytl_(model, mode="norm+last", norm="detached")
    assert type(model[1]) is DetachedBatchNorm and "2 BatchNorms follow the batch" in detached.notes[0]
    torch.testing.assert_close(model(x), plain(x))
    with torch.no_grad():
        model[1].weight.add_(1)
    model.eval()
    expected = model(x)
    folded = odt.adapt.bias_only_(model, norm="folded")
    assert "1 frozen BatchNorms are a part" in str(folded) and type(model[1]) is FoldedBatchNorm
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    folded.unload()
    assert type(model[1]) is DetachedBatchNorm
    detached.unload()
    assert type(model[1]) is FrozenBatchNorm
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    grouped = odt.adapt.tinytl_(model, mode="bias", norm="group")
    assert type(model[1]) is nn.GroupNorm and "2 layers normalize" in grouped.notes[0]
    grouped.unload()
    frozen.unload()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", ["detached", "group"])
def test_a_model_without_batch_norms_says_so(norm: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    assert odt.adapt.tinytl_(model, mode="bias", norm=norm).notes[0] == f"the model has no BatchNorm for {norm=}"


def test_a_norm_of_several_processes_is_refused() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(_network())
    with pytest.raises(ValueError, match=r"1 is a SyncBatchNorm, .* Choose norm='frozen'"):
        odt.adapt.tinytl_(model, mode="bias", norm="detached")
    assert odt.adapt.tinytl_(model, mode="bias").trained


def test_timms_norm_activates_what_it_has_normalised() -> None:
    timm = pytest.importorskip("timm")
    norm = timm.layers.BatchNormAct2d(3).train()
    model, x = nn.Sequential(nn.Conv2d(3, 3, 1), norm, nn.Flatten(), nn.Linear(48, 2)), torch.randn(4, 3, 4, 4)
    plain = copy.deepcopy(model)(x)
    odt.adapt.tinytl_(model, mode="bias", norm="detached")
    torch.testing.assert_close(model(x), plain)


def test_what_has_no_variance_is_named() -> None:
    norm = DetachedBatchNorm(nn.BatchNorm1d(3)).train()
    with pytest.raises(ValueError, match=r"shape \(1, 3\) has fewer than two values for each channel"):
        norm(torch.randn(1, 3))
    assert isinstance(norm, FrozenBatchNorm) and norm.eval()(torch.randn(1, 3)).shape == (1, 3)
