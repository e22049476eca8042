"""Convolutions and linear layers in int8, forward and backward, as operators that autograd and captures know.

Forward (TTE; J. Lin et al., "On-Device Training Under 256KB Memory", NeurIPS 2022, section 3.1): with the input's step
s_x and the weight's s_W, one for each output channel, (sum of (x - z_x) W + b) s_x s_W / s_y, rounded, plus z_y,
clamped; a clamp behind the layer is part of that, and so is a max-pool behind both (`layer_pool.py`). Backward, with
the gradient g of the real output where nothing was clamped, in int8 as well: the weight's gradient from g rounded
channel by channel, the input's from g s_W rounded as a whole, since s_W does not factor out of its sums; of a depthwise
convolution both from the former, since there it does. Rounding is stochastic, so that both are right on average for the
gradient that arrives, which is bfloat16 where an int8 layer follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_odt.capture.fused_updates import FusedUpdate, register_fused_update
from torch_odt.capture.parameter_updates import INT8, SPARE
from torch_odt.ops import (
    int8_conv2d_grad_input_scaled,
    int8_conv2d_grad_weight_scaled,
    int8_conv2d_quantized,
    int8_conv2d_scaled,
    int8_descend_,
    int8_quantize_gradient,
)
from torch_odt.ops.int8_arguments import WINDOWS, windows_of
from torch_odt.ops.int8_plain import Geometry, is_depthwise
from torch_odt.ops.int8_rows import GRADIENT_NOT_FINITE
from torch_odt.ops.registration import register, register_gradient
from torch_odt.quant.activation import (
    GRADIENT,
    Int8Activation,
    bounds,
    by_rows,
    empty_in_order,
    fake_slot,
    new_slot,
    packed_size,
    step_of,
    weight_of,
    zero_of,
)
from torch_odt.quant.in_backward import is_same_memory, use_of
from torch_odt.quant.layer_pool import noted_size, numbers_of, parts_of, pooled, pooled_size, spread_of
from torch_odt.quant.pooling import Pool

# int32 has to hold the sums with it.
BIAS_MOST = 2.0**30
BIAS_NOT_FINITE = "int8_layer: a bias over its steps is not a number: the training has diverged"


class Descent(NamedTuple):
    """What SGD does without momentum to an int8 weight, see `int8_descend_`.

    Attributes:
        rate, weight_decay: of the optimizer, as of now.
        weight, rounding, saturated: the layer's, see `Int8Layer`.
    """

    rate: float
    weight_decay: float
    weight: Tensor
    rounding: Tensor
    saturated: Tensor


class LayerTensors(NamedTuple):
    """What a layer computes with, beside its input.

    Attributes:
        weight: int8 of shape (out, in) or (out, in / groups, rows, columns).
        weight_slot: float32 of shape (out, in) or (out, rows, columns, in / groups), which is how the weight lies in
            memory: where its gradient goes; its data is not read.
        weight_scale: float32 of shape (out,): the steps of the weight.
        bias: float32 of shape (out,), or None.
    """

    weight: Tensor
    weight_slot: Tensor
    weight_scale: Tensor
    bias: Tensor | None


class Windows(NamedTuple):
    """As in `torch.nn.Conv2d`; a linear layer is a convolution of images of one pixel.

    Attributes:
        pool: what pools the output, if anything does; see `can_be_of_a_layer`.
    """

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    pool: Pool | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """As the operators take them: seven of the convolution, and seven more of a pool."""
        of_convolution = windows_of(self.stride, self.padding, self.dilation, self.groups)
        if self.pool is None:
            return of_convolution
        return (*of_convolution, *numbers_of(self.pool))


def int8_layer(
    input: Int8Activation,
    tensors: LayerTensors,
    windows: Windows,
    output_grid: Tensor,
    *,
    low: float | None = None,
    high: float | None = None,
    scales_gradients: bool = True,
) -> Int8Activation:
    """A convolution or linear layer from int8 to int8, with the clamp behind it, and behind that a max-pool.

    When to choose it: between int8 layers; `Int8Conv2d` and `Int8Linear` call it.

    Args:
        input: of shape (N, C, H, W), or (..., in) for a linear layer.
        tensors, windows: the layer.
        output_grid: float32 of shape (2,), step and zero point of the output.
        low, high: bounds of the output as real numbers, as those of ReLU6; None for those of int8.
        scales_gradients: QAS, see `scale_gradients_`: weight and bias have the gradients of real numbers.

    Returns:
        The output, pooled if `windows` say so. Its gradient's part at clamped elements is lost, as behind any clamp.

    Raises:
        RuntimeError: a shape, dtype or device is another, or a gradient is not finite.
    """
    values, slot, _ = torch.ops.torch_odt.int8_layer.default(
        *input, *tensors, output_grid, low, high, scales_gradients, windows.numbers
    )
    return Int8Activation(values, slot, output_grid)


def int8_layer_to_float(
    input: Int8Activation, tensors: LayerTensors, windows: Windows, *, scales_gradients: bool = True
) -> Tensor:
    """A convolution or linear layer from int8 to float32, which nothing pools; otherwise as `int8_layer`.

    When to choose it: at the end of the int8 part, as for a classifier.
    """
    output: Tensor = torch.ops.torch_odt.int8_layer_to_float.default(
        *input, *tensors, scales_gradients, windows.numbers
    )
    return output


def _image(tensor: Tensor) -> Tensor:
    """Rows of features as images of one pixel."""
    return tensor if tensor.dim() == 4 else tensor.reshape(-1, tensor.shape[-1], 1, 1)


def _output_shape(input_shape: Sequence[int], weight: Tensor, windows: Sequence[int]) -> list[int]:
    """The shape before a pool."""
    if len(input_shape) != 4:
        return [*input_shape[:-1], weight.shape[0]]
    size = Geometry.of("int8_layer", windows).output_size("int8_layer", input_shape[2:], weight.shape[2:])
    return [input_shape[0], weight.shape[0], *size]


def _whole_bias(bias: Tensor | None, weight_scale: Tensor, grid: Tensor) -> Tensor | None:
    """The bias in units of the sums."""
    if bias is None:
        return None
    counted = bias.div(step_of(grid) * weight_scale)
    if bool(counted.isnan().any()):
        raise RuntimeError(BIAS_NOT_FINITE)
    return counted.round_().clamp_(-BIAS_MOST, BIAS_MOST).to(torch.int32)


def _named(windows: Sequence[int]) -> dict[str, Any]:
    return vars(Geometry.of("int8_layer", windows))


def _layer(
    values: Tensor,
    slot: Tensor,
    grid: Tensor,
    weight: Tensor,
    weight_slot: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    output_grid: Tensor,
    low: float | None,
    high: float | None,
    scales_gradients: bool,
    windows: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    windows, pool = parts_of(windows)
    shape = _output_shape(values.shape, weight, windows)
    least, most = bounds(output_grid, low, high)
    output, mask, _ = int8_conv2d_quantized(
        _image(values), _image(weight), step_of(grid) * weight_scale / step_of(output_grid),
        _whole_bias(bias, weight_scale, grid), input_zero_point=zero_of(grid), output_zero_point=zero_of(output_grid),
        low=least, high=most, **_named(windows),
    )  # fmt: skip
    output = output.reshape(shape)
    if pool:
        output, mask = pooled(output, mask, pool)
    return output, new_slot(output.shape), mask


def _layer_fake(
    values: Tensor, slot: Tensor, grid: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    windows, pool = parts_of(rest[-1])
    shape = _output_shape(values.shape, weight, windows)
    output = empty_in_order(pooled_size(shape, pool) if pool else shape, torch.int8, values)
    noted = noted_size(output.numel()) if pool else packed_size(output.numel())
    return output, fake_slot(values, output.shape), values.new_empty(noted, dtype=torch.uint8)


def _layer_to_float(
    values: Tensor,
    slot: Tensor,
    grid: Tensor,
    weight: Tensor,
    weight_slot: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    scales_gradients: bool,
    windows: Sequence[int],
) -> Tensor:
    output = int8_conv2d_scaled(
        _image(values), _image(weight), step_of(grid) * weight_scale, _whole_bias(bias, weight_scale, grid),
        input_zero_point=zero_of(grid), **_named(windows),
    )  # fmt: skip
    return output.reshape(_output_shape(values.shape, weight, windows))


def _layer_to_float_fake(values: Tensor, slot: Tensor, grid: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return empty_in_order(_output_shape(values.shape, weight, rest[-1]), torch.float32, values)


def _backward(
    gradient: Tensor,
    mask: Tensor | None,
    values: Tensor | None,
    grid: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_shape: list[int],
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
    scales_gradients: bool,
    windows: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    windows, pool = parts_of(windows)
    geometry = _named(windows)
    spread: Callable[[Tensor], Tensor] = _image
    if pool:
        mask, spread = spread_of(gradient, mask, pool, _output_shape(input_shape, weight, windows))
    by_channel = for_input and is_depthwise(weight.shape, geometry["groups"])
    found = int8_quantize_gradient(
        _image(gradient),
        mask,
        weight_scale=weight_scale if for_input and not by_channel else None,
        for_weight=for_weight or by_channel,
    )
    of_input = gradient.new_empty(0, dtype=GRADIENT)
    of_weight, of_bias = weight_scale.new_empty(0), weight_scale.new_empty(0)
    if for_input:
        size = input_shape[2:] if len(input_shape) == 4 else (1, 1)
        rounded = spread(found.for_weight if by_channel else found.for_input)
        step = torch.ones(1) if by_channel else found.input_step
        of_input = int8_conv2d_grad_input_scaled(rounded, _image(weight), step, size, **geometry)
        if by_channel:
            units = found.weight_steps * weight_scale
            if not bool(units.isfinite().all()):
                raise RuntimeError(GRADIENT_NOT_FINITE)
            of_input *= units.view(-1, 1, 1)
        of_input = of_input.to(GRADIENT).reshape(input_shape)
    if for_weight:
        assert values is not None
        scale = found.weight_steps * step_of(grid)
        if not scales_gradients:
            scale = scale * (weight_scale * weight_scale)
        of_weight, _ = int8_conv2d_grad_weight_scaled(
            spread(found.for_weight),
            _image(values),
            scale,
            _image(weight).shape[2:],
            input_zero_point=zero_of(grid),
            **geometry,
        )
        of_weight = by_rows(of_weight.reshape(weight.shape))
    if for_bias:
        unit = step_of(grid) * weight_scale
        of_bias = found.sums if scales_gradients else found.sums * (unit * unit)
    return of_input, of_weight, of_bias


def _backward_fake(
    gradient: Tensor,
    mask: Tensor | None,
    values: Tensor | None,
    grid: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_shape: list[int],
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    of_input = empty_in_order(input_shape if for_input else (0,), GRADIENT, gradient)
    of_weight = weight_scale.new_empty(by_rows(weight).shape if for_weight else (0,))
    return of_input, of_weight, weight_scale.new_empty(weight_scale.shape if for_bias else (0,))


def _descend(
    gradient: Tensor,
    mask: Tensor | None,
    values: Tensor,
    grid: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    rounding: Tensor,
    saturated: Tensor,
    input_shape: list[int],
    for_input: bool,
    for_bias: bool,
    scales_gradients: bool,
    rate: float,
    weight_decay: float,
    windows: Sequence[int],
) -> tuple[Tensor, Tensor]:
    of_input, of_weight, of_bias = _backward(
        gradient, mask, values, grid, weight, weight_scale, input_shape, for_input, True, for_bias,
        scales_gradients, windows,
    )  # fmt: skip
    int8_descend_(weight, weight_of(of_weight), weight_scale, rounding, saturated, rate=rate, weight_decay=weight_decay)
    return of_input, of_bias


def _descend_fake(
    gradient: Tensor,
    mask: Tensor | None,
    values: Tensor,
    grid: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    rounding: Tensor,
    saturated: Tensor,
    input_shape: list[int],
    for_input: bool,
    for_bias: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    of_input, _, of_bias = _backward_fake(
        gradient, mask, values, grid, weight, weight_scale, input_shape, for_input, False, for_bias
    )
    return of_input, of_bias


def pass_back_and_descend(arguments: Sequence[Any], descent: Descent) -> tuple[Tensor, Tensor]:
    """The gradients of input and bias, while the weight's is taken off the weight and never stored.

    Args:
        arguments: of `int8_layer_backward`.
        descent: what becomes of the weight, which is among the arguments.
    """
    updated = (descent.rounding, descent.saturated)
    found: tuple[Tensor, Tensor] = torch.ops.torch_odt.int8_layer_descend_.default(
        *arguments_of_descent(arguments, updated, descent.rate, descent.weight_decay)
    )
    torch.autograd.graph.increment_version([descent.weight, *updated])
    return found


def arguments_of_descent(
    arguments: Sequence[Any], counters: tuple[Tensor, Tensor], rate: Any, weight_decay: Any
) -> tuple[Any, ...]:
    """Those of `int8_layer_descend_`, from those of `int8_layer_backward`."""
    *tensors, input_shape, for_input, _, for_bias, scales_gradients, windows = arguments
    return (*tensors, *counters, input_shape, for_input, for_bias, scales_gradients, rate, weight_decay, windows)


def _measured_descent(*arguments: Any) -> tuple[Tensor, None, Tensor]:
    of_input, of_bias = pass_back_and_descend(arguments, Descent(0.0, 0.0, arguments[KEPT_WEIGHT + 1], *SPARE))
    return of_input, None, of_bias


SLOT, WEIGHT_SLOT, BIAS = 1, 4, 6
KEPT_WEIGHT = 3  # among what is kept for the backward pass


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values, _, grid, weight, weight_slot, weight_scale, _ = inputs[:7]
    mask = None
    if isinstance(output, tuple):
        mask = output[2]
        ctx.mark_non_differentiable(output[0], mask)
    ctx.wanted = [ctx.needs_input_grad[position] for position in (SLOT, WEIGHT_SLOT, BIAS)]
    ctx.use = use_of(weight_slot) if ctx.wanted[1] else None
    ctx.input_shape = list(values.shape)
    ctx.options = inputs[-2:]
    ctx.inputs = len(inputs)
    ctx.save_for_backward(mask, values if ctx.wanted[1] else None, grid, weight, weight_scale)


def _pass_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    kept = ctx.saved_tensors
    descent: Descent | None = None if ctx.use is None else ctx.use.update()
    if descent is not None and not is_same_memory(kept[KEPT_WEIGHT], descent.weight):
        descent = None
    for_input, for_weight, for_bias = ctx.wanted
    of_weight = None
    arguments = (gradient, *kept, ctx.input_shape, *ctx.wanted, *ctx.options)
    if descent is None:
        of_input, of_weight, of_bias = torch.ops.torch_odt.int8_layer_backward.default(*arguments)
    else:
        of_input, of_bias = pass_back_and_descend(arguments, descent)
    gradients: list[Tensor | None] = [None] * ctx.inputs
    gradients[SLOT] = of_input if for_input else None
    gradients[WEIGHT_SLOT] = of_weight if for_weight else None
    gradients[BIAS] = of_bias if for_bias else None
    return tuple(gradients)


def _pass_back_int8(ctx: Any, of_values: Any, gradient: Tensor, of_mask: Any) -> tuple[Any, ...]:
    return _pass_back(ctx, gradient)


TENSORS = (
    "Tensor values, Tensor slot, Tensor grid, Tensor weight, Tensor weight_slot, Tensor weight_scale, Tensor? bias"
)
register(
    "int8_layer",
    f"({TENSORS}, Tensor output_grid, float? low, float? high, bool scales_gradients, {WINDOWS}) -> "
    "(Tensor, Tensor, Tensor)",
    _layer,
    _layer_fake,
)
register(
    "int8_layer_to_float",
    f"({TENSORS}, bool scales_gradients, {WINDOWS}) -> Tensor",
    _layer_to_float,
    _layer_to_float_fake,
)
register(
    "int8_layer_backward",
    "(Tensor gradient, Tensor? mask, Tensor? values, Tensor grid, Tensor weight, Tensor weight_scale, "
    "int[] input_shape, bool for_input, bool for_weight, bool for_bias, bool scales_gradients, "
    f"{WINDOWS}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
register(
    "int8_layer_descend_",
    "(Tensor gradient, Tensor? mask, Tensor values, Tensor grid, Tensor(a!) weight, Tensor weight_scale, "
    "Tensor(b!) rounding, Tensor(c!) saturated, int[] input_shape, bool for_input, bool for_bias, "
    f"bool scales_gradients, float rate, float weight_decay, {WINDOWS}) -> (Tensor, Tensor)",
    _descend,
    _descend_fake,
)
register_fused_update(
    INT8,
    "torch_odt.int8_layer_backward.default",
    FusedUpdate(gradient=1, weight=KEPT_WEIGHT + 1, measured=_measured_descent, in_memory_order=True),
)
register_gradient("int8_layer", _keep, _pass_back_int8)
register_gradient("int8_layer_to_float", _keep, _pass_back)
