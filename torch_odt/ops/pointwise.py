"""Convolutions of float32 images in channels_last with windows of one element, and their gradients.

Weights are of float32, or stored in 8 bits.

They compute at once and keep nothing, where oneDNN looks a kernel up or compiles it and MKL copies the weight: of small
images that takes as long as the sums, and memory that stays. The operators have no gradient of their own: they stand in
graphs that hold both passes already. Plain torch's sums are rounded in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_odt.ops.registration import register

SCHEMAS = {
    "pointwise_conv2d": "(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
    "pointwise_conv2d_grad_input": "(Tensor grad_output, Tensor weight) -> Tensor",
    "pointwise_conv2d_grad_weight": "(Tensor grad_output, Tensor input) -> Tensor",
    "stored_pointwise_conv2d": "(Tensor input, Tensor codes, Tensor scale, Tensor? bias) -> Tensor",
    "stored_pointwise_conv2d_grad_input": "(Tensor grad_output, Tensor codes, Tensor scale) -> Tensor",
}


def pointwise_conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer over the channels of each pixel, as `conv2d` with a 1 x 1 kernel within rounding.

    When to choose it: for small images, and where memory counts: nothing is kept behind it. The more there is to
    compute, the less it gains. Threads change no bit. It has no gradient of its own (there are operators for those), so
    that a module which calls it cannot be trained by autograd.

    Args:
        input: float32 of shape (N, inputs, H, W). Another memory format than channels_last costs a copy.
        weight: float32 of shape (outputs, inputs, 1, 1).
        bias: float32 of shape (outputs,), or None.

    Returns:
        The output, of shape (N, outputs, H, W) in channels_last.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> x, weight = torch.randn(1, 8, 5, 5), torch.randn(16, 8, 1, 1)
        >>> torch.allclose(pointwise_conv2d(x, weight), torch.conv2d(x, weight), atol=1e-5)
        True
    """
    return torch.ops.torch_odt.pointwise_conv2d(input, weight, bias)


