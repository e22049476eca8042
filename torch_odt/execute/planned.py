"""A step from a plan that was made before, maybe elsewhere: checked, placed, ready to run.

Nothing is measured and no schedule is looked for. Where the plan carries its graphs, nothing is traced either, and
neither the model's code nor the loss is run: the plan is the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from torch_odt import _extensions
from torch_odt.capture import accumulate, pack_dropout_masks  # noqa: F401  (they register operators of graphs)
from torch_odt.capture.accumulate import ACCUMULATING
from torch_odt.capture.draws import Draw
from torch_odt.capture.fused_updates import FUSED_UPDATE, changed_by
from torch_odt.capture.graph import Op, Ref, TrainingGraph
from torch_odt.capture.machine import machine_name, settings_name
from torch_odt.capture.separation import Separation, ancestors
from torch_odt.capture.step_data import with_results
from torch_odt.capture.trace import TracedStep
from torch_odt.capture.update_in_backward import UPDATES, UpdateRule
from torch_odt.errors import InfeasibleBudget, PlanError
from torch_odt.execute.accounting import Allowance, UndoCost, allow
from torch_odt.execute.candidate import Candidate, LaterPart, PlannedPart
from torch_odt.execute.operator_guards import needs_guard
from torch_odt.execute.optimizer_updates import OptimizerUpdates
from torch_odt.execute.plan_data import (
    PlannedProgram,
    StoredPart,
    StoredProgram,
    on_device,
    program_from_data,
    require_page_file,
    require_same_graph,
)
from torch_odt.execute.prepared import Prepared, assemble
from torch_odt.execute.request import StepRequest
from torch_odt.execute.requirements import Requirements
from torch_odt.planning.plan import Plan, PlanLine, Program
from torch_odt.planning.pool import check
from torch_odt.planning.simulate import simulate

# What the process holds differs a little from start to start.
_NOISE_BYTES = 2 << 20


@dataclass(frozen=True)
class GivenPlan:
    """A plan that a step is to follow.

    Attributes:
        plan: for people.
        program: what executes it, checked by itself.
    """

    plan: Plan
    program: StoredProgram

    @classmethod
    def of_value(cls, value: str | Path | Plan) -> GivenPlan:
        """A plan from anything that a `plan=` may be given.

        Raises:
            OSError: the file cannot be read.
            PlanError: it is no plan, or nothing that can be executed.
            TypeError: it is neither a plan nor a path.
        """
        plan = Plan.of_value(value)
        if plan.program is None:
            raise PlanError("the plan holds nothing that can be executed: the step that it is for has no graph")
        program = program_from_data(_data_of(plan.program))
        # As text it weighs several times what it is decoded to.
        return cls(replace(plan, program=None), program)

    def require(self, model: nn.Module, loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises PlanError when a step is not the one that the plan was made for; the text names what differs."""
        wanted, found = self.program.requirements, Requirements.of(model, loss_fn, args, kwargs)
        difference = wanted.difference(found)
        if not difference and self.program.carries_graph:
            difference = wanted.difference_of_settings(found)
        if difference:
            raise PlanError(f"the plan is for another step: {difference}")

    def prepare(
        self, request: StepRequest, args: tuple[Any, ...], kwargs: dict[str, Any], *, want_results: bool
    ) -> Prepared:
        """Make a step ready as the plan says; `require` has been asked before.

        Raises:
            PlanError: the plan cannot be executed here.
            InfeasibleBudget: it does not fit.
            CaptureError: it does not carry its graph, and the step has none.
        """
        program = self.program
        _require_same_use(request, program, want_results)
        require_page_file((part.schedule for part in program.parts.values()), request.page_file)
        graphs = _carried(program) if program.carries_graph else _traced(request, program, args, kwargs)
        with _as_plan_errors():
            parts = {size: _planned_part(graphs[size], part, request) for size, part in program.parts.items()}
            for part in parts.values():
                for graph in (part.graph, *([part.later.graph] if part.later else [])):
                    _require_known(graph, part, program.requirements)
                    _require_updates(graph, request.updates, len(program.sizes))
            candidate = Candidate.of(program.sizes, parts, self.plan.step_seconds, self.plan.step_joules)
        allowance = _take_stock(request, candidate)
        if not allowance.admits(candidate):
            raise _does_not_fit(request, allowance, candidate)
        results = None if program.results is None else _read_results(candidate, program.results)
        plan = _described(self.plan, program, allowance.lines(candidate), allowance)
        plan.program = PlannedProgram(candidate, program.requirements, program.accumulates, program.disabled, results)
        with _as_plan_errors():
            prepared = assemble(request, plan, candidate, allowance, is_foreign=program.carries_graph)
        prepared.results = results if want_results else None
        return prepared


