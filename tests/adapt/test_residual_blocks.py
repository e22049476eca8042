"""Which modules of a CNN are blocks, and where a lite residual module is added to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_odt as odt
from torch_odt.adapt.lite_residual import LiteBranch

SIZE = 64


def test_blocks_are_what_a_function_says() -> None:
    def pair() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 8, 3), pair(), pair(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))

    for blocks, names in ((lambda name, module: "" if name == "2" else None, ["2"]), ({nn.Sequential: ""}, ["1", "2"])):
        model = make()
        odt.adapt.tinytl_(model, blocks=blocks, input_size=SIZE)
        assert [name for name, module in model.named_children() if isinstance(module, LiteBranch)] == names
        assert type(model[2][:1]) is nn.Sequential and model[2][:1][0] is model[2][0]
    with pytest.raises(ValueError, match=r"an input of \(1, 8, 1, 1\) is too small .* give the input_size="):
        model(torch.randn(1, 3, 3, 3))
    with pytest.raises(ValueError, match=r"1\.1 is not given what 1 is, so that it is a part of a branch alone"):
        odt.adapt.tinytl_(make(), blocks=lambda name, _: "1" if name == "1" else None, input_size=SIZE)
    with pytest.raises(ValueError, match="blocks says True of '0'"):
        odt.adapt.tinytl_(make(), blocks=lambda *_: True, input_size=SIZE)


@pytest.mark.parametrize(("name", "branch"), [("mnasnet0_5", "layers"), ("regnet_y_400mf", "f")])
def test_blocks_of_torchvision_are_known(name: str, branch: str) -> None:
    model = getattr(pytest.importorskip("torchvision").models, name)(num_classes=3).eval()
    x = torch.randn(1, 3, SIZE, SIZE)
    before = model(x)
    adaptation = odt.adapt.tinytl_(model, input_size=SIZE)
    beside = [name for name, module in model.named_modules() if isinstance(module, LiteBranch)]
    assert len(beside) > 10 and all(name.endswith(f".{branch}") for name in beside)
    torch.testing.assert_close(model.eval()(x), before, rtol=1e-4, atol=1e-4)
    model.train()(torch.randn(2, 3, SIZE, SIZE)).sum().backward()
    assert all(parameter.grad is not None for parameter in adaptation.parameters())


def test_the_width_is_that_of_the_blocks_input() -> None:
    class Halves(nn.Module):
        """A block that never gives all of its input to one layer."""

        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = x.chunk(2, 1)
            return torch.cat([self.left(left), self.right(right)], 1)

    model = nn.Sequential(nn.Conv2d(3, 8, 3), Halves(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    odt.adapt.tinytl_(model, blocks={Halves: ""}, input_size=SIZE)
    assert model[1].lite.conv.in_channels == 8
    assert model(torch.randn(2, 3, SIZE, SIZE)).shape == (2, 2)
