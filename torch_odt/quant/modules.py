"""The layers of a converted network. `convert_` makes them; what they compute is in `layer.py` and `pointwise.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torch_odt.ops import int8_descend_, int8_store_rounded_
from torch_odt.quant import joining, pointwise
from torch_odt.quant.activation import (
    WEIGHT_MOST,
    Int8Activation,
    by_channel,
    by_rows,
    in_memory_order,
    new_weight_slot,
    order_of,
    require_activation,
    weight_of,
)
from torch_odt.quant.layer import BIAS_MOST, LayerTensors, Windows, int8_layer, int8_layer_to_float
from torch_odt.quant.one_way import Quantized
from torch_odt.quant.ranges import weight_steps

Masters = Literal["none", "fp32"]
MASTERS: tuple[Masters, ...] = ("none", "fp32")


class Int8Layer(Quantized):
    """A convolution or a linear layer in int8.

    With `masters="none"` the weight is int8 and nothing else: `weight_slot` takes its gradient, with input channels
    last, as the weight lies in memory; it has no memory itself, and is in no state_dict. With "fp32" there is a float32
    weight, `master`, and int8 is made of it in each forward pass. Parameters and gradients are real numbers either way,
    whatever steps the layer computes with, and mean to an optimizer what those of a float32 layer do.

    Args:
        weight: float32, BatchNorm folded into it.
        bias: float32 of shape (out,), or None.
        windows: of a convolution, and of the max-pool behind it that is a part of the layer.
        input_step: the input's step at calibration.
        output_grid: step and zero point of the output; None for one in float32.
        low, high: the clamp behind it, as real numbers.
        masters: see above.
        headroom: see `weight_steps`.
        seed: of the rounding of its updates.

    Attributes:
        weight: int8, in torch.channels_last where it has four dimensions; None with masters.
        weight_scale: float32 of shape (out,): the steps.
        bias: float32 of shape (out,).
        rounding: int64 of shape (2,): the seed, and how many updates were rounded.
        saturated: int64 of shape (): how many weights updates wanted beyond 127 steps, so far.
        scales_gradients: QAS, see `scale_gradients_`.
    """

    verb, way_back = "convert_", "odt.quant.dequantize_"

    weight: Tensor
    weight_scale: Tensor
    weight_slot: nn.Parameter
    master: nn.Parameter
    bias: nn.Parameter | None
    output_grid: Tensor | None
    rounding: Tensor
    saturated: Tensor

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        windows: Windows,
        input_step: Tensor,
        output_grid: Tensor | None,
        *,
        low: float | None = None,
        high: float | None = None,
        masters: Masters = "none",
        headroom: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        # A bias is counted in products of steps, of which int32 holds so many: it outweighs a channel of tiny weights.
        least = None if bias is None else bias.detach().abs() / (BIAS_MOST / 2 * input_step)
        scale = weight_steps(weight, headroom, least)
        self.masters = masters
        self.scales_gradients = True
        self.windows, self.low, self.high = windows, low, high
        if masters == "none":
            self.register_buffer("weight", _whole(weight.detach(), scale))
            self.weight_slot = nn.Parameter(new_weight_slot(weight))
        else:
            self.master = nn.Parameter(weight.detach().clone(memory_format=order_of(weight)))
        self.register_buffer("weight_scale", scale)
        self.register_buffer("output_grid", output_grid)
        self.register_buffer("rounding", torch.tensor([seed, 0]))
        self.register_buffer("saturated", torch.tensor(0))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @property
    def trained(self) -> nn.Parameter:
        """The parameter that takes the weight's gradient, and whose `requires_grad` says whether the weight trains."""
        return self.weight_slot if self.masters == "none" else self.master

    def int8_weight(self) -> Tensor:
        """The weight that the layer computes with."""
        return self.weight if self.masters == "none" else _whole(self.master.detach(), self.weight_scale)

    def float_weight(self) -> Tensor:
        """The real weight, float32; with masters what they hold, not rounded."""
        if self.masters == "fp32":
            return self.master.detach().clone()
        return self.weight.float() * by_channel(self.weight_scale, self.weight)

    def float_bias(self) -> Tensor | None:
        """The real bias, float32."""
        return None if self.bias is None else self.bias.detach().clone()

    def forward(self, x: Int8Activation) -> Int8Activation | Tensor:
        x = require_activation(x, type(self).__name__)
        # Attributes of modules that are tensors take long to be found, beside what a small layer takes.
        parameters, buffers = self._parameters, self._buffers
        weight, slot = (
            (buffers["weight"], parameters["weight_slot"])
            if self.masters == "none"
            else (self.int8_weight(), by_rows(self.master))
        )
        scale, output_grid = buffers["weight_scale"], buffers["output_grid"]
        assert weight is not None and slot is not None and scale is not None
        tensors = LayerTensors(weight, slot, scale, parameters.get("bias"))
        if output_grid is None:
            return int8_layer_to_float(x, tensors, self.windows, scales_gradients=self.scales_gradients)
        return int8_layer(
            x, tensors, self.windows, output_grid, low=self.low, high=self.high, scales_gradients=self.scales_gradients
        )

    def descend_(self, gradient: Tensor, rate: float, weight_decay: float) -> None:
        """Take `rate` times a gradient of `weight_slot` off the weight, as SGD does, rounded as `pack_` rounds.

        Raises:
            RuntimeError: a number is not finite; what becomes of the weight is not told.
        """
        tensors = (self.weight, weight_of(gradient), self.weight_scale, self.rounding, self.saturated)
        int8_descend_(*tensors, rate=rate, weight_decay=weight_decay)

    def unpack_(self) -> None:
        """Give `weight_slot` the real weight, for an optimizer to change; `pack_` gives back the very same integers."""
        real = by_rows(self.weight).float()
        self.weight_slot.data = real.mul_(by_channel(self.weight_scale, real))

    def pack_(self) -> None:
        """Round what an optimizer made of them back to int8, stochastically, and take the memory away.

        Raises:
            RuntimeError: they are not finite; the weight is then as it was.
        """
        real = self.weight_slot.data
        steps = weight_of(real.div_(by_channel(self.weight_scale, real)))
        self.discard_()
        int8_store_rounded_(self.weight, steps, self.rounding, self.saturated)

    def discard_(self) -> None:
        """Take the memory of `weight_slot` away, with what an optimizer has made of the weight's numbers."""
        if self.masters == "none":
            self.weight_slot.data = new_weight_slot(self.weight)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.discard_()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copies of tensors are dense.
        super().__setstate__(state)
        self.discard_()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}weight_slot", None)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        missing: list[str] = rest[1]
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)
        if f"{prefix}weight_slot" in missing:
            missing.remove(f"{prefix}weight_slot")

    def extra_repr(self) -> str:
        shape = tuple(self.weight.shape if self.masters == "none" else self.master.shape)
        output = "float32" if self.output_grid is None else "int8"
        masters = ", masters in float32" if self.masters == "fp32" else ""
        pooled = "" if self.windows.pool is None else ", max-pooled"
        return f"weight={shape} in int8, output in {output}{pooled}{masters}"


