"""Two records against each other: two devices, or two versions on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from torch_odt.commands.table import ABSENT, render
from torch_odt.measure.record import Cell, Machine, Record
from torch_odt.measure.report.bars import Bar, Group, bars
from torch_odt.measure.report.figure import Figure, Panel, figure_section
from torch_odt.measure.report.names import for_people, renamed, short_names
from torch_odt.measure.report.page import machine_facts, style
from torch_odt.measure.report.selection import cell_name, details_of, is_least, model_of, ratio, threads_text
from torch_odt.measure.report.units import BYTES, JOULES, SECONDS, Unit, unit_of
from torch_odt.measure.report.ways import series_of
from torch_odt.pages.document import document, facts, section

_STYLES = ("line0", "line1")
_LARGEST = "largest-batch"


@dataclass(frozen=True)
class Pair:
    """The same configuration in both records."""

    first: Cell
    second: Cell

    @property
    def name(self) -> str:
        """What both are; where they used all cores of different machines, both numbers of threads."""
        return ", ".join([model_of(self.first), *self.details])

    @property
    def details(self) -> list[str]:
        """The same without the network."""
        threads = f"{self.first.threads} against {self.second.threads} threads (all cores)"
        same = self.first.threads == self.second.threads
        mine = threads_text(self.first.threads)
        return [threads if each == mine and not same else each for each in details_of(self.first)]


@dataclass(frozen=True)
class Comparison:
    """What two records say of the same configurations. `print` it for a table; `write_page` draws it.

    Attributes:
        names: what the records are called.
        machines: where they were measured.
        pairs: cells that both have, in the order of the first record.
        only_first: cells that only the first one has.
        only_second: cells that only the second one has.
    """

    names: tuple[str, str]
    machines: tuple[Machine, Machine]
    pairs: Sequence[Pair]
    only_first: Sequence[Cell]
    only_second: Sequence[Cell]

    def __str__(self) -> str:
        first, second = self.names
        shown = self._for_people()
        blocks = [f"{second} against {first}; ratios are {second} / {first}"]
        if not self.pairs:
            blocks = [f"{first} and {second} have no cell in common: there is nothing to compare"]
        for measure in _measures(shown.pairs):
            rows = [_texts(pair, measure) for pair in shown.pairs if _says(pair, measure)]
            if rows:
                blocks.append(render(rows, [measure.title, first, second, ""]))
        for name, cells, _ in shown._unpaired():
            if cells:
                blocks.append("\n".join([f"Only in {name}", *(f"  {cell_name(cell)}" for cell in cells)]))
        return "\n\n".join(blocks)

    def to_dict(self) -> dict[str, Any]:
        """The comparison for a program.

        Returns:
            "names" and "machines" of both records, the "rows", and what identifies the cells that "only_first" and
            "only_second" have. A row is one quantity of one cell of both: all that identifies the first one's ("suite",
            "model", ...), the "quantity" with its "unit", the numbers "first" and "second", None where there is none,
            and their "ratio", second / first, None where one is missing or says no more than a bound. "outcomes",
            "threads" and "at_least" (whether the number is the least that it may be) are pairs, and so are the
            "sources" of energy.

        Example:
            >>> from dataclasses import replace
            >>> from torch_odt.measure.record import Cell, Machine, Record
            >>> cell = Cell(suite="ubiquitous", model="lenet", batch_size=1, mode="training", engine="torch", threads=1)
            >>> first, second = (
            ...     Record(Machine(name=name, processor=""), [replace(cell, step_seconds=[seconds])])
            ...     for name, seconds in (("a", 0.002), ("b", 0.004))
            ... )
            >>> (row,) = compare(first, second).to_dict()["rows"]
            >>> row["model"], row["quantity"], row["first"], row["second"], row["ratio"]
            ('lenet', 'step_seconds', 0.002, 0.004, 2.0)
        """
        return {
            "names": list(self.names),
            "machines": [machine.to_dict() for machine in self.machines],
            "rows": [
                _json_row(pair, measure)
                for measure in _measures(self.pairs)
                for pair in self.pairs
                if _says(pair, measure)
            ],
            "only_first": [cell.identity for cell in self.only_first],
            "only_second": [cell.identity for cell in self.only_second],
        }

    def write_page(self, path: str | Path, *, title: str = "") -> None:
        """Write the comparison to an HTML file that needs no network; the file is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(self.page(title=title), encoding="utf-8")

    def page(self, *, title: str = "") -> str:
        """The comparison as the text of an HTML page."""
        first, second = self.names
        shown = self._for_people()
        machines = "".join(
            section(escape(name), facts(list(machine_facts(machine))))
            for name, machine in zip(self.names, self.machines, strict=True)
        )
        figures = [_figure(shown, measure) for measure in _measures(shown.pairs)]
        figures += [_only(name, cells, key) for name, cells, key in shown._unpaired()]
        content = machines + "".join(map(figure_section, figures))
        return document(title or f"{second} against {first}", content, subtitle="What training costs", style=style())

    def _for_people(self) -> Comparison:
        """The same with short names of networks, which `to_dict` has as they were given."""
        first, second = [pair.first for pair in self.pairs], [pair.second for pair in self.pairs]
        firsts, seconds = (
            short_names(cell.model for cell in cells)
            for cells in ([*first, *self.only_first], [*second, *self.only_second])
        )
        return replace(
            self,
            pairs=list(map(Pair, renamed(first, firsts), renamed(second, seconds))),
            only_first=renamed(self.only_first, firsts),
            only_second=renamed(self.only_second, seconds),
        )

    def _unpaired(self) -> Iterator[tuple[str, Sequence[Cell], str]]:
        yield self.names[0], self.only_first, "only-first"
        yield self.names[1], self.only_second, "only-second"


