"""The plan: what a training step will do and hold, for people and for the next process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_odt.capture.costs import Costs
from torch_odt.capture.estimates import estimate
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.planning.pool import Layout
from torch_odt.planning.schedule import Run, Schedule, schedule_from_data, schedule_to_data
from torch_odt.planning.timeline import Timeline, recomputing_runs

if TYPE_CHECKING:
    from torch_odt.runtime.budget import ResolvedBudget

FORMAT = 1


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
    """

    planner: str
    lines: Sequence[PlanLine]
    step_seconds: float
    eager_seconds: float
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
        """Draw memory over the step into a PNG, SVG or PDF file.

        Raises:
            ImportError: matplotlib is missing; `pip install "torch_odt[plot]"` brings it.
            PlanError: the plan has no timeline, because the step was not captured.
            ValueError: the file's name ends in no known image format.
        """
        from torch_odt.planning.plan_plot import draw_plan

        draw_plan(self, Path(path))

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
            "recomputed_ops": self.recomputed_ops,
            "recomputed": [asdict(entry) for entry in self.recomputed],
            "lines": [asdict(line) for line in self.lines],
            "notes": list(self.notes),
        }

    def to_state(self) -> dict[str, Any]:
        """The whole plan as plain data for JSON; `from_state` reads it."""
        return self.to_dict() | {
            "format": FORMAT,
            "schedule": schedule_to_data(self.schedule) if self.schedule is not None else None,
            "layout": asdict(self.layout) if self.layout is not None else None,
            "later_layout": asdict(self.later_layout) if self.later_layout is not None else None,
            "timeline": asdict(self.timeline) if self.timeline is not None else None,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Plan:
        """The inverse of `to_state`.

        Raises:
            PlanError: it is something else, or of another version.
        """
        from torch_odt.runtime.budget import ResolvedBudget

        try:
            if state["format"] != FORMAT:
                raise PlanError(f"the plan is of format {state['format']}; this version reads format {FORMAT}")
            return cls(
                planner=str(state["planner"]),
                lines=tuple(PlanLine(**line) for line in state["lines"]),
                step_seconds=float(state["step_seconds"]),
                eager_seconds=float(state["eager_seconds"]),
                batch=state["batch"],
                micro_batch=state["micro_batch"],
                budget=ResolvedBudget(**state["budget"]) if state["budget"] is not None else None,
                recomputed=tuple(Recomputed(**entry) for entry in state["recomputed"]),
                notes=tuple(map(str, state["notes"])),
                smallest_feasible_bytes=state["smallest_feasible_bytes"],
                tensor_peak_bytes=state["tensor_peak_bytes"],
                planning_seconds=state["planning_seconds"],
                captured=bool(state["captured"]),
                schedule=schedule_from_data(state["schedule"]) if state["schedule"] is not None else None,
                layout=_layout_from(state["layout"]),
                later_layout=_layout_from(state["later_layout"]),
                timeline=Timeline(**state["timeline"]) if state["timeline"] is not None else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"this is no plan: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(json.dumps(self.to_state(), separators=(",", ":")), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            PlanError: it holds no plan.
        """
        try:
            state = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise PlanError(f"{path} is no plan: {error}") from error
        return cls.from_state(state)


def eager_seconds(graph: TrainingGraph, costs: Costs) -> float:
    """The time of every op of the program, each run once."""
    return _seconds(graph, costs, range(graph.program_length))


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


def _layout_from(state: dict[str, Any] | None) -> Layout | None:
    if state is None:
        return None
    table = [[(offset, nbytes) for offset, nbytes in row] for row in state["table"]]
    return Layout(**{**state, "table": table})
