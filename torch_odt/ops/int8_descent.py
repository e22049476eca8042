"""Gradient descent of int8 weights: a step that is computed in float32 and rounded stochastically, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_odt.ops.int8_rows import require_update, store_plain
from torch_odt.ops.registration import register


def int8_descend_(
    weight: Tensor,
    gradient: Tensor,
    scale: Tensor,
    rounding: Tensor,
    saturated: Tensor,
    *,
    rate: float,
    weight_decay: float = 0.0,
) -> None:
    """Takes `rate` times a gradient off an int8 weight, rounded stochastically and clamped to -127 and 127.

    When to choose it: for SGD without momentum, instead of a float32 copy of the weight that an optimizer changes and
    `int8_store_rounded_` rounds. With the same numbers in the counters both draw the same.

    Args:
        weight: int8 of two dimensions, contiguous, or of four in torch.channels_last.
        gradient: float32 of its shape, of the real weight.
        scale: float32 of shape (out,): the steps that the weight counts; of them, the rate is `rate / scale`.
        rounding: int64 of shape (2,): a seed, and how many updates there were, which the draws depend on; one is added.
        saturated: int64 of one number: how many weights were clamped so far; these are added.
        rate: the learning rate.
        weight_decay: so many times the weight are added to the gradient first.

    Raises:
        RuntimeError: a shape, dtype or layout is another, or a number is not finite before it is rounded; weight and
            counters are as they were.

    Example:
        >>> weight, rounding, saturated = torch.ones(1, 2, dtype=torch.int8), torch.tensor([7, 0]), torch.tensor(0)
        >>> int8_descend_(weight, torch.tensor([[1.0, -75.0]]), torch.tensor([0.25]), rounding, saturated, rate=0.5)
        >>> weight, rounding, saturated
        (tensor([[ -1, 127]], dtype=torch.int8), tensor([7, 1]), tensor(1))
    """
    torch.ops.torch_odt.int8_descend_.default(weight, gradient, scale, rounding, saturated, rate, weight_decay)
    # By it autograd and packed weights know of changes; operators do not move it.
    torch.autograd.graph.increment_version([weight, rounding, saturated])


def _descend_plain(
    weight: Tensor,
    gradient: Tensor,
    scale: Tensor,
    rounding: Tensor,
    saturated: Tensor,
    rate: float,
    weight_decay: float,
) -> None:
    name = "int8_descend_"
    require_update(name, weight, gradient, "gradient", rounding, saturated)
    if scale.dtype != torch.float32 or scale.numel() != len(weight) or not scale.is_contiguous():
        raise RuntimeError(f"{name}: scale must be a contiguous float32 CPU tensor of {len(weight)} numbers")
    rate_of_reals = torch.tensor(rate)
    rates = (rate_of_reals / scale).view(-1, *[1] * (weight.dim() - 1))
    steps = weight.float()
    steps -= gradient * rates + steps * (rate_of_reals * weight_decay)
    store_plain(weight, steps, rounding, saturated)


register(
    "int8_descend_",
    "(Tensor(a!) weight, Tensor gradient, Tensor scale, Tensor(b!) rounding, Tensor(c!) saturated, float rate, "
    "float weight_decay) -> ()",
    _descend_plain,
    lambda weight, gradient, scale, rounding, saturated, rate, weight_decay: None,
)
