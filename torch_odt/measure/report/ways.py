"""How steps are made: by which engine, within which budget; and how that is called, coloured and dashed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch_odt.measure.record import DEFAULT_OPTIMIZER, Cell

_ENGINES = {"torch": "plain PyTorch", "torch_odt": "torch_odt", "executorch": "ExecuTorch"}
# Colours of `pages/base.css`: plain PyTorch always has the first one.
_COLORS = 8
_DASHES = ("dashed", "long-dashed", "dash-dotted", "short-dashed")


@dataclass(frozen=True)
class Way:
    """How steps are made: what is drawn in one colour, and inference in a pale one.

    Attributes:
        optimizer: empty for the usual one, and for inference, which has none.
    """

    engine: str
    budget: str = ""
    device: str = "cpu"
    optimizer: str = ""

    @property
    def name(self) -> str:
        given = [self.budget, "" if self.device == "cpu" else self.device, self.optimizer]
        details = ", ".join(part for part in given if part)
        return f"{self.engine_name} ({details})" if details else self.engine_name

    @property
    def engine_name(self) -> str:
        return _ENGINES.get(self.engine, self.engine)

    @property
    def inference(self) -> Way:
        """The same without an optimizer."""
        return replace(self, optimizer="")

    @property
    def plain(self) -> Way:
        """Plain PyTorch's on the same device, with the same optimizer."""
        return replace(self, engine="torch", budget="")


@dataclass(frozen=True)
class Series:
    """A way of making steps of training, or of inference."""

    way: Way
    mode: str

    @property
    def name(self) -> str:
        return f"{self.way.name}, {self.mode}"


def way_of(cell: Cell) -> Way:
    has_usual = cell.mode == "inference" or cell.optimizer == DEFAULT_OPTIMIZER
    return Way(cell.engine, cell.budget, cell.device, "" if has_usual else cell.optimizer)


def series_of(cell: Cell) -> Series:
    return Series(way_of(cell), cell.mode)


def styles_of(cells: Iterable[Cell]) -> dict[Series, str]:
    """A class for each series, in the order in which bars stand: inference before training, plain before torch_odt."""
    cells = list(cells)
    trained = dict.fromkeys(way_of(cell) for cell in cells if cell.mode == "training")
    ways = _plain_first(map(way_of, cells))
    # Where nothing was trained with the usual optimizer, inference is as pale a colour as the first one's.
    owners = {
        way: way if way in trained else next((each for each in trained if each.inference == way), way) for way in ways
    }
    colors = {owner: f"line{i % _COLORS}" for i, owner in enumerate(dict.fromkeys(owners.values()))}
    return {
        Series(way, mode): colors[owner] + (" pale" if mode == "inference" else "")
        for way, owner in owners.items()
        for mode in ("inference", "training")
    }


def legend_of(styles: Mapping[Series, str], cells: Iterable[Cell]) -> list[tuple[str, str]]:
    """Of the series that there are cells of."""
    used = set(map(series_of, cells))
    return [(series.name, style) for series, style in styles.items() if series in used]


def strokes_of(ways: Iterable[Way]) -> dict[Way, str]:
    """A class for the lines of each way, where colours stand for something else: none for the first, plain PyTorch."""
    ordered = _plain_first(ways)
    dashed = [way for way in ordered[1:] if way.engine != "executorch"]
    dashes = {way: _DASHES[i % len(_DASHES)] for i, way in enumerate(dashed)}
    return {way: dashes.get(way, "dotted" if way.engine == "executorch" else "") for way in ordered}


def stroke_legend(strokes: Mapping[Way, str]) -> list[tuple[str, str]]:
    """A legend of the strokes; the first way's lines, of no class of their own, are solid."""
    return [(f"{stroke or 'solid'}: {way.name}", stroke or "solid") for way, stroke in strokes.items()]


def _plain_first(ways: Iterable[Way]) -> list[Way]:
    return sorted(dict.fromkeys(ways), key=lambda way: way.engine != "torch")
