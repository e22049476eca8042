"""The integer program of rematerialization over a reduced problem.

In the manner of Checkmate, time is cut into stages, at whose start things are recomputed, and binaries say which unit
is kept into which stage (`kept`) and which action runs in it (`runs`). What differs makes the relaxation tighter:

- Bytes while the program's own steps run depend on what is kept beyond the stage alone: one knapsack for each moment,
  without any variable for freeing.
- Bytes while an action runs: a unit made earlier is in memory if it is kept beyond the stage or if one of its readers
  is still to run: the larger of those binaries, not a product of them. These rows are many and few of them bind, so
  `add_moment` adds them one by one, where a solution violates them. Without some of them the bound is still one.

A planner that pages adds variables to `present` (what else brings a unit into memory), rows to `program` and terms to
its objective: see paging_model.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch_odt.planning.expand import Returns, Solution, returns_of
from torch_odt.planning.reduce import Reduced

_SCALE = 1000.0

Key = tuple[int, int]
"""A stage, and a unit or an action."""


@dataclass(frozen=True)
class Values:
    """What a solver found, fractional or not: `kept` and `paged` by stage and unit, `runs` by stage and action."""

    kept: dict[Key, float]
    runs: dict[Key, float]
    paged: dict[Key, float] = field(default_factory=dict)

    def solution(self, reduced: Reduced) -> Solution:
        """The solution that integer values, or nearly such, stand for."""
        paged: list[set[int]] = [set() for _ in range(reduced.stages)]
        for (stage, unit), value in self.paged.items():
            if value > 0.5:
                paged[stage].add(unit)
        return Solution(self.kept_above(reduced, 0.5), paged)

    def kept_above(self, reduced: Reduced, threshold: float) -> list[set[int]]:
        """For each stage, the units whose value is above a threshold."""
        kept: list[set[int]] = [set() for _ in range(reduced.stages + 1)]
        for (stage, unit), value in self.kept.items():
            if value > threshold:
                kept[stage].add(unit)
        return kept

    def paged_rather(self, reduced: Reduced) -> set[int]:
        """The units that come back from the file more often than by an action."""
        balance: dict[int, float] = {}
        for (stage, unit), value in self.paged.items():
            again = self.runs.get((stage, reduced.units[unit].action), 0.0)
            balance[unit] = balance.get(unit, 0.0) + value - again
        return {unit for unit, value in balance.items() if value > 0 or reduced.units[unit].action < 0}


class Model:
    """The program, in pulp's terms.

    Attributes:
        reduced: what it is about.
        budget_bytes: the right-hand side of all rows in bytes.
        program: pulp's problem; bytes and seconds in it are scaled.
        kept, runs: its variables.
    """

    def __init__(self, reduced: Reduced, budget_bytes: int) -> None:
        import pulp

        self._pulp = pulp
        self.reduced = reduced
        self.budget_bytes = budget_bytes
        self.program = pulp.LpProblem("rematerialization", pulp.LpMinimize)
        self._per_second = _SCALE / max(reduced.problem.program_seconds, 1e-12)
        self._per_byte = _SCALE / max(budget_bytes, 1)
        self.kept = {
            (stage, number): self._binary(f"kept_{stage}_{number}")
            for number, unit in enumerate(reduced.units)
            for stage in range(unit.born + 1, unit.last + 1)
        }
        self.runs = {
            (stage, number): self._binary(f"run_{stage}_{number}")
            for number, action in enumerate(reduced.actions)
            for stage in range(action.first, action.last + 1)
        }
        self._add_choices()
        self._readers: list[list[int]] = [[] for _ in reduced.units]
        for number, action in enumerate(reduced.actions):
            for unit_read in action.reads:
                self._readers[unit_read].append(number)
        self._largest: dict[tuple[int, int, int], Any] = {}
        self._added: set[Key] = set()
        self._minimize()
        self._add_dependencies()
        self._add_retention()
        self._add_moments_of_steps()

    def cost(self, objective: float) -> float:
        """What a value of the objective stands for: the seconds of recomputation."""
        return objective / self._per_second

    def present(self, stage: int, unit: int) -> list[tuple[Any, float]]:
        """The variables of which one must be 1 for a unit to be in memory for the readers in a stage."""
        action = self.reduced.units[unit].action
        variables = (self.kept.get((stage, unit)), self.runs.get((stage, action)))
        return [(variable, 1.0) for variable in variables if variable is not None]

    def values(self) -> Values:
        """What the last solver found."""
        return Values(
            {key: float(variable.varValue or 0.0) for key, variable in self.kept.items()},
            {key: float(variable.varValue or 0.0) for key, variable in self.runs.items()},
        )

    def start(self, solution: Solution) -> dict[Any, float] | None:
        """The value of every variable for a known solution; None where that is none."""
        returns = returns_of(self.reduced, solution.kept, solution.paged)
        return None if returns is None else self._start(solution, returns)

    def _start(self, solution: Solution, returns: list[Returns]) -> dict[Any, float]:
        kept = solution.kept
        values = {variable: float(unit in kept[stage]) for (stage, unit), variable in self.kept.items()}
        runs = {key: float(key[1] in returns[key[0]].actions) for key in self.runs}
        values |= {variable: runs[key] for key, variable in self.runs.items()}
        for (stage, unit, action), variable in self._largest.items():
            readers = [runs.get((stage, reader), 0.0) for reader in self._readers[unit] if reader >= action]
            values[variable] = max([float(unit in kept[stage + 1]), *readers])
        return values

    @contextmanager
    def only(self, units: Collection[int], solution: Solution) -> Iterator[None]:
        """Leave the choice of what is kept to these units; the others are kept as in a known solution."""
        kept = solution.kept
        fixed = [(v, float(unit in kept[stage])) for (stage, unit), v in self.kept.items() if unit not in units]
        for variable, value in fixed:
            variable.lowBound = variable.upBound = value
        try:
            yield
        finally:
            for variable, _ in fixed:
                variable.lowBound, variable.upBound = 0, 1

    def add_violated(self, values: Values, at_most: int = 3) -> int:
        """Add rows for the actions during which the most bytes above the budget are in memory; returns how many."""
        added = 0
        for stage in range(self.reduced.stages):
            excess = sorted(self._excess(stage, values), reverse=True)
            for over, action in excess[:at_most]:
                if over > 1e-6 * self.budget_bytes and (stage, action) not in self._added:
                    self.add_moment(stage, action)
                    added += 1
        return added

    def add_moment(self, stage: int, action: int) -> None:
        """Add the row for the bytes in memory while an action runs in a stage."""
        self._added.add((stage, action))
        reduced = self.reduced
        terms = [(self.runs[stage, action], self._bytes(reduced.actions[action].peak_bytes))]
        fixed = reduced.fixed_bytes[stage]
        used = set(reduced.used[stage])
        for number, unit in enumerate(reduced.units):
            if unit.born >= stage:
                continue
            if unit.action >= action:
                if (stage, number) in self.kept:
                    terms.append((self.kept[stage, number], self._bytes(unit.nbytes)))
            elif number in used:
                fixed += unit.nbytes
            else:
                variable = self._needed(stage, number, action)
                if variable is not None:
                    terms.append((variable, self._bytes(unit.nbytes)))
        self._at_most(terms, self._bytes(self.budget_bytes - fixed))

    def _binary(self, name: str) -> Any:
        return self.program.add_variable(name, 0, 1, self._pulp.LpBinary)

    def _bytes(self, size: float) -> float:
        return size * self._per_byte

    def _at_most(self, terms: list[tuple[Any, float]], bound: float) -> None:
        self.program.addConstraint(self._sum(terms) <= bound)

    def _sum(self, terms: list[tuple[Any, float]]) -> Any:
        # A variable may stand in its row twice, and pulp takes the last.
        factors: dict[Any, float] = {}
        for variable, factor in terms:
            factors[variable] = factors.get(variable, 0.0) + factor
        return self._pulp.LpAffineExpression(factors)

    def _add_choices(self) -> None:
        """Variables besides `kept` and `runs`; here there are none."""

    def _minimize(self) -> None:
        actions = self.reduced.actions
        terms = [(variable, actions[key[1]].seconds * self._per_second) for key, variable in self.runs.items()]
        self.program.setObjective(self._sum(terms))

    def _add_dependencies(self) -> None:
        """What a step or an action reads is in memory."""
        for stage, units in enumerate(self.reduced.used):
            for unit in units:
                self.program.addConstraint(self._sum(self.present(stage, unit)) == 1)
        for (stage, action), runs in self.runs.items():
            for unit in self.reduced.actions[action].reads:
                sources = [(variable, -1.0) for variable, _ in self.present(stage, unit)]
                self._at_most([(runs, 1.0), *sources], 0)

    def _add_retention(self) -> None:
        """What is kept into a stage was in memory in the one before; what is in memory is not made again."""
        for (stage, unit), kept in self.kept.items():
            if stage - 1 > self.reduced.units[unit].born:
                sources = [(variable, -1.0) for variable, _ in self.present(stage - 1, unit)]
                self._at_most([(kept, 1.0), *sources], 0)
            if len(both := self.present(stage, unit)) > 1 and unit not in self.reduced.used[stage]:
                self._at_most(both, 1)

    def _add_moments_of_steps(self) -> None:
        for stage, moments in enumerate(self.reduced.moments):
            for moment in moments:
                keys = [(stage + 1, u) for u in moment.units if (stage + 1, u) in self.kept]
                terms = [(self.kept[key], self._bytes(self.reduced.units[key[1]].nbytes)) for key in keys]
                self._at_most(terms, self._bytes(self.budget_bytes - moment.fixed_bytes))

    def _needed(self, stage: int, unit: int, action: int) -> Any | None:
        """A variable that is 1 where a unit is kept beyond a stage or read in it from an action on; None for never."""
        readers = [r for r in self._readers[unit] if r >= action and (stage, r) in self.runs]
        kept = self.kept.get((stage + 1, unit))
        terms = [*([] if kept is None else [kept]), *(self.runs[stage, r] for r in readers)]
        if len(terms) <= 1:
            return terms[0] if terms else None
        key = (stage, unit, readers[0])
        if key not in self._largest:
            largest = self.program.add_variable(f"needed_{stage}_{unit}_{readers[0]}", 0, 1)
            self._largest[key] = largest
            for term in terms:
                self._at_most([(term, 1.0), (largest, -1.0)], 0)
        return self._largest[key]

    def _excess(self, stage: int, values: Values) -> Iterator[tuple[float, int]]:
        """For each action of a stage, the bytes above the budget while it runs."""
        units, actions = self.reduced.units, self.reduced.actions
        live = [number for number, unit in enumerate(units) if unit.born < stage <= unit.last]
        needed = {u: values.kept.get((stage + 1, u), 0.0) for u in live}
        needed |= dict.fromkeys(self.reduced.used[stage], 1.0)
        total = self.reduced.fixed_bytes[stage] + sum(units[u].nbytes * needed[u] for u in live)
        for number in range(len(actions) - 1, -1, -1):
            action = actions[number]
            for unit in action.makes:
                if unit in needed:
                    total += units[unit].nbytes * (values.kept.get((stage, unit), 0.0) - needed[unit])
            runs = values.runs.get((stage, number), 0.0)
            if runs <= 1e-9:
                continue
            for unit in action.reads:
                if units[unit].nbytes and runs > needed[unit]:
                    total += units[unit].nbytes * (runs - needed[unit])
                    needed[unit] = runs
            yield total + action.peak_bytes * runs - self.budget_bytes, number
