"""What a cell's process is told: which cell, and how to measure it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch_odt.measure.record import Cell

# With this code a cell's process ends that has printed a job for another one.
GO_ON = 75


@dataclass(frozen=True, kw_only=True)
class How:
    """How a cell is measured.

    Attributes:
        warmup_steps: before anything counts; the first one is reported apart.
        repetitions: of a step, one after the other.
        least_seconds: for which they are repeated where so many take less.
        most_seconds: after which no other repetition begins.
        idle_seconds: during which the meters measure while nothing runs.
        run_seconds: of a long run, or beside a neighbour.
        search_seconds: after which no other batch is tried while the largest one is looked for.
        operators: profile where the seconds of a step go.
        follow: read memory over a step.
        start_celsius: how hot the processors are to be at most when a long run begins; None takes them as they are.
        layers: count memory by layer.
        limit_bytes: that the process may hold; None for no limit.
        budget_bytes: for torch_odt, above the level before the step is made.
        smallest_tries: how often the smallest feasible budget may take the place of one that is too small; what a
            refusal names as the smallest differs a little from process to process.
        smallest_bytes: what has taken the place of `budget_bytes`; None where nothing has.
        was_refused: the budget was refused once, by estimates, and what they are of has been measured since.
        watts: that the user states for a busy processor-second and for a second; None measures energy alone.
        classes: that networks tell apart.
        channels_last: how images and weights lie.
        optimizer: by name.
        seed: of weights and batch.
    """

    warmup_steps: int = 2
    repetitions: int = 5
    least_seconds: float = 0.3
    most_seconds: float = 20.0
    idle_seconds: float = 0.3
    run_seconds: float = 10.0
    search_seconds: float = 300.0
    operators: bool = True
    follow: bool = True
    start_celsius: float | None = None
    layers: bool = False
    limit_bytes: int | None = None
    budget_bytes: int | None = None
    smallest_tries: int = 0
    smallest_bytes: int | None = None
    was_refused: bool = False
    watts: tuple[float, float] | None = None
    classes: int = 10
    channels_last: bool = True
    optimizer: str = "sgd"
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """A cell without measurements, and how it gets them."""

    cell: Cell
    how: How

    def to_json(self) -> str:
        return json.dumps({"cell": self.cell.to_dict(), "how": asdict(self.how)})

    @classmethod
    def from_json(cls, text: str) -> Job:
        data: Mapping[str, Any] = json.loads(text)
        how = {each.name: data["how"][each.name] for each in fields(How)}
        how["watts"] = None if how["watts"] is None else tuple(how["watts"])
        return cls(Cell.from_dict(data["cell"]), How(**how))
