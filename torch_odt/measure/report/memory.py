"""Memory: the peak of training against inference, what it is made of, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch_odt.measure.record import Cell, Record
from torch_odt.measure.report.bars import Bar, Group, bars
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.selection import (
    grouped,
    is_least,
    model_of,
    notes_of,
    plain,
    ratio,
    refusals,
    sides_of,
    threads_hint,
    usual_steps,
)
from torch_odt.measure.report.side_by_side import Measure, side_by_side
from torch_odt.measure.report.units import BYTES, COUNT, times_text
from torch_odt.measure.report.ways import Series, legend_of, series_of, styles_of

# From the bottom upwards: what is there all the time first.
_STYLES = {
    "weights": "line7",
    "other": "line5",
    "optimizer": "line4",
    "gradients": "line2",
    "activations": "line0",
    "workspace": "line1",
}
_NAMES = {"optimizer": "optimizer state", "other": "batch and others"}


def category_style(name: str) -> str:
    """The class that colours a category of memory everywhere."""
    return _STYLES.get(name, "line6")


def category_name(name: str) -> str:
    """What a legend calls it."""
    return _NAMES.get(name, name)


def in_order(names: Iterable[str]) -> list[str]:
    """Categories from the bottom upwards; those that nobody knows are last."""
    order = list(_STYLES)
    return sorted(set(names), key=lambda name: (order.index(name) if name in order else len(order), name))


def peak_memory(record: Record) -> Figure:
    """What the process takes above its level before the step was made (Cai et al., Figure 5)."""
    cells = usual_steps(record)
    return side_by_side(
        cells,
        Measure(lambda cell: cell.training_bytes, BYTES, "bytes above the level before the step was made"),
        key="peak-memory",
        title="Peak memory of the process: training against inference, torch_odt against plain PyTorch",
        hint="What steps take on top of a process that holds the model and a batch." + threads_hint(record, cells),
        why_absent=lambda cell: ["the process's memory was not read"],
    )


def device_memory(record: Record) -> Figure:
    """What tensors take of the memory of a graphics card, weights and batch included."""
    cells = usual_steps(record, lambda cell: cell.device != "cpu" and cell.engine == "torch")
    figure = side_by_side(
        cells,
        Measure(lambda cell: cell.device_bytes, BYTES, "bytes of the device's memory"),
        key="device-memory",
        title="Peak memory of another device: training against inference",
        hint="What torch allocates there, weights and batch included." + threads_hint(record, cells),
        why_absent=lambda cell: ["the device's memory was not counted"],
    )
    return figure if figure.rows else replace(figure, missing=("No step was made on another device than the CPU.",))


def memory_by_category(record: Record) -> Figure:
    """What tensors take when they take most (the survey of on-device training, Figure 2)."""
    cells = usual_steps(record, lambda cell: bool(cell.categories))
    names = in_order(name for cell in cells for name, nbytes in cell.categories.items() if nbytes)
    styles = styles_of(cells)
    panels, rows = [], []
    for model, batches in sides_of(cells).items():
        groups = []
        for batch, side in batches.items():
            for series in styles:
                if (cell := side.get(series)) is None:
                    continue
                total = sum(cell.categories.values())
                inference = plain(side, "inference", series.way)
                times = ratio(total, sum(inference.categories.values()) if inference else None)
                against = f" · {times_text(times)} inf." if times is not None and cell is not inference else ""
                parts = [(cell.categories.get(name, 0), category_style(name)) for name in names]
                groups.append(Group(f"batch {batch}: {series.name}", [Bar(parts, BYTES.text(total) + against)]))
                sizes = [BYTES.text(cell.categories.get(name, 0)) for name in names]
                rows.append(
                    (model, str(batch), series.name, *sizes, BYTES.text(total), f"{times:.3g}" if times else "")
                )
        chart = bars(groups, BYTES, title="bytes of tensors at their peak", rows_title="batch and way of a step")
        if chart:
            panels.append(Panel(model, chart))
    return Figure(
        "memory-categories",
        "What the peak is made of: training against inference, by category",
        "Tensors of a step, weights included, at the moment when they take most. "
        "× inf.: times plain PyTorch's inference of the same batch." + threads_hint(record, cells),
        panels,
        [(category_name(name), category_style(name)) for name in names] if panels else (),
        ("network", "batch", "series", *names, "together", "times inference"),
        rows,
        () if panels else ("No cell has memory by category: the tracking allocator was not in use.",),
    )


def largest_batch(record: Record) -> Figure:
    """The largest batch that trains within a limit."""
    cells = [cell for cell in record.cells if cell.experiment == "largest batch"]
    known = [cell for cell in cells if _largest(cell) is not None]
    styles = styles_of(cells)
    groups = [
        Group(f"{model}, within {BYTES.text(limit)}" if limit else model, _batch_bars(each, styles))
        for (model, limit), each in grouped(cells, lambda cell: (model_of(cell), cell.limit_bytes)).items()
    ]
    chart = bars(groups, COUNT, title="samples in the largest batch that fits", rows_title="network and limit")
    missing = refusals(cells) + [f"{name}: {note}" for note, names in notes_of(known).items() for name in names]
    missing += [
        f"{model_of(cell)}: no batch size was found" for cell in cells if cell.outcome == "ok" and cell not in known
    ]
    return Figure(
        "largest-batch",
        "Largest batch that fits: torch_odt against plain PyTorch",
        "More is better.",
        [Panel("", chart)] if chart else (),
        legend_of(styles, cells),
        ("network", "series", "limit", "samples"),
        [
            (model_of(c), series_of(c).name, BYTES.text(c.limit_bytes) if c.limit_bytes else "none", _samples(c))
            for c in known
        ],
        missing or (() if chart else ("The largest batch was not looked for.",)),
    )


def _batch_bars(cells: list[Cell], styles: Mapping[Series, str]) -> list[Bar]:
    found = {series_of(cell): cell for cell in cells}
    made = []
    for series, style in styles.items():
        if (cell := found.get(series)) is None:
            continue
        largest = _largest(cell)
        if largest is None:
            made.append(Bar((), cell.outcome if cell.outcome != "ok" else "absent", is_refused=cell.outcome != "ok"))
            continue
        other = plain(found, "training", series.way) if cell.engine != "torch" and not is_least(cell) else None
        times = ratio(largest, _largest(other)) if other is not None and not is_least(other) else None
        made.append(Bar([(largest, style)], _samples(cell) + (f" · {times_text(times)} plain" if times else "")))
    return made


def _samples(cell: Cell) -> str:
    return ("at least " if is_least(cell) else "") + f"{_largest(cell):g}"


def _largest(cell: Cell) -> float | None:
    return cell.results.get("largest_batch") if cell.outcome == "ok" else None
