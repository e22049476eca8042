"""What executes a plan, to and from plain data: graphs, their costs, schedules and addresses.

A file that carries its graphs needs neither the model's code nor a trace. One that does not names their fingerprints,
and what is traced where it is used must have the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch_odt._extensions import has_kernels
from torch_odt.capture.cost_table import cost_from_list, cost_to_list
from torch_odt.capture.costs import Costs
from torch_odt.capture.draws import Draw, Layout
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.graph_check import check_graph
from torch_odt.capture.graph_data import decode, encode, graph_from_data, graph_to_data, op_from_data, op_to_data
from torch_odt.capture.machine import settings_name
from torch_odt.capture.separation import Separation
from torch_odt.capture.step_data import results_to_data
from torch_odt.capture.trace import TracedStep
from torch_odt.capture.update_in_backward import UPDATES
from torch_odt.errors import PlanError
from torch_odt.execute.candidate import Candidate, PlannedPart
from torch_odt.execute.page_file import OpenPageFile
from torch_odt.execute.requirements import Requirements
from torch_odt.planning import pool
from torch_odt.planning.plan import layout_from_data, layout_to_data
from torch_odt.planning.schedule import Schedule, schedule_from_data, schedule_to_data

# Larger ones are weights that the model does not declare: as text they would be most of the file.
MOST_CONSTANT_BYTES = 1 << 20
DOOR = "TrainStep"


@dataclass(frozen=True)
class PlannedProgram:
    """What executes a plan, as it was planned in this process.

    Attributes:
        accumulates: gradients of several calls may be summed.
        disabled: names of rewrites that were not made.
        results: the traced step, whose model's outputs are wanted; None where they are not.
    """

    candidate: Candidate
    requirements: Requirements
    accumulates: bool
    disabled: frozenset[str]
    results: TracedStep | None = None

    def to_data(self, *, carry_graph: bool) -> dict[str, Any]:
        """For JSON.

        Raises:
            PlanError: the graph cannot be carried, or the outputs' structure cannot be written.
        """
        try:
            parts = [_part_to_data(size, part, carry_graph) for size, part in self.candidate.parts.items()]
        except (TypeError, NotImplementedError) as error:
            raise PlanError(f"the graph cannot be written: {error}; save the plan with carry_graph=False") from error
        try:
            results = None if self.results is None else results_to_data(self.results)
        except (TypeError, NotImplementedError) as error:
            raise PlanError(f"the model's outputs cannot be written: {error}; save a plan without outputs") from error
        first = self.candidate.parts[self.candidate.sizes[0]]
        return {
            "door": DOOR,
            "requirements": self.requirements.to_data(),
            "machine": first.costs.machine,
            "settings": settings_name(),
            "has kernels": has_kernels,
            "accumulates": self.accumulates,
            "disabled rewrites": sorted(self.disabled),
            "results": results,
            "micro-batches": list(self.candidate.sizes),
            "parts": parts,
        }


@dataclass(frozen=True)
class StoredGraph:
    """A graph of a file, with its costs and addresses; None instead of the graph where the file only names it."""

    fingerprint: str
    operators: Mapping[str, int]
    graph: TrainingGraph | None
    costs: Costs
    layout: pool.Layout


@dataclass(frozen=True)
class StoredPart:
    """The plan of one micro-batch size, as `PlannedPart`, from a file."""

    schedule: Schedule
    first: StoredGraph
    later: StoredGraph | None
    separation: Separation | None
    draws: tuple[Draw, ...]


@dataclass(frozen=True)
class StoredProgram:
    """What executes a plan, from a file. Nothing of it has been checked against a model yet.

    Attributes:
        sizes: the micro-batches in order; `parts` are by size.
        results: see `results_to_data`; None where the model's outputs are not among what is computed.
    """

    requirements: Requirements
    machine: str
    settings: str
    has_kernels: bool
    accumulates: bool
    disabled: frozenset[str]
    results: Mapping[str, Any] | None
    sizes: tuple[int, ...]
    parts: Mapping[int, StoredPart]

    @property
    def makes_updates(self) -> bool:
        """Whether parameters are updated in the backward pass."""
        return any(not UPDATES.isdisjoint(part.first.operators) for part in self.parts.values())

    @property
    def carries_graph(self) -> bool:
        return all(part.first.graph is not None for part in self.parts.values())


def program_from_data(data: Mapping[str, Any]) -> StoredProgram:
    """The program of `PlannedProgram.to_data`.

    Raises:
        PlanError: it is something else, or a graph is not what it says.
    """
    try:
        if data["door"] != DOOR:
            raise PlanError(f"the plan is one of {data['door']}, which {DOOR} cannot follow")
        sizes = tuple(map(int, data["micro-batches"]))
        program = StoredProgram(
            requirements=Requirements.from_data(data["requirements"]),
            machine=str(data["machine"]),
            settings=str(data["settings"]),
            has_kernels=bool(data["has kernels"]),
            accumulates=bool(data["accumulates"]),
            disabled=frozenset(map(str, data["disabled rewrites"])),
            results=data["results"],
            sizes=sizes,
            parts={int(part["size"]): _part_from_data(str(data["machine"]), part) for part in data["parts"]},
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise PlanError(f"the plan's program is damaged: {error!r}") from error
    if not sizes or min(sizes) < 1 or program.parts.keys() != set(sizes):
        raise PlanError("the plan's micro-batches are not those that it has schedules for")
    return program


def _part_to_data(size: int, part: PlannedPart, carry_graph: bool) -> dict[str, Any]:
    return {
        "size": size,
        "schedule": schedule_to_data(part.schedule),
        "first": graph_to_stored(part.graph, part.costs, part.first, carry_graph),
        "later": _later_to_data(part, carry_graph),
        "separation": _separation_to_data(part.separation) if carry_graph else None,
        "draws": [_draw_to_data(draw) for draw in part.draws] if carry_graph else [],
    }


def _later_to_data(part: PlannedPart, carry_graph: bool) -> dict[str, Any] | None:
    later = part.later
    if later is None:
        return None
    if later.graph is part.graph:
        return {"layout": layout_to_data(later.layout)}
    return graph_to_stored(later.graph, later.costs, later.layout, carry_graph)


def _part_from_data(machine: str, data: Mapping[str, Any]) -> StoredPart:
    first = graph_from_stored(machine, data["first"])
    later = data["later"]
    if later is not None:
        is_same = later.keys() == {"layout"}
        layout = layout_from_data(later["layout"])
        later = replace(first, layout=layout) if is_same else graph_from_stored(machine, later)
    return StoredPart(
        schedule=schedule_from_data(data["schedule"]),
        first=first,
        later=later,
        separation=_separation_from_data(data["separation"]),
        draws=tuple(map(_draw_from_data, data["draws"])),
    )


def graph_to_stored(graph: TrainingGraph, costs: Costs, layout: pool.Layout, carry_graph: bool) -> dict[str, Any]:
    """A graph with its costs and addresses, as plain data.

    Raises:
        TypeError: the graph cannot be carried.
        PlanError: it has an operator that a file may not carry.
    """
    if carry_graph:
        check_graph(graph)
    return {
        "fingerprint": graph.fingerprint,
        "operators": count_operators(graph),
        "graph": graph_to_data(graph, most_constant_bytes=MOST_CONSTANT_BYTES) if carry_graph else None,
        "costs": [[op, *cost_to_list(replace(cost, layouts=()))] for op, cost in costs.ops.items()],
        "layout": layout_to_data(layout),
    }


def graph_from_stored(machine: str, data: Mapping[str, Any]) -> StoredGraph:
    """The inverse of `graph_to_stored`.

    Args:
        machine: where the costs were measured.

    Raises:
        PlanError: the graph is not what it says.
        KeyError, TypeError, ValueError, AttributeError: the data is something else.
    """
    graph = None if data["graph"] is None else graph_from_data(data["graph"])
    if graph is not None:
        check_graph(graph)
    costs = {int(op): cost_from_list(cost) for op, *cost in data["costs"]}
    operators = {str(target): int(count) for target, count in data["operators"].items()}
    return StoredGraph(
        str(data["fingerprint"]), operators, graph, Costs(costs, machine), layout_from_data(data["layout"])
    )


def require_same_graph(graph: TrainingGraph, stored: StoredGraph) -> None:
    """Raises PlanError when a graph is not the one that a plan was made for; the text names what differs."""
    if graph.fingerprint == stored.fingerprint:
        return
    here = count_operators(graph)
    differing = [t for t in (*stored.operators, *here) if stored.operators.get(t, 0) != here.get(t, 0)]
    if differing:
        target = differing[0]
        counts = f"{stored.operators.get(target, 0)} calls of {target}, and the step has {here.get(target, 0)}"
        raise PlanError(f"the plan is for another graph: it has {counts}")
    raise PlanError("the plan is for another graph: the same operators with other arguments, shapes or strides")


def on_device(stored: StoredGraph, page_file: OpenPageFile | None) -> StoredGraph:
    """With what paging costs where the plan is followed."""
    transfers = None if page_file is None else page_file.costs
    return replace(stored, costs=replace(stored.costs, transfers=transfers))


def require_page_file(schedules: Iterable[Schedule], page_file: OpenPageFile | None) -> None:
    """Raises PlanError when a plan pages and there is nothing to page to."""
    if page_file is None and any(schedule.pages for schedule in schedules):
        raise PlanError("the plan moves tensors to a file: name a folder for it with page_to=")


def count_operators(graph: TrainingGraph) -> dict[str, int]:
    """How often each operator stands in a graph's program."""
    found: dict[str, int] = {}
    for op in graph.program:
        found[op.target] = found.get(op.target, 0) + 1
    return found


