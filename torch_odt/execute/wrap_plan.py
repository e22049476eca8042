"""What `wrap` knows and decides about a model's memory, and the plan that people see of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_odt._extensions import memory_module
from torch_odt.capture.concatenate import Concatenation
from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.execute.candidate import update_seconds
from torch_odt.execute.executor import Executor
from torch_odt.execute.graph_calls import GraphRunner, Rules
from torch_odt.execute.page_file import paging_notes
from torch_odt.execute.wrap_updates import Names
from torch_odt.planning.plan import Plan, PlanLine, eager_seconds, recomputed_in
from torch_odt.planning.pool import QUICK, Layout, pack
from torch_odt.planning.schedule import PageOut, Schedule
from torch_odt.planning.simulate import simulate
from torch_odt.planning.timeline import timeline_of
from torch_odt.runtime.budget import ResolvedBudget


@dataclass(eq=False)
class StepPlan:
    """A plan for a sequence of graphs.

    Attributes:
        graph: all graphs of the sequence as one; `costs` and `schedule` are of it.
        executors: one for each graph.
        layout: the schedule's addresses; None without an arena.
        peak_bytes: the planned peak above the level before the step.
        boundary_bytes: what the plan holds between forward and backward.
        made_for_bytes: the room for which it was made.
        seconds: predicted, recomputation included.
    """

    graph: TrainingGraph
    costs: Costs
    schedule: Schedule
    executors: list[Executor]
    layout: Layout | None
    peak_bytes: int
    boundary_bytes: int
    made_for_bytes: int
    seconds: float
    recompute_seconds: float

    @property
    def costs_no_time(self) -> bool:
        """More memory would not make it faster."""
        return self.recompute_seconds == 0 and not any(isinstance(i, PageOut) for i in self.schedule.instructions)


@dataclass(eq=False)
class Sequence:
    """The calls of a step, and its plans.

    Attributes:
        names: the parameters of each call, when it was seen last.
        rules: how each call updates parameters; `plans` and `whole` have these updates.
    """

    runners: tuple[GraphRunner, ...]
    names: tuple[Names, ...] = ()
    rules: list[Rules] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    whole: Concatenation | None = None

    def follow(self, rules: list[Rules]) -> None:
        """Updates are made by these rules from now on; what was planned with others is of no use."""
        if rules != self.rules:
            self.rules, self.plans, self.whole = rules, [], None

    @property
    def graphs(self) -> list[TrainingGraph]:
        return [runner.graph(rules) for runner, rules in zip(self.runners, self.rules, strict=True)]


@dataclass
class Ledger:
    """What has been seen of a wrapped model so far; it changes as steps run.

    Attributes:
        tracing_bytes: what tracing left behind.
        held_bytes: what was held when the last step began, above the level when the model was wrapped: what tracing
            left, and the optimizer's state.
        reserved_bytes: kept free for what `wrap` cannot see (the loss, operators outside of the graphs).
        is_reserve_measured: whether that comes from a step that ran, or from the size of the model's results.
        optimizer_bytes: kept free for the optimizer's state until it exists.
        is_optimizer_known: the optimizer was found among the objects of the process; otherwise it is taken for Adam.
        graph_breaks: why the model is in more than one graph; operators between them run plainly.
        notes: what the captures and the rewrites did, and what was not possible.
        fallback: why the model could not be captured at all, so that checkpointed submodules run instead.
        fallback_line: what a step then takes.
        step: the plan of the last step.
    """

    tracing_bytes: int = 0
    held_bytes: int = 0
    reserved_bytes: int = 0
    is_reserve_measured: bool = False
    optimizer_bytes: int = 0
    is_optimizer_known: bool = False
    graph_breaks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fallback: str = ""
    fallback_line: PlanLine | None = None
    step: StepPlan | None = None

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def summarize_wrap(ledger: Ledger, budget: ResolvedBudget, planner: str, remarks: tuple[str, ...] = ()) -> Plan:
    """The plan of a wrapped model as it stands.

    Args:
        remarks: on what has been seen since it was made; empty ones do not count.
    """
    step = None if ledger.fallback else ledger.step
    if step is not None and step.costs.transfers is not None:
        remarks = (*remarks, *paging_notes(simulate(step.graph, step.costs, step.schedule)))
    steps = _step_lines(step) if ledger.fallback_line is None else [ledger.fallback_line]
    lines = tuple(line for line in (*steps, *_other_lines(ledger)) if line.nbytes)
    notes = tuple(dict.fromkeys((*_notes(ledger), *([] if step is None else step.graph.notes), *filter(None, remarks))))
    if step is None:
        name = "checkpointing" if ledger.fallback else planner
        return Plan(
            planner=name,
            lines=lines,
            step_seconds=0.0,
            eager_seconds=0.0,
            budget=budget,
            notes=notes,
            captured=not ledger.fallback,
        )
    return Plan(
        planner=step.schedule.planner,
        lines=lines,
        step_seconds=step.seconds - update_seconds(step.graph, step.costs),
        eager_seconds=eager_seconds(step.graph, step.costs),
        device=step.costs.machine,
        budget=budget,
        recomputed=recomputed_in(step.graph, step.costs, step.schedule),
        notes=notes,
        schedule=step.schedule,
        layout=step.layout,
        timeline=timeline_of(step.graph, step.costs, step.schedule),
    )


def _step_lines(step: StepPlan | None) -> list[PlanLine]:
    if step is None:
        return []
    if step.layout is None:
        return [PlanLine("activations, temporaries and gradients", step.peak_bytes, "ordinary allocations")]
    arena_bytes = step.layout.address_peak_bytes
    return [
        PlanLine("activations and temporaries", arena_bytes, "one arena, mapped once"),
        PlanLine("gradients and outputs", step.peak_bytes - arena_bytes, ""),
    ]


def _other_lines(ledger: Ledger) -> list[PlanLine]:
    seen = "measured" if ledger.is_reserve_measured else "estimated from the outputs"
    found = "" if ledger.is_optimizer_known else "as for Adam: no optimizer was found; "
    return [
        PlanLine("loss", ledger.reserved_bytes, f"and what else lies outside of the graphs, {seen}"),
        PlanLine("optimizer state", ledger.optimizer_bytes, f"{found}made by its first step"),
        PlanLine("held when a step begins", max(0, ledger.held_bytes - ledger.tracing_bytes), "tensors"),
        PlanLine("capture and planning", ledger.tracing_bytes, "counted in the process"),
    ]


def _notes(ledger: Ledger) -> list[str]:
    notes = [f"not captured: {ledger.fallback}"] if ledger.fallback else []
    notes += [f"graph break: {reason}" for reason in ledger.graph_breaks]
    if ledger.step is not None and len(ledger.step.executors) > 1:
        notes.append(f"{len(ledger.step.executors)} graphs, planned together")
    return notes + ledger.notes


def footprint(graph: TrainingGraph, costs: Costs, schedule: Schedule) -> int:
    """What a schedule takes: in an arena a little more than its live bytes."""
    if memory_module is None:
        return simulate(graph, costs, schedule).peak_bytes
    return pack(graph, costs, schedule, effort=QUICK).total_bytes


def result_bytes(graphs: list[TrainingGraph]) -> int:
    return sum(graph.values[o.value].nbytes for graph in graphs for o in graph.outputs_of("result"))
