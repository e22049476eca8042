"""Runs a schedule, instruction by instruction.

The executor owns every value of a step in a table of its own. An instruction either calls an operator on values of
the table, drops a value, or delivers an output. Where an arena is given, the allocations of an operator (its
temporaries included) land at the addresses that the plan gave them. Where `torch_odt._memory` is built, it is that
which goes from one instruction to the next; there are arenas only there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from torch_odt import _extensions, memory
from torch_odt.capture.graph import Op, Output, Ref, TrainingGraph, map_refs, refs
from torch_odt.capture.operators import resolve
from torch_odt.capture.overwrite import function_of
from torch_odt.execute.native_calls import native_call
from torch_odt.execute.paging import PageCode, Pager
from torch_odt.execute.profiler_marks import BACKWARD, marked
from torch_odt.memory._tracking import tagger
from torch_odt.planning.schedule import Deliver, Free, PageIn, PageOut, Run, Schedule

Table = list[Any]
"""The tensors of a graph's values, and behind them what is known of their pages; None where there is nothing."""


class Receiver(Protocol):
    """Takes what leaves the graph."""

    def deliver(self, output: Output, tensor: torch.Tensor) -> None: ...


class ArenaTable(Protocol):
    """The part of an arena that the executor needs: by which table allocations go."""

    def select(self, table: int) -> None: ...


class Executor:
    """A schedule made ready to run, as often as wanted.

    Args:
        graph: the graph that the schedule was made for.
        schedule: what to run. It must have passed `simulate`.
        arena: where the operators' memory lies; None for ordinary allocations.
        arena_table: the number under which the schedule's addresses were loaded into the arena.
        operators: what some ops call in the place of what the graph names.
        pager: moves what the schedule pages.
        calls: ops of the graph that have been compiled before; what is compiled here is added.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        schedule: Schedule,
        *,
        arena: ArenaTable | None = None,
        arena_table: int = -1,
        operators: Mapping[int, Callable[..., Any]] | None = None,
        pager: Pager | None = None,
        calls: dict[int, Callable[[Table], None]] | None = None,
    ) -> None:
        self.graph = graph
        self.schedule = schedule
        self._arena = arena
        self._arena_table = arena_table
        self._operators = operators
        self._pager = pager
        self._calls = {} if calls is None else calls
        self._pages = PageCode(graph, schedule, pager)
        self._code: list[tuple[Callable[[Table], None] | None, int, Output | None]] = list(self._compile())
        self._instructions: Any = None
        if _extensions.memory_module is not None:
            # They hold all that the list does, without a tuple for each.
            self._instructions = _extensions.memory_module.Instructions(self._code)
            self._code = []

    def _compile(self) -> Iterator[tuple[Callable[[Table], None] | None, int, Output | None]]:
        """For each instruction what it calls, the value that it frees or delivers, and what it delivers it as."""
        graph, pages, calls = self.graph, self._pages, self._calls
        for position, instruction in enumerate(self.schedule.instructions):
            match instruction:
                case Run(op):
                    if op not in calls:
                        function = (self._operators or {}).get(op) or function_of(graph.ops[op])
                        calls[op] = compile_op(graph, graph.ops[op], function)
                    yield pages.waiting(position, calls[op]), -1, None
                case Free(value):
                    yield pages.freeing(value), value, None
                case Deliver(output):
                    yield None, graph.outputs[output].value, graph.outputs[output]
                case PageOut(value):
                    yield pages.paging_out(value), -1, None
                case PageIn(value):
                    yield pages.paging_in(position, value), -1, None

    def new_table(self) -> Table:
        """An empty table with the graph's constants in it."""
        table: Table = [None] * self.table_size
        for value, tensor in self.graph.constants.items():
            table[value] = tensor
        return table

    def run_forward(self, table: Table, receiver: Receiver) -> None:
        self._run(table, receiver, 0, self.schedule.boundary)

    def run_backward(self, table: Table, receiver: Receiver) -> None:
        self._run(table, receiver, self.schedule.boundary, len(self.schedule.instructions))

    def run(self, table: Table, receiver: Receiver) -> None:
        """Run the whole step. `table` holds the graph's inputs and, at the end, nothing else."""
        self.run_forward(table, receiver)
        with marked(BACKWARD):
            self.run_backward(table, receiver)

    def run_part(self, table: Table, receiver: Receiver, start: int, stop: int) -> None:
        """Run the instructions from `start` up to `stop`, after all that come before."""
        self._run(table, receiver, start, stop)

    def followed_by(self, schedule: Schedule) -> Executor:
        """What goes on in ordinary memory by another schedule, which begins with what has been run of this one.

        It must have passed `simulate`. A table needs its `table_size`.
        """
        return Executor(self.graph, schedule, operators=self._operators, pager=self._pager, calls=self._calls)

    @property
    def table_size(self) -> int:
        """The entries of a table: the graph's values and pages."""
        return len(self.graph.values) + self._pages.count

    def _run(self, table: Table, receiver: Receiver, start: int, stop: int) -> None:
        if start == 0:
            self._pages.begin()
        with torch.no_grad(), _PlainDispatch(), memory.category("workspace"):
            if self._instructions is not None:
                if self._arena is not None:
                    self._arena.select(self._arena_table)
                self._instructions.run(table, receiver, start, stop, self._arena)
            else:
                for call, value, output in self._code[start:stop]:
                    if call is not None:
                        call(table)
                    elif output is None:
                        table[value] = None
                    else:
                        receiver.deliver(output, _present(table[value]))


