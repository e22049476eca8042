"""What stands between layers in NITI's arithmetic: in and out of mantissas, ReLU, pools, sums of two, and the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_odt import ops
from torch_odt.ops.int8_arguments import ROUNDINGS, Pair, Rounding, number_of, pair
from torch_odt.ops.registration import register, register_gradient
from torch_odt.quant.niti_numbers import (
    BITS,
    CARRIER,
    MOST,
    Scaled,
    added,
    as_carrier,
    as_int8,
    bits_of,
    cross_entropy_gradient,
    dequantized,
    fitting_shift,
    quantized,
    rescaled,
    shifted,
)
from torch_odt.quant.niti_passes import How

_PART_ELEMENTS = 1 << 18  # of a thread: a megabyte in float32


def niti_quantize(values: Tensor, rounding: Rounding = "pseudo_stochastic") -> Scaled:
    """A float32 tensor as mantissas and an exponent; its gradient comes back as float32.

    Args:
        values: float32.
        rounding: of the values; they are rounded to nearest where nothing else is asked for by a caller.

    Raises:
        ValueError: a number is not finite.
    """
    return Scaled(*_quantize(values, number_of(rounding)))


def niti_dequantize(tensor: Scaled, rounding: Rounding = "pseudo_stochastic") -> Tensor:
    """Mantissas and their exponent as float32; the gradient is rounded to mantissas."""
    return _dequantize(*tensor, number_of(rounding))


def niti_relu(tensor: Scaled, ceiling: float | None = None) -> Scaled:
    """max(0, x), and at most `ceiling` where there is one."""
    return Scaled(_relu(*tensor, ceiling), tensor.exponent)


def niti_max_pool2d(tensor: Scaled, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> Scaled:
    """The largest element of each window; see `torch.nn.MaxPool2d`."""
    windows = [*pair(kernel_size), *pair(kernel_size if stride is None else stride), *pair(padding)]
    return Scaled(*_max_pool(*tensor, windows)[:2])


def niti_avg_pool2d(tensor: Scaled, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> Scaled:
    """The mean of each window, which is a depthwise convolution by a constant of seven bits.

    A window of 2**n elements is averaged exactly; otherwise 1 / elements is off by up to a part in 128, the same for
    all elements.
    """
    windows = [*pair(kernel_size), *pair(kernel_size if stride is None else stride), *pair(padding)]
    return Scaled(*_avg_pool(*tensor, windows))


def niti_global_avg_pool2d(tensor: Scaled, *, keeps_dimensions: bool = True) -> Scaled:
    """The mean over rows and columns, see `niti_avg_pool2d`."""
    rows, columns = tensor.mantissas.shape[2:]
    pooled = niti_avg_pool2d(tensor, (rows, columns))
    return pooled if keeps_dimensions else niti_flatten(pooled)


def niti_flatten(tensor: Scaled) -> Scaled:
    """All dimensions but the first in one."""
    return Scaled(tensor.mantissas.flatten(1), tensor.exponent)


def niti_add(first: Scaled, second: Scaled, rounding: Rounding = "nearest") -> Scaled:
    """The sum of two tensors, brought to the finer scale of both and rescaled; see `added`.

    Its scale is looked at in every batch: the sums are there, and reading them is all that it takes. Where a tensor is
    repeated to the other's shape, the sum is made in float32, which knows how gradients are added up then.
    """
    if first.mantissas.shape != second.mantissas.shape:
        return niti_quantize(niti_dequantize(first) + niti_dequantize(second), rounding)
    return Scaled(*torch.ops.torch_odt.niti_add.default(*first, *second, number_of(rounding)))


def niti_fork(tensor: Scaled) -> tuple[Scaled, Scaled]:
    """A tensor that two operators use: their gradients have scales of their own, and are added as `niti_add` does."""
    one, one_exponent, other, other_exponent = _Fork.apply(*tensor)
    return Scaled(one, one_exponent), Scaled(other, other_exponent)


def niti_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy, with the gradient in integers (NITI, section 3.4).

    When to choose it: where the whole backward pass is to be of integers. The loss itself is for the reader, and
    float32.

    Args:
        logits: float32 of shape (N, classes); they are taken as mantissas of eight bits, which is what a converted
            model's are.
        target: int64 of shape (N,).

    Returns:
        float32 of no dimensions. Over a batch that is no power of two, the gradient is smaller than the mean's, by less
        than a half.

    Raises:
        ValueError: the shapes are others, or a logit is not finite.

    Example:
        >>> logits = torch.zeros(1, 2, requires_grad=True)
        >>> niti_cross_entropy(logits, torch.tensor([1])).backward()
        >>> logits.grad
        tensor([[ 0.5000, -0.5000]])
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"niti_cross_entropy takes logits of shape (N, classes) and N classes, not {tuple(logits.shape)} and "
            f"{tuple(target.shape)}"
        )
    loss: Tensor = _cross_entropy(logits, target)[0]
    return loss


def _exponent(number: int) -> Tensor:
    return torch.tensor([float(number)])


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype)


@torch.library.custom_op("torch_odt::niti_quantize", mutates_args=())
def _quantize(values: Tensor, rounding: int) -> tuple[Tensor, Tensor]:
    mantissas, exponent = quantized(values, ROUNDINGS[rounding], "what is to be quantised")
    return as_carrier(mantissas), _exponent(exponent)


@_quantize.register_fake
def _(values: Tensor, rounding: int) -> tuple[Tensor, Tensor]:
    return _like(values, CARRIER), values.new_empty(1)


@torch.library.custom_op("torch_odt::niti_dequantize", mutates_args=())
def _dequantize(mantissas: Tensor, exponent: Tensor, rounding: int) -> Tensor:
    return dequantized(as_int8(mantissas), float(exponent))


@_dequantize.register_fake
def _(mantissas: Tensor, exponent: Tensor, rounding: int) -> Tensor:
    return _like(mantissas, torch.float32)


def _keep_rounding(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.rounding = inputs[-1]


_quantize.register_autograd(
    lambda ctx, gradient, exponent: (_dequantize(gradient, exponent, ctx.rounding), None),
    setup_context=_keep_rounding,
)
_dequantize.register_autograd(
    lambda ctx, gradient: (*_quantize(gradient, ctx.rounding), None), setup_context=_keep_rounding
)


@torch.library.custom_op("torch_odt::niti_relu", mutates_args=())
def _relu(mantissas: Tensor, exponent: Tensor, ceiling: float | None) -> Tensor:
    return as_carrier(as_int8(mantissas).clamp(0, How(ceiling=ceiling).most(float(exponent))))


@_relu.register_fake
def _(mantissas: Tensor, exponent: Tensor, ceiling: float | None) -> Tensor:
    return torch.empty_like(mantissas)


@torch.library.custom_op("torch_odt::niti_relu_backward", mutates_args=())
def _relu_backward(gradient: Tensor, output: Tensor, exponent: Tensor, ceiling: float | None) -> Tensor:
    bound = How(ceiling=ceiling).passes_below(float(exponent))
    return as_carrier(ops.int8_keep_between(as_int8(gradient), as_int8(output), 0, bound))


@_relu_backward.register_fake
def _(gradient: Tensor, output: Tensor, exponent: Tensor, ceiling: float | None) -> Tensor:
    return torch.empty_like(gradient)


def _keep_relu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, inputs[1])
    ctx.ceiling = inputs[2]


# The exponent passes by this operator, and so does its gradient.
_relu.register_autograd(
    lambda ctx, gradient: (_relu_backward(gradient, *ctx.saved_tensors, ctx.ceiling), None, None),
    setup_context=_keep_relu,
)


def _split(windows: list[int]) -> tuple[list[int], list[int], list[int], tuple[int, int], bool]:
    return windows[:2], windows[2:4], windows[4:], (1, 1), False


@torch.library.custom_op("torch_odt::niti_max_pool2d", mutates_args=())
def _max_pool(mantissas: Tensor, exponent: Tensor, windows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    pooled, offsets = ops.max_pool2d_with_offsets(as_int8(mantissas), *_split(windows))
    return as_carrier(pooled), exponent.clone(), offsets


@_max_pool.register_fake
def _(mantissas: Tensor, exponent: Tensor, windows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    pooled, offsets = torch.ops.torch_odt.max_pool2d_with_offsets(_like(mantissas, torch.int8), *_split(windows))
    return _like(pooled, CARRIER), torch.empty_like(exponent), torch.empty_like(offsets)


@torch.library.custom_op("torch_odt::niti_max_pool2d_backward", mutates_args=())
def _max_pool_backward(
    gradient: Tensor, exponent: Tensor, mantissas: Tensor, offsets: Tensor, windows: list[int]
) -> tuple[Tensor, Tensor]:
    """Where windows overlap, the gradients of an element are added, and rescaled if they need more than eight bits."""
    overlaps = windows[0] > windows[2] or windows[1] > windows[3]
    steps = as_int8(gradient)
    if not overlaps:
        found = ops.max_pool2d_with_offsets_backward(steps, as_int8(mantissas), *_split(windows), offsets)
        return as_carrier(found), exponent.clone()
    # 256 elements of a window make 256 sums of eight bits at most. All of them in float32 and in int32 would be a peak.
    sums = torch.empty_like(mantissas, dtype=torch.int16)
    parts = [slice(start, start + _some_samples(sums)) for start in range(0, len(sums), _some_samples(sums))]
    for part in parts:
        like = torch.empty_like(sums[part], dtype=torch.float32)
        sums[part] = ops.max_pool2d_with_offsets_backward(steps[part].float(), like, *_split(windows), offsets[part])
    shift = fitting_shift(sums)
    found = torch.empty_like(mantissas, dtype=torch.int8)
    for part in parts:
        found[part] = shifted(sums[part].to(torch.int32), shift, "pseudo_stochastic")
    return as_carrier(found), exponent + shift


def _some_samples(images: Tensor) -> int:
    """So many samples that the caches hold them while they are wide."""
    return max(1, _PART_ELEMENTS * torch.get_num_threads() * len(images) // max(1, images.numel()))


@_max_pool_backward.register_fake
def _(
    gradient: Tensor, exponent: Tensor, mantissas: Tensor, offsets: Tensor, windows: list[int]
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(mantissas), torch.empty_like(exponent)


def _keep_windows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.windows = inputs[2]


_max_pool.register_autograd(
    lambda ctx, gradient, exponent, _: (*_max_pool_backward(gradient, exponent, *ctx.saved_tensors, ctx.windows), None),
    setup_context=_keep_windows,
)


def _mean_weight(channels: int, kernel: list[int]) -> tuple[Tensor, int]:
    """One over the elements of a window, as a weight of seven bits, and its exponent."""
    elements = kernel[0] * kernel[1]
    exponent = (elements - 1).bit_length() + BITS - 1
    mantissa = round(2.0**exponent / elements)
    return torch.full((channels, 1, *kernel), mantissa, dtype=torch.int8), -exponent


@torch.library.custom_op("torch_odt::niti_avg_pool2d", mutates_args=())
def _avg_pool(mantissas: Tensor, exponent: Tensor, windows: list[int]) -> tuple[Tensor, Tensor]:
    channels = mantissas.shape[1]
    weight, weight_exponent = _mean_weight(channels, windows[:2])
    sums = ops.int8_conv2d(as_int8(mantissas), weight, stride=windows[2:4], padding=windows[4:], groups=channels)
    pooled, shift = rescaled(sums, "nearest")
    return as_carrier(pooled), exponent + (weight_exponent + shift)


@_avg_pool.register_fake
def _(mantissas: Tensor, exponent: Tensor, windows: list[int]) -> tuple[Tensor, Tensor]:
    size = [
        (length + 2 * pad - kernel) // stride + 1
        for length, kernel, stride, pad in zip(mantissas.shape[2:], windows[:2], windows[2:4], windows[4:], strict=True)
    ]
    pooled = torch.empty(
        (*mantissas.shape[:2], *size), dtype=CARRIER, device=mantissas.device, memory_format=torch.channels_last
    )
    return pooled, torch.empty_like(exponent)


@torch.library.custom_op("torch_odt::niti_avg_pool2d_backward", mutates_args=())
def _avg_pool_backward(
    gradient: Tensor, exponent: Tensor, size: list[int], windows: list[int]
) -> tuple[Tensor, Tensor]:
    channels = gradient.shape[1]
    weight, weight_exponent = _mean_weight(channels, windows[:2])
    arguments: dict[str, Any] = {"stride": windows[2:4], "padding": windows[4:], "groups": channels}

    def attempt(shift: int) -> tuple[Tensor, float]:
        found = ops.int8_conv2d_grad_input_quantized(
            as_int8(gradient), weight, torch.tensor([2.0**-shift]), size, rounding="pseudo_stochastic", **arguments
        )
        return found.gradient, float(found.largest)

    # The weight has seven bits: unless windows overlap, the product fits when it has lost them.
    shift = BITS
    found, largest = attempt(shift)
    if largest >= MOST + 1:
        shift += bits_of(largest) - BITS
        found, _ = attempt(shift)
    return as_carrier(found.clamp_(min=-MOST)), exponent + (weight_exponent + shift)


@_avg_pool_backward.register_fake
def _(gradient: Tensor, exponent: Tensor, size: list[int], windows: list[int]) -> tuple[Tensor, Tensor]:
    found = torch.empty(
        (*gradient.shape[:2], *size), dtype=CARRIER, device=gradient.device, memory_format=torch.channels_last
    )
    return found, torch.empty_like(exponent)


def _keep_size(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.size, ctx.windows = list(inputs[0].shape[2:]), inputs[2]


_avg_pool.register_autograd(
    lambda ctx, gradient, exponent: (*_avg_pool_backward(gradient, exponent, ctx.size, ctx.windows), None),
    setup_context=_keep_size,
)


def _add(
    first: Tensor, first_exponent: Tensor, second: Tensor, second_exponent: Tensor, rounding: int
) -> tuple[Tensor, Tensor]:
    exponents = (int(first_exponent), int(second_exponent))
    total = added(as_int8(first), exponents[0], as_int8(second), exponents[1], ROUNDINGS[rounding])
    return as_carrier(total.mantissas.contiguous(memory_format=_format_of(first))), total.exponent


def _format_of(first: Tensor) -> torch.memory_format:
    """A sum lies as its first addend, if that is contiguous or in channels_last; otherwise in channels_last."""
    strides = first.stride()
    if first.dim() == 4 and (not first.is_contiguous() or (strides[1] == 1 and strides[3] == first.shape[1])):
        return torch.channels_last
    return torch.contiguous_format


def _add_fake(
    first: Tensor, first_exponent: Tensor, second: Tensor, second_exponent: Tensor, rounding: int
) -> tuple[Tensor, Tensor]:
    total = torch.empty(first.shape, dtype=CARRIER, device=first.device, memory_format=_format_of(first))
    return total, torch.empty_like(first_exponent)


register(
    "niti_add",
    "(Tensor first, Tensor first_exponent, Tensor second, Tensor second_exponent, int rounding) -> (Tensor, Tensor)",
    _add,
    _add_fake,
)
register_gradient(
    "niti_add",
    lambda ctx, inputs, output: None,
    lambda ctx, gradient, exponent: (gradient, exponent, gradient, exponent, None),
)


class _Fork(torch.autograd.Function):
    """The same tensor twice, without a copy."""

    @staticmethod
    def forward(ctx: Any, mantissas: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            mantissas.view_as(mantissas),
            exponent.view_as(exponent),
            mantissas.view_as(mantissas),
            exponent.view_as(exponent),
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = torch.ops.torch_odt.niti_add.default(*gradients, number_of("pseudo_stochastic"))
        return found


@torch.library.custom_op("torch_odt::niti_cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    mantissas, exponent = quantized(logits, name="the logits")
    gradient, gradient_exponent = cross_entropy_gradient(mantissas, exponent, target)
    loss = torch.nn.functional.cross_entropy(logits, target)
    return loss, dequantized(gradient, gradient_exponent)


@_cross_entropy.register_fake
def _(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(()), _like(logits, torch.float32)


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


_cross_entropy.register_autograd(
    lambda ctx, gradient, _: (gradient * ctx.saved_tensors[0], None), setup_context=_keep_gradient
)
