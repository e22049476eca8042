"""What networks from a user's files are called for people: without the folders that the files lie in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch_odt.measure.record import Cell, Record

# What --model takes besides names: a file of Python, and the function in it that makes the model.
_FILE = re.compile(r".*[/\\](?P<short>[^/\\]+\.py:[^/\\]+)")


def short_names(models: Iterable[str]) -> dict[str, str]:
    """For each network "mynet.py:make" in the place of "/home/me/mynet.py:make"; all of it where two would be alike."""
    whole = list(dict.fromkeys(models))
    shortened = {model: found["short"] if (found := _FILE.fullmatch(model)) else model for model in whole}
    taken = list(shortened.values())
    return {model: short if taken.count(short) == 1 else model for model, short in shortened.items()}


def renamed(cells: Iterable[Cell], names: Mapping[str, str]) -> list[Cell]:
    """The same cells, of networks that are called otherwise."""
    return [replace(cell, model=names[cell.model]) for cell in cells]


def for_people(record: Record) -> Record:
    """A record whose networks have short names; the record itself keeps what was given."""
    return replace(record, cells=renamed(record.cells, short_names(cell.model for cell in record.cells)))
