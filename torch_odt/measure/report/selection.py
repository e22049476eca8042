"""Which cells of a record belong beside each other, and what they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch_odt.measure.record import Cell, Machine, Record
from torch_odt.measure.report.units import result_text
from torch_odt.measure.report.ways import Series, Way, series_of

Key = TypeVar("Key")
Value = TypeVar("Value", int, str)

_MOST_NAMES = 4
# What the search for the largest batch notes where it ended before a batch that does not fit.
_OPEN = ("no more than ", "the search was ended ")

Beside = Mapping[Series, Cell]
"""The cells that stand beside each other."""


def steps_of(record: Record, where: Callable[[Cell], bool] = lambda cell: True) -> list[Cell]:
    """Steps of whole networks that fulfil a condition, each configuration once."""
    cells = [cell for cell in record.cells if cell.experiment == "step" and not cell.factors and where(cell)]
    # What the breakdown measures again is not the first choice.
    cells.sort(key=lambda cell: cell.suite == "breakdown")
    once: dict[tuple[object, ...], Cell] = {}
    for cell in cells:
        once.setdefault((model_of(cell), series_of(cell), cell.batch_size, cell.threads, cell.governor), cell)
    return list(once.values())


def usual_steps(record: Record, where: Callable[[Cell], bool] = lambda cell: True) -> list[Cell]:
    """Of those of each network the ones with the number of threads and the governor that most of them have."""
    cells: list[Cell] = []
    for each in grouped(steps_of(record, where), model_of).values():
        threads = usual([cell.threads for cell in each])
        governor = usual([cell.governor for cell in each if cell.threads == threads])
        cells += [cell for cell in each if cell.threads == threads and cell.governor == governor]
    return cells


def threads_hint(record: Record, cells: Sequence[Cell]) -> str:
    """How many threads steps had that are shown, where a record has others of their networks, too; to end a hint."""
    counts = {model: {cell.threads for cell in each} for model, each in grouped(steps_of(record), model_of).items()}
    by_threads = grouped((cell for cell in cells if len(counts.get(model_of(cell), ())) > 1), lambda cell: cell.threads)
    if not by_threads:
        return ""
    named = [
        threads_text(count) + (f" ({', '.join(dict.fromkeys(map(model_of, each)))})" if len(by_threads) > 1 else "")
        for count, each in sorted(by_threads.items())
    ]
    return f" With {', '.join(named)}; the others are in the figure of threads and in the table of every cell."


def usual(values: Sequence[Value]) -> Value:
    """The most frequent one, of equally frequent ones the highest."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))


def model_of(cell: Cell) -> str:
    """The network, with the shape of a sample."""
    shape = "x".join(map(str, cell.input_shape))
    return f"{cell.model}, {shape}" if shape else cell.model


def sides_of(cells: Iterable[Cell]) -> dict[str, dict[int, Beside]]:
    """For each network, and each size of a batch of it, the cells by series."""
    return {
        model: {batch: by_series(same) for batch, same in sorted(grouped(each, lambda cell: cell.batch_size).items())}
        for model, each in grouped(cells, model_of).items()
    }


def by_series(cells: Iterable[Cell]) -> Beside:
    """The first cell of each series."""
    found: dict[Series, Cell] = {}
    for cell in cells:
        found.setdefault(series_of(cell), cell)
    return found


def plain(side: Beside, mode: str, way: Way) -> Cell | None:
    """Plain PyTorch's cell beside that of a way, with the same optimizer, and on the same device."""
    return side.get(Series(way.plain if mode == "training" else way.plain.inference, mode))


def grouped(cells: Iterable[Cell], key: Callable[[Cell], Key]) -> dict[Key, list[Cell]]:
    """Cells that have something in common, in the order in which they come."""
    found: dict[Key, list[Cell]] = {}
    for cell in cells:
        found.setdefault(key(cell), []).append(cell)
    return found


def largest_batches(cells: Iterable[Cell]) -> Iterator[Cell]:
    """Of each network and series the cell with the largest batch."""
    for each in grouped(cells, lambda cell: (model_of(cell), series_of(cell))).values():
        yield max(each, key=lambda cell: cell.batch_size)


def cell_name(cell: Cell) -> str:
    """All that tells a cell from others, for people."""
    return ", ".join([model_of(cell), *details_of(cell)])


def details_of(cell: Cell) -> list[str]:
    """All that tells a cell from others of its network."""
    batch = [f"batch {cell.batch_size}"] if cell.batch_size else []
    threads = [threads_text(cell.threads)]
    governor = [f"governor {cell.governor}"] if cell.governor else []
    factors = [
        f"{name} {value}" if isinstance(value, str) else result_text(name, value)
        for name, value in cell.factors.items()
    ]
    experiment = [cell.experiment] if cell.experiment != "step" else []
    # What the breakdown measures may be a step of another suite, too.
    suite = ["breakdown"] if cell.suite == "breakdown" else []
    return [*factors, *batch, series_of(cell).name, *threads, *governor, *experiment, *suite]


def threads_text(count: int) -> str:
    return f"{count} thread{'s' if count != 1 else ''}"


def refusals(cells: Iterable[Cell]) -> list[str]:
    """What became of cells that were not measured, and why: a line for each reason."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        if cell.outcome != "ok":
            became = f"{cell.outcome} ({cell.reason})" if cell.reason else cell.outcome
            found.setdefault(became, []).append(cell_name(cell))
    return [f"{together(names)}: {became}" for became, names in found.items()]


def together(names: Sequence[str]) -> str:
    """Names of cells; of many the first ones."""
    more = len(names) - _MOST_NAMES
    return "; ".join(names) if more <= 1 else f"{'; '.join(names[:_MOST_NAMES])}; and {more} others"


def notes_of(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """What is to be known beside the numbers of cells that were measured, and the names of the cells that it is of."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        for note in dict.fromkeys(cell.notes if cell.outcome == "ok" else ()):
            found.setdefault(note, []).append(cell_name(cell))
    return found


def is_least(cell: Cell) -> bool:
    """Whether the largest batch that was found may not be the largest one that fits."""
    return any(note.startswith(_OPEN) for note in cell.notes)


def results_text(cell: Cell) -> list[str]:
    """The results of an experiment, for people."""
    return [
        f"largest batch at least {value:g}" if name == "largest_batch" and is_least(cell) else result_text(name, value)
        for name, value in cell.results.items()
    ]


def why_absent(machine: Machine, source: str) -> str:
    """What a machine says of a source of numbers that it lacks; empty where it says nothing.

    It may name the source alone, or with one of its numbers behind it.
    """
    found = (reason for name, reason in machine.absent.items() if name.split(" ")[0] == source)
    return next(found, "")


def absences(machine: Machine) -> list[str]:
    """What a machine cannot measure, a line for each source and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, reason in machine.absent.items():
        source, _, quantity = name.partition(" ")
        found.setdefault((source, reason), []).append(quantity.replace("_", " "))
    return [f"{source}{f' ({names})' if (names := ', '.join(filter(None, each))) else ''}: {reason}"
            for (source, reason), each in found.items()]  # fmt: skip


def ratio(value: float | None, other: float | None) -> float | None:
    """How many times the other a value is; None where one is not known."""
    return value / other if value is not None and other else None