class _PlainDispatch:
    """The graph already holds the casts of autocast; applying them again would change dtypes."""

    def __enter__(self) -> None:
        self._autocast = torch.autocast("cpu", enabled=False)
        self._autocast.__enter__()

    def __exit__(self, *details: Any) -> None:
        self._autocast.__exit__(*details)


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise RuntimeError("the schedule delivers a value that is not in memory")
    return tensor


def compile_op(graph: TrainingGraph, op: Op, function: Callable[..., Any]) -> Callable[[Table], None]:
    """A function that calls `op`'s function on the values of a table and puts its results there."""
    shape_only = {v: memory.phantom_tensor(*_layout(graph, v)) for v in op.shape_reads}
    return native_call(op, function, shape_only) or _counted(_python_call(op, function, shape_only), op)


def _python_call(op: Op, function: Callable[..., Any], shape_only: dict[int, torch.Tensor]) -> Callable[[Table], None]:
    gather = _compile_arguments(op, shape_only)
    call = _with_kwargs(function, op.kwargs)
    writes = op.writes
    if _returns_one(op):
        (target,) = writes
        assert target is not None

        def run_single(table: Table) -> None:
            table[target] = call(table, gather(table))

        return run_single

    kept = [(position, value) for position, value in enumerate(writes) if value is not None]

    def run_several(table: Table) -> None:
        results = call(table, gather(table))
        for position, value in kept:
            table[value] = results[position]

    return run_several


def _with_kwargs(function: Callable[..., Any], kwargs: dict[str, Any]) -> Callable[[Table, Sequence[Any]], Any]:
    """Calls a function with arguments, and with keyword arguments of which some may stand in a table."""
    # What torch puts around an operator, only to call it, takes as long as a small operator does.
    function = getattr(function, "_op", function) if isinstance(function, torch._ops.OpOverload) else function
    if any(True for _ in refs(kwargs)):
        return lambda table, args: function(*args, **map_refs(kwargs, lambda v: table[v]))
    if kwargs:
        return lambda table, args: function(*args, **kwargs)
    return lambda table, args: function(*args)


def _counted(call: Callable[[Table], None], op: Op) -> Callable[[Table], None]:
    """Everything that an op allocates is workspace, until what is kept of it is known."""
    if op.is_view or not memory.is_tracking():
        return call
    kept, tag = op.results, tagger("activation")

    def run_and_tag(table: Table) -> None:
        call(table)
        for value in kept:
            tag(_present(table[value]))

    return run_and_tag


def _returns_one(op: Op) -> bool:
    function = resolve(op.target)
    if isinstance(function, torch._ops.OpOverload):
        returns = function._schema.returns
        return len(returns) == 1 and str(returns[0].type) == "Tensor"
    return len(op.writes) == 1 and op.target.startswith("odt.")


def _layout(graph: TrainingGraph, value: int) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    v = graph.values[value]
    return v.shape, v.stride, getattr(torch, v.dtype)


def _compile_arguments(op: Op, shape_only: dict[int, torch.Tensor]) -> Callable[[Table], Sequence[Any]]:
    """A function that fills the op's arguments from a table; fast where no value stands inside a list."""
    fixed = [_fill(a, shape_only) for a in op.args]
    places = [(i, a.value) for i, a in enumerate(fixed) if isinstance(a, Ref)]
    nested = [i for i, a in enumerate(fixed) if not isinstance(a, Ref) and any(True for _ in refs(a))]

    def gather(table: Table) -> list[Any]:
        args = fixed.copy()
        for position, value in places:
            args[position] = table[value]
        for position in nested:
            args[position] = map_refs(fixed[position], lambda v: table[v])
        return args

    return gather


def _fill(argument: Any, tensors: dict[int, torch.Tensor]) -> Any:
    return map_refs(argument, lambda v: tensors.get(v, Ref(v)))
