"""Self-adaptive rescaling (Mandheling): a tensor's scale is held, and looked at less and less often while it fits.

D. Xu et al., "Mandheling: Mixed-Precision On-Device DNN Training with DSP Offloading", MobiCom 2022. To look at a scale
in each batch is what integer training pays for its range; scales jump by a bit once in some ten batches. So a scale is
checked every `period` batches, the period doubles each time it has held, and falls back to 1 when it changed, or when
a batch in between was clipped.

What is held is the exponent of the result, not the shift: where a layer in front changes its own, the shift follows,
and this result stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from torch_odt.quant.niti_numbers import LARGEST_SHIFT, bits_of


@dataclass(frozen=True)
class Rescaling:
    """How the scale of one tensor is kept; as a row of float64 it lies in a module's state.

    Attributes:
        longest_period: the period doubles up to here; 1 checks every batch.
        slack_bits: a scale still holds where so many bits more would fit. 0 is the paper's rule; with 1, a largest
            value that goes to and fro over a power of two is no change.
        is_known: whether there is a scale already.
        exponent: the one that is held.
        period: batches from a check to the next one.
        wait: batches before the next check.
        batches, checks: so many there were.
        changes: checks that found another scale.
        clipped_batches: batches without a check in which something was clipped.
    """

    longest_period: int = 64
    slack_bits: int = 1
    is_known: bool = False
    exponent: int = 0
    period: int = 1
    wait: int = 0
    batches: int = 0
    checks: int = 0
    changes: int = 0
    clipped_batches: int = 0

    @classmethod
    def of(cls, row: Tensor) -> Rescaling:
        """From float64 of shape (WIDTH,)."""
        longest, slack, known, *rest = (int(number) for number in row.tolist())
        return cls(longest, slack, bool(known), *rest)

    def row(self) -> Tensor:
        """As float64 of shape (WIDTH,)."""
        return torch.tensor([float(getattr(self, name)) for name in _NAMES], dtype=torch.float64)

    @property
    def is_due(self) -> bool:
        """Whether this batch looks at the scale."""
        return not self.is_known or self.wait == 0

    def shift(self, sums_exponent: int) -> int:
        """The bits to drop of sums of that exponent, so that the result has the held one, as far as that goes."""
        return min(max(0, self.exponent - sums_exponent), LARGEST_SHIFT) if self.is_known else 0

    def fitting_shift(self, largest: float, bits: int, sums_exponent: int) -> int:
        """The bits to drop of sums that reach so far; the present ones, where they still fit.

        Args:
            largest: the largest magnitude among the sums.
            bits: that are left of it.
            sums_exponent: of the sums.
        """
        fitting = min(max(0, bits_of(largest) - bits), LARGEST_SHIFT)
        present = self.shift(sums_exponent)
        holds = self.is_known and (fitting <= present <= fitting + self.slack_bits or not largest)
        return present if holds else fitting

    def after_check(self, exponent: int, *, is_zero: bool = False) -> Rescaling:
        """The state when a batch has found this exponent; of zeros alone, nothing is learnt."""
        if is_zero:
            return replace(self, batches=self.batches + 1, checks=self.checks + 1)
        held = self.is_known and exponent == self.exponent
        period = min(2 * self.period, self.longest_period) if held else 1
        return replace(
            self,
            is_known=True,
            exponent=exponent,
            period=period,
            wait=period - 1,
            batches=self.batches + 1,
            checks=self.checks + 1,
            changes=self.changes + (self.is_known and not held),
        )

    def after_batch(self, *, was_clipped: bool) -> Rescaling:
        """The state when a batch has taken the scale as it was."""
        if was_clipped:
            return replace(self, period=1, wait=0, batches=self.batches + 1, clipped_batches=self.clipped_batches + 1)
        return replace(self, wait=self.wait - 1, batches=self.batches + 1)


_NAMES = tuple(field.name for field in fields(Rescaling))
WIDTH = len(_NAMES)
