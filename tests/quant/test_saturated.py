"""What has reached the ends of its ranges is told by layer."""

from __future__ import annotations

import pytest
import torch
from quantized_models import calibration, images, trained_a_little
from torch import Tensor, nn

import torch_odt as odt


def test_shares_grow_with_the_numbers() -> None:
    model = trained_a_little("residual").train()
    odt.quant.convert_(model, calibration())
    before = odt.quant.saturation(model, calibration())
    assert {"stem", "depthwise", "pointwise", "int8.add"} <= before.keys()
    assert all(each.activations < 0.01 and each.updates == 0 for each in before.values())
    after = odt.quant.saturation(model, [5 * x for x in calibration()])
    # ReLU6 is a bound of the stem's own, and holds more of it back than the range does.
    assert after["depthwise"].activations > 10 * before["depthwise"].activations + 0.01
    assert after["pointwise"].activations > before["pointwise"].activations
    assert model.training and not any(module._forward_hooks for module in model.modules())


class Branching(nn.Module):
    """Behind ReLUs half of what is put side by side, added or multiplied is 0, the least of its range."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.one(x).relu(), self.other(x).relu()
        return self.head(torch.cat([one + other, one * other], 1).mean((2, 3)))


def test_zeros_of_relus_do_not_count_where_branches_join() -> None:
    torch.manual_seed(0)
    model = Branching()
    odt.quant.convert_(model, calibration())
    found = odt.quant.saturation(model, calibration())
    assert len(found) == 6
    assert all(each.activations < 0.02 for each in found.values())
    after = odt.quant.saturation(model, [5 * x for x in calibration()])
    assert all(after[name].activations > found[name].activations + 0.01 for name in found)


def test_weights_at_their_ends_are_counted() -> None:
    model = trained_a_little("mlp")
    odt.quant.convert_(model, calibration())
    layer = model[1]
    layer.unpack_()
    layer.weight_slot.data.fill_(130.0 * float(layer.weight_scale.max()))
    layer.pack_()
    found = odt.quant.saturation(model, [images(4)])["1"]
    assert found.weights == 1.0 and found.updates == layer.weight.numel()


def test_bad_input_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(ValueError, match="has no int8 layers"):
        odt.quant.saturation(model, [torch.randn(2, 4)])
    model = trained_a_little("mlp")
    odt.quant.convert_(model, calibration())
    with pytest.raises(ValueError, match="batches is empty"):
        odt.quant.saturation(model, [])
