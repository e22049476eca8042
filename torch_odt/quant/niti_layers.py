"""Convolutions and linear layers whose weights are mantissas of eight bits, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_odt.ops.int8_arguments import Rounding, windows_of
from torch_odt.quant.niti_integers import niti_layer
from torch_odt.quant.niti_numbers import Scaled, as_carrier, as_int8, dequantized, quantized
from torch_odt.quant.niti_packed import niti_packed_layer
from torch_odt.quant.niti_passes import ROUNDINGS, Convolved, How
from torch_odt.quant.one_way import Quantized
from torch_odt.quant.packed_weights import PackedWeights
from torch_odt.quant.rescaling import Rescaling

MOST_GRADIENT_BITS, LEAST_GRADIENT_BITS = 7, -8
POINTWISE = windows_of(1, 0, 1, 1)


class NitiLayer(Quantized):
    """What a convolution and a linear layer share: weight and bias in eight bits, and the state of three rescalings.

    Parameters and buffers:
        weight, bias: mantissas, int8 seen as a float of eight bits (`as_int8(layer.weight)` are the integers).
        weight_exponent, bias_exponent: float32 of shape (1,).
        rescaling: of the output; see `Rescaling`.
        gradient_rescaling: of the gradients of input and weight: a parameter, whose "gradient" is its next value.
        gradient_bits: int64 of shape (1,), what is left of a weight's gradient: the layer's learning rate (mu).

    Attributes:
        to_float: return float32 instead of mantissas, which spares their rounding.
        relu: clamp the output at 0.
        ceiling: and at this, with `relu`; None sets no bound.
        rounding: of activations and gradients.
        part_bytes: what a part of a batch may take; 0 does not split.
        packs: where packed weights are kept, or None.
    """

    verb, way_back = "niti_", "dequantize_() of what niti_ returned"

    weight: Tensor
    bias: Tensor | None
    weight_exponent: Tensor
    bias_exponent: Tensor | None
    rescaling: Tensor
    gradient_bits: Tensor

    def __init__(
        self,
        layer: nn.Conv2d | nn.Linear,
        *,
        gradient_bits: int = 4,
        headroom_bits: int = 0,
        rounding: Rounding = "pseudo_stochastic",
        rescaling: Rescaling | None = None,
        part_bytes: int = 0,
        packs: PackedWeights | None = None,
    ) -> None:
        super().__init__()
        if rounding not in ROUNDINGS:
            raise ValueError(f"rounding={rounding!r}: it is one of {', '.join(ROUNDINGS)}")
        if not LEAST_GRADIENT_BITS <= gradient_bits <= MOST_GRADIENT_BITS:
            raise ValueError(f"gradient_bits={gradient_bits}: it is from {LEAST_GRADIENT_BITS} to {MOST_GRADIENT_BITS}")
        self.to_float = self.relu = False
        self.ceiling: float | None = None
        self.rounding, self.part_bytes, self.packs = rounding, part_bytes, packs
        mantissas, exponent = quantized(layer.weight.detach(), name="weight", spare_bits=headroom_bits)
        if not mantissas.any():
            raise ValueError("weight is all zeros: it has no scale")
        if mantissas.dim() == 4:
            mantissas = mantissas.contiguous(memory_format=torch.channels_last)
        self.weight = nn.Parameter(as_carrier(mantissas), requires_grad=layer.weight.requires_grad)
        self.register_buffer("weight_exponent", torch.tensor([float(exponent)]))
        self._take_bias(layer.bias, exponent)
        row = (Rescaling() if rescaling is None else rescaling).row()
        self.register_buffer("rescaling", row)
        self.gradient_rescaling = nn.Parameter(torch.stack([row, row]))
        self.register_buffer("gradient_bits", torch.tensor([gradient_bits]))

    def _take_bias(self, bias: Tensor | None, weight_exponent: int) -> None:
        if bias is None:
            self.bias = self.bias_exponent = None
            return
        mantissas, exponent = quantized(bias.detach(), name="bias")
        exponent = exponent if mantissas.any() else weight_exponent
        self.bias = nn.Parameter(as_carrier(mantissas), requires_grad=bias.requires_grad)
        self.register_buffer("bias_exponent", torch.tensor([float(exponent)]))

    def float_weight(self) -> Tensor:
        """The weight as float32, exactly."""
        return dequantized(as_int8(self.weight.detach()), float(self.weight_exponent))

    def float_bias(self) -> Tensor | None:
        """The bias as float32, exactly."""
        if self.bias is None or self.bias_exponent is None:
            return None
        return dequantized(as_int8(self.bias.detach()), float(self.bias_exponent))

    def rescalings(self) -> dict[str, Rescaling]:
        """How the scales of the output and of the gradients of input and weight are kept."""
        rows = (self.rescaling, *self.gradient_rescaling.detach())
        names = ("output", "input gradient", "weight gradient")
        return {name: Rescaling.of(row) for name, row in zip(names, rows, strict=True)}

    def _convolve(self, x: Scaled | Tensor, weight: Tensor, windows: tuple[int, ...]) -> Scaled | Tensor:
        how = How(
            self.to_float, self.relu and not self.to_float, self.ceiling, self.rounding, self.part_bytes,
            0 if self.packs is None else self.packs.number, self.training,
        )  # fmt: skip
        tensors = (
            weight, self.weight_exponent, self.bias, self.bias_exponent, self.rescaling, self.gradient_rescaling,
            self.gradient_bits,
        )  # fmt: skip
        input, exponent = (x, None) if isinstance(x, Tensor) else x
        if how.packs:
            made = Convolved(*niti_packed_layer(input, exponent, *tensors, how.numbers(), how.ceiling, windows))
        else:
            made = niti_layer(input, exponent, tensors, how, windows)
        if self.training and not self.to_float:
            with torch.no_grad():
                self.rescaling.copy_(made.state)
        return made.output if how.to_float else Scaled(made.output, made.exponent)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NitiLayer:
        """Moves to other devices; integers and states have no other type."""

        def keep_type(tensor: Tensor) -> Tensor:
            return fn(tensor.view(torch.int8)).view(tensor.dtype)

        return super()._apply(keep_type, recurse)

    def extra_repr(self) -> str:
        return f"bits of gradients={int(self.gradient_bits)}, rounding={self.rounding}"


class NitiConv2d(NitiLayer):
    """A convolution in NITI's arithmetic; made of an ordinary one by `niti_`.

    It takes mantissas or float32 of shape (N, C, H, W), and returns mantissas, or float32 with `to_float`.
    """

    def __init__(self, layer: nn.Conv2d, **options: Any) -> None:
        super().__init__(layer, **options)
        if isinstance(layer.padding, str):
            raise ValueError(f"padding={layer.padding!r} is not known to the int8 kernels")
        self.windows = windows_of(layer.stride, layer.padding, layer.dilation, layer.groups)

    def forward(self, x: Scaled | Tensor) -> Scaled | Tensor:
        return self._convolve(x, self.weight, self.windows)


class NitiLinear(NitiLayer):
    """A linear layer in NITI's arithmetic; made of an ordinary one by `niti_`.

    It takes mantissas or float32 of shape (..., features), and returns mantissas, or float32 with `to_float`.
    """

    def forward(self, x: Scaled | Tensor) -> Scaled | Tensor:
        shape = (*(x if isinstance(x, Tensor) else x.mantissas).shape[:-1], self.weight.shape[0])
        pixels = _pixels(x) if isinstance(x, Tensor) else Scaled(_pixels(x.mantissas), x.exponent)
        found = self._convolve(pixels, self.weight[:, :, None, None], POINTWISE)
        if isinstance(found, Tensor):
            return found.view(shape)
        return Scaled(found.mantissas.view(shape), found.exponent)


def _pixels(rows: Tensor) -> Tensor:
    """Rows as images of one pixel."""
    rows = rows if rows.dim() == 2 else rows.reshape(-1, rows.shape[-1])
    return rows[:, :, None, None]
