"""A record as text for a terminal: plain PyTorch beside torch_odt, and beside ExecuTorch where it was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from torch_odt.commands.table import ABSENT, bytes_text, render, seconds_text
from torch_odt.measure.record import Cell, Number, Record
from torch_odt.measure.report.names import for_people
from torch_odt.measure.report.selection import (
    absences,
    grouped,
    is_least,
    model_of,
    notes_of,
    ratio,
    refusals,
    together,
)
from torch_odt.measure.report.units import CELSIUS, HERTZ, Unit, result_text, unit_of
from torch_odt.measure.report.ways import way_of
from torch_odt.planning.plan_text import format_joules

_CIRCUMSTANCES = (
    "network", "factors", "batch", "threads", "governor", "device", "step", "optimizer", "budget", "engine",
)  # fmt: skip


def table(record: Record) -> str:
    """A record as tables for a terminal; ratios are the other engine's numbers in plain PyTorch's.

    Choose it for a first look, or where there is no browser; `write_page` shows much more.

    Args:
        record: what was measured.

    Returns:
        Lines without colours: the machine; steps, plain PyTorch's numbers beside torch_odt's; results of the other
        experiments; what is to be known beside the numbers; what could not be measured,
        and why. What ran out of memory says so in the place of its seconds.

    Example:
        >>> from torch_odt.measure.record import Cell, Machine, Record
        >>> cells = [Cell(suite="ubiquitous", model="lenet", batch_size=1, mode="training", engine=engine, threads=1,
        ...               step_seconds=[seconds]) for engine, seconds in (("torch", 0.004), ("torch_odt", 0.003))]
        >>> print(table(Record(Machine(name="a board", processor="Cortex-A72", cores=4), cells)))
        a board: Cortex-A72, 4 cores
        <BLANKLINE>
        Steps
          network  batch  threads      step  seconds, plain  torch_odt
          lenet        1        1  training            4 ms       3 ms  0.75×
    """
    machine = record.machine
    cores = f", {machine.cores} cores" if machine.cores else ""
    return "\n\n".join([f"{machine.name}: {machine.processor}{cores}", *_blocks(for_people(record))])


def _blocks(record: Record) -> Iterator[str]:
    steps = [cell for cell in record.cells if cell.experiment == "step"]
    for title, cells in (
        ("Steps", [cell for cell in steps if not cell.factors]),
        ("Steps of networks that were varied", [cell for cell in steps if cell.factors]),
    ):
        if cells:
            yield f"{title}\n{_steps(cells)}"
    others = [cell for cell in record.cells if cell.experiment != "step" and cell.outcome == "ok"]
    for experiment, cells in grouped(others, lambda cell: cell.experiment).items():
        yield f"{experiment.capitalize()}\n{_experiments(cells)}"
    if notes := notes_of(record.cells):
        yield "\n".join(["Notes", *(f"  {note}: {together(names)}" for note, names in notes.items())])
    if refused := refusals(record.cells):
        yield "\n".join(["Not measured", *(f"  {text}" for text in refused)])
    if absent := absences(record.machine):
        yield "\n".join(["This machine cannot measure", *(f"  {text}" for text in absent)])


def _steps(cells: Sequence[Cell]) -> str:
    """A row for each budget that torch_odt was given; columns in which nothing stands are left out."""
    measures = ("seconds", "memory", "device memory", "energy")
    has_others = any(cell.engine == "executorch" for cell in cells)
    has_optimizers = any(way_of(cell).optimizer for cell in cells)
    beside = "engine's" if has_others else "torch_odt"
    header = [*_CIRCUMSTANCES, *(text for name in measures for text in (f"{name}, plain", beside, ""))]
    shaped = {model: set(map(model_of, each)) for model, each in grouped(cells, _model).items()}
    rows = []
    ordered = [cell for each in grouped(cells, model_of).values() for cell in each]
    for same in grouped(ordered, _circumstances).values():
        plain = next((cell for cell in same if cell.engine == "torch"), None)
        name = model_of(same[0]) if len(shaped[same[0].model]) > 1 else same[0].model
        beside_it: list[Cell | None] = [cell for cell in same if cell.engine != "torch"]
        rows += [
            _row(name, plain, cell, names_engine=has_others, names_optimizer=has_optimizers)
            for cell in beside_it or [None]
        ]
    return _used(header, rows)


def _row(name: str, plain: Cell | None, ours: Cell | None, *, names_engine: bool, names_optimizer: bool) -> list[str]:
    cell = ours or plain
    assert cell is not None
    # The name of a network of one kind of layer tells its width and depth.
    factors = "" if "width" in cell.factors else ", ".join(f"{key} {value}" for key, value in cell.factors.items())
    device = "" if cell.device == "cpu" else cell.device
    batch = str(cell.batch_size) if cell.batch_size else ""
    engine = way_of(ours).engine_name if names_engine and ours is not None else ""
    optimizer = _optimizer(cell) if names_optimizer else ""
    found = [name, factors, batch, str(cell.threads), cell.governor, device, cell.mode, optimizer, cell.budget, engine]
    pair = (plain, ours)
    found += _beside(pair, lambda each: each.median_seconds, seconds_text, says_outcome=True)
    found += _beside(pair, lambda each: each.training_bytes, lambda count: bytes_text(round(count)))
    found += _beside(pair, lambda each: each.device_bytes, lambda count: bytes_text(round(count)))
    return found + _beside(pair, lambda each: joules[0] if (joules := each.joules_per_step()) else None, format_joules)


def _beside(
    pair: tuple[Cell | None, Cell | None],
    of: Callable[[Cell], float | None],
    text: Callable[[float], str],
    *,
    says_outcome: bool = False,
) -> list[str]:
    """Both numbers and their ratio."""
    values = [of(cell) if cell is not None and cell.outcome == "ok" else None for cell in pair]
    texts = [
        cell.outcome
        if says_outcome and cell is not None and cell.outcome != "ok"
        else (ABSENT if value is None else text(value))
        for cell, value in zip(pair, values, strict=True)
    ]
    times = ratio(values[1], values[0])
    return [*texts, "" if times is None else f"{times:.2f}×"]


def _used(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns in which nothing stands."""
    used = [any(row[column].strip(ABSENT) for row in rows) for column in range(len(header))]
    lines = [[text for text, is_used in zip(row, used, strict=True) if is_used] for row in (header, *rows)]
    return render(lines[1:], lines[0])


