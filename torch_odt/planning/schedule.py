"""The schedule: a flat list of instructions that executes a training graph.

Every planner returns one, the simulator checks it, the executor runs it. An op may stand in it more than once
(rematerialization); a value may come and go, to a file and back (paging).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Run:
    """Execute an op; its results are in memory afterwards."""

    op: int


@dataclass(frozen=True, slots=True)
class Free:
    """Drop a value. Its storage is returned when no other value in memory shares it."""

    value: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand output number `output` of the graph to whoever receives it.

    A loss or result is kept for the caller, a gradient is added to the parameter's, a mutation is copied into its
    buffer. A delivered loss, result or first gradient outlives the step; the value itself is still dropped by a `Free`.
    """

    output: int


@dataclass(frozen=True, slots=True)
class PageOut:
    """Begin to write the storage of a value to the file. The value stays in memory until a `Free`, which waits."""

    value: int


@dataclass(frozen=True, slots=True)
class PageIn:
    """Begin to read the storage of a value from the file; it is in memory, and what touches it first waits.

    The file keeps its copy until the last `PageIn` of the value.
    """

    value: int


Instruction = Run | Free | Deliver | PageOut | PageIn


@dataclass(frozen=True)
class Schedule:
    """What runs, what is freed and what is recomputed, in order.

    Attributes:
        instructions: the list to execute.
        boundary: how many of them belong to the forward pass: between them and the rest the caller may run code of
            its own (its loss). Mutations are delivered before it.
        planner: the registered name of the planner that made it.
    """

    instructions: Sequence[Instruction]
    boundary: int
    planner: str = ""

    @property
    def pages(self) -> bool:
        """Whether anything is written to the file."""
        return any(isinstance(instruction, PageOut) for instruction in self.instructions)


_LETTERS: dict[type, str] = {Run: "run", Free: "free", Deliver: "deliver", PageOut: "page-out", PageIn: "page-in"}
_INSTRUCTIONS: dict[str, Any] = {letter: kind for kind, letter in _LETTERS.items()}


def schedule_to_data(schedule: Schedule) -> dict[str, Any]:
    """A schedule as plain data for JSON."""
    return {
        "planner": schedule.planner,
        "boundary": schedule.boundary,
        "instructions": [[_LETTERS[type(i)], getattr(i, type(i).__slots__[0])] for i in schedule.instructions],
    }


def schedule_from_data(data: dict[str, Any]) -> Schedule:
    """The inverse of `schedule_to_data`.

    Raises:
        ValueError, KeyError, TypeError: the data is no schedule.
    """
    instructions = tuple(_INSTRUCTIONS[kind](int(argument)) for kind, argument in data["instructions"])
    return Schedule(instructions, int(data["boundary"]), str(data["planner"]))
