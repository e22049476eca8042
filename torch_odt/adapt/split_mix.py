"""Base models of Split-Mix as one model: the mean of their logits.

J. Hong, H. Wang, Z. Wang, J. Zhou, "Efficient Split-Mix Federated Learning for On-Demand and In-Situ Customization",
ICLR 2022: base models train apart, and a device runs as many of them as it has time for.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Mix(nn.Module):
    """The mean of the logits of base models.

    `SubModel.split` makes base models of a wide one. Clients train each by itself, so that a step holds one of them;
    each is merged from the clients that have trained it.

    Args:
        bases: models with outputs of one shape; they are used, not copied.

    Raises:
        ValueError: there are none.

    Example:
        >>> bases = [nn.Linear(3, 2) for _ in range(4)]
        >>> Mix(bases[:2])(torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(self, bases: Iterable[nn.Module]) -> None:
        super().__init__()
        try:
            self.bases = nn.ModuleList(bases)
        except TypeError as error:
            raise TypeError(f"bases is a {type(bases).__name__}: give a list of base models") from error
        if not self.bases:
            raise ValueError("a mix is made of one base model or more")

    def forward(self, x: Tensor) -> Tensor:
        """The bases run one after the other, so that evaluation holds the activations of one.

        Args:
            x: what each of them takes.
        """
        return torch.stack([base(x) for base in self.bases]).mean(0)
