"""Shapes and axes of charts that stretch with the page.

A chart is an SVG without any text, stretched over a box of the page; what is written on it are elements of the page at
positions in percent. So shapes fill any width while letters, dots and lines keep their size, with no script at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 1000, 400


@dataclass(frozen=True)
class Axis:
    """A range of numbers along a side of a chart, from 0 to 1."""

    low: float
    high: float

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0

    def percent(self, value: float) -> str:
        return f"{100 * self.share(value):.3f}%"

    def ticks(self, most: int, unit: float = 1.0) -> list[float]:
        """Round numbers of a unit inside the range, no more than so many steps of them."""
        rough = (self.high - self.low) / unit / most
        if rough <= 0:
            return [self.low]
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / unit / step - 1e-9), math.floor(self.high / unit / step + 1e-9)
        return [number * step * unit for number in range(first, last + 1)]

    def byte_ticks(self, most: int) -> list[tuple[float, str]]:
        """Ticks with their labels, in the unit that suits the range."""
        power = min(3, max(0, int(math.log2(max(self.high, 1)) // 10)))
        unit, name = 1024**power, ("B", "KiB", "MiB", "GiB")[power]
        return [(tick, f"{tick / unit:.6g} {name}" if tick else "0") for tick in self.ticks(most, unit)]

    def decimal_ticks(self, most: int, symbol: str) -> list[tuple[float, str]]:
        """The same for seconds ("s") and joules ("J")."""
        scale, prefix = next((s, p) for s, p in ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (0.0, "n")) if self.high >= s)
        unit = scale or 1e-9
        return [(tick, f"{tick / unit:.6g} {prefix}{symbol}" if tick else "0") for tick in self.ticks(most, unit)]


@dataclass(frozen=True)
class LogAxis(Axis):
    """A range of positive numbers of which equal ratios are equally far apart."""

    def share(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low) if self.high > self.low else 0.0

    def power_ticks(self, most: int) -> list[float]:
        """Powers of ten inside the range, no more than so many; where they are few, their doubles and halves, too."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for factors, stride in (((1, 2, 5), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
            powers = range(stride * math.ceil(first / stride), last + 1, stride)
            found = [factor * 10.0**power for power in powers for factor in factors]
            inside = [tick for tick in found if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]
            if len(inside) <= most:
                break
        return inside


def drawing(shapes: Iterable[str], description: str) -> str:
    """An SVG that fills the box around it."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(description)}">{"".join(shapes)}</svg>'
    )


def steps(horizontal: Axis, vertical: Axis, edges: Sequence[float], values: Sequence[float]) -> str:
    """The path of a line that holds each value from one edge to the next."""
    path = [f"M{_x(horizontal, edges[0])} {_y(vertical, values[0])}"]
    previous = values[0]
    for edge, value in zip(edges[1:], [*values[1:], values[-1]], strict=True):
        if value != previous:
            path.append(f"H{_x(horizontal, edge)}V{_y(vertical, value)}")
        previous = value
    return "".join([*path, f"H{_x(horizontal, edges[-1])}"])


def polyline(horizontal: Axis, vertical: Axis, xs: Sequence[float], ys: Sequence[float]) -> str:
    """The path of a line from point to point."""
    return "M" + "L".join(f"{_x(horizontal, x)} {_y(vertical, y)}" for x, y in zip(xs, ys, strict=True))


def block(horizontal: Axis, vertical: Axis, across: tuple[float, float], upwards: tuple[float, float]) -> str:
    """The path of a rectangle."""
    left, right = (_x(horizontal, value) for value in across)
    bottom, top = (_y(vertical, value) for value in upwards)
    return f"M{left} {bottom}H{right}V{top}H{left}Z"


def area(horizontal: Axis, vertical: Axis, edges: Sequence[float], values: Sequence[float], style: str) -> str:
    """Everything below a line of steps."""
    line = steps(horizontal, vertical, edges, values)
    return f'<path class="area {style}" d="{line}V{HEIGHT}H{_x(horizontal, edges[0])}Z"/>'


def line(path: str, style: str) -> str:
    return f'<path class="line {style}" d="{path}"/>'


def level(vertical: Axis, value: float, style: str) -> str:
    """A line from side to side."""
    return line(f"M0 {_y(vertical, value)}H{WIDTH}", style)


def upright(horizontal: Axis, value: float, style: str) -> str:
    """A line from top to bottom."""
    return line(f"M{_x(horizontal, value)} 0V{HEIGHT}", style)


def spans(horizontal: Axis, intervals: Iterable[tuple[float, float]], style: str) -> str:
    """A bar for each interval, as high as the chart."""
    bars = [f"M{_x(horizontal, a)} 0H{_x(horizontal, b)}V{HEIGHT}H{_x(horizontal, a)}Z" for a, b in intervals]
    return f'<path class="span {style}" d="{"".join(bars)}"/>'


def label(text: str, style: str, *, left: str = "", bottom: str = "") -> str:
    """Text at a place of a chart, in percent."""
    place = ";".join(f"{side}:{where}" for side, where in (("left", left), ("bottom", bottom)) if where)
    return f'<span class="{style}" style="{place}">{escape(text)}</span>'


def _x(axis: Axis, value: float) -> str:
    return f"{WIDTH * axis.share(value):.2f}".rstrip("0").rstrip(".")


def _y(axis: Axis, value: float) -> str:
    return f"{HEIGHT * (1 - axis.share(value)):.2f}".rstrip("0").rstrip(".")
