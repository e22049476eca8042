"""What numbers are called: on axes, at bars and in tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_odt.memory._units import format_bytes
from torch_odt.pages.svg import Axis
from torch_odt.planning.plan_text import format_joules, format_seconds

Tick = tuple[float, str]


@dataclass(frozen=True)
class Unit:
    """How a kind of number is written.

    Attributes:
        name: for the title of an axis.
        text: a number for people.
        ticks: round numbers of an axis with their labels, no more than so many steps of them.
    """

    name: str
    text: Callable[[float], str]
    ticks: Callable[[Axis, int], list[Tick]]


def _scaled(scale: float, symbol: str) -> Callable[[Axis, int], list[Tick]]:
    def ticks(axis: Axis, most: int) -> list[Tick]:
        return [(tick, f"{tick / scale:.6g}{symbol}") for tick in axis.ticks(most, scale)]

    return ticks


def _prefixed(count: float, largest: float) -> str:
    """With the prefix that suits the largest of several."""
    scale, prefix = next(((s, p) for s, p in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if largest >= s), (1.0, ""))
    return f"{count / scale:.4g}{prefix}/s"


def _prefixed_ticks(axis: Axis, most: int) -> list[Tick]:
    return [(tick, _prefixed(tick, axis.high) if tick else "0") for tick in axis.ticks(most)]


SECONDS = Unit("seconds", format_seconds, lambda axis, most: axis.decimal_ticks(most, "s"))
BYTES = Unit("bytes", lambda count: format_bytes(round(count)), lambda axis, most: axis.byte_ticks(most))
JOULES = Unit("joules", format_joules, lambda axis, most: axis.decimal_ticks(most, "J"))
CELSIUS = Unit("degrees Celsius", lambda celsius: f"{celsius:.1f} °C", _scaled(1.0, " °C"))
HERTZ = Unit("gigahertz", lambda hertz: f"{hertz / 1e9:.2f} GHz", _scaled(1e9, " GHz"))
SHARE = Unit("per cent", lambda share: f"{share:.1%}", _scaled(0.01, " %"))
COUNT = Unit("number", lambda count: f"{count:.6g}" if count == round(count) else f"{count:.2f}", _scaled(1.0, ""))
TIMES = Unit("times", lambda ratio: f"{ratio:.3g}×", _scaled(1.0, "×"))
PER_SECOND = Unit("number per second", lambda count: _prefixed(count, count), _prefixed_ticks)
BYTES_PER_SECOND = Unit("bytes per second", lambda count: f"{BYTES.text(count)}/s", BYTES.ticks)


def times_text(ratio: float) -> str:
    """How many times: two digits, and all of those before the point."""
    return f"{ratio:.0f}×" if ratio >= 99.5 else f"{ratio:.2g}×"


def unit_of(name: str) -> Unit:
    """The unit that the name of a result ends in."""
    endings = (
        ("bytes_per_second", BYTES_PER_SECOND),
        ("_per_second", PER_SECOND),
        ("_seconds", SECONDS),
        ("_bytes", BYTES),
        ("_joules", JOULES),
        ("_share", SHARE),
    )
    return next((unit for ending, unit in endings if name.endswith(ending)), COUNT)


def result_text(name: str, value: float) -> str:
    """A result of an experiment with its name."""
    return f"{name.replace('_', ' ')} {unit_of(name).text(value)}"