_SEPARATION_FIELDS = ("batch", "micro_batch", "loss_kind", "input_axes", "result_axes", "count_value", "ignore_index")


def _separation_to_data(separation: Separation | None) -> dict[str, Any] | None:
    if separation is None:
        return None
    return {name: encode(getattr(separation, name)) for name in _SEPARATION_FIELDS}


def _separation_from_data(data: Mapping[str, Any] | None) -> Separation | None:
    return None if data is None else Separation(**{name: decode(data[name]) for name in _SEPARATION_FIELDS})


def _draw_to_data(draw: Draw) -> dict[str, Any]:
    return {
        "op": op_to_data(draw.op),
        "value": draw.value,
        "dim": draw.dim,
        "outer": draw.outer,
        "rows": draw.rows,
        "stride": list(draw.stride),
        "layout": asdict(draw.layout),
        "like": None if draw.like is None else asdict(draw.like),
        "needs": [op_to_data(op) for op in draw.needs],
    }


def _draw_from_data(data: Mapping[str, Any]) -> Draw:
    return Draw(
        op=op_from_data(0, data["op"]),
        value=int(data["value"]),
        dim=None if data["dim"] is None else int(data["dim"]),
        outer=int(data["outer"]),
        rows=int(data["rows"]),
        stride=tuple(map(int, data["stride"])),
        layout=_form_from_data(data["layout"]),
        like=None if data["like"] is None else _form_from_data(data["like"]),
        needs=tuple(op_from_data(index, row) for index, row in enumerate(data["needs"])),
    )


def _form_from_data(data: Mapping[str, Any]) -> Layout:
    return Layout(tuple(map(int, data["shape"])), tuple(map(int, data["stride"])), str(data["dtype"]))
