"""Weights in 8 bits are made for each pass: fewer bytes are kept, and no bit is another."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_odt as odt
from torch_odt.adapt import bias_only_, tinytl_
from torch_odt.adapt.adaptation import Adapting
from torch_odt.adapt.stored_weights import store_frozen_weights

BATCH = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1])


def network() -> nn.Module:
    """Convolutions whose biases train, so that gradients go through frozen weights in 8 bits."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 4),
    )
    bias_only_(model)
    with Adapting(model) as adapting:
        assert store_frozen_weights(adapting) == 3
    return model


def trained(model: nn.Module, *disabled: str) -> tuple[odt.TrainStep, list[torch.Tensor]]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    step = odt.TrainStep(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        budget=odt.Budget("1GiB", of="training"),
        disable_rewrites=disabled,
        cache=False,
    )
    for _ in range(3):
        step(*BATCH)
    return step, list(model.parameters())


def test_every_bit_stays_and_less_is_kept() -> None:
    model = network()
    other = copy.deepcopy(model)
    (again, ours), (kept, theirs) = trained(model), trained(other, "decode_again")
    assert "decode_again" in str(again.plan) and "decode_again" not in str(kept.plan)
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one, two)
    # The gradient goes through two weights, of which only one is there at a time.
    weight_bytes = 64 * 64 * 9 * 4
    assert again.plan is not None and kept.plan is not None
    assert kept.plan.tensor_peak_bytes - again.plan.tensor_peak_bytes >= weight_bytes  # type: ignore[operator]


def test_weights_that_only_one_pass_needs_are_made_once() -> None:
    model = network()
    for module in model:
        if isinstance(getattr(module, "bias", None), nn.Parameter) and not isinstance(module, nn.Linear):
            module.bias.requires_grad_(False)
    step, _ = trained(model)
    assert "decode_again" not in str(step.plan)


@pytest.mark.parametrize("code", ["affine", "codebook"])
def test_lite_residual_modules_beside_weights_in_8_bits(code: str) -> None:
    from torchvision.models import mobilenet_v2

    torch.manual_seed(0)
    model = mobilenet_v2(width_mult=0.35, dropout=0.0)
    tinytl_(model, classes=4, weight_bits=8, weight_code=code, norm="folded", input_size=64)  # type: ignore[arg-type]
    plain = copy.deepcopy(model)
    loss_fn = nn.CrossEntropyLoss()
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05) for m in (model, plain)]
    step = odt.TrainStep(model, loss_fn, optimizers[0], budget=odt.Budget("1GiB", of="training"), cache=False)
    x, y = torch.randn(2, 3, 64, 64), torch.tensor([0, 3])
    for _ in range(2):
        optimizers[1].zero_grad()
        loss = loss_fn(plain(x), y)
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-4, atol=1e-5)


class Masked(nn.Module):
    """A mask of int8 is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.register_buffer("mask", torch.ones(8, 1, 1, dtype=torch.int8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.mask * self.first(x)).mean((2, 3)))


def test_products_of_activations_are_not_made_again() -> None:
    step, _ = trained(Masked())
    assert "decode_again" not in str(step.plan)
