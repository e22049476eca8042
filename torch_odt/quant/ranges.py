"""Which real numbers int8 stands for: ranges seen over calibration batches, and the grids and steps made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torch_odt.quant.activation import LEAST, MOST, WEIGHT_MOST

Observer = Literal["minmax", "mean"]
OBSERVERS: tuple[Observer, ...] = ("minmax", "mean")
# Below it, steps and their reciprocals leave float32.
LEAST_RANGE = 1e-30
# Seven bits of a weight and seventeen of its step are the 24 of float32.
_STEP_UNITS = 2**17


@dataclass
class Range:
    """The least and the largest number of a tensor, over batches.

    Choose "minmax" where nothing may be clamped, "mean" (of the batches' own bounds) where single batches have outliers
    that would make all steps larger.

    Args:
        observer: how batches are put together.

    Example:
        >>> seen = Range("mean")
        >>> seen.add(torch.tensor([0.0, 1.0]))
        >>> seen.add(torch.tensor([-2.0, 3.0]))
        >>> seen.low, seen.high
        (-1.0, 2.0)
    """

    observer: Observer = "minmax"
    low: float = math.nan
    high: float = math.nan
    batches: int = 0

    def add(self, tensor: Tensor) -> None:
        """See another batch; what is empty counts for nothing."""
        if not tensor.numel():
            return
        low, high = (float(bound) for bound in torch.aminmax(tensor.detach().float()))
        self.batches += 1
        if self.batches == 1:
            self.low, self.high = low, high
        elif self.observer == "mean":
            self.low += (low - self.low) / self.batches
            self.high += (high - self.high) / self.batches
        elif not math.isnan(self.low + self.high):
            self.low, self.high = (min(self.low, low), max(self.high, high)) if low == low else (low, high)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def is_zero(self) -> bool:
        """Whether all numbers were 0, so that there is nothing to make steps of."""
        return max(abs(self.low), abs(self.high)) < LEAST_RANGE


def grid_of(low: float, high: float) -> Tensor:
    """The asymmetric grid over a range: 255 steps, 0 on one of them.

    Args:
        low, high: the range, to which 0 is added.

    Returns:
        float32 of shape (2,): step and zero point.

    Raises:
        ValueError: a bound is not finite, or there is nothing between them.

    Example:
        >>> grid_of(0.0, 6.0)
        tensor([ 2.3529e-02, -1.2800e+02])
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"a range from {low} to {high} has no steps: its bounds must be finite")
    low, high = min(low, 0.0), max(high, 0.0)
    if high - low < LEAST_RANGE:
        raise ValueError(f"a range from {low} to {high} has no steps")
    step = (high - low) / (MOST - LEAST)
    zero = max(LEAST, min(MOST, round(LEAST - low / step)))
    return torch.tensor([step, float(zero)])


def weight_steps(weight: Tensor, headroom: float = 0.0, least: Tensor | None = None) -> Tensor:
    """The step of each output channel: its largest absolute weight is 127 of them.

    Steps are rounded up to 17 significant bits, so that float32 holds any number of them that int8 can count: weights
    become real numbers and integers again without a change.

    Args:
        weight: float32 of shape (out, ...).
        headroom: so much larger, in parts of it, a weight may become.
        least: float32 of shape (out,): a bound for steps.

    Returns:
        float32 of shape (out,). Channels of zeros take the mean of the others.

    Raises:
        ValueError: a weight is not finite, or all are 0.

    Example:
        >>> weight_steps(torch.tensor([[1.27, -0.5], [0.0, 0.0]]))
        tensor([0.0100, 0.0100])
    """
    largest = weight.detach().abs().flatten(1).amax(1)
    if not bool(largest.isfinite().all()):
        raise ValueError("the weight is not finite")
    used = largest > LEAST_RANGE
    if not bool(used.any()):
        raise ValueError("all weights are 0")
    steps = torch.where(used, largest, largest[used].mean()) * ((1 + headroom) / WEIGHT_MOST)
    if least is not None:
        steps = torch.maximum(steps, least)
    mantissa, exponent = torch.frexp(steps)
    return torch.ldexp(mantissa.mul(_STEP_UNITS).ceil_().div_(_STEP_UNITS), exponent)