def compare(first: Record, second: Record, *, names: tuple[str, str] | None = None) -> Comparison:
    """Set two records against each other, cell by cell.

    Choose it for two devices, or for two versions on one device. Cells are the same if all that identifies them is
    (`Cell.key`), but that a network's file may lie in another folder. Of cells that only one record has, those that
    used all cores of their machine are compared, too, since machines differ in how many they have.

    Args:
        first: what is compared with.
        second: what is compared; ratios are its numbers in those of the first.
        names: what both are called; by default as their machines are, and "A" and "B" where these have one name.

    Example:
        >>> from torch_odt.measure.record import Cell, Machine, Record
        >>> def record(seconds):
        ...     cell = Cell(suite="ubiquitous", model="lenet", batch_size=1, mode="training", engine="torch", threads=1,
        ...                 step_seconds=[seconds])
        ...     return Record(Machine(name="a board", processor="Cortex-A72"), [cell])
        >>> print(compare(record(0.002), record(0.004)))
        B against A; ratios are B / A
        <BLANKLINE>
          seconds of a step                                     A     B
          lenet, batch 1, plain PyTorch, training, 1 thread  2 ms  4 ms  2.00×
    """
    if names is None:
        called = (first.machine.name, second.machine.name)
        names = ("A", "B") if called[0] == called[1] or not all(called) else called
    matched: dict[str, Cell] = {}
    used: set[str] = set()
    for mine, theirs in zip(_by_keys(first), _by_keys(second), strict=True):
        for key, cell in mine.items():
            other = theirs.get(key)
            if other is not None and cell.key not in matched and other.key not in used:
                matched[cell.key] = other
                used.add(other.key)
    return Comparison(
        names,
        (first.machine, second.machine),
        [Pair(cell, matched[cell.key]) for cell in first.cells if cell.key in matched],
        [cell for cell in first.cells if cell.key not in matched],
        [cell for cell in second.cells if cell.key not in used],
    )


@dataclass(frozen=True)
class _Measure:
    """A number that is compared.

    Attributes:
        quantity: its name for programs, with its unit; that for a page's places is `key`.
        source: where a cell's number comes from, where there are several.
    """

    quantity: str
    key: str
    title: str
    unit: Unit
    of: Callable[[Cell], float | None]
    source: Callable[[Cell], str] = lambda cell: ""


_MEASURES = (
    _Measure("step_seconds", "seconds", "seconds of a step", SECONDS, lambda cell: cell.median_seconds),
    _Measure("training_bytes", "bytes", "bytes above the level before", BYTES, lambda cell: cell.training_bytes),
    _Measure("device_bytes", "device-bytes", "bytes of the device's memory", BYTES, lambda cell: cell.device_bytes),
    _Measure(
        "step_joules",
        "joules",
        "joules of a step",
        JOULES,
        lambda cell: found[0] if (found := cell.joules_per_step()) else None,
        lambda cell: found[1] if (found := cell.joules_per_step()) else "",
    ),
)


def _measures(pairs: Sequence[Pair]) -> list[_Measure]:
    """Those of every step, and the results of experiments."""
    names = dict.fromkeys(name for pair in pairs for cell in (pair.first, pair.second) for name in cell.results)
    return [*_MEASURES, *map(_result, names)]


def _result(name: str) -> _Measure:
    return _Measure(
        name, name.replace("_", "-"), name.replace("_", " "), unit_of(name), lambda cell: cell.results.get(name)
    )


def _says(pair: Pair, measure: _Measure) -> bool:
    """Whether one of both has the number, or a step was to be timed that could not be measured."""
    if any(measure.of(cell) is not None for cell in (pair.first, pair.second)):
        return True
    return measure.key == "seconds" and "ok" not in (pair.first.outcome, pair.second.outcome)


