"""Layers that compute in int8 in both passes, and learn what makes up for it, see `octo_`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torch_odt.quant.octo_conv2d import OPERANDS, octo_conv2d
from torch_odt.quant.one_way import Quantized

_SEEDS = 1 << 16  # for the layers of a step


class _OctoLayer(Quantized):
    """What both have beside the layer in whose place they are.

    Attributes:
        weight, bias: those of the layer.
        log_clip: logarithms of the shares of their ranges to which input, weight and gradient are clipped for the
            backward pass, of shape (3,).
        alpha, mu, delta: the compensation `alpha * mu + delta` is added to the output; of shape (channels,), or of the
            output's own without the batch, or None.
        steps_made: int64, so many passes that keep something for a backward pass; stochastic rounding goes by it.
    """

    verb, way_back = "octo_", "unload() or merge() of what octo_ returned"

    weight: Tensor
    bias: Any
    log_clip: nn.Parameter
    alpha: nn.Parameter | None
    mu: nn.Parameter | None
    delta: nn.Parameter | None
    steps_made: Tensor
    by_channel = True

    def prepare(
        self,
        label: str,
        number: int,
        shape: tuple[int, ...] | None,
        *,
        clip: float,
        learns: bool,
        is_stochastic: bool,
        by_channel: bool,
    ) -> None:
        """Everything that the plain layer has not.

        Args:
            label: a name for errors.
            number: another one for each layer of the model.
            shape: of the compensation, or None for none.
        """
        self.label, self.number, self.is_stochastic, self.by_channel = label, number, is_stochastic, by_channel
        self.clips = learns or clip < 1
        like = self.weight.detach()
        self.log_clip = nn.Parameter(like.new_full((len(OPERANDS),), math.log(clip)), requires_grad=learns)
        for name in ("alpha", "mu", "delta"):
            self.register_parameter(name, None)
        if shape is not None:
            self.alpha = nn.Parameter(like.new_ones(shape))
            self.mu = nn.Parameter(like.new_empty(shape).normal_(0, 1e-3))
            self.delta = nn.Parameter(like.new_empty(shape).normal_(0, 1e-3))
        self.register_buffer("steps_made", torch.zeros((), dtype=torch.int64))

    def compensation(self) -> Tensor | None:
        """What is added to the output."""
        if self.alpha is None or self.mu is None or self.delta is None:
            return None
        return torch.addcmul(self.delta, self.alpha, self.mu)

    def convolved(
        self, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
    ) -> Tensor:
        """Without bias and compensation."""
        keeps = torch.is_grad_enabled()
        if keeps:
            self.steps_made.add_(1)
        seed = self.steps_made * _SEEDS + self.number
        output: Tensor = octo_conv2d(
            x, weight, self.log_clip, seed, stride, padding, dilation, groups, keeps, self.clips,
            keeps and self.log_clip.requires_grad, self.is_stochastic, self.by_channel, self.label,
        )[0]  # fmt: skip
        return output

    def extra_repr(self) -> str:
        added = "no" if self.alpha is None else "x".join(map(str, self.alpha.shape))
        return f"{super().extra_repr()}, int8, compensation: {added}"


class OctoConv2d(_OctoLayer, nn.Conv2d):
    """`torch.nn.Conv2d` in int8, see `octo_`; padded with zeros, the same on both sides."""

    def forward(self, x: Tensor) -> Tensor:
        padding = padding_of(self)
        assert padding is not None
        batch = x if x.dim() == 4 else x[None]
        output = self.convolved(batch, self.weight, list(self.stride), list(padding), list(self.dilation), self.groups)
        shift = self.bias if self.bias is None else self.bias[:, None, None]
        compensation = self.compensation()
        if compensation is not None:
            compensation = compensation[:, None, None] if compensation.dim() == 1 else compensation
            shift = compensation if shift is None else compensation + shift
        output = output if shift is None else output + shift
        return output if x.dim() == 4 else output[0]


class OctoLinear(_OctoLayer, nn.Linear):
    """`torch.nn.Linear` in int8, see `octo_`."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1], 1, 1)
        output = self.convolved(rows, self.weight[:, :, None, None], [1, 1], [0, 0], [1, 1], 1)
        output = output.reshape(*x.shape[:-1], self.out_features)
        compensation = self.compensation()
        shift = self.bias if compensation is None else compensation
        if compensation is not None and self.bias is not None:
            shift = compensation + self.bias
        return output if shift is None else output + shift


def padding_of(layer: nn.Conv2d) -> tuple[int, int] | None:
    """The zeros on either side in rows and columns; None if the sides differ, or something else is padded with."""
    if layer.padding_mode != "zeros":
        return None
    if not isinstance(layer.padding, str):
        rows, columns = layer.padding
        return rows, columns
    # Left, right, top, bottom.
    left, right, top, bottom = layer._reversed_padding_repeated_twice
    return (top, left) if left == right and top == bottom else None
