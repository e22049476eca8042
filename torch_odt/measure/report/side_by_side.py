"""Figures of bars in which all ways of making a step of a network stand beside each other, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_odt.measure.record import Cell
from torch_odt.measure.report.bars import Bar, Group, bars
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.selection import Beside, plain, ratio, refusals, sides_of
from torch_odt.measure.report.units import Unit, times_text
from torch_odt.measure.report.ways import Series, legend_of, styles_of


@dataclass(frozen=True)
class Measure:
    """A number of each cell.

    Attributes:
        of: the number, or None where the cell has none.
        unit: of the number.
        title: of the axis, unit included.
    """

    of: Callable[[Cell], float | None]
    unit: Unit
    title: str


def side_by_side(
    cells: Sequence[Cell],
    measure: Measure,
    *,
    key: str,
    title: str,
    hint: str,
    why_absent: Callable[[Cell], Sequence[str]],
) -> Figure:
    """A chart for each network: bars for each batch, with how many times plain PyTorch's each number is.

    Training is compared with inference for plain PyTorch, torch_odt's with plain PyTorch's of the same kind.

    Args:
        why_absent: reasons why a cell that was measured does not have the number.
    """
    styles = styles_of(cells)
    panels, rows, missing = [], [], refusals(cells)
    for model, batches in sides_of(cells).items():
        groups = [Group(f"batch {batch}", list(_bars(side, styles, measure))) for batch, side in batches.items()]
        chart = bars(groups, measure.unit, title=measure.title, rows_title="samples in a batch")
        if chart:
            panels.append(Panel(model, chart))
        rows += [row for batch, side in batches.items() for row in _rows(model, batch, side, styles, measure)]
    missing += _absent([cell for cell in cells if cell.outcome == "ok"], measure, why_absent)
    header = ("network", "batch", "series", measure.title, "times inference", "times plain PyTorch")
    return Figure(key, title, hint, panels, legend_of(styles, cells), header, rows, missing or _nothing(cells))


def _absent(cells: Sequence[Cell], measure: Measure, why_absent: Callable[[Cell], Sequence[str]]) -> list[str]:
    """A line for each reason, with the networks that it is of where others have the number."""
    models: dict[str, list[str]] = {}
    for cell in cells:
        for reason in why_absent(cell) if measure.of(cell) is None else ():
            models.setdefault(reason, []).append(cell.model)
    some_have = any(measure.of(cell) is not None for cell in cells)
    return [reason + (f" ({', '.join(dict.fromkeys(each))})" if some_have else "") for reason, each in models.items()]


def _nothing(cells: Sequence[Cell]) -> list[str]:
    return [] if cells else ["The record has no steps of networks."]


def _bars(side: Beside, styles: Mapping[Series, str], measure: Measure) -> Iterator[Bar]:
    for series, style in styles.items():
        if (cell := side.get(series)) is None:
            continue
        value = measure.of(cell)
        if cell.outcome != "ok":
            yield Bar((), cell.outcome, is_refused=True)
        elif value is None:
            yield Bar((), "absent")
        else:
            yield Bar([(max(0.0, value), style)], _text(side, series, value, measure))


def _text(side: Beside, series: Series, value: float, measure: Measure) -> str:
    """The number with the ratio that says most."""
    to_inference, to_plain = _ratios(side, series, value, measure)
    times = to_plain if to_plain is not None else to_inference
    name = "plain" if to_plain is not None else "inf."
    return measure.unit.text(value) + (f" · {times_text(times)} {name}" if times is not None else "")


def _ratios(side: Beside, series: Series, value: float, measure: Measure) -> tuple[float | None, float | None]:
    """To inference done the same way, and to plain PyTorch's of the same kind on the same device."""
    inference = side.get(Series(series.way.inference, "inference")) if series.mode == "training" else None
    other = plain(side, series.mode, series.way) if series.way.engine != "torch" else None
    of_inference, of_other = (measure.of(cell) if cell is not None else None for cell in (inference, other))
    return ratio(value, of_inference), ratio(value, of_other)


def _rows(
    model: str, batch: int, side: Beside, styles: Mapping[Series, str], measure: Measure
) -> Iterator[tuple[str, ...]]:
    for series in styles:
        if (cell := side.get(series)) is None:
            continue
        value = measure.of(cell)
        if cell.outcome != "ok" or value is None:
            yield model, str(batch), series.name, cell.outcome if cell.outcome != "ok" else "absent", "", ""
            continue
        times = ("" if each is None else f"{each:.3g}" for each in _ratios(side, series, value, measure))
        yield model, str(batch), series.name, measure.unit.text(value), *times