def _model(cell: Cell) -> str:
    return cell.model


def _circumstances(cell: Cell) -> tuple[object, ...]:
    """What cells have in common that are compared."""
    factors = tuple(sorted(cell.factors.items()))
    return (
        cell.suite,
        model_of(cell),
        factors,
        cell.batch_size,
        cell.threads,
        cell.governor,
        cell.mode,
        cell.device,
        _optimizer(cell),
    )


def _optimizer(cell: Cell) -> str:
    return "" if cell.mode == "inference" else cell.optimizer


def _experiments(cells: Sequence[Cell]) -> str:
    """A row for each cell: what was found, and the steps' times where steps were made."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.results))
    header = ["network", "batch", "threads", "governor", "", "way", *(name.replace("_", " ") for name in names)]
    header += ["a step at first", "in the end", "hottest", "slowest core"]
    return _used(header, [_found(cell, names) for cell in cells])


def _found(cell: Cell, names: Sequence[str]) -> list[str]:
    factors = ", ".join(
        f"{name} {value}" if isinstance(value, str) else result_text(name, value)
        for name, value in cell.factors.items()
    )
    least = "at least " if is_least(cell) else ""
    results = [unit_of(name).text(cell.results[name]) if name in cell.results else ABSENT for name in names]
    results = [f"{least}{text}" if name == "largest_batch" else text for name, text in zip(names, results, strict=True)]
    batch = str(cell.batch_size) if cell.batch_size else ""
    way = "" if cell.factors.get("training") == "none" else way_of(cell).name
    return [
        cell.model, batch, str(cell.threads), cell.governor, factors, way, *results,
        *map(seconds_text, _first_and_last(cell.step_seconds)),
        _extreme(cell, "temperature", max, CELSIUS), _extreme(cell, "frequency", min, HERTZ),
    ]  # fmt: skip


def _first_and_last(seconds: Sequence[float]) -> tuple[float | None, float | None]:
    """Medians of the first and of the last tenth: what heat and others did meanwhile."""
    tenth = max(1, len(seconds) // 10)
    return (median(seconds[:tenth]), median(seconds[-tenth:])) if seconds else (None, None)


def _extreme(cell: Cell, quantity: str, which: Callable[[list[Number]], Number], unit: Unit) -> str:
    values = [value for trace in cell.traces if trace.quantity == quantity for value in trace.values]
    return unit.text(which(values)) if values else ABSENT
