"""Convolutions whose weights have mean 0 and deviation 1 in each output channel.

S. Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization", 2019. TinyTL uses it
together with GroupNorm.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from torch_odt.adapt.adaptation import Adapting

EPS = 1e-5


def standardized(weight: Tensor) -> Tensor:
    """A weight less the mean of each output channel, divided by that channel's deviation + 1e-5.

    Channels of one element have no deviation: their weight is returned as it is.

    Example:
        >>> weight = standardized(torch.randn(4, 3, 3, 3))
        >>> torch.allclose(weight.flatten(1).std(1), torch.ones(4), atol=1e-3)
        True
    """
    if weight[0].numel() == 1:
        return weight
    dims = list(range(1, weight.dim()))
    return (weight - weight.mean(dims, keepdim=True)) / (weight.std(dims, keepdim=True) + EPS)


class StandardizedConv2d(nn.Conv2d):
    """A convolution that standardises its weight in every step, for weights that train.

    Example:
        >>> conv = StandardizedConv2d(4, 8, 3, bias=False)
        >>> x = torch.randn(1, 4, 5, 5)
        >>> torch.equal(conv(x), nn.functional.conv2d(x, standardized(conv.weight)))
        True
    """

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, standardized(self.weight), self.bias)


def standardize_convolutions(adapting: Adapting, *, but: type[nn.Module] | None = None) -> None:
    """Standardise every 2-D convolution without a bias: once where its weight is frozen, else in every step.

    Taken back, a frozen weight is within rounding what it was.

    Those whose output channels have one weight each have no deviation: they stay as they are, and a note names them. So
    do those of classes of their own that train: what else these compute is not known.

    Args:
        but: modules of this class and what is in them stay as they are.
    """
    modules = list(adapting.model.named_modules())
    left = {inner for _, module in modules if but is not None and isinstance(module, but) for inner in module.modules()}
    for name, module in modules:
        if module in left:
            continue
        if not isinstance(module, nn.Conv2d) or isinstance(module, StandardizedConv2d) or module.bias is not None:
            continue
        if module.weight[0].numel() == 1:
            adapting.notes.append(f"{name} has one weight an output channel, and is not standardized")
        elif module.weight.requires_grad and type(module) is not nn.Conv2d:
            adapting.notes.append(f"{name} is a {type(module).__name__}, and is not standardized")
        elif module.weight.requires_grad:
            adapting.replace(name, _standardizing(module), is_added=True)
        else:
            _fold(adapting, module)


def _standardizing(conv: nn.Conv2d) -> StandardizedConv2d:
    geometry: dict[str, Any] = {
        name: getattr(conv, name) for name in ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    }
    new = StandardizedConv2d(conv.in_channels, conv.out_channels, bias=False, device="meta", **geometry)
    new.weight = conv.weight
    return new


def _fold(adapting: Adapting, conv: _ConvNd) -> None:
    # Of the weight itself nothing is kept: it would take what 8 bits save.
    weight, dims = conv.weight, list(range(1, conv.weight.dim()))
    with torch.no_grad():
        mean, deviation = weight.mean(dims, keepdim=True), weight.std(dims, keepdim=True) + EPS
        adapting.also_undo(partial(_give_back, weight, mean, deviation), is_added=True)
        weight.data = standardized(weight.data).contiguous(memory_format=torch.preserve_format)


def _give_back(weight: Tensor, mean: Tensor, deviation: Tensor) -> None:
    # The weight may have been moved to another device or type meanwhile.
    weight.data = weight.data * deviation.to(weight) + mean.to(weight)
