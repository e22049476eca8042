"""Depthwise convolutions of float32 images in channels_last, and their gradients.

They compute at once, where oneDNN looks a kernel up, compiles it, keeps it and brings the weight into another order: of
small images that takes longer than the sums, and memory that stays. The operators have no gradient of their
own: they stand in graphs that hold both passes already. Plain torch's sums are rounded in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_odt.ops.registration import register

SCHEMAS = {
    "depthwise_conv2d": "(Tensor input, Tensor weight, Tensor? bias, int[2] stride, int[2] padding) -> Tensor",
    "depthwise_conv2d_grad_input": (
        "(Tensor grad_output, Tensor weight, int[2] image_size, int[2] stride, int[2] padding) -> Tensor"
    ),
    "depthwise_conv2d_grad_weight": (
        "(Tensor grad_output, Tensor input, int[2] kernel_size, int[2] stride, int[2] padding) -> Tensor"
    ),
}


def depthwise_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
) -> Tensor:
    """A convolution of each channel by itself, as `conv2d(..., groups=channels)` within rounding.

    When to choose it: for small images of 16 channels or more, and narrow windows: the more there is to compute, the
    less it gains, and of wide windows (5, 7) oneDNN computes large ones faster. Threads change no bit. It has no
    gradient of its own (there are operators for those), so that a module which calls it cannot be trained by autograd.

    Args:
        input: float32 of shape (N, C, H, W). Another memory format than channels_last costs a copy.
        weight: float32 of shape (C, 1, rows, columns).
        bias: float32 of shape (C,), or None.
        stride, padding: for rows and for columns; padding is less than the kernel.

    Returns:
        The output, in channels_last.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> x, weight = torch.randn(1, 8, 5, 5), torch.randn(8, 1, 3, 3)
        >>> y = depthwise_conv2d(x, weight, None, (2, 2), (1, 1))
        >>> torch.allclose(y, torch.conv2d(x, weight, None, 2, 1, groups=8), atol=1e-5)
        True
    """
    return torch.ops.torch_odt.depthwise_conv2d(input, weight, bias, stride, padding)


def depthwise_conv2d_grad_input(
    grad_output: Tensor, weight: Tensor, image_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """The gradient of the input of `depthwise_conv2d`.

    When to choose it: in place of `convolution_backward`, within rounding; it does not take the input.

    Args:
        grad_output: float32 of the output's shape. Another memory format than channels_last costs a copy.
        weight, stride, padding: as they were given to `depthwise_conv2d`.
        image_size: rows and columns of the input.

    Returns:
        The gradient, in channels_last.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> depthwise_conv2d_grad_input(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), (3, 3), (1, 1), (0, 0))
        tensor([[[[1., 2., 1.],
                  [2., 4., 2.],
                  [1., 2., 1.]]]])
    """
    return torch.ops.torch_odt.depthwise_conv2d_grad_input(grad_output, weight, image_size, stride, padding)


def depthwise_conv2d_grad_weight(
    grad_output: Tensor, input: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """The gradient of the weight of `depthwise_conv2d`.

    When to choose it: in place of `convolution_backward`, within rounding; of windows wider than three that takes ten
    times as long.

    Args:
        grad_output: float32 of the output's shape. Another memory format than channels_last costs a copy.
        input, stride, padding: as they were given to `depthwise_conv2d`.
        kernel_size: rows and columns of the weight.

    Returns:
        The gradient, contiguous.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> depthwise_conv2d_grad_weight(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 3, 3), (2, 2), (1, 1), (0, 0))
        tensor([[[[4., 4.],
                  [4., 4.]]]])
    """
    return torch.ops.torch_odt.depthwise_conv2d_grad_weight(grad_output, input, kernel_size, stride, padding)


def _check(images: Tensor, *others: Tensor | None) -> None:
    tensors = [images, *(other for other in others if other is not None)]
    if images.dim() != 4 or any(tensor.dtype != torch.float32 for tensor in tensors):
        raise RuntimeError("depthwise_conv2d: images must have 4 dimensions, and all tensors must be float32")


def _check_weight(input: Tensor, weight: Tensor) -> None:
    if weight.shape[:2] != (input.shape[1], 1):
        raise RuntimeError("depthwise_conv2d: weight must have the shape (channels, 1, rows, columns)")


def _check_windows(kernel_size: Sequence[int], padding: Sequence[int]) -> None:
    if any(pad >= size for size, pad in zip(kernel_size, padding, strict=True)):
        raise RuntimeError("depthwise_conv2d: padding must be less than the kernel size")


def _channels_last(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.channels_last).copy_(tensor)


def _in_torch(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """As the compiled operator, in plain torch."""
    _check(input, weight, bias)
    _check_windows(weight.shape[2:], padding)
    _check_weight(input, weight)
    return _channels_last(torch.conv2d(input, weight, bias, stride, padding, groups=input.shape[1]))


def _grad_input_in_torch(
    grad_output: Tensor, weight: Tensor, image_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """As the compiled operator, in plain torch."""
    _check(grad_output, weight)
    _check_windows(weight.shape[2:], padding)
    images = grad_output.new_empty(*grad_output.shape[:2], *image_size)
    return _channels_last(_backward(grad_output, images, weight, stride, padding, [True, False, False])[0])


def _grad_weight_in_torch(
    grad_output: Tensor, input: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """As the compiled operator, in plain torch."""
    _check(grad_output, input)
    _check_windows(kernel_size, padding)
    weight = input.new_empty(input.shape[1], 1, *kernel_size)
    return _backward(grad_output, input, weight, stride, padding, [False, True, False])[1].contiguous()


def _backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    mask: list[bool],
) -> tuple[Tensor, ...]:
    groups = input.shape[1]
    return torch.ops.aten.convolution_backward(
        grad_output, input, weight, None, stride, padding, (1, 1), False, (0, 0), groups, mask
    )


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    _check_weight(input, weight)
    sizes = [
        (size + 2 * pad - window) // step + 1
        for size, window, step, pad in zip(input.shape[2:], weight.shape[2:], stride, padding, strict=True)
    ]
    return input.new_empty(*input.shape[:2], *sizes).to(memory_format=torch.channels_last)


def _grad_input_fake(
    grad_output: Tensor, weight: Tensor, image_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    return grad_output.new_empty(*grad_output.shape[:2], *image_size).to(memory_format=torch.channels_last)


def _grad_weight_fake(
    grad_output: Tensor, input: Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    return input.new_empty(input.shape[1], 1, *kernel_size)


register("depthwise_conv2d", SCHEMAS["depthwise_conv2d"], _in_torch, _fake)
register("depthwise_conv2d_grad_input", SCHEMAS["depthwise_conv2d_grad_input"], _grad_input_in_torch, _grad_input_fake)
register(
    "depthwise_conv2d_grad_weight", SCHEMAS["depthwise_conv2d_grad_weight"], _grad_weight_in_torch, _grad_weight_fake
)
