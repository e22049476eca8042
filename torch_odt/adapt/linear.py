"""A linear layer of given weights."""

from __future__ import annotations

from torch import Tensor, nn


def linear_of(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A layer that holds these very tensors, `(outputs, inputs)` and `(outputs,)`; it may have no outputs yet.

    Neither memory nor random numbers are spent on an initialisation.

    Example:
        >>> import torch
        >>> linear_of(torch.ones(2, 3), torch.zeros(2))
        Linear(in_features=3, out_features=2, bias=True)
    """
    layer = nn.Linear(1, 1, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight)
    layer.bias = nn.Parameter(bias)
    return layer
