"""The rest of a schedule that has begun, made again for fewer bytes.

A step may be told while it runs that it is to hold less from now on. What is in memory then is evicted by the scores of
SAGE (Gim, Ko, MobiSys 2022) and Melon (Wang et al., MobiSys 2022), and recomputed, or paged, where the rest needs it.
The result is a whole schedule again: what has run, and a new end. So the one simulator checks it, with every rule on
what may run twice, and counts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError, ScheduleError
from torch_odt.planning.lowering import Begun, lower
from torch_odt.planning.problem import BOUNDARY, Gradients, Problem, problem_of
from torch_odt.planning.rematerialize import Score, Start, build
from torch_odt.planning.schedule import Deliver, Free, PageIn, PageOut, Run, Schedule
from torch_odt.planning.scores import bytes_per_second, furthest, tensor_size_per_second
from torch_odt.planning.simulate import Simulation, simulate

_SCORES: tuple[Score, ...] = (bytes_per_second, tensor_size_per_second, furthest)
# Of the whole program's time: who waits for memory does not gain by a step that takes many times as long.
_MOST_RECOMPUTATION = 2.0


@dataclass(frozen=True)
class Rest:
    """A schedule from some instruction on.

    Attributes:
        schedule: the whole one; up to `position` it is what has run.
        position: of the first instruction of the rest.
        peak_bytes: the most that the rest holds at once, without what leaves the step.
        begin_bytes: the same when everything is gone that was evicted at once.
        recompute_seconds: that its recomputations take.
    """

    schedule: Schedule
    position: int
    peak_bytes: int
    begin_bytes: int
    recompute_seconds: float

    @classmethod
    def of(cls, schedule: Schedule, position: int, simulation: Simulation) -> Rest:
        """What a schedule that has passed the simulator still holds and takes."""
        timeline = simulation.timeline
        first = position
        while first < len(timeline) and isinstance(schedule.instructions[first], Free):
            first += 1
        before = timeline[first - 1].arena_bytes if first else 0
        return cls(
            schedule=schedule,
            position=position,
            # What is freed at once is there for that long only.
            peak_bytes=max((moment.arena_peak_bytes for moment in timeline[first:]), default=before),
            begin_bytes=before,
            recompute_seconds=simulation.recompute_seconds,
        )


def rest_within(
    graph: TrainingGraph,
    costs: Costs,
    schedule: Schedule,
    position: int,
    budget_bytes: int,
    *,
    gradients: Gradients = "keep",
) -> Rest:
    """The rest of a schedule within a budget: as it is if it fits, else the one of fewest recomputed seconds that does.

    Where none is found that fits, it is the one of the fewest bytes, which may be the schedule's own.

    Args:
        graph, costs: what the schedule was made for.
        schedule: has passed the simulator.
        position: how many of its instructions have run.
        budget_bytes: for all but what leaves the step.
        gradients: whether delivered gradients stay in memory or are added to existing ones, as for `simulate`.

    Example:
        >>> from torch_odt.capture.graph import TrainingGraph
        >>> empty = TrainingGraph(ops=[], values=[], inputs=[], outputs=[], boundary=0, program_length=0)
        >>> rest_within(empty, Costs({}), Schedule((), 0), 0, 0).peak_bytes
        0
    """
    simulation = simulate(graph, costs, schedule, gradients=gradients)
    own = Rest.of(schedule, position, simulation)
    if own.peak_bytes <= budget_bytes:
        return own
    found = [own, *_rests(graph, costs, schedule, position, budget_bytes, gradients)]
    fitting = [rest for rest in found if rest.peak_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=lambda rest: rest.recompute_seconds)
    return min(found, key=lambda rest: rest.peak_bytes)


def _rests(
    graph: TrainingGraph, costs: Costs, schedule: Schedule, position: int, budget_bytes: int, gradients: Gradients
) -> Iterator[Rest]:
    """What can be made of the rest, by one score after the other."""
    begun = _replay(graph, schedule, position)
    paged_out, on_file = _paged(schedule, position)
    problem = problem_of(graph, costs, gradients, apart=True)
    # Nothing is written to the file twice.
    paging = {s: steps for s, steps in problem.paging.items() if s in on_file or s not in paged_out}
    problem = replace(problem, paging=paging)
    start = _start(problem, begun, on_file)
    if start is None:
        return
    for score in _SCORES:
        # A schedule that was not made by `lower` may have dropped what only this rest needs: then there is none.
        with suppress(PlanError, ScheduleError):
            built = build(
                problem,
                budget_bytes=budget_bytes,
                score=score,
                max_recompute_seconds=_MOST_RECOMPUTATION * problem.program_seconds,
                start=start,
            )
            whole = _joined(schedule, position, lower(problem, built.runs, begun=begun))
            simulation = simulate(graph, costs, whole, gradients=gradients)
            yield Rest.of(whole, position, simulation)


def _replay(graph: TrainingGraph, schedule: Schedule, position: int) -> Begun:
    values: dict[int, None] = {}
    ran: dict[int, None] = {}
    delivered: set[int] = set()
    for instruction in schedule.instructions[:position]:
        match instruction:
            case Run(op):
                ran[op] = None
                values.update(dict.fromkeys(graph.ops[op].results))
            case Free(value):
                del values[value]
            case Deliver(output):
                delivered.add(output)
            case PageIn(value):
                values[value] = None
    return Begun(tuple(values), tuple(ran), delivered, position >= schedule.boundary)


def _paged(schedule: Schedule, position: int) -> tuple[frozenset[int], frozenset[int]]:
    """What has been paged out, and what of it can be paged in: the file keeps a copy until the last page-in."""
    out = frozenset(i.value for i in schedule.instructions[:position] if isinstance(i, PageOut))
    return out, out.intersection(i.value for i in schedule.instructions[position:] if isinstance(i, PageIn))


def _start(problem: Problem, begun: Begun, on_file: frozenset[int]) -> Start | None:
    """The state of a build; None where the ops have not run in the program's order, which a build follows."""
    ran = set(begun.ran)
    is_done = [begun.is_past_boundary if op == BOUNDARY else op in ran for op in problem.steps]
    position = is_done.index(False) if False in is_done else len(is_done)
    if any(is_done[position:]) or position == len(is_done):
        return None
    bases = dict.fromkeys(problem.graph.values[value].base for value in begun.values)
    return Start(position, [s for s in bases if problem.born[s] >= 0], on_file)


def _joined(schedule: Schedule, position: int, rest: Schedule) -> Schedule:
    boundary = schedule.boundary if position >= schedule.boundary else position + rest.boundary
    return Schedule((*schedule.instructions[:position], *rest.instructions), boundary, schedule.planner)
