"""The plan: what a training step will do and hold, for people and for the next process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args

from torch_odt.capture.costs import Costs
from torch_odt.capture.estimates import estimate
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.update_in_backward import UPDATE
from torch_odt.errors import PlanError
from torch_odt.planning.objective import Objective
from torch_odt.planning.plan_fields import Fields
from torch_odt.planning.plan_file import read_plan_file, write_plan_file
from torch_odt.planning.pool import Layout
from torch_odt.planning.schedule import Run, Schedule, schedule_from_data, schedule_to_data
from torch_odt.planning.timeline import Timeline, recomputing_runs

if TYPE_CHECKING:
    from torch_odt.runtime.budget import Budget, ResolvedBudget


# A budget may lie below what the process holds, and what has been measured below what it was before.
_LEAST = -(1 << 63)


class Program(Protocol):
    """What executes a plan: graphs with their costs, schedules and addresses."""

    def to_data(self, *, carry_graph: bool) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class FileProgram:
    """What executes a plan, as it stands in a file."""

    data: Mapping[str, Any]

    def to_data(self, *, carry_graph: bool) -> Mapping[str, Any]:
        """As it is: what it does not carry cannot be added."""
        return self.data


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One part of the footprint: what it is, its bytes, and a remark."""

    label: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """All recomputed calls of one operator in a step."""

    target: str
    calls: int
    seconds: float


