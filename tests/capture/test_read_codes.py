"""Pointwise convolutions that read weights in 8 bits as they are stored: where, and that no bit is another."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_odt as odt
from torch_odt._extensions import has_kernels
from torch_odt.adapt.stored_weights import StoredConv2d

pytestmark = pytest.mark.skipif(not has_kernels, reason="without compiled operators the rewrite is not made")


class Network(nn.Module):
    """A convolution that trains, and behind it one with a weight in 8 bits that some other way reads, too."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.first = nn.Conv2d(3, 16, 3)
        self.stored = StoredConv2d(nn.Conv2d(16, 16, 1))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        weight = self.stored.weight
        x = F.conv2d(x, weight, self.stored.bias)
        if self.way == "twice":
            x = F.conv2d(torch.relu(x), weight)
        elif self.way == "as numbers":
            x = x + weight.sum()
        elif self.way == "as images":
            x = x + F.conv2d(weight, weight).mean((0, 2, 3))[:, None, None]
        elif self.way == "changed":
            self.stored.codes.copy_(self.stored.codes.roll(1, 0))
        return self.last(x.mean((2, 3)))


def trained(way: str, micro_batch: int | None, *disabled: str) -> tuple[str, list[Tensor]]:
    model = Network(way).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    step = odt.TrainStep(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        budget=odt.Budget("1GiB", of="training"),
        micro_batch=micro_batch,
        disable_rewrites=disabled,
        cache=False,
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        x = torch.randn(4, 3, 9, 9, generator=generator).contiguous(memory_format=torch.channels_last)
        step(x, torch.randint(4, (4,), generator=generator))
    return str(step.plan), [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("micro_batch", [None, 2])
# Where the forward pass reads a weight otherwise, too, the backward pass still reads its codes.
@pytest.mark.parametrize("way", ["once", "twice", "as numbers", "as images", "changed"])
def test_no_bit_is_another(way: str, micro_batch: int | None) -> None:
    if way == "changed" and micro_batch is not None:
        pytest.skip("what a step changes keeps its batch from being cut")
    (plan, ours), (other, theirs) = trained(way, micro_batch), trained(way, micro_batch, "read_codes")
    assert ("read_codes" in plan) is (way != "changed") and "read_codes" not in other
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one, two)


def test_the_weight_is_never_there() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), StoredConv2d(nn.Conv2d(64, 2048, 1)), nn.Flatten(), nn.Linear(2048, 2))
    peaks = []
    for disabled in ((), ("read_codes",)):
        own = copy.deepcopy(model).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=0.1)
        budget = odt.Budget("1GiB", of="training")
        step = odt.TrainStep(
            own, nn.CrossEntropyLoss(), optimizer, budget=budget, disable_rewrites=disabled, cache=False
        )
        step(torch.randn(2, 3, 3, 3).contiguous(memory_format=torch.channels_last), torch.tensor([0, 1]))
        assert step.plan is not None
        peaks.append(step.plan.tensor_peak_bytes)
    # With it a gradient of the last layer is there, as large as a third of it.
    assert peaks[1] - peaks[0] >= 2048 * 64 * 4 // 2
