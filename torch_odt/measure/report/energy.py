"""Energy of a step and of a sample, above the level of the idle machine, where there is a source for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch_odt.measure.record import ENERGY, Cell, Record
from torch_odt.measure.report.figure import Figure
from torch_odt.measure.report.selection import threads_hint, usual_steps, why_absent
from torch_odt.measure.report.side_by_side import Measure, side_by_side
from torch_odt.measure.report.units import JOULES

_SOURCES = {
    "nvml": "the card's own counter (NVML)",
    "rapl": "the processor's counter (RAPL)",
    "ina": "the board's sensors (INA)",
    "battery": "the battery",
    "model": "a model of stated watts, not measured",
}


def step_energy(record: Record) -> Figure:
    """Joules of a step (Cai et al., Figure 6a)."""
    return _figure(
        record,
        Measure(_joules, JOULES, "joules of a step"),
        key="step-energy",
        title="Energy of a step: training against inference, torch_odt against plain PyTorch",
    )


def sample_energy(record: Record) -> Figure:
    """Joules for each sample (Cai et al., Figure 6b)."""

    def joules(cell: Cell) -> float | None:
        found = _joules(cell)
        return found / cell.batch_size if found is not None and cell.batch_size else None

    figure = _figure(
        record,
        Measure(joules, JOULES, "joules per sample"),
        key="sample-energy",
        title="Energy per sample: small batches against large ones",
    )
    # The reasons stand at the energy of a step.
    return figure if figure.panels else replace(figure, rows=(), missing=("No energy was measured.",))


def _figure(record: Record, measure: Measure, *, key: str, title: str) -> Figure:
    cells = usual_steps(record)
    sources = dict.fromkeys(found[1] for cell in cells if (found := cell.joules_per_step()) is not None)
    named = "; ".join(_SOURCES.get(source, source) for source in sources)
    hint = f"Above what the machine draws while nothing runs. Source: {named}." if named else ""
    return side_by_side(
        cells,
        measure,
        key=key,
        title=title,
        hint=hint + threads_hint(record, cells),
        why_absent=lambda cell: why_no_energy(record, cell),
    )


def why_no_energy(record: Record, cell: Cell) -> list[str]:
    """What each source of energy says instead of a number."""
    reasons = []
    for source, name in ENERGY:
        reading = cell.quantities.get(source, {}).get(name)
        if isinstance(reading, Mapping):
            reasons.append(f"no energy from {_SOURCES[source]}: {reading['absent']}")
        elif reading is None and (reason := why_absent(record.machine, source)):
            reasons.append(f"no energy from {_SOURCES[source]}: {reason}")
    if "model" not in cell.quantities:
        reasons.append("no energy by a model: torch-odt measure --watts states what a busy core draws")
    return reasons


def _joules(cell: Cell) -> float | None:
    found = cell.joules_per_step()
    return found[0] if found is not None else None