class Int8Conv2d(Int8Layer):
    """A convolution in int8, see `Int8Layer`."""


class Int8Linear(Int8Layer):
    """A linear layer in int8, see `Int8Layer`."""

    def forward(self, x: Int8Activation) -> Int8Activation | Tensor:
        if require_activation(x, type(self).__name__).values.dim() != 4:
            return super().forward(x)
        # Four dimensions are images to what computes in int8.
        output = super().forward(Int8Activation(x.values.flatten(0, 2), x.slot.flatten(0, 2), x.grid))
        shape = x.values.shape[:3]
        if isinstance(output, Tensor):
            return output.unflatten(0, shape)
        values, slot, grid = output
        return Int8Activation(in_memory_order(values.unflatten(0, shape)), slot.unflatten(0, shape), grid)


class Quantize(nn.Module):
    """From float32 to int8.

    Args:
        grid: step and zero point.
    """

    grid: Tensor

    def __init__(self, grid: Tensor) -> None:
        super().__init__()
        self.register_buffer("grid", grid)

    def forward(self, x: Tensor) -> Int8Activation:
        return pointwise.quantize(x, self.grid)


class Int8Add(nn.Module):
    """The sum of two int8 activations, with the clamp behind it.

    Args:
        grid: step and zero point of the sum.
        low, high: the clamp, as real numbers; None for none.
    """

    grid: Tensor

    def __init__(self, grid: Tensor, low: float | None = None, high: float | None = None) -> None:
        super().__init__()
        self.register_buffer("grid", grid)
        self.low, self.high = low, high

    def forward(self, left: Int8Activation, right: Int8Activation) -> Int8Activation:
        return pointwise.add(left, right, self.grid, low=self.low, high=self.high)


