"""Numbers as int8: which step a code stands for, and which code for 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOWEST, HIGHEST = -128, 127


@dataclass(frozen=True)
class Int8Range:
    """What int8 codes stand for: (code - zero_point) * scale.

    Make it with `over`, from the numbers that it is to hold. 0 has a code of its own, and a number in the range differs
    from what its code stands for by at most half a step, `scale / 2`. What lies outside becomes the nearest end.

    Attributes:
        scale: float32 of shape (): one step for all; or of shape (channels,).
        zero_point: int32 of the same shape.

    Example:
        >>> codes = Int8Range.over(torch.tensor(-1.0), torch.tensor(4.1)).quantize(torch.tensor([[0.0, 4.1, 9.0]]))
        >>> codes
        tensor([[-78, 127, 127]], dtype=torch.int8)
    """

    scale: Tensor
    zero_point: Tensor

    @classmethod
    def over(cls, lowest: Tensor, highest: Tensor) -> Int8Range:
        """The range of numbers from `lowest` to `highest`, which are of one shape, () or (channels,), and 0.

        Raises:
            ValueError: one is not finite, or the lowest above the highest.
        """
        if not bool((lowest.isfinite() & highest.isfinite()).all()):
            raise ValueError("a range from or to a number that is not finite has no steps")
        if bool((lowest > highest).any()):
            raise ValueError("the lowest number of a range lies above its highest")
        # In double precision, so that the last code is not rounded out of reach.
        low, high = lowest.double().clamp(max=0), highest.double().clamp(min=0)
        scale = ((high - low) / (HIGHEST - LOWEST)).float()
        scale = torch.where(scale > 0, scale, 1.0)
        return cls(scale, (LOWEST - low / scale).round().clamp(LOWEST, HIGHEST).int())

    @property
    def nbytes(self) -> int:
        """What the range itself takes."""
        return self.scale.nbytes + self.zero_point.nbytes

    def quantize(self, values: Tensor) -> Tensor:
        """Codes of float samples, `(n, ...)` or, by channel, `(n, channels, ...)`."""
        scale, zero_point = self._beside(values)
        return (values / scale).round_().add_(zero_point).clamp_(LOWEST, HIGHEST).to(torch.int8)

    def dequantize(self, codes: Tensor) -> Tensor:
        """What codes stand for, float32."""
        scale, zero_point = self._beside(codes)
        return codes.float().sub_(zero_point).mul_(scale)

    def is_outside(self, values: Tensor) -> Tensor:
        """Which of the values are more than half a step beyond the range's ends, so that codes saturate."""
        scale, zero_point = self._beside(values)
        steps = values / scale + zero_point
        return (steps < LOWEST - 0.5) | (steps > HIGHEST + 0.5)

    def _beside(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        if not self.scale.dim():
            return self.scale, self.zero_point
        shape = (-1, *[1] * (samples.dim() - 2))
        return self.scale.view(shape), self.zero_point.view(shape)
