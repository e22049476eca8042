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
from torch_odt.planning.lowering import Begun, end_of_forward, lower
from torch_odt.planning.problem import BOUNDARY, Gradients, Problem, problem_of
from torch_odt.planning.rematerialize import Score, Start, build
from torch_odt.planning.schedule import Deliver, Free, PageIn, PageOut, Run, Schedule
from torch_odt.planning.scores import bytes_per_second, furthest, tensor_size_per_second
from torch_odt.planning.simulate import Simulation, simulate

_SCORES: tuple[Score, ...] = (bytes_per_second, tensor_size_per_second, furthest)
# Of the whole program's time: who waits for memory gains nothing by a step that takes many times as long.
_MOST_RECOMPUTATION = 1.0


@dataclass(frozen=True)
class Checked:
    """A schedule that has passed the simulator, and what it was made for.

    Attributes:
        gradients: whether delivered gradients stay in memory or are added to existing ones, as for `simulate`.
    """

    graph: TrainingGraph
    costs: Costs
    schedule: Schedule
    simulation: Simulation
    gradients: Gradients = "keep"

    @classmethod
    def of(cls, graph: TrainingGraph, costs: Costs, schedule: Schedule, gradients: Gradients = "keep") -> Checked:
        """Pass a schedule through the simulator.

        Raises:
            ScheduleError: an instruction breaks a rule of the graph.
        """
        return cls(graph, costs, schedule, simulate(graph, costs, schedule, gradients=gradients), gradients)


@dataclass(frozen=True)
class Rest:
    """A schedule from some instruction on.

    Attributes:
        checked: the whole of it.
        peak_bytes: the most that the rest holds at once, without what leaves the step.
        recompute_seconds: of the whole schedule.
    """

    checked: Checked
    peak_bytes: int
    recompute_seconds: float

    @classmethod
    def of(cls, checked: Checked, position: int) -> Rest:
        """What a schedule takes from a position on."""
        timeline, instructions = checked.simulation.timeline, checked.schedule.instructions
        # What leaves before anything runs is as good as gone.
        while position < len(timeline) and isinstance(instructions[position], Free | Deliver | PageOut):
            position += 1
        peak_bytes = max((moment.arena_peak_bytes for moment in timeline[position:]), default=0)
        return cls(checked, peak_bytes, checked.simulation.recompute_seconds)


def rest_within(running: Checked, position: int, budget_bytes: int) -> Rest:
    """The rest of a schedule within a budget: as it is if it fits, else made anew, up to `position` the same.

    Where none is found that fits, it is the one of the fewest bytes, which may be the schedule's own.

    Args:
        running: the schedule.
        position: how many of its instructions have run.
        budget_bytes: for all but what leaves the step.

    Example:
        >>> from torch_odt.capture.graph import TrainingGraph
        >>> empty = TrainingGraph(ops=[], values=[], inputs=[], outputs=[], boundary=0, program_length=0)
        >>> rest_within(Checked.of(empty, Costs({}), Schedule((), 0)), 0, 0).peak_bytes
        0
    """
    best = Rest.of(running, position)
    if best.peak_bytes > budget_bytes:
        for rest in _rests(running, position, budget_bytes):
            best = min(best, rest, key=lambda each: each.peak_bytes)
            if rest.peak_bytes <= budget_bytes:
                return rest
    return best


def _rests(running: Checked, position: int, budget_bytes: int) -> Iterator[Rest]:
    """What can be made of the rest, by one score after the other."""
    graph, schedule = running.graph, running.schedule
    if end_of_forward(graph, schedule) < position < schedule.boundary:
        # Some buffers have got their new contents, others not: they all get them first.
        position = schedule.boundary
    begun = _replay(graph, schedule, position)
    paged_out, on_file = _paged(schedule, position)
    problem = problem_of(graph, running.costs, running.gradients, apart=True)
    # Nothing is written to the file twice.
    paging = {s: steps for s, steps in problem.paging.items() if s in on_file or s not in paged_out}
    problem = replace(problem, paging=paging)
    start = _start(problem, begun, on_file)
    if start is None:
        return
    most_bytes = Rest.of(running, position).peak_bytes
    aim_bytes = max(budget_bytes, _least_bytes(problem, start.position))
    # Below what can be reached, a build recomputes the same things again and again until it is cut short.
    for aim in (aim_bytes, (aim_bytes + most_bytes) // 2):
        is_reached = False
        for score in _SCORES:
            # A schedule that was not made by `lower` may have dropped what only this rest needs: then there is none.
            with suppress(PlanError, ScheduleError):
                built = build(
                    problem,
                    budget_bytes=aim,
                    score=score,
                    max_recompute_seconds=_MOST_RECOMPUTATION * problem.program_seconds,
                    start=start,
                )
                if built.was_cut:
                    continue
                whole = _joined(schedule, position, lower(problem, built.runs, begun=begun))
                yield Rest.of(Checked.of(graph, running.costs, whole, running.gradients), position)
                is_reached = True
        if is_reached:
            return


def _least_bytes(problem: Problem, position: int) -> int:
    """What no rest can be below: the most that one of its steps holds by itself."""
    nbytes = problem.nbytes
    steps = [step for step in problem.steps[position:] if step != BOUNDARY]
    return max((problem.transient_bytes[s] + sum(nbytes[r] for r in problem.reads[s]) for s in steps), default=0)


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