class Int8Multiply(nn.Module):
    """The product of two int8 activations, one of which may be broadcast.

    Args:
        grid: step and zero point of the product.
    """

    grid: Tensor

    def __init__(self, grid: Tensor) -> None:
        super().__init__()
        self.register_buffer("grid", grid)

    def forward(self, left: Int8Activation, right: Int8Activation) -> Int8Activation:
        if left.values.numel() < right.values.numel():
            left, right = right, left
        return pointwise.multiply(left, right, self.grid)


class Int8Concatenate(nn.Module):
    """Int8 activations side by side.

    Args:
        grid: step and zero point of the result.
        dim: along which they are put.
    """

    grid: Tensor

    def __init__(self, grid: Tensor, dim: int) -> None:
        super().__init__()
        self.register_buffer("grid", grid)
        self.dim = dim

    def forward(self, *inputs: Int8Activation) -> Int8Activation:
        return joining.concatenate(inputs, self.grid, self.dim)


class Int8Function(nn.Module):
    """A function of one number, by a table of its 256 values.

    Args:
        function: what it stands for: element by element, differentiable.
        input_grid: at calibration; the input must come on this one.
        grid: step and zero point of the output.
    """

    table: Tensor
    slopes: Tensor
    grid: Tensor

    def __init__(self, function: nn.Module, input_grid: Tensor, grid: Tensor) -> None:
        super().__init__()
        self.name = type(function).__name__
        step, zero = float(input_grid[0]), float(input_grid[1])
        x = ((torch.arange(-128, 128) - zero) * step).requires_grad_()
        with torch.enable_grad():
            y = function(x * 1)
            (slopes,) = torch.autograd.grad(y.sum(), x)
        whole = y.detach().div(grid[0]).round_().add_(grid[1])
        self.register_buffer("table", whole.clamp(-128, 127).to(torch.int8))
        self.register_buffer("slopes", torch.where((whole >= -128) & (whole <= 127), slopes, 0.0))
        self.register_buffer("grid", grid)

    def forward(self, x: Int8Activation) -> Int8Activation:
        return pointwise.look_up(require_activation(x, self.name), self.table, self.slopes, self.grid)

    def extra_repr(self) -> str:
        return self.name


def _whole(weight: Tensor, scale: Tensor) -> Tensor:
    whole = weight.div(by_channel(scale, weight)).round_().clamp_(-WEIGHT_MOST, WEIGHT_MOST).to(torch.int8)
    return whole.contiguous(memory_format=order_of(whole))


class Int8Windows(nn.Module):
    """A function of one activation that has no tensors of its own: pools and clamps.

    Args:
        function: called with the activation and the options.
        options: by name.
    """

    def __init__(self, function: Callable[..., Int8Activation], **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, x: Int8Activation) -> Int8Activation:
        return self.function(x, **self.options)

    def extra_repr(self) -> str:
        return f"{self.function.__name__}, " + ", ".join(f"{name}={value}" for name, value in self.options.items())


class Int8Dropout(nn.Module):
    """Dropout of an int8 activation.

    Args:
        probability: of an element to become 0.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Int8Activation) -> Int8Activation:
        return pointwise.drop(x, self.probability, self.training)
