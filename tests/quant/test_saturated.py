"""What has reached the ends of its ranges is told by layer."""

from __future__ import annotations

import pytest
import torch
from quantized_models import calibration, images, trained_a_little
from torch import nn

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


def test_weights_at_their_ends_are_counted() -> None:
    model = trained_a_little("mlp")
    odt.quant.convert_(model, calibration())
    layer = model[1]
    layer.unpack_()
    layer.weight_slot.data.fill_(130.0)
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
