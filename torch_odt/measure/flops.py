"""Floating-point operations of a step, a multiplication and an addition being two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def count_flops(step: Callable[[], Any]) -> int:
    """Makes a step and counts what matrix products and convolutions compute in it.

    Example:
        >>> a = torch.ones(2, 3)
        >>> count_flops(lambda: a.mm(a.t()))
        24
    """
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _of_gradients}) as counter:
        step()
    return int(counter.get_total_flops())


def _of_gradients(
    gradient_shape: Sequence[int],
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    is_transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """As many as the forward pass for each gradient; torch's own count knows no groups."""
    positions = input_shape if is_transposed else gradient_shape
    forward = 2 * positions[0] * prod(positions[2:]) * prod(weight_shape)
    return forward * sum(map(bool, output_mask[:2]))
