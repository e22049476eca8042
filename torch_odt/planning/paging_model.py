"""The integer program of rematerialization with paging: units may also be written to a file and read back.

After the program of POET (Patil et al., ICML 2022), on top of the one in milp.py: `paged` says which unit is read from
the file in which stage, `written` which unit is written at all. A unit that is read takes its place in memory where
its action would run, so that the rows for bytes hold as they are, arriving units included. What differs from the
original: transfers take time, which counts against the deadline; they may run beside ops; the file has a size. And a
unit is written once, in whichever stage, so that there is no variable for that unless the file may get full.

Of transfers beside ops the program knows that they come one after another, and that those of a stage do not begin
before it: the seconds that it counts are a bound, and a clock says what a schedule really takes.
"""

from __future__ import annotations

import math
from typing import Any

from torch_odt.capture.costs import TransferCosts
from torch_odt.planning.expand import Returns, Solution
from torch_odt.planning.milp import Key, Model, Values
from torch_odt.planning.paging_incumbent import PricedGoal
from torch_odt.planning.problem import BOUNDARY
from torch_odt.planning.reduce import Reduced

_SCALE = 1000.0


class PagingModel(Model):
    """The program, for a goal.

    Attributes:
        paged: whether a unit is read from the file, by stage and unit.
        written: whether it is ever written, by unit.
    """

    def __init__(self, reduced: Reduced, budget_bytes: int, goal: PricedGoal) -> None:
        self.goal = goal
        self.paged: dict[Key, Any] = {}
        self.written: dict[int, Any] = {}
        self._per_cost = _SCALE / max(goal.program_cost(reduced.problem), 1e-12)
        self._wait: Any = None
        self._still_to_read: list[Any] = []
        self._on_file: dict[Key, Any] = {}
        self._out: dict[Key, Any] = {}
        super().__init__(reduced, budget_bytes)

    def present(self, stage: int, unit: int) -> list[tuple[Any, float]]:
        paged = self.paged.get((stage, unit))
        return super().present(stage, unit) + ([] if paged is None else [(paged, 1.0)])

    def cost(self, objective: float) -> float:
        """What a value of the objective stands for: seconds or joules above the program's own."""
        return objective / self._per_cost

    def values(self) -> Values:
        values = super().values()
        paged = {key: float(variable.varValue or 0.0) for key, variable in self.paged.items()}
        return Values(values.kept, values.runs, paged)

    def _add_choices(self) -> None:
        problem = self.reduced.problem
        for number, unit in enumerate(self.reduced.units):
            if unit.storage not in problem.paging or unit.born == unit.last:
                continue
            self.written[number] = self._binary(f"written_{number}")
            for stage in range(unit.born + 1, unit.last + 1):
                self.paged[stage, number] = self._binary(f"paged_{stage}_{number}")
                self._at_most([(self.paged[stage, number], 1.0), (self.written[number], -1.0)], 0)
        if problem.transfers is None or not self.paged:
            return
        if problem.transfers.overlaps:
            self._add_waiting()
        if sum(self._file_bytes(unit) for unit in self.written) > problem.transfers.limit_bytes:
            self._add_file(problem.transfers.limit_bytes)

    def _minimize(self) -> None:
        if self.goal.objective == "joules":
            transfers = self.reduced.problem.transfers
            terms = [(variable, self.goal.watts * seconds) for variable, seconds in self._recomputing()]
            if transfers is not None:
                terms += [(v, transfers.watts * seconds) for v, seconds in self._transferring()]
                terms += [(v, transfers.waiting_watts * seconds) for v, seconds in self._waiting()]
        else:
            terms = self._extra_seconds()
        self.program.setObjective(self._sum([(variable, factor * self._per_cost) for variable, factor in terms]))
        if self.goal.deadline_seconds < math.inf:
            left = self.goal.deadline_seconds - self.reduced.problem.program_seconds
            scale = self._per_second
            self._at_most([(v, seconds * scale) for v, seconds in self._extra_seconds()], left * scale)

    def _extra_seconds(self) -> list[tuple[Any, float]]:
        """What a step takes longer than the program."""
        return self._recomputing() + self._waiting()

    def _waiting(self) -> list[tuple[Any, float]]:
        return self._transferring() if self._wait is None else [(self._wait, 1.0)]

    def _recomputing(self) -> list[tuple[Any, float]]:
        return [(variable, self.reduced.actions[key[1]].seconds) for key, variable in self.runs.items()]

    def _transferring(self) -> list[tuple[Any, float]]:
        reads = [(variable, self._read_seconds(unit)) for (_, unit), variable in self.paged.items()]
        return reads + [(variable, self._write_seconds(unit)) for unit, variable in self.written.items()]

    def _read_seconds(self, unit: int) -> float:
        problem = self.reduced.problem
        return problem.seconds[problem.paging[self.reduced.units[unit].storage].back]

    def _write_seconds(self, unit: int) -> float:
        problem = self.reduced.problem
        return problem.seconds[problem.paging[self.reduced.units[unit].storage].out]

    def _file_bytes(self, unit: int) -> int:
        return TransferCosts.file_bytes(self.reduced.units[unit].nbytes)

    def _stage_seconds(self, stage: int) -> float:
        reduced = self.reduced
        steps = reduced.problem.steps[reduced.starts[stage] : reduced.starts[stage + 1]]
        return sum(reduced.problem.seconds[op] for op in steps if op != BOUNDARY)

    def _add_waiting(self) -> None:
        """Ops wait for what a stage and those behind it read, beyond what they compute; and for everything together.

        `_still_to_read`: of each stage and those behind it, the seconds of reading beyond those of ops.
        """
        scale = self._per_second
        self._wait = self.program.add_variable("wait", 0)
        by_stage: list[list[tuple[Any, float]]] = [[] for _ in range(self.reduced.stages)]
        for (stage, unit), variable in self.paged.items():
            by_stage[stage].append((variable, self._read_seconds(unit) * scale))
        for (stage, action), variable in self.runs.items():
            by_stage[stage].append((variable, -self.reduced.actions[action].seconds * scale))
        self._still_to_read = [self.program.add_variable(f"still_{stage}") for stage in range(self.reduced.stages)]
        for stage, still in enumerate(self._still_to_read):
            behind = self._still_to_read[stage + 1 : stage + 2]
            terms = [*by_stage[stage], *((each, scale) for each in behind), (still, -scale)]
            self._at_most(terms, self._stage_seconds(stage) * scale)
            self._at_most([(still, scale), (self._wait, -scale)], 0)
        writes = [(variable, self._write_seconds(unit) * scale) for unit, variable in self.written.items()]
        if self._still_to_read:
            self._at_most([(self._still_to_read[0], scale), *writes, (self._wait, -scale)], 0)

    def _add_file(self, limit_bytes: int) -> None:
        """What is in the file between stages: written in some stage in which the unit is in memory, and still read."""
        units = self.reduced.units
        for stage, number in self.paged:
            self._on_file[stage, number] = self.program.add_variable(f"file_{stage}_{number}", 0, 1)
            self._out[stage - 1, number] = self.program.add_variable(f"out_{stage - 1}_{number}", 0, 1)
        for (stage, number), paged in self.paged.items():
            on_file, out = self._on_file[stage, number], self._out[stage - 1, number]
            self._at_most([(paged, 1.0), (on_file, -1.0)], 0)
            if stage - 1 == units[number].born:
                self._at_most([(on_file, 1.0), (out, -1.0)], 0)
            else:
                self._at_most([(on_file, 1.0), (self._on_file[stage - 1, number], -1.0), (out, -1.0)], 0)
                self._at_most([(out, 1.0), *((v, -1.0) for v, _ in self.present(stage - 1, number))], 0)
        for number, written in self.written.items():
            outs = [(variable, 1.0) for (_, unit), variable in self._out.items() if unit == number]
            self._at_most([*outs, (written, -1.0)], 0)
        for stage in range(self.reduced.stages):
            held = [(v, self._file_bytes(u) / limit_bytes) for (s, u), v in self._on_file.items() if s == stage]
            if held:
                self._at_most(held, 1.0)

    def _start(self, solution: Solution, returns: list[Returns]) -> dict[Any, float]:
        values = super()._start(solution, returns)
        read = {(stage, unit) for stage, back in enumerate(returns) for unit in back.paged}
        values |= {variable: float(key in read) for key, variable in self.paged.items()}
        values |= {v: float(any(unit == u for _, unit in read)) for u, v in self.written.items()}
        for unit in self.written if self._on_file else ():
            values |= self._start_of_file(unit, read, values)
        if self._wait is not None:
            values |= self._start_of_waiting(values)
        return values

    def _start_of_file(self, unit: int, read: set[Key], values: dict[Any, float]) -> dict[Any, float]:
        """A unit is written as late as possible, and in the file until it is read for the last time."""
        found = {v: 0.0 for table in (self._out, self._on_file) for (_, u), v in table.items() if u == unit}
        stages = [stage for stage, u in read if u == unit]
        if not stages:
            return found
        born = self.reduced.units[unit].born
        out = min(stages) - 1
        while out > born and not any(values[variable] for variable, _ in self.present(out, unit)):
            out -= 1
        found[self._out[out, unit]] = 1.0
        found |= {self._on_file[stage, unit]: 1.0 for stage in range(out + 1, max(stages) + 1)}
        return found

    def _start_of_waiting(self, values: dict[Any, float]) -> dict[Any, float]:
        found: dict[Any, float] = {}
        still = wait = 0.0
        for stage in range(self.reduced.stages - 1, -1, -1):
            still -= self._stage_seconds(stage)
            still += sum(values[v] * self._read_seconds(u) for (s, u), v in self.paged.items() if s == stage)
            still -= sum(values[v] * self.reduced.actions[a].seconds for (s, a), v in self.runs.items() if s == stage)
            found[self._still_to_read[stage]] = still
            wait = max(wait, still)
        written = sum(values[variable] * self._write_seconds(unit) for unit, variable in self.written.items())
        found[self._wait] = max(wait, still + written)
        return found
