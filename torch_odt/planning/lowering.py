"""From a sequence of steps to a schedule: views, deliveries and frees are put in.

A planner decides which ops run in which order, recomputation and paging included. Everything else follows: a view is
taken when somebody reads it, an output is delivered as soon as it exists, and a value is freed right after the last
instruction that touches it before it is computed again or the step ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning.problem import BOUNDARY, Problem, is_alias, maker_of
from torch_odt.planning.schedule import Deliver, Free, Instruction, PageIn, PageOut, Run, Schedule


@dataclass(frozen=True)
class Begun:
    """What a schedule has done up to some instruction.

    Attributes:
        values: in memory.
        ran: the ops.
        delivered: the outputs.
        is_past_boundary: the forward pass is over.
    """

    values: Collection[int]
    ran: Collection[int]
    delivered: Collection[int]
    is_past_boundary: bool


_NOTHING = Begun((), (), (), False)


def lower(problem: Problem, runs: Sequence[int], planner: str = "", *, begun: Begun = _NOTHING) -> Schedule:
    """The schedule that executes `runs`: ops by index, with `BOUNDARY` where the forward pass ends.

    Args:
        begun: what has been done already; the schedule is for the rest then, and its boundary 0 behind the forward
            pass. What is in memory and not touched any more is freed first.
    """
    return _Lowering(problem, planner, begun).lower(runs)


def runs_of(problem: Problem, schedule: Schedule) -> list[int]:
    """The steps of a schedule that somebody made of the same graph."""
    runs: list[int] = []
    leaving: set[int] = set()
    boundary = end_of_forward(problem.graph, schedule)
    for position, instruction in enumerate(schedule.instructions):
        if position == boundary:
            runs.append(BOUNDARY)
        if isinstance(instruction, Run) and not is_alias(problem.graph, problem.graph.ops[instruction.op]):
            runs.append(instruction.op)
        elif isinstance(instruction, PageOut):
            runs.append(problem.paging[instruction.value].out)
            leaving.add(instruction.value)
        elif isinstance(instruction, Free) and instruction.value in leaving:
            runs.append(problem.paging[instruction.value].let_go)
            leaving.discard(instruction.value)
        elif isinstance(instruction, PageIn):
            runs.append(problem.paging[instruction.value].back)
    if boundary == len(schedule.instructions):
        runs.append(BOUNDARY)
    return runs


def end_of_forward(graph: TrainingGraph, schedule: Schedule) -> int:
    """Where the forward pass ends, less what is delivered and freed because it does."""
    _, at_boundary, _ = _delivery_times(graph)
    for position, instruction in enumerate(schedule.instructions[: schedule.boundary]):
        if isinstance(instruction, Deliver) and instruction.output in at_boundary:
            return position
    return schedule.boundary


def _delivery_times(graph: TrainingGraph) -> tuple[dict[int, list[int]], list[int], list[int]]:
    """Which outputs are delivered after which op, and which at the boundary and at the end."""
    after_run: dict[int, list[int]] = {}
    at_boundary: list[int] = []
    at_end: list[int] = []
    for index, output in enumerate(graph.outputs):
        maker = maker_of(graph, output.value)
        if output.kind == "gradient" and (maker is None or graph.ops[maker].phase == "backward"):
            if maker is None:
                at_end.append(index)
            else:
                after_run.setdefault(maker, []).append(index)
        elif output.kind in ("loss", "result") and maker is not None:
            after_run.setdefault(maker, []).append(index)
        else:
            at_boundary.append(index)
    return after_run, at_boundary, at_end


class _Lowering:
    def __init__(self, problem: Problem, planner: str, begun: Begun) -> None:
        self.graph = problem.graph
        self.planner = planner
        self.page_outs = {steps.out: storage for storage, steps in problem.paging.items()}
        self.let_gos = {steps.let_go: storage for storage, steps in problem.paging.items()}
        self.page_ins = {steps.back: storage for storage, steps in problem.paging.items()}
        self.instructions: list[Instruction] = []
        self.last_touch = dict.fromkeys(begun.values, -1)
        self.frees: dict[int, list[int]] = {}
        self.done = set(begun.ran)
        self.delivered = set(begun.delivered)
        self.is_past_boundary = begun.is_past_boundary
        self.boundary = -1
        self._after_run, self._at_boundary, self._at_end = _delivery_times(problem.graph)

    def lower(self, runs: Sequence[int]) -> Schedule:
        self._catch_up()
        for index in runs:
            if index == BOUNDARY:
                self._cross_boundary()
            elif index in self.page_outs:
                self._page_out(self.page_outs[index])
            elif index in self.let_gos:
                self._touch(self.let_gos[index])
            elif index in self.page_ins:
                self._page_in(self.page_ins[index])
            else:
                self._run(index)
        for output in self._at_end:
            self._deliver(output)
        for value, position in self.last_touch.items():
            self.frees.setdefault(position, []).append(value)
        return self._with_frees()

    def _catch_up(self) -> None:
        """Deliver what was about to be."""
        due = [output for op in self.done for output in self._after_run.get(op, ())]
        if self.is_past_boundary:
            due += self._at_boundary
        for output in due:
            if output not in self.delivered:
                self._deliver(output)

    def _run(self, index: int) -> None:
        op = self.graph.ops[index]
        for value in op.reads:
            self._ensure(value)
        for value in op.results:
            if op.overwrites is None or self.graph.values[value].base == value:
                self._end_episodes(value)
        self._emit(index)
        if index in self._after_run and index not in self.done:
            for output in self._after_run[index]:
                self._deliver(output)
        self.done.add(index)

    def _page_out(self, storage: int) -> None:
        self.instructions.append(PageOut(storage))
        self._touch(storage)

    def _touch(self, storage: int) -> None:
        """A storage stays in memory until after the last instruction."""
        if storage not in self.last_touch:
            raise PlanError(f"value {storage} is paged out while it is not in memory")
        self.last_touch[storage] = len(self.instructions) - 1

    def _page_in(self, storage: int) -> None:
        self._end_episodes(storage)
        self.last_touch[storage] = len(self.instructions)
        self.instructions.append(PageIn(storage))

    def _emit(self, index: int) -> None:
        op = self.graph.ops[index]
        position = len(self.instructions)
        self.instructions.append(Run(index))
        for value in op.reads:
            self._keep_until(value, position)
        for value in op.results:
            self.last_touch[value] = position

    def _ensure(self, value: int) -> None:
        """Take the views that lead from a storage in memory to a value."""
        info = self.graph.values[value]
        if info.kind != "computed" or value in self.last_touch:
            return
        op = self.graph.ops[info.producer] if info.producer is not None else None
        if op is None or not is_alias(self.graph, op):
            raise PlanError(f"value {value} ({info.name}) is read while it is not in memory")
        for source in op.reads:
            self._ensure(source)
        for result in op.results:
            self._end_episode(result)
        self._emit(op.index)

    def _end_episodes(self, storage: int) -> None:
        """A storage is about to be computed anew: nothing of the old one is touched any more."""
        for value in self.graph.aliases.get(self.graph.values[storage].base, (storage,)):
            self._end_episode(value)

    def _end_episode(self, value: int) -> None:
        position = self.last_touch.pop(value, None)
        if position is not None:
            self.frees.setdefault(position, []).append(value)

    def _deliver(self, output: int) -> None:
        value = self.graph.outputs[output].value
        self._ensure(value)
        self._keep_until(value, len(self.instructions))
        self.instructions.append(Deliver(output))

    def _keep_until(self, value: int, position: int) -> None:
        """A value, and what it is a view of, which takes nothing more: a rest made anew may need other views."""
        while value in self.last_touch:
            self.last_touch[value] = position
            producer = self.graph.values[value].producer
            op = None if producer is None else self.graph.ops[producer]
            if op is None or not op.reads or not is_alias(self.graph, op):
                return
            value = op.reads[0]

    def _cross_boundary(self) -> None:
        late = []
        for output in self._at_boundary:
            if output in self.delivered:
                continue
            if self.graph.outputs[output].kind == "gradient":
                late.append(output)
            else:
                self._deliver(output)
        self.boundary = len(self.instructions)
        for output in late:
            self._deliver(output)

    def _with_frees(self) -> Schedule:
        instructions: list[Instruction] = [Free(value) for value in self.frees.get(-1, ())]
        boundary = 0
        for position, instruction in enumerate(self.instructions):
            if position == self.boundary:
                boundary = len(instructions)
            instructions.append(instruction)
            for value in self.frees.get(position, ()):
                instructions.append(Free(value))
        if self.boundary == len(self.instructions):
            boundary = len(instructions)
        return Schedule(tuple(instructions), boundary, self.planner)
