"""Calls whose gradients are summed before an optimizer step, and what share of their mean each has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Shares:
    """What gradients are multiplied with to become the mean over all samples of an accumulation.

    Attributes:
        earlier: the sum of the calls before.
        new: the gradients of this call.
    """

    earlier: float = 1.0
    new: float = 1.0


@dataclass
class Accumulation:
    """Attributes:
    calls, samples: how many there are in it.
    members: parameters whose gradients are the mean over them. What the optimizer does not reset has gradients of
        its own, which are no part of this mean.
    """

    calls: int = 0
    samples: int = 0
    members: tuple[nn.Parameter, ...] = ()

    def enter(self, samples: int, parameters: Iterable[nn.Parameter]) -> Shares:
        """Begin another call, over so many samples; its own gradients are not there yet."""
        before, self.samples = self.samples, self.samples + samples
        if not before:
            # By their identities: tensors' own hashes are Python's.
            self.members = tuple({id(p): p for p in parameters if p.grad is None}.values())
        return Shares(earlier=before / self.samples if before else 1.0, new=samples / self.samples if samples else 1.0)

    def scale_earlier(self, shares: Shares) -> None:
        """Make `.grad` the earlier calls' part of the mean."""
        for parameter in self.members:
            if parameter.grad is not None and shares.earlier != 1.0:
                parameter.grad.mul_(shares.earlier)