def _data_of(program: Program) -> Mapping[str, Any]:
    """With the graph where it can be carried; otherwise, as with large constants, the step is traced again."""
    try:
        return program.to_data(carry_graph=True)
    except PlanError:
        return program.to_data(carry_graph=False)


def _require_same_use(request: StepRequest, program: StoredProgram, want_results: bool) -> None:
    if want_results and program.results is None:
        raise PlanError("the plan was made without the model's outputs: use one of a step whose outputs were asked for")
    if request.accumulates and not program.accumulates and not request.transactional:
        raise PlanError("the plan was made for accumulation_steps=1: gradients of several calls have no place in it")
    is_own = any(t.startswith("torch_odt.") for part in program.parts.values() for t in part.first.operators)
    if is_own and program.has_kernels and not _extensions.has_kernels:
        raise PlanError(
            f"the plan uses torch_odt's compiled operators, which are missing here; {_extensions.REINSTALL}"
        )


@dataclass(frozen=True)
class _Graphs:
    """What one micro-batch size executes, wherever it comes from."""

    first: TrainingGraph
    later: TrainingGraph
    separation: Separation | None
    draws: Sequence[Draw]


def _carried(program: StoredProgram) -> dict[int, _Graphs]:
    found = {}
    for size, part in program.parts.items():
        assert part.first.graph is not None
        for draw in part.draws:
            if not draw.is_known or draw.value not in part.first.graph.inputs:
                raise PlanError(f"the plan draws random numbers in an unknown way ({draw.op.target})")
        with _as_plan_errors():
            _require_harmless_count(part.first.graph, part.separation)
        later = None if part.later is None else part.later.graph
        found[size] = _Graphs(part.first.graph, later or part.first.graph, part.separation, part.draws)
    return found


def _require_harmless_count(graph: TrainingGraph, separation: Separation | None) -> None:
    """What counts valid targets runs outside of the executor, and may rely on nothing that is checked there."""
    if separation is None or separation.count_value is None:
        return
    for op in ancestors(graph, separation.count_value, (*graph.inputs, *graph.constants)):
        if needs_guard(op) or op.target in (*UPDATES, *ACCUMULATING) or op.overwrites is not None:
            raise PlanError(
                f"the plan counts targets by op {op.index} of the graph, {op.target}, which is not for that"
            )


def _traced(
    request: StepRequest, program: StoredProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, _Graphs]:
    """The graphs of the step as it is here."""
    # What traces is not for those who carry their graphs.
    from torch_odt.execute.session import traced_sizes

    found = {}
    traced = traced_sizes(request, args, kwargs, tuple(program.parts), want_results=program.results is not None)
    for size, sized in traced.items():
        part = program.parts[size]
        require_same_graph(sized.graph, part.first)
        later, _ = sized.later(part.schedule)
        if part.later is not None:
            require_same_graph(later, part.later)
        found[size] = _Graphs(sized.graph, later, sized.separation, sized.draws)
    return found


def _planned_part(graphs: _Graphs, part: StoredPart, request: StepRequest) -> PlannedPart:
    """A part whose schedule and addresses have been replayed."""
    first, costs = graphs.first, on_device(part.first, request.page_file).costs
    simulation = simulate(first, costs, part.schedule)
    check(first, costs, part.schedule, part.first.layout)
    later = None
    if part.later is not None:
        later_costs = on_device(part.later, request.page_file).costs
        later = LaterPart(
            graph=graphs.later,
            costs=later_costs,
            simulation=simulate(graphs.later, later_costs, part.schedule, gradients="accumulate"),
            layout=part.later.layout,
        )
        check(later.graph, later.costs, part.schedule, later.layout, gradients="accumulate")
    return PlannedPart(
        first, costs, part.schedule, simulation, part.first.layout, later, graphs.separation, graphs.draws
    )


def _require_known(graph: TrainingGraph, part: PlannedPart, requirements: Requirements) -> None:
    """What a graph of a part takes and gives is what the step has, by name and form."""
    forms = {"parameter": requirements.parameters, "buffer": requirements.buffers, "gradient": requirements.parameters}
    drawn = {draw.value for draw in part.draws}
    arguments = range(len(requirements.batch))
    for index in graph.inputs:
        value = graph.values[index]
        if value.kind in forms:
            form = forms[value.kind].get(str(value.target))
            if form is None or (form.shape, form.dtype) != (value.shape, value.dtype):
                raise PlanError(f"the plan's graph takes {value.kind} {value.target}, which is not as the model's")
        elif value.kind == "input" and index not in drawn and value.target not in arguments:
            raise PlanError(f"the plan's graph takes argument {value.target}, which is none of the batch's")
    for output in graph.outputs:
        known = {"gradient": requirements.parameters, "mutation": requirements.buffers}.get(output.kind)
        if known is not None and output.target not in known:
            raise PlanError(f"the plan's graph gives the {output.kind} of {output.target}, which the model has not")


