"""Mean and spread of a stream of features, in constant memory, and the standardisation that they make.

B. P. Welford, "Note on a method for calculating corrected sums of squares and products", Technometrics 4(3), 1962; with
weights as in D. H. D. West, "Updating mean and variance estimates: an improved method", Communications of the ACM
22(9), 1979.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_odt.adapt.arguments import require_numbers
from torch_odt.adapt.linear import linear_of


class RunningStatistics:
    """Mean and variance of each feature over all samples seen so far.

    With `forgetting` f below 1 a sample that lies k samples back counts f^k: the statistics follow a stream that
    changes, and remember some 1 / (1 - f) samples. For x_n, with weight w_n = f w_{n-1} + 1:

        mean_n = mean_{n-1} + (x_n - mean_{n-1}) / w_n
        s_n = f s_{n-1} + (x_n - mean_{n-1}) (x_n - mean_n),   variance_n = s_n / w_n

    Args:
        features: how many.
        forgetting: in (0, 1]; 1 lets all samples count alike.
        eps: is added to the variance, so that a feature which never changes does not become infinite.
        device: where they are kept, in float64: rounding must not drown the millionth sample.

    Attributes:
        samples: seen so far.
        weight: what they count together; `samples` where nothing is forgotten.
        mean: `(features,)`.

    Raises:
        ValueError: `features`, `forgetting` or `eps` is out of its range.

    Example:
        >>> statistics = RunningStatistics(1)
        >>> for value in (1.0, 2.0, 6.0):
        ...     statistics.update_(torch.tensor([value]))
        >>> statistics.mean.item(), round(statistics.variance.item(), 3)
        (3.0, 4.667)
    """

    def __init__(
        self, features: int, *, forgetting: float = 1.0, eps: float = 1e-5, device: torch.device | str = "cpu"
    ) -> None:
        if features < 1:
            raise ValueError(f"features={features}: there is nothing to keep statistics of")
        require_numbers(forgetting=forgetting, eps=eps)
        if not 0 < forgetting <= 1:
            raise ValueError(f"forgetting={forgetting}: a sample's weight is multiplied by it at the next; in (0, 1]")
        if not eps > 0:
            raise ValueError(f"eps={eps}: it is added to variances, and must be above 0")
        self.forgetting = forgetting
        self.eps = eps
        self.samples = 0
        self.weight = 0.0
        self.mean = torch.zeros(features, dtype=torch.float64, device=device)
        self._squares = torch.zeros_like(self.mean)

    @property
    def variance(self) -> Tensor:
        """Of the samples seen, not of what they were drawn from: divided by their weight. `(features,)`."""
        return self._squares / max(self.weight, 1.0)

    @property
    def spread(self) -> Tensor:
        """What features are divided by, `(features,)`: the standard deviation, and 1 before the first sample."""
        return (self.variance + self.eps).sqrt() if self.samples else torch.ones_like(self.mean)

    def update_(self, sample: Tensor) -> None:
        """Take in one sample, `(features,)`."""
        deviation = sample.to(self.mean.dtype) - self.mean
        self.samples += 1
        self.weight = self.forgetting * self.weight + 1
        self.mean += deviation / self.weight
        self._squares.mul_(self.forgetting).addcmul_(deviation, sample - self.mean)

    def standardise(self, x: Tensor) -> Tensor:
        """`(n, features)` less the mean, over the spread; in the dtype of `x`."""
        return ((x - self.mean) / self.spread).to(x.dtype)

    def restore(self, x: Tensor) -> Tensor:
        """What `standardise` made `x`, `(n, features)`, of."""
        return (x * self.spread + self.mean).to(x.dtype)

    def fold_into(self, layer: nn.Linear) -> nn.Linear:
        """A layer that does to features what `layer` does to standardised ones: standardisation costs nothing then."""
        weight = layer.weight.detach() / self.spread
        bias = layer.bias.detach() - weight @ self.mean
        return linear_of(weight.to(layer.weight.dtype), bias.to(layer.weight.dtype))

    def unfold_from(self, layer: nn.Linear) -> nn.Linear:
        """A layer that does to standardised features what `layer` does to features as they are."""
        weight = layer.weight.detach().to(self.mean.dtype)
        bias = weight @ self.mean
        if layer.bias is not None:
            bias += layer.bias.detach()
        return linear_of((weight * self.spread).to(layer.weight.dtype), bias.to(layer.weight.dtype))

    def fold_behind(self, layer: nn.Linear) -> nn.Linear:
        """A layer that returns features as they are where `layer` returns standardised ones."""
        weight = layer.weight.detach() * self.spread[:, None]
        bias = layer.bias.detach() * self.spread + self.mean
        return linear_of(weight.to(layer.weight.dtype), bias.to(layer.weight.dtype))

    def state_dict(self) -> dict[str, Any]:
        """What was counted, for `load_state_dict`; the tensors are its own."""
        counted = {"samples": self.samples, "weight": self.weight, "mean": self.mean, "squares": self._squares}
        return counted | {"forgetting": self.forgetting, "eps": self.eps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state, as a copy.

        Raises:
            ValueError: it is of another number of features.
        """
        if state["mean"].shape != self.mean.shape:
            raise ValueError(f"the state has {state['mean'].numel()} features; here there are {self.mean.numel()}")
        self.samples, self.weight = state["samples"], state["weight"]
        self.forgetting, self.eps = state["forgetting"], state["eps"]
        self.mean.copy_(state["mean"])
        self._squares.copy_(state["squares"])
