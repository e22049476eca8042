"""The page of a record: what training costs on one device, in the figures of the papers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

from torch_odt.measure.record import Machine, Record
from torch_odt.measure.report.cells import all_cells
from torch_odt.measure.report.energy import sample_energy, step_energy
from torch_odt.measure.report.figure import Figure, figure_section, lacking_section
from torch_odt.measure.report.frontier import frontier
from torch_odt.measure.report.layers import layers
from torch_odt.measure.report.long_run import long_run
from torch_odt.measure.report.memory import device_memory, largest_batch, memory_by_category, peak_memory
from torch_odt.measure.report.memory_over_time import memory_over_time
from torch_odt.measure.report.names import for_people
from torch_odt.measure.report.neighbours import neighbours
from torch_odt.measure.report.operators import operators, phases
from torch_odt.measure.report.selection import absences
from torch_odt.measure.report.sweeps import layer_kinds, sweep_of_depth, sweep_of_width
from torch_odt.measure.report.threads import threads
from torch_odt.measure.report.times import busy_processors, sample_times, step_times
from torch_odt.measure.report.units import BYTES
from torch_odt.pages.document import asset, document, facts, section

_FIGURES: tuple[Callable[[Record], Figure], ...] = (
    step_times,
    sample_times,
    threads,
    busy_processors,
    peak_memory,
    device_memory,
    memory_by_category,
    memory_over_time,
    layers,
    largest_batch,
    frontier,
    phases,
    operators,
    step_energy,
    sample_energy,
    long_run,
    layer_kinds,
    sweep_of_width,
    sweep_of_depth,
    neighbours,
    all_cells,
)


def write_page(record: Record, path: str | Path, *, title: str = "") -> None:
    """Write the page of a record to an HTML file, which is replaced; see `page`.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(page(record, title=title), encoding="utf-8")


def page(record: Record, *, title: str = "") -> str:
    """A record as the text of an HTML page: all figures, each with its numbers, and with reasons for what is missing.

    Choose it over `table` to look at what a device does: memory over a step, operators, heat, lines over threads and
    sizes. It needs no network and no script.

    Args:
        record: what was measured, by one or several suites.
        title: any text; by default it names the machine.

    Example:
        >>> from torch_odt.measure.record import Machine, Record
        >>> page(Record(Machine(name="a board", processor="Cortex-A72"), []))[:15]
        '<!DOCTYPE html>'
    """
    machine, named = record.machine, for_people(record)
    figures = [figure(named) for figure in _FIGURES]
    parts = [
        facts(list(machine_facts(machine))),
        *(figure_section(figure) for figure in figures if not figure.is_empty),
        lacking_section([figure for figure in figures if figure.is_empty]),
        _absent(machine),
    ]
    return document(
        title or f"What training costs on {machine.name or 'this device'}",
        "".join(parts),
        subtitle=f"measured {machine.started}" if machine.started else "",
        style=style(),
    )


def style() -> str:
    """The CSS that pages of measurements add to that of all pages."""
    return asset("torch_odt.measure.report", "report.css")


def machine_facts(machine: Machine) -> Iterator[tuple[str, str]]:
    """What a machine is, by name."""
    yield "processor", machine.processor or "unknown"
    yield "cores for this process", str(machine.cores or "unknown")
    yield "memory", BYTES.text(machine.memory_bytes) if machine.memory_bytes else "unknown"
    yield "instruction sets", ", ".join(machine.instruction_sets) or "unknown"
    yield "frequency governor", machine.governor or "none found"
    yield "accelerator", machine.accelerator or "none"
    yield "system", machine.system or "unknown"
    yield from machine.versions.items()


def _absent(machine: Machine) -> str:
    entries = "".join(f"<li>{escape(text)}</li>" for text in absences(machine))
    if not entries:
        return ""
    return section("What this machine cannot measure", f'<ul class="absent">{entries}</ul>')
