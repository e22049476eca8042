"""Memory over a step by category, with what the plan predicted laid over it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch_odt.measure.record import CATEGORIES, Cell, Record, Trace
from torch_odt.measure.report.areas import Band, Overlay, areas
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.memory import category_name, category_style, in_order
from torch_odt.measure.report.selection import grouped, largest_batches, model_of, threads_hint, usual_steps
from torch_odt.measure.report.units import BYTES, SECONDS
from torch_odt.measure.report.ways import series_of

_PROCESS = "process"
# More moments than a chart has pixels, or a table readers, are thinned out; the highest ones stay.
_MOST_DRAWN, _MOST_LISTED = 1200, 40


def memory_over_time(record: Record) -> Figure:
    """A chart for each network and way of making a step, of the largest batch that was traced."""
    cells = list(largest_batches(usual_steps(record, _is_traced)))
    panels, rows, most = [], [], 0
    for same in grouped(cells, lambda cell: (model_of(cell), cell.batch_size)).values():
        most = max(most, len(same))
        drawn = [_drawn(cell) for cell in same]
        until_seconds = max(each.end_seconds for each in drawn)
        at_most = max(each.highest for each in drawn)
        for each in drawn:
            panels.append(Panel(each.name, _chart(each, until_seconds, at_most), begins_row=each is drawn[0]))
            rows += list(_rows(each))
    names = in_order(trace.label for cell in cells for trace in _bands(cell) if any(trace.values))
    laid_over = [("held by the process", "process")] if any(map(_process, cells)) else []
    laid_over += [("predicted by the plan", "predicted")] if any(_predicted(cell, 1.0) for cell in cells) else []
    return Figure(
        "memory-over-time",
        "Memory over a training step: by category as measured, against the plan's prediction",
        "Of the largest batch that was traced. What the plan predicts and what the process holds is above the level "
        "before the step: weights and batch are added. The prediction's seconds are stretched to the step's."
        + threads_hint(record, cells),
        panels,
        [*((category_name(name), category_style(name)) for name in names), *laid_over] if panels else (),
        ("step", "at", *CATEGORIES, "together", "process", "predicted"),
        rows,
        () if panels else ("No training step's memory was traced.",),
        is_dense=most == 3 or most > 4,
    )


@dataclass(frozen=True)
class _Drawn:
    """What a chart shows."""

    name: str
    start_seconds: Sequence[float]
    end_seconds: float
    bands: Sequence[Band]
    totals: Sequence[float]
    process: Overlay | None
    predicted: Overlay | None

    @property
    def overlays(self) -> list[Overlay]:
        return [overlay for overlay in (self.process, self.predicted) if overlay is not None]

    @property
    def highest(self) -> float:
        return max([*self.totals, *(size for overlay in self.overlays for size in overlay.sizes)])


def _drawn(cell: Cell) -> _Drawn:
    starts, bands = _merged(_bands(cell))
    # The last reading ends the step, if it is not the only one.
    end_seconds = starts[-1] if starts[-1] > 0 else cell.median_seconds or 1.0
    return _Drawn(
        f"{model_of(cell)}, batch {cell.batch_size}: {series_of(cell).name}",
        starts,
        end_seconds,
        bands,
        [sum(sizes) for sizes in zip(*(band.sizes for band in bands), strict=True)],
        _process(cell),
        _predicted(cell, end_seconds),
    )


def _chart(drawn: _Drawn, until_seconds: float, at_most: float) -> str:
    kept = _thinned(drawn.totals, _MOST_DRAWN)
    return areas(
        [drawn.start_seconds[i] for i in kept],
        drawn.end_seconds,
        [Band(band.name, band.style, [band.sizes[i] for i in kept]) for band in drawn.bands],
        overlays=drawn.overlays,
        until_seconds=until_seconds,
        at_most=at_most,
        description=f"bytes of tensors over a step of {drawn.name}: at most {BYTES.text(max(drawn.totals))}",
    )


def _rows(drawn: _Drawn) -> Iterator[tuple[str, ...]]:
    for i in _thinned(drawn.totals, _MOST_LISTED):
        second = drawn.start_seconds[i]
        sizes = {band.name: BYTES.text(band.sizes[i]) for band in drawn.bands}
        parts = [sizes.get(category, "") for category in CATEGORIES]
        others = [BYTES.text(_at(each, second)) if each else "" for each in (drawn.process, drawn.predicted)]
        yield drawn.name, SECONDS.text(second), *parts, BYTES.text(drawn.totals[i]), *others


def _is_traced(cell: Cell) -> bool:
    return cell.mode == "training" and bool(_bands(cell))


def _bands(cell: Cell) -> list[Trace]:
    return [trace for trace in cell.traces if trace.quantity == "memory" and trace.label != _PROCESS and trace.values]


def _merged(traces: Sequence[Trace]) -> tuple[list[float], list[Band]]:
    """All categories at all moments of any of them."""
    starts = sorted({second for trace in traces for second in trace.at_seconds})
    found = {trace.label: trace for trace in traces}
    ordered = [found[label] for label in in_order(found)]
    return starts, [
        Band(trace.label, category_style(trace.label), [_value(trace, second) for second in starts])
        for trace in ordered
    ]


def _value(trace: Trace, second: float) -> float:
    """What a trace holds at a moment; nothing before its first reading."""
    place = bisect_right(trace.at_seconds, second) - 1
    return trace.values[place] if place >= 0 else 0


def _held_before(cell: Cell) -> float:
    """What tensors take before the step is made: weights, and the batch."""
    return sum(max(trace.values) for trace in _bands(cell) if trace.label in ("weights", "other"))


def _process(cell: Cell) -> Overlay | None:
    for trace in cell.traces:
        if trace.quantity == "memory" and trace.label == _PROCESS and trace.values:
            return Overlay("process", trace.at_seconds, [_held_before(cell) + value for value in trace.values])
    return None


def _predicted(cell: Cell, end_seconds: float) -> Overlay | None:
    """Every pass of the step, one after the other."""
    prediction = cell.prediction
    if prediction is None or not prediction.at_seconds or not prediction.bytes:
        return None
    arena = [sum(sizes) for sizes in zip(*prediction.bytes.values(), strict=True)]
    pass_seconds = max(prediction.step_seconds / prediction.passes, prediction.at_seconds[-1])
    scale = end_seconds / (pass_seconds * prediction.passes) if pass_seconds > 0 else 0.0
    passes = range(prediction.passes)
    starts = [scale * (number * pass_seconds + second) for number in passes for second in prediction.at_seconds]
    base_bytes = _held_before(cell) + prediction.resident_bytes
    return Overlay("predicted", starts, [base_bytes + nbytes for nbytes in arena] * prediction.passes)


def _at(overlay: Overlay, second: float) -> float:
    return overlay.sizes[max(0, bisect_right(overlay.start_seconds, second) - 1)]


def _thinned(totals: Sequence[float], most: int) -> list[int]:
    """Which moments are kept: of equally many neighbours the one with the highest total, and the last."""
    if len(totals) <= most:
        return list(range(len(totals)))
    edges = [round(i * (len(totals) - 1) / (most - 1)) for i in range(most)]
    highest = [max(range(low, high), key=totals.__getitem__) for low, high in pairwise(edges)]
    return [*highest, len(totals) - 1]
