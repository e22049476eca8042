"""What is asked of each rewrite by which this package computes convolutions itself."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.adapt.step_bytes import step_graph

BUDGET = odt.Budget("1GiB", of="training")


def targets(model: nn.Module, images: Tensor) -> list[str]:
    """The operators of a step, in order."""
    model = model.to(memory_format=torch.channels_last)
    batch = (images.contiguous(memory_format=torch.channels_last), torch.randint(5, (len(images),)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return [op.target for op in step_graph(model, nn.CrossEntropyLoss(), batch, optimizer=optimizer).program]


def assert_trains_as_plain_pytorch_does(model: nn.Module, micro_batch: int | None, rewrite: str) -> None:
    """Steps of five classes, of whose plan the rewrite is a part."""
    model = model.to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    loss_fn = nn.CrossEntropyLoss()
    step = odt.TrainStep(model, loss_fn, optimizers[0], budget=BUDGET, micro_batch=micro_batch, cache=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(4, 3, 17, 17, generator=generator).contiguous(memory_format=torch.channels_last)
        y = torch.randint(5, (4,), generator=generator)
        optimizers[1].zero_grad()
        loss = loss_fn(plain(x), y)
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert rewrite in str(step.plan)


def assert_can_be_switched_off(model: nn.Module, rewrite: str) -> None:
    """The plan of a step without the rewrite does not name it."""
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.CrossEntropyLoss()
    step = odt.TrainStep(model, loss_fn, optimizer, budget=BUDGET, disable_rewrites=[rewrite], cache=False)
    step(torch.randn(2, 3, 9, 9), torch.tensor([0, 1]))
    assert rewrite not in str(step.plan)
