"""Frozen weights of convolutions and linear layers, stored in 8 bits.

The weight that a layer computes with is made of the codes when it is needed, one product, so that it is no state of the
model: a planner may drop it after the forward pass, and make it again for the backward pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_odt.adapt.adaptation import Adapting, StoresWeight

LEVELS = 127


class _StoredWeight(StoresWeight):
    codes: Tensor
    scale: Tensor
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.stored_shape = tuple(weight.shape)
        largest = weight.abs().amax(list(range(1, weight.dim())), keepdim=True)
        scale = torch.where(largest > 0, largest / LEVELS, 1.0)
        self.register_buffer("codes", (weight / scale).round_().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_parameter("bias", layer._parameters["bias"])

    def weight(self) -> Tensor:
        """The weight that the codes stand for."""
        return self.codes * self.scale

    def extra_repr(self) -> str:
        return f"weight={self.stored_shape} in 8 bits"


class StoredLinear(_StoredWeight):
    """A linear layer with a frozen weight in 8 bits: integers of -127 to 127, and a scale for each output.

    The weight differs from the layer's by at most half a step, 1/254 of the largest of its output. The bias is the
    layer's own, and may train.

    Example:
        >>> layer = nn.Linear(64, 8)
        >>> stored = StoredLinear(layer)
        >>> bool(((stored.weight() - layer.weight).abs() <= layer.weight.abs().amax(1, keepdim=True) / 253).all())
        True
        >>> stored.codes.nbytes, layer.weight.nbytes
        (512, 2048)
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(), self.bias)


class StoredConv2d(_StoredWeight):
    """A convolution with a frozen weight in 8 bits: integers of -127 to 127, and a scale for each output channel.

    As `StoredLinear`.
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__(layer)
        self.stride, self.padding, self.dilation, self.groups = (
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.groups,
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight(), self.bias, self.stride, self.padding, self.dilation, self.groups)


def store_frozen_weights(adapting: Adapting) -> int:
    """Store the frozen weights of 2-D convolutions and linear layers in 8 bits, and free those of 32.

    Returns:
        How many there were. Those that several layers share stay as they are, and so do convolutions that are padded
        with something else than zeros; notes name them.
    """
    uses: dict[int, int] = {}
    # A module under several names is one use: it is replaced under all of them.
    for module in adapting.model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    count = 0
    for name, module in list(adapting.model.named_modules()):
        # Subclasses compute something else, or are read by what they are part of (nn.MultiheadAttention).
        if type(module) not in (nn.Linear, nn.Conv2d) or module.weight.requires_grad:
            continue
        assert isinstance(module, nn.Linear | nn.Conv2d)
        if uses[id(module.weight)] > 1:
            adapting.notes.append(f"{name} shares its weight, which stays in {module.weight.dtype}")
        elif isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
            adapting.notes.append(f"{name} is padded by {module.padding_mode!r}; its weight stays as it is")
        else:
            _store(adapting, name, module)
            count += 1
    return count


def _store(adapting: Adapting, name: str, layer: nn.Linear | nn.Conv2d) -> None:
    stored = StoredLinear(layer) if isinstance(layer, nn.Linear) else StoredConv2d(layer)
    weight = layer.weight
    adapting.replace(name, stored)

    def give_back() -> None:
        weight.data = stored.weight()

    adapting.also_undo(give_back)
    weight.data = weight.data.new_empty(0)
