"""The learning rate of a way to train: the best on held-out samples."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence


def best_rate(
    rates: Sequence[float], reached: Callable[[float, int], float], *, trainings: int
) -> tuple[float, dict[float, float]]:
    """The rate with the highest accuracy in the mean over some trainings, and that of each.

    Where there is but one rate, nothing is trained and no accuracy given.

    Args:
        reached: the accuracy on held-out samples after training at a rate with a seed.
        trainings: at each rate, with seeds that no other training has.
    """
    if len(rates) == 1:
        return rates[0], {}
    seeds = range(1000, 1000 + trainings)
    means = {rate: statistics.mean(reached(rate, seed) for seed in seeds) for rate in rates}
    return max(means, key=means.__getitem__), means
