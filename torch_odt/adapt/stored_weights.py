"""Frozen weights of convolutions and linear layers, stored in 8 bits.

The weight that a layer computes with is made of the codes when it is needed, so that it is no state of the model: a
planner may drop it after the forward pass, and make it again for the backward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_odt.adapt.adaptation import Adapting, StoresWeight
from torch_odt.adapt.weight_codebook import CENTROIDS, make_codebook, read_codebook
from torch_odt.adapt.whole_weights import reader_of

WeightCode = Literal["affine", "codebook"]
WEIGHT_CODES: tuple[WeightCode, ...] = ("affine", "codebook")
LEVELS = 127


class _StoredWeight(StoresWeight):
    codes: Tensor
    scale: Tensor
    centroids: Tensor
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear | nn.Conv2d, code: WeightCode = "affine") -> None:
        super().__init__()
        weight = layer.weight.detach()
        if not bool(weight.isfinite().all()):
            raise ValueError("the weight has elements that are NaN or infinite, for which 8 bits have no code")
        self.stored_shape = tuple(weight.shape)
        self.code = code
        if code == "codebook":
            codes, centroids = make_codebook(weight)
            self.register_buffer("codes", codes)
            self.register_buffer("centroids", centroids)
        else:
            largest = weight.abs().amax(list(range(1, weight.dim())), keepdim=True)
            scale = torch.where(largest > 0, _steps(largest), 1.0)
            codes = (weight.to(torch.promote_types(weight.dtype, torch.float32)) / scale).round_()
            self.register_buffer("codes", codes.clamp_(-LEVELS, LEVELS).to(torch.int8))
            self.register_buffer("scale", scale)
        self.register_parameter("bias", layer._parameters["bias"])

    @property
    def weight(self) -> Tensor:
        """The weight that the codes stand for, made each time that it is asked for."""
        return read_codebook(self.codes, self.centroids) if self.code == "codebook" else self.codes * self.scale

    def extra_repr(self) -> str:
        return f"weight={self.stored_shape} in 8 bits ({self.code})"


def _steps(largest: Tensor) -> Tensor:
    """A 127th, in the same type, and by no rounding less."""
    exact = largest.to(torch.promote_types(largest.dtype, torch.float32)) / LEVELS
    steps = exact.to(largest.dtype)
    if steps.dtype == exact.dtype:
        return steps
    above = torch.nextafter(steps, torch.full_like(steps, torch.inf))
    return torch.where((steps < exact) & (above * LEVELS).isfinite(), above, steps)


class StoredLinear(_StoredWeight):
    """A linear layer with a frozen weight in 8 bits.

    With the code "affine": integers of -127 to 127, and a scale for each output; the weight differs from the layer's by
    at most half a step, 1/254 of the largest of its output (in types of 16 bits, rounding adds about as much). With
    "codebook": numbers of 256 values that k-means has found for the layer (`make_codebook`). The bias is the layer's
    own, and may train.

    Choose "affine" where outputs differ in size, as channels of a depthwise convolution do, and where each has few
    weights: its steps follow the largest of them. Choose "codebook" where outputs are alike and have many weights, or a
    few of these are much larger than the others: of 1,000 normal weights an output, its mean squared error is a third
    smaller. It takes 1 KiB a layer beside the codes, "affine" 4 bytes an output; TinyTL stores its weights so.

    Example:
        >>> layer = nn.Linear(64, 8)
        >>> stored = StoredLinear(layer)
        >>> bool(((stored.weight - layer.weight).abs() <= layer.weight.abs().amax(1, keepdim=True) / 253).all())
        True
        >>> stored.codes.nbytes, layer.weight.nbytes
        (512, 2048)
        >>> StoredLinear(layer, "codebook").centroids.shape
        torch.Size([256])
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class StoredConv2d(_StoredWeight):
    """A convolution with a frozen weight in 8 bits; as `StoredLinear`, an output being a channel."""

    def __init__(self, layer: nn.Conv2d, code: WeightCode = "affine") -> None:
        super().__init__(layer, code)
        self.in_channels = layer.in_channels
        self.stride, self.padding, self.dilation, self.groups = (
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.groups,
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def store_frozen_weights(adapting: Adapting, code: WeightCode = "affine") -> int:
    """Store the frozen weights of 2-D convolutions and linear layers in 8 bits, and free those of 32.

    Returns:
        How many there were. Those that something beside the layer reads stay as they are, and so do convolutions that
        are padded with something else than zeros, layers of other classes, and weights that take less than their
        codebook would; notes name them.
    """
    count = 0
    small: list[str] = []
    others: list[str] = []
    for name, module in list(adapting.model.named_modules()):
        if not isinstance(module, nn.Linear | nn.Conv2d) or module.weight.requires_grad:
            continue
        if type(module) not in (nn.Linear, nn.Conv2d):
            # Subclasses compute something else.
            others.append(name)
        elif reader := reader_of(adapting.model, name):
            adapting.notes.append(f"{name} has a weight that is read by {reader}; it stays in {module.weight.dtype}")
        elif isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
            adapting.notes.append(f"{name} is padded by {module.padding_mode!r}; its weight stays as it is")
        elif code == "codebook" and not _codebook_saves(module.weight):
            small.append(name)
        else:
            _store(adapting, name, module, code)
            count += 1
    if others:
        adapting.notes.append(f"{len(others)} layers of classes of their own keep their weights: {others[0]}, ...")
    if small:
        adapting.notes.append(f"{len(small)} weights are smaller than a codebook and stay: {', '.join(small[:3])}, ...")
    return count


def _codebook_saves(weight: Tensor) -> bool:
    return weight.numel() + CENTROIDS * weight.element_size() < weight.nbytes


def _store(adapting: Adapting, name: str, layer: nn.Linear | nn.Conv2d, code: WeightCode) -> None:
    stored = StoredLinear(layer, code) if isinstance(layer, nn.Linear) else StoredConv2d(layer, code)
    weight = layer.weight
    adapting.replace(name, stored)

    adapting.also_undo(partial(_give_back, weight, stored))
    weight.data = weight.data.new_empty(0)


def _give_back(weight: Tensor, stored: StoredLinear | StoredConv2d) -> None:
    weight.data = stored.weight
