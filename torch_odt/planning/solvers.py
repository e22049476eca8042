"""Solvers of integer programs, through pulp: HiGHS by default, CBC where highspy is missing.

pulp calls a solution "Optimal" when the time is over, so bounds come from the solvers themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch_odt.errors import PlanError

SolverName = Literal["highs", "cbc"]


@dataclass(frozen=True)
class Outcome:
    """What a solver reached.

    Attributes:
        has_solution: the variables of the program have values.
        bound: the objective that nothing can go below, as far as the solver has proved it.
    """

    has_solution: bool
    bound: float


class Solver(Protocol):
    def relax(self, program: Any, seconds: float) -> Outcome:
        """Solve a pulp program as if nothing were integer; the bound is minus infinity if time did not suffice."""

    def solve(self, program: Any, start: Mapping[Any, float] | None, seconds: float, gap: float) -> Outcome:
        """Solve a pulp program from a known solution until the relative gap is reached or the time is over."""


def make_solver(name: SolverName | None = None, threads: int = 2) -> Solver:
    """The solver of a name; by default HiGHS, or CBC where highspy is not installed.

    Raises:
        PlanError: pulp or the solver is not installed; the text says how to install them.
    """
    if importlib.util.find_spec("pulp") is None:
        raise _missing("pulp")
    has_highs = importlib.util.find_spec("highspy") is not None
    if name == "highs" and not has_highs:
        raise _missing("highspy")
    return Highs(threads) if name != "cbc" and has_highs else Cbc(threads)


def _missing(package: str) -> PlanError:
    return PlanError(f"this planner needs {package}, which is not installed: pip install torch_odt[planners]")


class Highs:
    """HiGHS through highspy; pulp makes its model.

    HiGHS 1.16.0 loses what its presolve has fixed from the value of a start, and so takes it for the best. A value that
    is not that of the solution gives that away; from then on, nothing starts from a solution.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._takes_starts = True

    def relax(self, program: Any, seconds: float) -> Outcome:
        import highspy

        model = self._model(program, mip=False, timeLimit=seconds)
        model.run()
        if model.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return Outcome(False, float("inf"))
        if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return Outcome(False, float("-inf"))
        self._assign(program, model)
        return Outcome(True, model.getInfo().objective_function_value)

    def solve(self, program: Any, start: Mapping[Any, float] | None, seconds: float, gap: float) -> Outcome:
        import highspy

        end = time.perf_counter() + seconds
        model = self._model(program, mip=True, timeLimit=seconds, gapRel=gap)
        is_started = start is not None and self._takes_starts
        if start is not None and is_started:
            solution = highspy.HighsSolution()
            solution.col_value = [start[variable] for variable in program.variables()]
            model.setSolution(solution)
        model.run()
        if model.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return Outcome(False, float("inf"))
        info = model.getInfo()
        has_solution = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if has_solution:
            self._assign(program, model)
            if is_started and not _is_value_of(program, info.objective_function_value):
                self._takes_starts = False
                return self.solve(program, None, max(0.0, end - time.perf_counter()), gap)
        return Outcome(has_solution, info.mip_dual_bound)

    def _model(self, program: Any, **options: Any) -> Any:
        import highspy
        import pulp

        # The threads of one process are shared by all models, and their number is that of the first.
        highspy.Highs.resetGlobalScheduler(True)
        solver = pulp.HiGHS(msg=False, threads=self.threads, **options)
        solver.createAndConfigureSolver(program)
        solver.buildSolverModel(program)
        return program.solverModel

    def _assign(self, program: Any, model: Any) -> None:
        values = list(model.getSolution().col_value)
        for variable in program.variables():
            variable.varValue = values[variable.index]


def _is_value_of(program: Any, objective: float) -> bool:
    value = float(program.objective.value())
    return abs(value - objective) <= 1e-6 * max(1.0, abs(value))


class Cbc:
    """CBC, which pulp brings along."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def relax(self, program: Any, seconds: float) -> Outcome:
        return self._run(program, seconds, mip=False)

    def solve(self, program: Any, start: Mapping[Any, float] | None, seconds: float, gap: float) -> Outcome:
        for variable, value in (start or {}).items():
            variable.setInitialValue(value)
        return self._run(program, seconds, mip=True, gapRel=gap, warmStart=start is not None)

    def _run(self, program: Any, seconds: float, *, mip: bool, **options: Any) -> Outcome:
        import pulp

        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            log = Path(folder) / "log"
            solver = pulp.PULP_CBC_CMD(
                msg=False, mip=mip, threads=self.threads, timeLimit=seconds, logPath=str(log), **options
            )
            program.solve(solver)
            text = log.read_text()
        if program.status == pulp.LpStatusInfeasible:
            return Outcome(False, float("inf"))
        has_solution = program.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        stated = re.search(r"^Lower bound:\s*(\S+)", text, re.MULTILINE)
        if stated:
            return Outcome(has_solution, float(stated[1]))
        finished = "Optimal solution found" in text or (not mip and has_solution)
        return Outcome(
            has_solution, float(pulp.value(program.objective)) if finished and has_solution else float("-inf")
        )