@dataclass(kw_only=True)
class Plan:
    """A training step as it was decided.

    `print` it for a summary, `plot` it for memory over time, `save` it for another process or machine.

    Attributes:
        planner: the name of the planner that made the schedule.
        lines: the predicted footprint above the level at construction, part by part; their sum is `peak_bytes`.
        step_seconds: predicted time of the operators of a step.
        eager_seconds: the same with every operator run once.
        step_joules: predicted for a step; None where nobody knows what the machine draws.
        device: the machine that it was made for, in words.
        objective: what it spends least of, "seconds" or "joules".
        deadline_seconds: what a step was to take at most; None where there was no such limit.
        batch: samples in a batch, if known.
        micro_batch: samples that go through the schedule at once; None for the whole batch.
        budget: what it was made for; None where there was none.
        recomputed: what runs more than once, the most expensive first.
        notes: which rewrites are on, and what was not possible and why.
        smallest_feasible_bytes: the smallest budget that would be accepted, in the budget's own terms, if known.
        tensor_peak_bytes: predicted bytes of all tensors of the step at its peak, optimizer state included: what the
            allocator will count. Less than the footprint, whose parts are not all full at the same moment.
        planning_seconds: what looking for the schedule has taken, after the whole batch was captured and measured.
        captured: whether the step is executed from its graph; otherwise it runs plainly, with checkpoints.
        schedule: what runs; None where nothing was captured.
        layout: its addresses while gradients are new; None where there is no arena.
        later_layout: its addresses when gradients are added to those of earlier micro-batches.
        timeline: memory over one pass through the schedule.
        program: what executes it; None where it can only be looked at.
    """

    planner: str
    lines: Sequence[PlanLine]
    step_seconds: float
    eager_seconds: float
    step_joules: float | None = None
    device: str = ""
    objective: Objective = "seconds"
    deadline_seconds: float | None = None
    batch: int | None = None
    micro_batch: int | None = None
    budget: ResolvedBudget | None = None
    recomputed: Sequence[Recomputed] = ()
    notes: Sequence[str] = ()
    smallest_feasible_bytes: int | None = None
    tensor_peak_bytes: int | None = None
    planning_seconds: float | None = None
    captured: bool = True
    schedule: Schedule | None = None
    layout: Layout | None = None
    later_layout: Layout | None = None
    timeline: Timeline | None = None
    program: Program | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of_value(cls, value: str | Path | Plan) -> Plan:
        """A plan from anything that a `plan=` may be given.

        Raises:
            OSError: the file cannot be read.
            PlanError: it is no plan.
            TypeError: it is neither a plan nor a path.
        """
        if not isinstance(value, (str, Path, Plan)):
            raise TypeError(f"plan= takes a Plan or the path of its file, not a {type(value).__name__}")
        return value if isinstance(value, Plan) else cls.load(value)

    @property
    def given_budget(self) -> Budget:
        """The budget that it was made for, to be asked for again.

        Raises:
            ValueError: it was made for none.
        """
        from torch_odt.runtime.budget import Budget

        if self.budget is None:
            raise ValueError("the plan was made for no budget: give one")
        return Budget(self.budget.in_terms_of(self.budget.growth_bytes), of=self.budget.of)

    @property
    def peak_bytes(self) -> int:
        """The predicted peak above the level at construction."""
        return sum(line.nbytes for line in self.lines)

    @property
    def arena_bytes(self) -> int:
        """The size of the arena that all passes share; 0 without one."""
        layouts = [layout for layout in (self.layout, self.later_layout) if layout is not None]
        return max((layout.address_peak_bytes for layout in layouts), default=0)

    @property
    def recomputed_ops(self) -> int:
        """How many operator calls of a step bring back what was dropped."""
        return sum(entry.calls for entry in self.recomputed)

    @property
    def passes(self) -> int:
        """How often the schedule runs in a step."""
        if self.micro_batch is None or self.batch is None:
            return 1
        return -(-self.batch // self.micro_batch)

    @property
    def slowdown(self) -> float:
        """Predicted time over that of running every operator once; 1 when nothing is known."""
        return self.step_seconds / self.eager_seconds if self.eager_seconds > 0 else 1.0

    def __str__(self) -> str:
        from torch_odt.planning.plan_text import plan_text

        return plan_text(self)

    def plot(self, path: str | Path) -> None:
        """Draw memory over the step, what is recomputed and what is paged, into a PNG, SVG, PDF or HTML file.

        An HTML file is one page that needs no network, with everything that `print` says and the bytes of any moment;
        for the frontiers of several planners in it see `torch_odt.planning.page.document.page`.

        Raises:
            ImportError: matplotlib is missing, which images need; `pip install "torch_odt[plot]"` brings it.
            PlanError: the plan has no timeline, because the step was not captured.
            ValueError: the file's name ends in no known image format.
        """
        if self.timeline is None or not self.timeline.start_seconds:
            raise PlanError("there is nothing to draw: the step was not captured")
        path = Path(path)
        if path.suffix.lower() == ".html":
            from torch_odt.planning.page.document import write_page

            write_page(path, self)
            return
        from torch_odt.planning.plan_plot import draw_plan

        draw_plan(self, self.timeline, path)

    def to_dict(self) -> dict[str, Any]:
        """What the plan says, as plain data: everything but the instructions and addresses."""
        return {
            "planner": self.planner,
            "captured": self.captured,
            "batch": self.batch,
            "micro_batch": self.micro_batch,
            "budget": asdict(self.budget) if self.budget is not None else None,
            "peak_bytes": self.peak_bytes,
            "arena_bytes": self.arena_bytes,
            "smallest_feasible_bytes": self.smallest_feasible_bytes,
            "tensor_peak_bytes": self.tensor_peak_bytes,
            "planning_seconds": self.planning_seconds,
            "step_seconds": self.step_seconds,
            "eager_seconds": self.eager_seconds,
            "step_joules": self.step_joules,
            "device": self.device,
            "objective": self.objective,
            "deadline_seconds": self.deadline_seconds,
            "recomputed_ops": self.recomputed_ops,
            "recomputed": [asdict(entry) for entry in self.recomputed],
            "lines": [asdict(line) for line in self.lines],
            "notes": list(self.notes),
        }

    def to_state(self, *, carry_graph: bool = True) -> dict[str, Any]:
        """The whole plan as plain data for JSON; `from_state` reads it. See `save` for `carry_graph`."""
        program = None if self.program is None else self.program.to_data(carry_graph=carry_graph)
        own = _schedule_to_data(self) if program is None else {}
        timeline = asdict(self.timeline) if self.timeline is not None else None
        return self.to_dict() | own | {"timeline": timeline, "program": program}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Plan:
        """The inverse of `to_state`.

        Raises:
            PlanError: it is something else.
        """
        fields = Fields.of_value(state)
        program = None if fields.raw("program") is None else fields.record("program")
        executed = fields if program is None else Fields(fields.made(_first_part, "program"), "program")
        return cls(
            planner=fields.text("planner"),
            lines=tuple(
                PlanLine(line.text("label"), line.whole("nbytes", _LEAST), line.text("note"))
                for line in fields.records("lines")
            ),
            step_seconds=fields.number("step_seconds"),
            eager_seconds=fields.number("eager_seconds"),
            step_joules=fields.optional(fields.number, "step_joules"),
            device=fields.text("device"),
            objective=fields.one_of("objective", get_args(Objective)),
            deadline_seconds=fields.optional(fields.number, "deadline_seconds"),
            batch=fields.optional(lambda name: fields.whole(name, 1), "batch"),
            micro_batch=fields.optional(lambda name: fields.whole(name, 1), "micro_batch"),
            budget=fields.optional(lambda name: _budget_from(fields.record(name)), "budget"),
            recomputed=tuple(
                Recomputed(entry.text("target"), entry.whole("calls"), entry.number("seconds"))
                for entry in fields.records("recomputed")
            ),
            notes=tuple(fields.items("notes", lambda note: isinstance(note, str), "a text")),
            smallest_feasible_bytes=fields.optional(fields.whole, "smallest_feasible_bytes"),
            tensor_peak_bytes=fields.optional(fields.whole, "tensor_peak_bytes"),
            planning_seconds=fields.optional(fields.number, "planning_seconds"),
            captured=fields.flag("captured"),
            schedule=executed.optional(lambda name: executed.made(schedule_from_data, name), "schedule"),
            layout=executed.optional(lambda name: executed.made(layout_from_data, name), "layout"),
            later_layout=executed.optional(lambda name: executed.made(layout_from_data, name), "later_layout"),
            timeline=fields.optional(lambda name: Timeline.from_fields(fields.record(name)), "timeline"),
            program=None if program is None else FileProgram(program.data),
        )

    def save(self, path: str | Path, *, carry_graph: bool = True) -> None:
        """Write the plan to a JSON file, from which `TrainStep(plan=...)` trains on another machine.

        Args:
            path: the file.
            carry_graph: write the graph into it: whoever trains from the file needs the model's parameters, but neither
                traces the model nor runs its code, nor that of the loss. Without, the file is smaller, and the model
                is traced where it is used and must give the same graph.

        Raises:
            OSError: the file cannot be written.
            PlanError: the graph holds something that cannot be written, such as a large constant.
        """
        write_plan_file(Path(path), self.to_state(carry_graph=carry_graph))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            PlanError: it holds no plan, one of another version, or has been changed.
        """
        return cls.from_state(read_plan_file(Path(path)))


def load_plan(path: str | Path) -> Plan:
    """Read a plan that `Plan.save` wrote.

    Choose it to look at a plan from a file; `TrainStep(plan=...)` takes the path as well, and needs less memory so.

    Raises:
        OSError: the file cannot be read.
        PlanError: it holds no plan, one of another version, or has been changed.

    Example:
        >>> import tempfile, torch, torch_odt as odt
        >>> model, batch = torch.nn.Linear(4, 2), (torch.ones(3, 4), torch.tensor([0, 1, 1]))
        >>> made = odt.plan(model, torch.nn.functional.cross_entropy, batch, budget="8GiB", cache=False)
        >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
        ...     made.save(file.name)
        ...     load_plan(file.name).batch
        3
    """
    return Plan.load(path)


def layout_to_data(layout: Layout) -> dict[str, Any]:
    """Addresses as plain data for JSON."""
    return asdict(layout)


def layout_from_data(data: Mapping[str, Any]) -> Layout:
    """The inverse of `layout_to_data`.

    Raises:
        ValueError, KeyError, TypeError: the data is no layout.
    """
    return Layout(
        address_peak_bytes=int(data["address_peak_bytes"]),
        outside_peak_bytes=int(data["outside_peak_bytes"]),
        live_peak_bytes=int(data["live_peak_bytes"]),
        table=[tuple((int(offset), int(nbytes)) for offset, nbytes in row) for row in data["table"]],
    )


def _budget_from(fields: Fields) -> ResolvedBudget:
    from torch_odt.runtime.budget import BudgetOf, ResolvedBudget

    return ResolvedBudget(
        total_bytes=fields.whole("total_bytes", _LEAST),
        level_bytes=fields.whole("level_bytes", _LEAST),
        growth_bytes=fields.whole("growth_bytes", _LEAST),
        of=fields.one_of("of", get_args(BudgetOf)),
        text=fields.text("text"),
        children_bytes=fields.whole("children_bytes"),
    )


def _schedule_to_data(plan: Plan) -> dict[str, Any]:
    """What runs and where, of a plan that nothing executes."""
    return {
        "schedule": schedule_to_data(plan.schedule) if plan.schedule is not None else None,
        "layout": layout_to_data(plan.layout) if plan.layout is not None else None,
        "later_layout": layout_to_data(plan.later_layout) if plan.later_layout is not None else None,
    }


def _first_part(program: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a program."""
    part = program["parts"][0]
    later = part["later"]
    return {
        "schedule": part["schedule"],
        "layout": part["first"]["layout"],
        "later_layout": None if later is None else later["layout"],
    }


def eager_seconds(graph: TrainingGraph, costs: Costs) -> float:
    """The time of every op of the program, each run once; without the optimizer's step, wherever that is made."""
    return _seconds(graph, costs, [op.index for op in graph.program if op.target != UPDATE])


def recomputed_in(graph: TrainingGraph, costs: Costs, schedule: Schedule, *, passes: int = 1) -> tuple[Recomputed, ...]:
    """What a schedule runs more than once, by operator, the most expensive first; views are left out."""
    found: dict[str, Recomputed] = {}
    for position in recomputing_runs(graph, schedule):
        instruction = schedule.instructions[position]
        assert isinstance(instruction, Run)
        op = graph.ops[instruction.op]
        if op.is_view:
            continue
        seconds = passes * _seconds(graph, costs, [op.index])
        before = found.get(op.target, Recomputed(op.target, 0, 0.0))
        found[op.target] = Recomputed(op.target, before.calls + passes, before.seconds + seconds)
    return tuple(sorted(found.values(), key=lambda entry: (-entry.seconds, entry.target)))


def _seconds(graph: TrainingGraph, costs: Costs, ops: Iterable[int]) -> float:
    return sum((costs.ops.get(op) or estimate(graph, graph.ops[op])).seconds for op in ops)
