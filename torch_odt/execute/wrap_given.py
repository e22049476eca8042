"""A plan that a wrapped model is to follow.

torch.compile finds the graphs in the user's loop, so a plan of `wrap` never carries them: the loop must give the same
ones again. What the plan saves is measuring and planning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch_odt.capture.concatenate import concatenate
from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.errors import PlanError
from torch_odt.execute.page_file import OpenPageFile
from torch_odt.execute.plan_data import (
    StoredGraph,
    graph_from_stored,
    graph_to_stored,
    on_device,
    require_page_file,
    require_same_graph,
)
from torch_odt.execute.wrap_plan import StepPlan
from torch_odt.planning.plan import Plan
from torch_odt.planning.pool import Layout, check
from torch_odt.planning.schedule import Schedule, schedule_from_data, schedule_to_data
from torch_odt.planning.simulate import simulate

DOOR = "wrap"


@dataclass(frozen=True)
class WrapProgram:
    """What executes the plan of a wrapped model.

    Attributes:
        disabled: names of rewrites that were not made.
    """

    step: StepPlan
    layout: Layout
    disabled: frozenset[str]

    def to_data(self, *, carry_graph: bool) -> dict[str, Any]:
        """For JSON; graphs are never carried."""
        step = self.step
        first = graph_to_stored(step.graph, step.costs, self.layout, False)
        part = {"schedule": schedule_to_data(step.schedule), "first": first, "later": None}
        return {
            "door": DOOR,
            "machine": step.costs.machine,
            "disabled rewrites": sorted(self.disabled),
            "graphs": len(step.executors),
            "parts": [part],
        }


@dataclass(frozen=True)
class GivenSchedule:
    """The schedule of a step, and the graph that it is for.

    Attributes:
        disabled: names of rewrites that were not made.
        graphs: how many graphs torch.compile had found.
    """

    plan: Plan
    disabled: frozenset[str]
    graphs: int
    schedule: Schedule
    stored: StoredGraph

    @classmethod
    def of_value(cls, value: str | Path | Plan, page_file: OpenPageFile | None = None) -> GivenSchedule:
        """A schedule from anything that a `plan=` may be given.

        Args:
            page_file: what it may page to.

        Raises:
            OSError: the file cannot be read.
            PlanError: it is no plan, or none of a wrapped model that has been planned.
            TypeError: it is neither a plan nor a path.
        """
        plan = Plan.of_value(value)
        data: Mapping[str, Any] = {} if plan.program is None else plan.program.to_data(carry_graph=False)
        if data.get("door") != DOOR:
            raise PlanError(
                "the plan is not one of a wrapped model after its second step: no other can be followed by wrap. Make "
                "one there, with odt.plan_of(model).save(...)"
            )
        try:
            part = data["parts"][0]
            stored = on_device(graph_from_stored(str(data["machine"]), part["first"]), page_file)
            disabled = frozenset(map(str, data["disabled rewrites"]))
            schedule = schedule_from_data(part["schedule"])
            require_page_file([schedule], page_file)
            return cls(replace(plan, program=None), disabled, int(data["graphs"]), schedule, stored)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise PlanError(f"the plan's program is damaged: {error!r}") from error

    def schedule_for(self, graph: TrainingGraph) -> Schedule:
        """The schedule, replayed on the graph of a whole step.

        Raises:
            PlanError: it is another graph, or the plan contradicts itself.
        """
        require_same_graph(graph, self.stored)
        try:
            simulate(graph, self.stored.costs, self.schedule)
            check(graph, self.stored.costs, self.schedule, self.stored.layout)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise PlanError(f"the plan contradicts itself: {error!r}") from error
        return self.schedule

    def costs_for(self, graph: TrainingGraph) -> Costs | None:
        """The costs of a graph of the step, where the plan has them: of a whole step, or of its only graph."""
        whole = [graph] if self.graphs > 1 else [graph, concatenate([graph]).graph]
        return self.stored.costs if any(one.fingerprint == self.stored.fingerprint for one in whole) else None
