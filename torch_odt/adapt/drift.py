"""How well a stream is predicted, sample after sample, and the sign that it has become another one.

J. Gama, R. Sebastião, P. P. Rodrigues, "On evaluating stream learning algorithms", Machine Learning 90, 2013: a model
that is evaluated on each sample before it learns from it (prequentially) is judged by a mean that fades, and drift is
noticed by the test of E. S. Page, "Continuous inspection schemes", Biometrika 41, 1954.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_odt.adapt.arguments import require_numbers


class FadingMean:
    """The mean of a stream's values, in which one that lies k values back counts fading^k.

    Args:
        fading: in (0, 1]; it remembers some 1 / (1 - fading) values, and all of them at 1.

    Attributes:
        values: how many were taken in.

    Raises:
        ValueError: `fading` is out of its range.

    Example:
        >>> mean = FadingMean(0.5)
        >>> for value in (0.0, 1.0):
        ...     mean.update(value)
        >>> round(mean.value, 3)
        0.667
    """

    def __init__(self, fading: float = 0.998) -> None:
        require_numbers(fading=fading)
        if not 0 < fading <= 1:
            raise ValueError(f"fading={fading}: a value's weight is multiplied by it at the next; in (0, 1]")
        self.fading = fading
        self.values = 0
        self._sum = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float:
        """The mean; NaN before the first value."""
        return self._sum / self._weight if self.values else float("nan")

    def update(self, value: float) -> None:
        """Take in the next value."""
        self.values += 1
        self._sum = self.fading * self._sum + value
        self._weight = self.fading * self._weight + 1

    def state_dict(self) -> dict[str, Any]:
        """The setting and what was counted, for `load_state_dict`."""
        return {"fading": self.fading, "values": self.values, "sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        self.fading = state["fading"]
        self.values, self._sum, self._weight = state["values"], state["sum"], state["weight"]


class PageHinkley:
    """Notices that the mean of a stream's values has risen.

    For values x_1, x_2, ... with the means m_1, m_2, ... of those up to each, u_n is the sum of x_i - m_i - delta up to
    n: it falls while the stream is what it was, and rises when it is not. The signal is given where u_n is more than
    `threshold` above its smallest value so far; all counts then begin anew.

    Args:
        delta: rises of the mean below this are no drift.
        threshold: a higher one gives fewer false signals, and later ones: after a rise of the mean by r, it takes some
            threshold / (r - delta) values. The defaults are for errors, which are 0 or 1.
        least_values: so many are seen first.

    Attributes:
        signals: given so far.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> test = PageHinkley(threshold=10)
        >>> [n for n in range(200) if test.update(float(n >= 100))]
        [110]
    """

    def __init__(self, *, delta: float = 0.02, threshold: float = 30.0, least_values: int = 30) -> None:
        require_numbers(delta=delta, threshold=threshold, least_values=least_values)
        if not (delta >= 0 and threshold > 0 and least_values >= 1):
            raise ValueError(
                f"delta={delta}, threshold={threshold}, least_values={least_values}: give a delta of 0 or more, a "
                "threshold above 0 and at least one value"
            )
        self.delta = delta
        self.threshold = threshold
        self.least_values = least_values
        self.signals = 0
        self._values = 0
        self._mean = self._sum = self._smallest = 0.0

    def update(self, value: float) -> bool:
        """Take in the next value.

        Returns:
            Whether the mean has risen.
        """
        self._values += 1
        self._mean += (value - self._mean) / self._values
        self._sum += value - self._mean - self.delta
        self._smallest = min(self._smallest, self._sum)
        if self._values < self.least_values or self._sum - self._smallest <= self.threshold:
            return False
        self.signals += 1
        self._values = 0
        self._mean = self._sum = self._smallest = 0.0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Settings and what was counted, for `load_state_dict`."""
        settings = {"delta": self.delta, "threshold": self.threshold, "least_values": self.least_values}
        counts = {"values": self._values, "mean": self._mean, "sum": self._sum, "smallest": self._smallest}
        return settings | {"signals": self.signals, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        self.delta, self.threshold, self.least_values = state["delta"], state["threshold"], state["least_values"]
        self.signals, self._values = state["signals"], state["values"]
        self._mean, self._sum, self._smallest = state["mean"], state["sum"], state["smallest"]
