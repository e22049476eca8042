"""Evolutionary search for the scheme that gains most inside a number of bytes.

J. Lin et al., "On-Device Training Under 256KB Memory", NeurIPS 2022, section 3.2: maximise the sum of the parts' gains
(bias_gain[k] + sum of weight_gain[i, r]) subject to memory(k, i, r) <= budget. Nothing is trained inside the search.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import SupportsIndex

from torch_odt.adapt.contributions import Contributions
from torch_odt.adapt.scheme import Scheme
from torch_odt.adapt.scheme_memory import MemoryModel
from torch_odt.errors import InfeasibleBudget, OdtWarning
from torch_odt.memory._units import format_bytes, parse_bytes

# Number of last biases; for each layer its ratio, 0 for none.
Genome = tuple[int, ...]
_ROUNDS = 12
# Less of the budget than this is not worth another search.
_SPARE_SHARE = 0.01
# Counted bytes may be so much too many; and so many winners of those between are simulated.
_ERROR_SHARE = 0.1
_CHECKS = 6


@dataclass(frozen=True)
class FoundScheme:
    """What a search has found.

    Attributes:
        scheme: the selection.
        gain: of accuracy above the classifier's alone, as the sum of its parts' gains.
        nbytes: of its step, by the simulator; at most the budget.
        evaluated: how many schemes were looked at.
    """

    scheme: Scheme
    gain: float
    nbytes: int
    evaluated: int


def search_scheme(
    contributions: Contributions,
    memory: MemoryModel,
    *,
    budget: int | str,
    population: int = 64,
    generations: int = 60,
    seed: int = 0,
) -> FoundScheme:
    """The scheme of the largest gain whose step fits into a budget.

    Where no part gained anything, the classifier alone is what is found, and a warning says so.

    The memory model counts while generations go by and simulates the winner. Where the simulation exceeds the budget,
    the search is made again with so many bytes less; where it leaves room, with so many more. Since counting errs in
    either direction, the best of those that count as a little too large are simulated, too.

    Args:
        contributions: what the parts of the model are worth; the search takes those that were measured.
        memory: what schemes take; `SchemeMemory` is one.
        budget: bytes of all that is not weights, such as "100KiB".
        population, generations: of the evolution.
        seed: of its random numbers.

    Raises:
        InfeasibleBudget: not even the classifier alone fits.
        ValueError: `population` is below 2, or `generations` below 0.

    Example:
        >>> class OneByteEach:
        ...     def counted(self, scheme):
        ...         return scheme.biases + len(scheme.weights)
        ...     simulated = counted
        >>> contributions = Contributions(0.5, 2, {0: 0.0, 1: 0.02, 2: 0.03}, {("a", 1.0): 0.04, ("b", 1.0): 0.015})
        >>> print(search_scheme(contributions, OneByteEach(), budget=2).scheme)
        the last 1 biases, weights of a (1), classifier
    """
    if not isinstance(contributions, Contributions):
        raise TypeError(f"contributions is a {type(contributions).__name__}: measure_contributions returns them")
    if population < 2 or generations < 0:
        raise ValueError(f"population={population}, generations={generations}: at least 2 schemes, and 0 generations")
    if not isinstance(budget, SupportsIndex | str):
        raise TypeError(f'budget={budget!r}: give the bytes of all that is not weights, as 262144 or "256KiB"')
    budget_bytes = parse_bytes(budget) if isinstance(budget, str) else budget
    least = memory.simulated(Scheme())
    if least > budget_bytes:
        detail = "the classifier alone trains"
        raise InfeasibleBudget(format_bytes(budget_bytes), least, detail=detail)
    search = _Search(contributions, memory, budget_bytes, population, generations, seed)
    search.best_bytes = least
    search.approach_budget()
    search.look_beyond()
    if not _largest_gain(contributions):
        warnings.warn(
            "no part of the model gained anything by its contributions, so that the classifier alone trains: measure "
            "them with more samples or epochs, or at another rate",
            OdtWarning,
            stacklevel=2,
        )
    return FoundScheme(search.best, contributions.gain(search.best), search.best_bytes, search.evaluated)


@dataclass
class _Search:
    """What was found so far.

    Attributes:
        best_bytes: by the simulator.
        limit: the largest of counted bytes whose winner fits.
        too_large: keys of the schemes that do not, by the simulator.
    """

    contributions: Contributions
    memory: MemoryModel
    budget_bytes: int
    population: int
    generations: int
    seed: int
    best: Scheme = field(default_factory=Scheme)
    best_bytes: int = 0
    limit: int = 0
    too_large: set[str] = field(default_factory=set)
    evaluated: int = 0

    def approach_budget(self) -> None:
        """Find the limit of counted bytes whose winner takes about the budget."""
        limits = _Limits(self.budget_bytes)
        limit: int | None = self.budget_bytes
        for _ in range(_ROUNDS):
            if limit is None or self._has_all():
                break
            scheme, nbytes = self._winner(limit)
            if nbytes <= self.budget_bytes:
                self.limit = limit
            limit = limits.after(limit, self.memory.counted(scheme), nbytes)

    def look_beyond(self) -> None:
        """Ask the simulator about the best of those that count as a little too large."""
        limit = round((1 + _ERROR_SHARE) * max(self.limit, self.budget_bytes))
        for _ in range(_CHECKS):
            if self._has_all():
                break
            _, nbytes = self._winner(limit)
            if nbytes <= self.budget_bytes:
                break

    def _winner(self, limit: int) -> tuple[Scheme, int]:
        evolution = _Evolution(
            self.contributions, self.memory, limit, self.too_large, self.population, random.Random(self.seed)
        )
        scheme = evolution.run(self.generations)
        self.evaluated += len(evolution.fitness)
        nbytes = self.memory.simulated(scheme)
        if nbytes > self.budget_bytes:
            self.too_large.add(scheme.key())
        elif self.contributions.gain(scheme) > self.contributions.gain(self.best):
            self.best, self.best_bytes = scheme, nbytes
        return scheme, nbytes

    def _has_all(self) -> bool:
        return self.contributions.gain(self.best) >= _largest_gain(self.contributions)


class _Limits:
    """Which limit of counted bytes is tried next, so that simulated bytes come near to the budget from below."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._fits: int | None = None
        self._exceeds: int | None = None

    def after(self, limit: int, counted: int, nbytes: int) -> int | None:
        """The next limit after one whose winner takes so many bytes; None where no other is worth it."""
        room = self._budget_bytes - nbytes
        if room >= 0:
            self._fits = limit
            if room <= _SPARE_SHARE * self._budget_bytes:
                return None
            return self._between(limit + room)
        self._exceeds = min(limit, counted)
        return self._between(self._exceeds + room)

    def _between(self, limit: int) -> int | None:
        """The limit, or where that is outside of those that are open, the middle of these."""
        low, high = self._fits, self._exceeds
        if high is not None and limit >= high:
            limit = high - 1
        if low is not None and limit <= low:
            if high is None or high - low < 2:
                return None
            limit = (low + high) // 2
        return limit


