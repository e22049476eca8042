"""The gradients of fused batch normalisation, in the place of the gradient that they are computed from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_odt.ops.fused_batch_norm import _add_backward_in_torch, _backward_in_torch, _fake_gradients
from torch_odt.ops.registration import register

SCHEMAS = {
    "batch_norm_act_backward_": (
        "(Tensor(a!) grad_output, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias, "
        "str activation, float low, float high, bool[3] output_mask) -> (Tensor, Tensor)"
    ),
    "batch_norm_add_act_backward_": (
        "(Tensor(a!) grad_output, Tensor output, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, "
        "float low, float high, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
    ),
}


def batch_norm_act_backward_(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "clamp",
    low: float = -math.inf,
    high: float = math.inf,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, Tensor]:
    """As `batch_norm_act_backward`, with the input's gradient in the place of `grad_output`.

    When to choose it: nobody reads `grad_output` any more. Two tensors of the input's size are in memory in place of
    three, and a pass over memory is saved.

    Args:
        grad_output: of the input's shape and dtype; it becomes the input's gradient, in its own memory format. One that
            is not the input's costs two copies.
        input, mean, invstd, weight, bias, activation, low, high: as for `batch_norm_act_backward`.
        output_mask: which gradients are wanted; the input's has to be.

    Returns:
        The gradients of the weight and the bias. One that is not wanted has no elements.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> x, g = torch.randn(8, 3, 4, 4), torch.randn(8, 3, 4, 4)
        >>> expected = torch.ops.torch_odt.batch_norm_act_backward(
        ...     g, x, torch.zeros(3), torch.ones(3), None, None, "clamp", 0.0, 6.0, [True] * 3)[0]
        >>> _ = batch_norm_act_backward_(g, x, torch.zeros(3), torch.ones(3), low=0.0, high=6.0)
        >>> torch.equal(g, expected)
        True
    """
    return torch.ops.torch_odt.batch_norm_act_backward_(
        grad_output, input, mean, invstd, weight, bias, activation, low, high, output_mask
    )


def batch_norm_add_act_backward_(
    grad_output: Tensor,
    output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:
    """As `batch_norm_add_act_backward`, with the residual's gradient in the place of `grad_output`.

    When to choose it: nobody reads `grad_output` any more.

    Args:
        grad_output: of the input's shape and dtype; it becomes the residual's gradient, in its own memory format. One
            that is not the input's costs two copies.
        output, input, mean, invstd, weight, low, high, output_mask: as for `batch_norm_add_act_backward`.

    Returns:
        The gradients of the input, the weight and the bias. One that is not wanted has no elements.

    Raises:
        RuntimeError: a shape, dtype or device is another.

    Example:
        >>> x, g, y = (torch.randn(8, 3, 4, 4) for _ in range(3))
        >>> expected = g * (y > 0)
        >>> _ = batch_norm_add_act_backward_(g, y, x, torch.zeros(3), torch.ones(3), low=0.0)
        >>> torch.equal(g, expected)
        True
    """
    return torch.ops.torch_odt.batch_norm_add_act_backward_(
        grad_output, output, input, mean, invstd, weight, low, high, output_mask
    )


def _overwriting_in_torch(grad_output: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    """As the compiled operator, in plain torch."""
    grad_input, grad_weight, grad_bias = _backward_in_torch(grad_output, *arguments)  # type: ignore[arg-type]
    if not grad_input.numel():
        raise RuntimeError("batch_norm_act_backward_: the input's gradient must be wanted")
    grad_output.copy_(grad_input)
    return grad_weight, grad_bias


def _overwriting_add_in_torch(grad_output: Tensor, *arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    """As the compiled operator, in plain torch."""
    *gradients, grad_residual = _add_backward_in_torch(grad_output, *arguments)  # type: ignore[arg-type]
    grad_output.copy_(grad_residual)
    return gradients[0], gradients[1], gradients[2]


def _fake(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    low: float,
    high: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    return _fake_gradients(input, mean, output_mask)[1:]


def _fake_add(
    grad_output: Tensor,
    output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    low: float,
    high: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradients(input, mean, output_mask)


register("batch_norm_act_backward_", SCHEMAS["batch_norm_act_backward_"], _overwriting_in_torch, _fake)
register("batch_norm_add_act_backward_", SCHEMAS["batch_norm_add_act_backward_"], _overwriting_add_in_torch, _fake_add)
