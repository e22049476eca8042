"""Costs as text: measured once, on the machine that will train, and used wherever the plan is made.

In a `CostTable` the costs are named by signature, which holds everything about a call but its data: the same call in
another graph, in another process or on another day finds its cost again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_odt.capture.costs import Costs, OpCost, ResultLayout
from torch_odt.capture.estimates import estimate
from torch_odt.capture.graph import Op, Ref, TrainingGraph
from torch_odt.capture.layouts import RealLayouts
from torch_odt.errors import PlanError

FORMAT = 3


@dataclass
class CostTable:
    """Measured costs by signature, and where they were measured.

    Attributes:
        machine: from `machine_name()`.
        settings: from `settings_name()`: torch's version, the number of threads and what else matters.
        ops: the costs.
    """

    machine: str
    settings: str
    ops: dict[str, OpCost] = field(default_factory=dict)


def signature(op: Op, layouts: RealLayouts) -> str:
    """A call without its data: the operator, its plain arguments, and shape, strides and type of its tensors."""

    def text(argument: Any) -> str:
        if isinstance(argument, Ref):
            layout = layouts.of_input(op, argument.value)
            mark = "~" if argument.value in op.shape_reads else ""
            dtype = str(layout.dtype).removeprefix("torch.")
            return f"{mark}{dtype}[{_numbers(layout.shape)};{_numbers(layout.stride)}]"
        if isinstance(argument, (list, tuple)):
            return f"({','.join(map(text, argument))})"
        return str(argument)

    keywords = [f"{name}={text(argument)}" for name, argument in sorted(op.kwargs.items())]
    mark = "" if op.overwrites is None else f"!{list(op.args).index(Ref(op.overwrites))}"
    return f"{op.target}{mark}({','.join([*map(text, op.args), *keywords])})"


def table_of(graph: TrainingGraph, costs: Costs, *, settings: str = "") -> CostTable:
    """The measured costs of a graph by signature, to be used for other graphs; estimates are left out."""
    table = CostTable(costs.machine, settings)
    layouts = RealLayouts(graph)
    for op in graph.ops:
        cost = costs.ops.get(op.index)
        if cost is None:
            continue
        if cost.source == "measured" and not op.is_view:
            table.ops[signature(op, layouts)] = cost
        layouts.learn(op, cost)
    return table


def costs_to_json(table: CostTable) -> str:
    """The table as text, to be read by `costs_from_json` on another machine."""
    ops = {name: cost_to_list(cost) for name, cost in sorted(table.ops.items())}
    return json.dumps({"format": FORMAT, "machine": table.machine, "settings": table.settings, "ops": ops}, indent=0)


def costs_from_json(text: str) -> CostTable:
    """Read what `costs_to_json` wrote.

    Raises:
        PlanError: it is something else, or was written by a version that does not match.
    """
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise PlanError(f"the costs are of format {data['format']}; this version reads format {FORMAT}")
        ops = {str(name): cost_from_list(entry) for name, entry in data["ops"].items()}
        return CostTable(str(data["machine"]), str(data["settings"]), ops)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise PlanError(f"this is no table of costs: {error!r}") from error


def apply_costs(graph: TrainingGraph, table: CostTable) -> Costs:
    """The costs of a graph from a table made elsewhere. What the table lacks is estimated, and named in the notes."""
    found: dict[int, OpCost] = {}
    missing: dict[str, int] = {}
    layouts = RealLayouts(graph)
    for op in graph.ops:
        cost = view_cost(op) if op.is_view else table.ops.get(signature(op, layouts))
        if cost is None:
            cost = estimate(graph, op)
            missing[op.target] = missing.get(op.target, 0) + 1
        found[op.index] = cost
        layouts.learn(op, cost)
    notes = [f"costs measured elsewhere: {table.machine}; {table.settings}"]
    if missing:
        named = ", ".join(f"{target} ({count})" for target, count in sorted(missing.items(), key=lambda m: -m[1]))
        count = sum(missing.values())
        notes.append(f"{count} of {len(graph.ops)} ops are not in the table and were estimated: {named}")
    return Costs(found, table.machine, notes)


def view_cost(op: Op) -> OpCost:
    return OpCost(0.0, (), (None,) * len(op.writes))


def cost_to_list(cost: OpCost) -> list[Any]:
    """As plain data, compact: a table has hundreds of entries."""
    events = [number for event in cost.events for number in event]
    layouts = [None if layout is None else list(layout) for layout in cost.layouts]
    return [cost.seconds, events, list(cost.result_ordinals), layouts, cost.library_bytes]


def cost_from_list(entry: Any) -> OpCost:
    """The inverse of `cost_to_list`.

    Raises:
        ValueError, TypeError: the entry is damaged.
    """
    seconds, numbers, ordinals, layouts, library_bytes = entry
    events = tuple((int(o), int(n)) for o, n in zip(numbers[::2], numbers[1::2], strict=True))
    known = {ordinal for ordinal, size in events if size > 0}
    results = tuple(None if o is None else int(o) for o in ordinals)
    if float(seconds) < 0 or not known.issuperset(o for o in results if o is not None):
        raise ValueError("a cost contradicts itself")
    if not known.issuperset(ordinal for ordinal, _ in events):
        raise ValueError("a cost frees what it never allocated")
    return OpCost(
        float(seconds),
        events,
        results,
        layouts=tuple(map(_layout_from_list, layouts)),
        library_bytes=max(0, int(library_bytes)),
    )


def _layout_from_list(entry: Any) -> ResultLayout | None:
    if entry is None:
        return None
    shape, stride, dtype = entry
    if len(shape) != len(stride) or not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise ValueError("a result is no tensor")
    return ResultLayout(tuple(map(int, shape)), tuple(map(int, stride)), str(dtype))


def cost_to_text(cost: OpCost) -> str:
    """A cost for a cache."""
    return json.dumps(cost_to_list(cost), separators=(",", ":"))


class RememberedCosts:
    """Costs that a cache holds as texts, by signature.

    Most are of other graphs: each is read when it is asked for. All of them at once would take megabytes, which the
    process would keep.

    Attributes:
        damaged: how many could not be read.
    """

    def __init__(self, texts: Mapping[str, Any]) -> None:
        self._texts = texts
        self._read: dict[str, OpCost | None] = {}
        self.damaged = 0

    def get(self, name: str) -> OpCost | None:
        """The cost of this signature; None where there is none that can be read."""
        if name not in self._read and name in self._texts:
            self._read[name] = self._from(self._texts[name])
        return self._read.get(name)

    def _from(self, text: Any) -> OpCost | None:
        try:
            return cost_from_list(json.loads(text))
        except (ValueError, TypeError, IndexError, KeyError):
            self.damaged += 1
            return None


def _numbers(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
