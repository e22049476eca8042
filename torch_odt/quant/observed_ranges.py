"""Ranges of activations: what is observed, and the steps of int8 that follow from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOW, HIGH = -128, 127
NONE_SEEN = (float("nan"), float("nan"))


@torch.library.custom_op("torch_odt::observed_range", mutates_args=())
def observed_range(x: Tensor, before: Tensor, averaging: float, layer: str) -> Tensor:
    """An exponential moving average of a tensor's least and greatest value.

    One operator, so that a step that runs as a graph looks at its numbers as well.

    Args:
        x: of any shape.
        before: float32 of shape (2,), the average up to now; NaN if nothing was seen.
        averaging: the share of what is seen now; with 0, `x` is not looked at.
        layer: a name for errors.

    Returns:
        float32 of shape (2,): least and greatest value, 0 within.

    Raises:
        RuntimeError: a number is not finite, or nothing was seen up to now and `averaging` is 0.

    Example:
        >>> observed_range(torch.tensor([-1.0, 2.0]), torch.tensor(NONE_SEEN), 0.1, "first")
        tensor([-1.,  2.])
    """
    if averaging == 0 or not x.numel():
        if bool(before.isnan().any()):
            raise RuntimeError(
                f"{layer} has seen no batch, so that its input's range is not known: train a step first, or give "
                "`sample` to the verb that quantized the model"
            )
        return before.clone()
    low, high = x.aminmax()
    now = torch.stack([low.clamp(max=0), high.clamp(min=0)]).to(before)
    if not bool(now.isfinite().all()):
        raise RuntimeError(f"{layer}: its input holds numbers that are not finite; training has diverged before it")
    # Whatever came first, the same allocations: a plan counts on them.
    return torch.where(before.isnan(), now, before.lerp(now, averaging))


@observed_range.register_fake
def _(x: Tensor, before: Tensor, averaging: float, layer: str) -> Tensor:
    return torch.empty_like(before)


@torch.library.custom_op("torch_odt::learned_steps", mutates_args=())
def learned_steps(relative_steps: Tensor, steps: Tensor, layer: str) -> Tensor:
    """Sizes of steps that are learned, in units of those that learning started from.

    The gradient is that of the result divided by `steps`, not multiplied. So gradient descent moves the result as if it
    were the parameter, and Adam, whose moves have a size of their own, moves it by a share of what it was.

    Args:
        relative_steps: the parameter, which starts from 1; float32 of shape (n,).
        steps: where the result starts; float32 of shape (n,).
        layer: a name for errors.

    Returns:
        `relative_steps * steps`.

    Raises:
        RuntimeError: one of them is not positive, or not finite.

    Example:
        >>> relative = torch.ones(1, requires_grad=True)
        >>> learned_steps(relative, torch.tensor([0.5]), "first").backward()
        >>> relative.grad
        tensor([2.])
    """
    result = relative_steps * steps
    if not bool((result.isfinite() & (result > 0)).all()):
        raise RuntimeError(
            f"{layer}: learning has brought a range to zero, below it, or to a number that is not finite; give the "
            "ranges a lower learning rate"
        )
    return result


@learned_steps.register_fake
def _(relative_steps: Tensor, steps: Tensor, layer: str) -> Tensor:
    return torch.empty_like(relative_steps)


def _keep_start(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _over_start(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient / ctx.saved_tensors[0], None, None


learned_steps.register_autograd(_over_start, setup_context=_keep_start)


def steps_of_range(span: Tensor) -> tuple[Tensor, Tensor]:
    """The size of a step of int8 and the value that stands for 0.

    Args:
        span: float32 of shape (2,): least and greatest value, 0 within. Where both are 0 a step is 1.

    Returns:
        float32 and int32, each of one number.

    Example:
        >>> steps_of_range(torch.tensor([0.0, 25.5]))
        (tensor(0.1000), tensor(-128, dtype=torch.int32))
    """
    width = span[1] - span[0]
    step = torch.where(width > 0, width / (HIGH - LOW), 1.0)
    return step, (LOW - span[0] / step).round().clamp(LOW, HIGH).to(torch.int32)


@torch.library.custom_op("torch_odt::weight_steps", mutates_args=())
def weight_steps(weight: Tensor, layer: str) -> Tensor:
    """The size of a step for each output channel of a weight, symmetric: its largest absolute value over 127.

    Args:
        weight: of shape (out_channels, ...).
        layer: a name for errors.

    Returns:
        float32 of shape (out_channels,); 1 where a channel is 0 throughout.

    Raises:
        RuntimeError: a number is not finite.

    Example:
        >>> weight_steps(torch.tensor([[1.27, -0.5], [0.0, 0.0]]), "first")
        tensor([0.0100, 1.0000])
    """
    largest = weight.abs().flatten(1).amax(1).float()
    if not bool(largest.isfinite().all()):
        raise RuntimeError(f"{layer}: its weight holds numbers that are not finite; training has diverged before it")
    return torch.where(largest > 0, largest / HIGH, 1.0)


@weight_steps.register_fake
def _(weight: Tensor, layer: str) -> Tensor:
    return weight.new_empty(weight.shape[0], dtype=torch.float32)
