"""Pointwise convolutions that this package computes: where, what of, and that steps train as plain PyTorch's do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import torch_odt as odt
from torch_odt._extensions import has_kernels
from torch_odt.adapt.step_bytes import step_graph
from torch_odt.capture.direct_pointwise import FORWARD, GRAD_INPUT, GRAD_WEIGHT

pytestmark = pytest.mark.skipif(not has_kernels, reason="without compiled operators the rewrite is not made")

CHANNELS = 24


def network(outputs: int = 40, inputs: int = CHANNELS, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, inputs, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, **{"kernel_size": 1, **options}),  # type: ignore[arg-type]
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(outputs, 5),
    )


def targets(model: nn.Module, images: Tensor) -> list[str]:
    model = model.to(memory_format=torch.channels_last)
    batch = (images.contiguous(memory_format=torch.channels_last), torch.randint(5, (len(images),)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return [op.target for op in step_graph(model, nn.CrossEntropyLoss(), batch, optimizer=optimizer).program]


def ours(found: list[str]) -> list[str]:
    return [target for target in (FORWARD, GRAD_INPUT, GRAD_WEIGHT) if target in found]


def test_each_gradient_has_an_operator() -> None:
    images = torch.randn(2, 3, 16, 16)
    found = targets(network(), images)
    assert ours(found) == [FORWARD, GRAD_INPUT, GRAD_WEIGHT]
    frozen = network()
    frozen[2].weight.requires_grad_(False)
    assert ours(targets(frozen, images)) == [FORWARD, GRAD_INPUT]
    first = network()
    first[0].requires_grad_(False)
    assert ours(targets(first, images)) == [FORWARD, GRAD_WEIGHT]


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (network(stride=2), 16),
        (network(padding=1), 16),
        (network(kernel_size=2), 16),
        (network(groups=2), 16),
        (network().double(), 16),
        (network(outputs=12), 16),
        (network(inputs=20), 16),
        (network(outputs=512, inputs=512), 256),
    ],
    ids=["stride", "padding", "window", "groups", "float64", "uneven outputs", "uneven inputs", "large"],
)
def test_others_stay_as_they_are(model: nn.Module, size: int) -> None:
    images = torch.randn(1, 3, size, size, dtype=next(model.parameters()).dtype)
    assert ours(targets(model, images)) == []


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_steps_train_as_plain_pytorch_does(bias: bool, micro_batch: int | None) -> None:
    model = network(bias=bias).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    loss_fn = nn.CrossEntropyLoss()
    budget = odt.Budget("1GiB", of="training")
    step = odt.TrainStep(model, loss_fn, optimizers[0], budget=budget, micro_batch=micro_batch, cache=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(4, 3, 17, 17, generator=generator).contiguous(memory_format=torch.channels_last)
        y = torch.randint(5, (4,), generator=generator)
        optimizers[1].zero_grad()
        loss = loss_fn(plain(x), y)
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-5, atol=1e-6)
    for ours_, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-4, atol=1e-6)
    assert "direct_pointwise" in str(step.plan)


def test_it_can_be_switched_off() -> None:
    model = network().to(memory_format=torch.channels_last)
    batch = torch.randn(2, 3, 9, 9), torch.tensor([0, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = odt.TrainStep(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        budget=odt.Budget("1GiB", of="training"),
        disable_rewrites=["direct_pointwise"],
        cache=False,
    )
    step(*batch)
    assert "direct_pointwise" not in str(step.plan)
