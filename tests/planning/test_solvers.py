"""What a solver says is only believed where it is the value of what it returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torch_odt.planning.solvers import Cbc, Highs, Solver, make_solver

pulp = pytest.importorskip("pulp")


def cheapest_of_three() -> tuple[Any, list[Any]]:
    """At least two of three things that cost 3, 4 and 5."""
    program = pulp.LpProblem("cheapest", pulp.LpMinimize)
    variables = [program.add_variable(f"x{i}", 0, 1, pulp.LpBinary) for i in range(3)]
    program.setObjective(pulp.LpAffineExpression(dict(zip(variables, (3.0, 4.0, 5.0), strict=True))))
    program.addConstraint(pulp.lpSum(variables) >= 2)
    return program, variables


class BoastsOfStarts:
    """A model of HiGHS that calls a start free and stops there, as HiGHS 1.16.0 does with some."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.start: list[float] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def setSolution(self, solution: Any) -> None:
        self.start = list(solution.col_value)

    def getSolution(self) -> Any:
        return self.model.getSolution() if self.start is None else SimpleNamespace(col_value=self.start)

    def getInfo(self) -> Any:
        if self.start is None:
            return self.model.getInfo()
        status = self.model.getInfo().primal_solution_status
        return SimpleNamespace(primal_solution_status=status, objective_function_value=0.0, mip_dual_bound=0.0)


def test_a_solver_that_boasts_of_the_start_solves_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[BoastsOfStarts] = []
    honest = Highs._model

    def make(self: Highs, program: Any, **options: Any) -> BoastsOfStarts:
        made.append(BoastsOfStarts(honest(self, program, **options)))
        return made[-1]

    monkeypatch.setattr(Highs, "_model", make)
    program, variables = cheapest_of_three()
    solver = make_solver("highs")
    for _ in range(2):
        outcome = solver.solve(program, dict(zip(variables, (0.0, 1.0, 1.0), strict=True)), 10.0, 0.0)
        assert outcome.has_solution
        assert outcome.bound == pytest.approx(7.0)
        assert [variable.varValue for variable in variables] == pytest.approx([1.0, 1.0, 0.0])
    assert [model.start is not None for model in made] == [True, False, False], "and starts are tried once"


@pytest.mark.parametrize("solver", [Highs(2), Cbc(2)], ids=["highs", "cbc"])
def test_a_start_that_is_not_the_best_is_left(solver: Solver) -> None:
    program, variables = cheapest_of_three()
    outcome = solver.solve(program, dict(zip(variables, (0.0, 1.0, 1.0), strict=True)), 10.0, 0.0)
    assert outcome.bound == pytest.approx(7.0)
    assert [variable.varValue for variable in variables] == pytest.approx([1.0, 1.0, 0.0])