def _largest_gain(contributions: Contributions) -> float:
    """Of a scheme that takes what it likes."""
    layers: dict[str, float] = {}
    for (name, _), gain in contributions.weight_gains.items():
        layers[name] = max(gain, layers.get(name, 0.0))
    return (max(contributions.bias_gains.values()) + sum(layers.values())) * (1 - 1e-9)


class _Evolution:
    def __init__(
        self,
        contributions: Contributions,
        memory: MemoryModel,
        limit: int,
        too_large: Collection[str],
        population: int,
        draw: random.Random,
    ) -> None:
        self.contributions, self.memory, self.draw = contributions, memory, draw
        self.limit, self.too_large = limit, too_large
        self.size = population
        self.layers = list(dict.fromkeys(name for name, _ in contributions.weight_gains))
        ratios = {name: [0.0] for name in self.layers}
        for name, ratio in contributions.weight_gains:
            ratios[name].append(ratio)
        # What each gene may be: indices into these.
        self.choices: list[list[float]] = [sorted(contributions.bias_gains), *(sorted(ratios[n]) for n in self.layers)]
        self.fitness: dict[Genome, float] = {}

    def run(self, generations: int) -> Scheme:
        people = [self._nothing(), *(self._random() for _ in range(self.size - 1))]
        people = [self._fit(genome) for genome in people]
        for _ in range(generations):
            people = sorted(set(people), key=self._gain, reverse=True)[: self.size // 2]
            children = [self._fit(self._mutate(self._cross(*self.draw.choices(people, k=2)))) for _ in range(self.size)]
            people += children
        return self.scheme(max(people, key=self._gain))

    def scheme(self, genome: Genome) -> Scheme:
        values = [choices[gene] for choices, gene in zip(self.choices, genome, strict=True)]
        weights = {name: ratio for name, ratio in zip(self.layers, values[1:], strict=True) if ratio}
        known = self.contributions.shapes
        return Scheme(int(values[0]), weights, {name: known[name] for name in weights if name in known})

    def _gain(self, genome: Genome) -> float:
        if genome not in self.fitness:
            scheme = self.scheme(genome)
            self.fitness[genome] = self.contributions.gain(scheme)
        return self.fitness[genome]

    def _fits(self, genome: Genome) -> bool:
        if genome == self._nothing():
            return True
        scheme = self.scheme(genome)
        return self.memory.counted(scheme) <= self.limit and scheme.key() not in self.too_large

    def _fit(self, genome: Genome) -> Genome:
        """Lower random genes until the scheme fits."""
        genes = list(genome)
        while not self._fits(tuple(genes)):
            gene = self.draw.choice([i for i, value in enumerate(genes) if value])
            genes[gene] = self.draw.randrange(genes[gene])
        return tuple(genes)

    def _nothing(self) -> Genome:
        return (0,) * len(self.choices)

    def _random(self) -> Genome:
        return tuple(self.draw.randrange(len(choices)) for choices in self.choices)

    def _cross(self, one: Genome, other: Genome) -> Genome:
        return tuple(self.draw.choice(pair) for pair in zip(one, other, strict=True))

    def _mutate(self, genome: Genome) -> Genome:
        """About one gene becomes another, and any other gene with a small chance."""
        genes = list(genome)
        for i in {self.draw.randrange(len(genes)), *(i for i in range(len(genes)) if self.draw.random() < 0.1)}:
            genes[i] = self.draw.randrange(len(self.choices[i]))
        return tuple(genes)