def _require_updates(graph: TrainingGraph, updates: OptimizerUpdates | None, micro_batches: int) -> None:
    """The optimizer must make the updates that stand in the graph, each once in a step."""
    ops = [op for op in graph.program if op.target in UPDATES]
    if not ops:
        return
    reason = "nothing updates parameters here" if updates is None else updates.waits_for
    rules = {} if updates is None or reason else updates.rules_for(graph)
    done = {output.target for output in graph.outputs_of("gradient")}
    for op in ops:
        name = str(graph.values[op.reads[0]].target) if op.reads else ""
        if micro_batches > 1 or name in done:
            raise PlanError(f"the plan updates {name} more than once in a step")
        done.add(name)
        if name not in rules or not _is_update(graph, op, rules[name]):
            reason = reason or f"the optimizer updates {name} in another way than the plan ({op.args[:1]})"
            raise PlanError(f"the plan updates parameters in the backward pass, which cannot be done here: {reason}")


def _is_update(graph: TrainingGraph, op: Op, rule: UpdateRule) -> bool:
    if op.target == FUSED_UPDATE:
        changed, weight = (graph.values[value] for value in changed_by(op))
        held = graph.values[weight.base]
        wanted = ("buffer", rule.into) if rule.into else ("parameter", changed.target)
        is_whole = (weight.dtype, prod(weight.shape)) == (held.dtype, prod(held.shape))
        return op.args[0] == rule.text and (held.kind, held.target) == wanted and is_whole
    parameter, _, *state = op.reads
    name = str(graph.values[parameter].target)
    taken = [(graph.values[v].kind, graph.values[v].target) for v in (parameter, *state)]
    expected = [("parameter", name), *(("state", f"{name}/{key}") for key in rule.state)]
    expected += [("buffer", rule.into)] if rule.into else []
    return op.args == (rule.text, *map(Ref, op.reads)) and taken == expected and not op.writes


def _take_stock(request: StepRequest, candidate: Candidate) -> Allowance:
    """What the budget leaves; garbage is only looked for where it is too little."""
    first = candidate.parts[candidate.sizes[0]]
    held = sum(p.grad.nbytes for p in request.model.parameters() if p.grad is not None) if request.accumulates else 0
    costs = [c for part in candidate.parts.values() for c in (part.costs, *([part.later.costs] if part.later else []))]

    def take(collects: bool) -> Allowance:
        return allow(
            request.resolve_budget(),
            request.optimizer_cost,
            first.graph,
            held_bytes=held,
            library_bytes=max(cost.library_bytes for cost in costs),
            collects=collects,
            undo=UndoCost.of(first.graph, accumulates=request.accumulates) if request.transactional else None,
        )

    allowance = take(collects=False)
    return allowance if allowance.admits(candidate) else take(collects=True)


def _does_not_fit(request: StepRequest, allowance: Allowance, candidate: Candidate) -> InfeasibleBudget:
    hints = ["a plan that was made for less"]
    if request.optimizer_cost is not None and request.updates is None:
        hints.append("a plan that was made with optimizer=")
    needed = allowance.budget.in_terms_of(allowance.total_with(candidate) + _NOISE_BYTES)
    return InfeasibleBudget(allowance.budget.text, needed, tuple(hints), allowance.describe())


@contextmanager
def _as_plan_errors() -> Iterator[None]:
    """What a file contradicts itself with shows in many ways."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise PlanError(f"the plan contradicts itself: {error!r}") from error


def _described(plan: Plan, program: StoredProgram, lines: Sequence[PlanLine], allowance: Allowance) -> Plan:
    """The plan as it is followed here."""
    notes = list(plan.notes)
    if program.settings != settings_name():
        where = "" if program.machine == machine_name() else f"on {program.machine}; "
        notes.append(f"planned with other settings: {where}{program.settings}")
    return replace(
        plan,
        lines=tuple(line for line in lines if line.nbytes),
        budget=allowance.budget,
        notes=tuple(notes),
        smallest_feasible_bytes=None,
    )


def _read_results(candidate: Candidate, data: Mapping[str, Any]) -> TracedStep:
    try:
        with _as_plan_errors():
            return with_results(candidate.parts[candidate.sizes[0]].graph, data)
    except NotImplementedError as error:
        raise PlanError(f"the model's outputs have a class that is not imported here: {error}") from error
