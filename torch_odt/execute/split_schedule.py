"""The schedule of a whole step as one schedule for each of its graphs."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from torch_odt.capture.concatenate import Concatenation
from torch_odt.planning.schedule import Deliver, Free, Instruction, PageIn, PageOut, Run, Schedule


@dataclass
class SchedulePart:
    """The instructions of one part of a concatenation, and their positions in the schedule of the whole."""

    schedule: Schedule
    positions: list[int]


def split(schedule: Schedule, whole: Concatenation) -> list[SchedulePart]:
    """The schedule of each part of a concatenation, from the schedule of the whole."""
    count = 1 + max((part for part, _ in whole.values), default=0)
    instructions: list[list[Instruction]] = [[] for _ in range(count)]
    positions: list[list[int]] = [[] for _ in range(count)]
    for position, instruction in enumerate(schedule.instructions):
        match instruction:
            case Run(op):
                part, index = whole.ops[op]
                instructions[part].append(Run(index))
            case Free(value):
                part, index = whole.values[value]
                instructions[part].append(Free(index))
            case PageOut(value) | PageIn(value):
                part, index = whole.values[value]
                instructions[part].append(type(instruction)(index))
            case Deliver(output):
                part, index = whole.outputs[output]
                instructions[part].append(Deliver(index))
        positions[part].append(position)
    return [
        SchedulePart(Schedule(tuple(own), bisect_left(at, schedule.boundary), schedule.planner), at)
        for own, at in zip(instructions, positions, strict=True)
    ]