def pointwise_conv2d_grad_input(grad_output: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input of `pointwise_conv2d`.

    When to choose it: in place of `convolution_backward`, within rounding; it does not take the input.

    Args:
        grad_output: float32 of the output's shape. Another memory format than channels_last costs a copy.
        weight: as it was given to `pointwise_conv2d`.

    Returns:
        The gradient, in channels_last.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> pointwise_conv2d_grad_input(torch.ones(1, 3, 1, 2), torch.full((3, 1, 1, 1), 0.5))
        tensor([[[[1.5000, 1.5000]]]])
    """
    return torch.ops.torch_odt.pointwise_conv2d_grad_input(grad_output, weight)


def pointwise_conv2d_grad_weight(grad_output: Tensor, input: Tensor) -> Tensor:
    """The gradient of the weight of `pointwise_conv2d`.

    When to choose it: in place of `convolution_backward`, within rounding; it does not take the weight.

    Args:
        grad_output: float32 of the output's shape. Another memory format than channels_last costs a copy.
        input: as it was given to `pointwise_conv2d`.

    Returns:
        The gradient, contiguous, of shape (outputs, inputs, 1, 1).

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> pointwise_conv2d_grad_weight(torch.ones(1, 1, 2, 2), torch.full((1, 2, 2, 2), 0.5)).flatten()
        tensor([2., 2.])
    """
    return torch.ops.torch_odt.pointwise_conv2d_grad_weight(grad_output, input)


def stored_pointwise_conv2d(input: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`pointwise_conv2d` by the weight `codes * scale`, bit for bit.

    When to choose it: where a weight is stored in 8 bits for want of memory: the weight itself is never there, but for
    the part that is being multiplied. It has no gradient of its own either.

    Args:
        input, bias: as in `pointwise_conv2d`.
        codes: int8 of shape (outputs, inputs, 1, 1).
        scale: float32, one number for each output.

    Returns:
        The output, in channels_last.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> x, codes = torch.ones(1, 2, 1, 1), torch.tensor([[3, -1], [5, 5]], dtype=torch.int8)[..., None, None]
        >>> stored_pointwise_conv2d(x, codes, torch.tensor([0.5, 0.25])).flatten()
        tensor([1.0000, 2.5000])
    """
    return torch.ops.torch_odt.stored_pointwise_conv2d(input, codes, scale, bias)


def stored_pointwise_conv2d_grad_input(grad_output: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """The gradient of the input of `stored_pointwise_conv2d`.

    When to choose it: as there.

    Args:
        grad_output: float32 of the output's shape. Another memory format than channels_last costs a copy.
        codes, scale: as they were given to `stored_pointwise_conv2d`.

    Returns:
        The gradient, in channels_last.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> codes = torch.tensor([[3, -1], [5, 5]], dtype=torch.int8)[..., None, None]
        >>> stored_pointwise_conv2d_grad_input(torch.ones(1, 2, 1, 1), codes, torch.tensor([0.5, 0.25])).flatten()
        tensor([2.7500, 0.7500])
    """
    return torch.ops.torch_odt.stored_pointwise_conv2d_grad_input(grad_output, codes, scale)


def _check(images: Tensor, *others: Tensor | None) -> None:
    tensors = [images, *(other for other in others if other is not None)]
    if images.dim() != 4 or any(tensor.dtype != torch.float32 for tensor in tensors):
        raise RuntimeError("pointwise_conv2d: images must have 4 dimensions, and all tensors must be float32")


def _check_weight(weight: Tensor, channels: int, of_weight: int) -> None:
    if weight.dim() != 4 or weight.shape[2:] != (1, 1) or weight.shape[of_weight] != channels:
        raise RuntimeError("pointwise_conv2d: weight must have the shape (outputs, inputs, 1, 1)")


def _check_pixels(grad_output: Tensor, input: Tensor) -> None:
    if grad_output.dim() != 4 or (grad_output.shape[0], grad_output.shape[2:]) != (input.shape[0], input.shape[2:]):
        raise RuntimeError("pointwise_conv2d: grad_output and input must have the same samples, rows and columns")


def _in_torch(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As the compiled operator, in plain torch."""
    _check(input, weight, bias)
    _check_weight(weight, input.shape[1], 1)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RuntimeError("pointwise_conv2d: bias must have one number for each output")
    return torch.conv2d(input, weight, bias).contiguous(memory_format=torch.channels_last)


def _grad_input_in_torch(grad_output: Tensor, weight: Tensor) -> Tensor:
    """As the compiled operator, in plain torch."""
    _check(grad_output, weight)
    _check_weight(weight, grad_output.shape[1], 0)
    gradient = torch.conv2d(grad_output, weight.transpose(0, 1))
    return gradient.contiguous(memory_format=torch.channels_last)


def _grad_weight_in_torch(grad_output: Tensor, input: Tensor) -> Tensor:
    """As the compiled operator, in plain torch."""
    _check(grad_output, input)
    _check_pixels(grad_output, input)
    return torch.einsum("nohw,nihw->oi", grad_output, input)[..., None, None].contiguous()


def _weight(codes: Tensor, scale: Tensor) -> Tensor:
    if codes.dim() != 4 or codes.dtype != torch.int8 or scale.dtype != torch.float32 or scale.numel() != len(codes):
        raise RuntimeError(
            "stored_pointwise_conv2d: codes must be int8 of the shape (outputs, inputs, 1, 1), and scale float32 with "
            "one number for each output"
        )
    return codes * scale.reshape(-1, 1, 1, 1)


def _stored_in_torch(input: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """As the compiled operator, in plain torch."""
    return _in_torch(input, _weight(codes, scale), bias)


def _stored_grad_input_in_torch(grad_output: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """As the compiled operator, in plain torch."""
    return _grad_input_in_torch(grad_output, _weight(codes, scale))


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check_weight(weight, input.shape[1], 1)
    return _images_like(input, weight.shape[0])


def _grad_input_fake(grad_output: Tensor, weight: Tensor) -> Tensor:
    _check_weight(weight, grad_output.shape[1], 0)
    return _images_like(grad_output, weight.shape[1])


def _grad_weight_fake(grad_output: Tensor, input: Tensor) -> Tensor:
    _check_pixels(grad_output, input)
    return input.new_empty(grad_output.shape[1], input.shape[1], 1, 1)


def _stored_fake(input: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return _fake(input, codes, bias)


def _stored_grad_input_fake(grad_output: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return _grad_input_fake(grad_output, codes)


def _images_like(images: Tensor, channels: int) -> Tensor:
    return images.new_empty(images.shape[0], channels, *images.shape[2:]).to(memory_format=torch.channels_last)


register("pointwise_conv2d", SCHEMAS["pointwise_conv2d"], _in_torch, _fake)
register("pointwise_conv2d_grad_input", SCHEMAS["pointwise_conv2d_grad_input"], _grad_input_in_torch, _grad_input_fake)
register(
    "pointwise_conv2d_grad_weight", SCHEMAS["pointwise_conv2d_grad_weight"], _grad_weight_in_torch, _grad_weight_fake
)
register("stored_pointwise_conv2d", SCHEMAS["stored_pointwise_conv2d"], _stored_in_torch, _stored_fake)
register(
    "stored_pointwise_conv2d_grad_input",
    SCHEMAS["stored_pointwise_conv2d_grad_input"],
    _stored_grad_input_in_torch,
    _stored_grad_input_fake,
)
