"""A record as a Chrome trace, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_odt.measure.record import Cell, Record, Trace
from torch_odt.measure.report.selection import cell_name

_MICRO = 1e6
_STEPS, _FIRST_OPERATORS = 1, 2
_DIRECTIONS = ("forward", "backward", "optimizer", "outside")
Event = dict[str, Any]


def write_chrome_trace(record: Record, path: str | Path) -> None:
    """Write a record as a trace: a process for each cell, with its steps, operators, and what was read over time.

    Choose it to look at one step's memory or a long run closely, with the zoom of https://ui.perfetto.dev.

    Steps stand behind each other, as long as they took. The record knows for each operator what all of its calls in a
    step take together: they stand behind each other in the order of the record, which is not that in which they ran.
    Memory by category, temperatures and frequencies are counters, and so is what the plan predicted, from the start of
    a pass.

    Args:
        record: what was measured.
        path: of a file that is replaced.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> from torch_odt.measure.record import Machine, Record
        >>> write_chrome_trace(Record(Machine(name="a board", processor=""), []), "trace.json")  # doctest: +SKIP
    """
    events = [event for process, cell in enumerate(record.cells, start=1) for event in _events(process, cell)]
    machine = {key: value for key, value in record.machine.to_dict().items() if key != "kind"}
    text = json.dumps({"displayTimeUnit": "ms", "otherData": machine, "traceEvents": events}, allow_nan=False)
    Path(path).write_text(text, encoding="utf-8")


def _events(process: int, cell: Cell) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": cell_name(cell)}}
    yield {"ph": "M", "name": "process_labels", "pid": process, "args": {"labels": cell.outcome}}
    if cell.step_seconds:
        yield _thread(process, _STEPS, "steps")
        yield from _row(
            process, _STEPS, [("step", seconds, {"number": i}) for i, seconds in enumerate(cell.step_seconds)]
        )
    for thread, direction in enumerate(_DIRECTIONS, start=_FIRST_OPERATORS):
        operators = [each for each in cell.operators if each.direction == direction]
        if operators:
            yield _thread(process, thread, f"operators: {direction}")
            yield from _row(process, thread, [(each.op, each.seconds, {"calls": each.calls}) for each in operators])
    for trace in cell.traces:
        yield from _counter(process, f"{trace.quantity} ({trace.unit})", trace)
    if cell.prediction is not None:
        for name, sizes in cell.prediction.bytes.items():
            predicted = Trace(
                quantity="", label=name, unit="bytes", at_seconds=cell.prediction.at_seconds, values=sizes
            )
            yield from _counter(process, "predicted memory (bytes)", predicted)


def _thread(process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _row(process: int, thread: int, spans: list[tuple[str, float, dict[str, Any]]]) -> Iterator[Event]:
    """Spans behind each other."""
    start = 0.0
    for name, seconds, details in spans:
        times = {"ts": start * _MICRO, "dur": seconds * _MICRO}
        yield {"ph": "X", "name": name, "pid": process, "tid": thread, **times, "args": details}
        start += seconds


def _counter(process: int, name: str, trace: Trace) -> Iterator[Event]:
    for second, value in zip(trace.at_seconds, trace.values, strict=True):
        yield {
            "ph": "C",
            "name": f"{name}: {trace.label}",
            "pid": process,
            "ts": second * _MICRO,
            "args": {trace.label: value},
        }