def _texts(pair: Pair, measure: _Measure) -> list[str]:
    times = _times(pair, measure)
    texts = [_text(cell, measure) for cell in (pair.first, pair.second)]
    return [pair.name, *texts, "" if times is None else f"{times:.2f}×"]


def _times(pair: Pair, measure: _Measure) -> float | None:
    """How many times the first one's number the second one's is.

    None where one is only the least that it may be, or where they come from different sources.
    """
    if any(_at_least(pair, measure)) or measure.source(pair.first) != measure.source(pair.second):
        return None
    return ratio(measure.of(pair.second), measure.of(pair.first))


def _at_least(pair: Pair, measure: _Measure) -> list[bool]:
    return [measure.key == _LARGEST and is_least(cell) for cell in (pair.first, pair.second)]


def _json_row(pair: Pair, measure: _Measure) -> dict[str, Any]:
    cells = (pair.first, pair.second)
    sources = [measure.source(cell) for cell in cells]
    return {
        **pair.first.identity,
        "threads": [cell.threads for cell in cells],
        "quantity": measure.quantity,
        "unit": measure.unit.name,
        "first": measure.of(pair.first),
        "second": measure.of(pair.second),
        "ratio": _times(pair, measure),
        "outcomes": [cell.outcome for cell in cells],
        "at_least": _at_least(pair, measure),
        **({"sources": sources} if any(sources) else {}),
    }


def _text(cell: Cell, measure: _Measure) -> str:
    value = measure.of(cell)
    if cell.outcome != "ok":
        return cell.outcome
    if value is None:
        return ABSENT
    least = "at least " if measure.key == _LARGEST and is_least(cell) else ""
    source = measure.source(cell)
    return least + measure.unit.text(value) + (f" ({source})" if source else "")


def _figure(comparison: Comparison, measure: _Measure) -> Figure:
    """Pairs of bars for each network."""
    first, second = comparison.names
    pairs = [pair for pair in comparison.pairs if _says(pair, measure)]
    panels = []
    by_panel: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_panel.setdefault(_panel(pair), []).append(pair)
    for model, same in by_panel.items():
        groups = [Group(_label(pair), _bars(pair, measure)) for pair in same]
        if chart := bars(groups, measure.unit, title=measure.title, rows_title="what was measured"):
            panels.append(Panel(model, chart))
    return Figure(
        measure.key,
        f"{measure.title.capitalize()}: {second} against {first}",
        f"Ratios are {second} / {first}.",
        panels,
        [(name, color) for name, color in zip(comparison.names, _STYLES, strict=True)] if panels else (),
        ("what was measured", first, second, f"{second} / {first}"),
        [_texts(pair, measure) for pair in pairs],
        () if panels else ("No configuration has this number in both records.",),
    )


def _panel(pair: Pair) -> str:
    """Networks of one kind of layer stand together."""
    layer = pair.first.factors.get("layer")
    return model_of(pair.first) if layer is None else f"{layer} layers"


def _label(pair: Pair) -> str:
    return ", ".join(each for each in pair.details if not each.startswith("layer "))


def _bars(pair: Pair, measure: _Measure) -> list[Bar]:
    times = _times(pair, measure)
    made = []
    for cell, color, suffix in zip(
        (pair.first, pair.second), _STYLES, ("", f" · {times:.2f}×" if times else ""), strict=True
    ):
        value = measure.of(cell)
        parts = [] if value is None or cell.outcome != "ok" else [(max(0.0, value), color)]
        made.append(Bar(parts, _text(cell, measure) + suffix, is_refused=cell.outcome != "ok"))
    return made


def _only(name: str, cells: Sequence[Cell], key: str) -> Figure:
    rows = [(cell_name(cell), series_of(cell).name, cell.outcome) for cell in cells]
    missing = () if rows else ("Nothing: the other record has all of its configurations.",)
    return Figure(key, f"Only in {name}", header=("what was measured", "series", "outcome"), rows=rows, missing=missing)


def _by_keys(record: Record) -> list[dict[str, Cell]]:
    """Its cells by what has to be the same: most of it first, so that the closest ones are compared."""
    both = list(zip(record.cells, for_people(record).cells, strict=True))
    on_all_cores = [(cell, named) for cell, named in both if cell.threads == record.machine.cores]
    return [
        {cell.key: cell for cell, _ in both},
        {named.key: cell for cell, named in both},
        {_without_threads(cell): cell for cell, _ in on_all_cores},
        {_without_threads(named): cell for cell, named in on_all_cores},
    ]


def _without_threads(cell: Cell) -> str:
    return replace(cell, threads=0).key
