"""What the epochs of a training took and reached, and from these what it takes to reach a stated accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch_odt.measure import Window
from torch_odt.measure.clock import Clock
from torch_odt.measure.energy import Battery, Board, Rapl, StatedPower
from torch_odt.measure.meter import Meter


@dataclass(frozen=True)
class Epoch:
    """One epoch.

    Attributes:
        seconds: of its steps, by the clock.
        energy_joules: of its steps, by source; without those that this machine does not have.
        accuracy: behind it.
    """

    seconds: float
    energy_joules: dict[str, float]
    accuracy: float


@dataclass(frozen=True)
class Reached:
    """What a training took until it had reached an accuracy.

    Attributes:
        epochs: so many, of which the last one reached it.
        seconds, energy_joules: of all of them.
    """

    epochs: int
    seconds: float
    energy_joules: dict[str, float] = field(default_factory=dict)


def measured_epoch(steps: Callable[[], None], accuracy: Callable[[], float], watts: float | None) -> Epoch:
    """An epoch's steps, measured, and what they led to, which is not.

    Args:
        steps: the epoch.
        accuracy: looked at behind it.
        watts: of a busy processor, where the user states them; this energy is then a model's.
    """
    meters: list[Meter] = [Clock(), Rapl(), Board(), Battery()]
    if watts is not None:
        meters.append(StatedPower(watts))
    with Window(meters) as window:
        steps()
    joules = {
        f"{source}, {name.removesuffix('_energy_joules')}": float(quantity)
        for source, quantities in window.quantities.items()
        for name, quantity in quantities.items()
        if name.endswith("_energy_joules") and isinstance(quantity, int | float)
    }
    seconds = window.quantities["clock"]["wall_seconds"]
    assert isinstance(seconds, int | float)
    return Epoch(float(seconds), joules, accuracy())


def reached(epochs: Sequence[Epoch], accuracy: float) -> Reached | None:
    """What it took to reach this accuracy; None where no epoch has."""
    for count, epoch in enumerate(epochs, 1):
        if epoch.accuracy >= accuracy:
            taken = epochs[:count]
            sources = set.intersection(*(set(each.energy_joules) for each in taken))
            joules = {source: sum(each.energy_joules[source] for each in taken) for source in sorted(sources)}
            return Reached(count, sum(each.seconds for each in taken), joules)
    return None
