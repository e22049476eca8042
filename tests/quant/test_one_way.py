"""A network that is quantized in one way is refused by the verbs of others, which name the way back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from quantized_models import calibration, trained_a_little
from torch import nn

import torch_odt as odt

VERBS: dict[str, Callable[[nn.Module], Any]] = {
    "convert_": lambda model: odt.quant.convert_(model, calibration()),
    "fake_quantize_": odt.quant.fake_quantize_,
    "octo_": odt.quant.octo_,
    "niti_": odt.quant.niti_,
}
BACK: dict[str, Callable[[nn.Module, Any], Any]] = {
    "convert_": lambda model, _: odt.quant.dequantize_(model),
    "fake_quantize_": lambda _, adaptation: adaptation.merge(),
    "octo_": lambda _, octo: octo.unload(),
    "niti_": lambda _, training: training.dequantize_(),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(VERBS, 2)))
def test_another_way_is_refused_until_the_first_is_taken_back(first: str, second: str) -> None:
    model = trained_a_little("residual").eval()
    made = VERBS[first](model)
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(ValueError, match=f"of {first}, and a network is quantized in one way: take that back first"):
        VERBS[second](model)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    BACK[first](model, made)
    VERBS[second](model)


@pytest.mark.parametrize("verb", [odt.quant.octo_, odt.quant.fake_quantize_])
def test_a_part_that_is_left_out_may_be_quantized_in_another_way(verb: Callable[..., Any]) -> None:
    front = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    odt.quant.convert_(front, calibration())
    model = nn.Sequential(front, nn.Conv2d(8, 8, 3), nn.Flatten(), nn.LazyLinear(4))
    model(calibration()[0])
    verb(model, skip=["0"])
    model(calibration()[0]).sum().backward()
    assert model[1].weight.grad is not None
