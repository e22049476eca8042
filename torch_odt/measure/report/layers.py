"""Memory of a training step by layer."""

from __future__ import annotations

from torch_odt.measure.record import LayerMemory, Record
from torch_odt.measure.report.bars import Bar, Group, bars
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.memory import category_name, category_style
from torch_odt.measure.report.selection import model_of
from torch_odt.measure.report.units import BYTES
from torch_odt.measure.report.ways import series_of

_CATEGORIES = ("weights", "gradients", "optimizer", "activations")
_MOST = 16


def layers(record: Record) -> Figure:
    """Which layers take it (the survey of on-device training, Figure 2, by layer)."""
    cells = [cell for cell in record.cells if cell.layers]
    panels, rows = [], []
    for cell in cells:
        name = f"{model_of(cell)}, batch {cell.batch_size}: {series_of(cell).name}"
        # The largest ones, in the order in which the network has them.
        largest = sorted(cell.layers, key=_total, reverse=True)[:_MOST]
        shown = [layer for layer in cell.layers if layer in largest]
        groups = [Group(_name(layer), [_bar([layer])]) for layer in shown]
        if rest := [layer for layer in cell.layers if layer not in largest]:
            groups.append(Group(f"{len(rest)} others", [_bar(rest)]))
        chart = bars(groups, BYTES, title="bytes of a training step", rows_title="layer, in the network's order")
        if chart:
            panels.append(Panel(name, chart))
        rows += [
            (
                name,
                _name(layer),
                *map(BYTES.text, _sizes(layer)),
                BYTES.text(_total(layer)),
            )
            for layer in cell.layers
        ]
    return Figure(
        "layers",
        "Memory by layer: weights, gradients, optimizer state and activations",
        f"The {_MOST} layers that take most; activations are what the forward pass leaves for the backward pass.",
        panels,
        [(category_name(category), category_style(category)) for category in _CATEGORIES] if panels else (),
        ("step", "layer", *_CATEGORIES, "together"),
        rows,
        () if panels else ("No network was measured layer by layer: torch-odt measure --suite breakdown does.",),
    )


def _bar(together: list[LayerMemory]) -> Bar:
    sizes = [sum(each) for each in zip(*map(_sizes, together), strict=True)]
    styles = map(category_style, _CATEGORIES)
    return Bar(list(zip(sizes, styles, strict=True)), BYTES.text(sum(sizes)))


def _name(layer: LayerMemory) -> str:
    return f"{layer.layer or 'the network itself'} ({layer.kind})"


def _sizes(layer: LayerMemory) -> tuple[int, ...]:
    return layer.weights_bytes, layer.gradients_bytes, layer.optimizer_bytes, layer.activations_bytes


def _total(layer: LayerMemory) -> int:
    return sum(_sizes(layer))
