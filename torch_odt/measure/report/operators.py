"""Where the seconds of a step go: phases against each other, and operators of the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch_odt.measure.record import Cell, OperatorTime, Record
from torch_odt.measure.report.bars import Bar, Group, bars
from torch_odt.measure.report.figure import Figure, Panel
from torch_odt.measure.report.selection import grouped, largest_batches, model_of, ratio, threads_hint, usual_steps
from torch_odt.measure.report.units import SECONDS, SHARE
from torch_odt.measure.report.ways import series_of

_DIRECTIONS = {"forward": "line0", "backward": "line1", "optimizer": "line2", "outside": "line7"}
_NAMES = {"outside": "outside operators (Python, autograd, allocator)"}
_GRADIENTS, _REST = "backward: convolutions' gradients", "backward: the rest"
# The backward pass in two: the darker part is what convolutions' gradients take.
_PHASES = {"forward": "line0", _GRADIENTS: "line3", _REST: "line1", "optimizer": "line2", "outside": "line7"}
_MOST = 10


def phases(record: Record) -> Figure:
    """The passes of a step, and what gradients of convolutions take of it (Chen et al., Figure 11)."""
    cells = _profiled(record)
    panels, rows = [], []
    for model, each in grouped(cells, model_of).items():
        groups = []
        for cell in each:
            seconds = _phases(cell.operators)
            total = sum(seconds.values())
            parts = [(seconds[name], style) for name, style in _PHASES.items()]
            groups.append(Group(f"batch {cell.batch_size}: {series_of(cell).name}", [Bar(parts, SECONDS.text(total))]))
            share = convolution_gradient_share(cell)
            texts = [SECONDS.text(seconds[name]) for name in _PHASES]
            gradients = "" if share is None else SHARE.text(share)
            name = series_of(cell).name
            of_steps = [_share_of(total, cell.profiled_seconds), _share_of(total, cell.unprofiled_seconds)]
            rows.append((model, str(cell.batch_size), name, *texts, SECONDS.text(total), *of_steps, gradients))
        chart = bars(groups, SECONDS, title="seconds of a step", rows_title="batch and way of making a step")
        if chart:
            panels.append(Panel(model, chart))
    return Figure(
        "phases",
        "Forward against backward: where the seconds of a step go",
        "Of the largest batch whose operators were counted, and of the largest network of each kind of layer. Steps "
        "whose operators are counted take longer than others." + threads_hint(record, cells),
        panels,
        [(_NAMES.get(name, name), style) for name, style in _PHASES.items()] if panels else (),
        (
            "network",
            "batch",
            "series",
            *_PHASES,
            "together",
            "of the same steps by the clock",
            "of steps whose operators were not counted",
            "convolution gradients' share of backward",
        ),
        rows,
        () if panels else ("No cell's operators were counted.",),
    )


def operators(record: Record) -> Figure:
    """The operators of training steps (Cai et al., Figure 4; Chen et al., Figure 11)."""
    cells = [cell for cell in _profiled(record) if cell.mode == "training"]
    networks = grouped(cells, model_of)
    panels, rows = [], []
    for cell in [cell for same in networks.values() for cell in same]:
        name = f"{model_of(cell)}, batch {cell.batch_size}: {series_of(cell).way.name}"
        total = sum(each.seconds for each in cell.operators)
        ordered = sorted(cell.operators, key=lambda each: -each.seconds)
        groups = [
            Group(each.op, [Bar([(each.seconds, _DIRECTIONS[each.direction])], _text(each.seconds, total))])
            for each in ordered[:_MOST]
        ]
        if rest := ordered[_MOST:]:
            seconds = [(_seconds(rest, direction), style) for direction, style in _DIRECTIONS.items()]
            together = sum(each.seconds for each in rest)
            groups.append(Group(f"{len(rest)} others", [Bar(seconds, _text(together, total))]))
        rows += [
            (name, each.op, each.direction, f"{each.calls:g}", SECONDS.text(each.seconds), _share(each.seconds, total))
            for each in ordered
        ]
        chart = bars(groups, SECONDS, title="seconds of all calls in a step", rows_title="operator")
        if chart:
            panels.append(Panel(name, chart, begins_row=cell is networks[model_of(cell)][0]))
    return Figure(
        "operators",
        "Operators of a training step: forward against backward",
        f"The {_MOST} that take longest, and their share of the step. What is computed again counts as backward."
        + threads_hint(record, cells),
        panels,
        [(_NAMES.get(name, name), style) for name, style in _DIRECTIONS.items()] if panels else (),
        ("step", "operator", "direction", "calls", "together", "share"),
        rows,
        () if panels else ("No training step's operators were counted.",),
    )


def convolution_gradient_share(cell: Cell) -> float | None:
    """The share of the backward pass that convolutions' gradients take; None where there is no backward pass."""
    backward = [each for each in cell.operators if each.direction == "backward"]
    gradients = [each for each in backward if _is_gradient(each)]
    return ratio(sum(each.seconds for each in gradients), sum(each.seconds for each in backward))


def _profiled(record: Record) -> list[Cell]:
    """The largest batches of networks, and the largest networks of one kind of layer."""
    swept = [cell for cell in record.cells if _is_profiled(cell) and {"width", "depth"} <= cell.factors.keys()]
    by_kind = grouped(swept, lambda cell: (cell.factors.get("layer"), series_of(cell)))
    largest = [max(each, key=lambda cell: (cell.factors["width"], cell.factors["depth"])) for each in by_kind.values()]
    return [*largest_batches(usual_steps(record, _is_profiled)), *largest]


def _is_profiled(cell: Cell) -> bool:
    return bool(cell.operators) and cell.outcome == "ok"


def _phases(operators: Sequence[OperatorTime]) -> dict[str, float]:
    gradients = sum(each.seconds for each in operators if _is_gradient(each))
    seconds = {name: _seconds(operators, name) for name in ("forward", "optimizer", "outside")}
    return {**seconds, _GRADIENTS: gradients, _REST: _seconds(operators, "backward") - gradients}


def _is_gradient(operator: OperatorTime) -> bool:
    """Of a convolution."""
    return operator.direction == "backward" and "conv" in operator.op and "backward" in operator.op


def _seconds(operators: Sequence[OperatorTime], direction: str) -> float:
    return sum(each.seconds for each in operators if each.direction == direction)


def _share_of(total: float, step_seconds: float | None) -> str:
    """The operators' sum as a share of a step."""
    share = ratio(total, step_seconds)
    return "" if share is None else SHARE.text(share)


def _text(seconds: float, total: float) -> str:
    return f"{SECONDS.text(seconds)} · {_share(seconds, total)}"


def _share(seconds: float, total: float) -> str:
    return SHARE.text(ratio(seconds, total) or 0.0)
