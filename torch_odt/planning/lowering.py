"""From a sequence of steps to a schedule: views, deliveries and frees are put in.

A planner decides which ops run in which order, recomputation included. Everything else follows: a view is taken when
somebody reads it, an output is delivered as soon as it exists, and a value is freed right after the last instruction
that touches it before it is computed again or the step ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning.problem import BOUNDARY, Problem, is_alias, maker_of
from torch_odt.planning.schedule import Deliver, Free, Instruction, Run, Schedule


def lower(problem: Problem, runs: Sequence[int], planner: str = "") -> Schedule:
    """The schedule that executes `runs`: ops by index, with `BOUNDARY` where the forward pass ends."""
    return _Lowering(problem.graph, planner).lower(runs)


class _Lowering:
    def __init__(self, graph: TrainingGraph, planner: str) -> None:
        self.graph = graph
        self.planner = planner
        self.instructions: list[Instruction] = []
        self.last_touch: dict[int, int] = {}
        self.frees: dict[int, list[int]] = {}
        self.done: set[int] = set()
        self.boundary = -1
        self._after_run, self._at_boundary, self._at_end = self._delivery_times()

    def lower(self, runs: Sequence[int]) -> Schedule:
        for index in runs:
            if index == BOUNDARY:
                self._cross_boundary()
            else:
                self._run(index)
        for output in self._at_end:
            self._deliver(output)
        for value, position in self.last_touch.items():
            self.frees.setdefault(position, []).append(value)
        return self._with_frees()

    def _delivery_times(self) -> tuple[dict[int, list[int]], list[int], list[int]]:
        """Which outputs are delivered after which op, and which at the boundary and at the end."""
        graph = self.graph
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

    def _run(self, index: int) -> None:
        op = self.graph.ops[index]
        for value in op.reads:
            self._ensure(value)
        for value in op.results:
            self._end_episodes(value)
        self._emit(index)
        if index in self._after_run and index not in self.done:
            for output in self._after_run[index]:
                self._deliver(output)
        self.done.add(index)

    def _emit(self, index: int) -> None:
        op = self.graph.ops[index]
        position = len(self.instructions)
        self.instructions.append(Run(index))
        for value in op.reads:
            if value in self.last_touch:
                self.last_touch[value] = position
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
        if value in self.last_touch:
            self.last_touch[value] = len(self.instructions)
        self.instructions.append(Deliver(output))

    def _cross_boundary(self) -> None:
        late = []
        for output in self._at_boundary:
            if self.graph.outputs[output].kind == "gradient":
                late.append(output)
            else:
                self._deliver(output)
        self.boundary = len(self.instructions)
        for output in late:
            self._deliver(output)

    def _with_frees(self) -> Schedule:
        instructions: list[Instruction] = []
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
