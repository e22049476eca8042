"""Calls of captured graphs: the values of each live in a table here from its forward to its backward pass.

Between the two halves autograd saves a token and nothing else. The table is found by the token, is emptied as the
schedule says, and is dropped with the token when a backward pass never comes.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_odt import memory
from torch_odt.capture.graph import Output, TrainingGraph
from torch_odt.capture.partition import Constant, GraphPiece
from torch_odt.capture.rewrite import with_updates
from torch_odt.capture.update_in_backward import UPDATE, UpdateRule
from torch_odt.errors import PagingError
from torch_odt.execute.executor import Executor, Table
from torch_odt.execute.wrap_undo import StepUndo
from torch_odt.planning.schedule import Deliver, Run

ChooseExecutor = Callable[["GraphRunner", list[Any]], Executor]
# How a call updates parameters, by their targets in the graph.
Rules = tuple[tuple[str, UpdateRule], ...]


class Collector:
    """The receiver of a half of a call: results and mutations of the forward pass, gradients of the backward pass."""

    def __init__(self) -> None:
        self.tensors: dict[int | str, torch.Tensor] = {}

    def deliver(self, output: Output, tensor: torch.Tensor) -> None:
        key = f"mutation of {output.target}" if output.kind == "mutation" else output.target
        self.tensors[key] = tensor


@dataclass
class Call:
    """A forward pass whose backward pass may come.

    Attributes:
        executor: runs both halves.
        table: what the forward half left.
        versions: the inputs that the backward half reads, with their version counters.
    """

    executor: Executor
    table: Table
    versions: list[tuple[int, int]]


@dataclass
class Calls:
    """The calls that wait for their backward pass, by token.

    Attributes:
        undo: puts a step back whose transfers fail; None where nothing is paged.
    """

    undo: StepUndo | None = None
    waiting: dict[int, Call] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def keep(self, call: Call) -> torch.Tensor:
        """A token for a call; the call is dropped with it."""
        number = next(self._numbers)
        self.waiting[number] = call
        content = np.array([number])
        # The array lives exactly as long as the token's storage, whatever becomes of the tensor object.
        weakref.finalize(content, self.waiting.pop, number, None).atexit = False
        return torch.from_numpy(content)

    @contextmanager
    def undone_on_failure(self, *, is_forward: bool) -> Iterator[None]:
        """Inside, a transfer that fails undoes the step."""
        if self.undo is not None and is_forward and not self.waiting:
            self.undo.begin()
        try:
            yield
        except PagingError:
            if self.undo is not None:
                self.undo.undo()
            raise

    def find(self, token: torch.Tensor, *, and_drop: bool) -> Call:
        number = int(token)
        call = self.waiting.pop(number, None) if and_drop else self.waiting.get(number)
        if call is None:
            raise RuntimeError(
                "the values of this forward pass are gone: a second backward pass needs retain_graph=True in the first"
            )
        return call


class Updates(Protocol):
    """The optimizer's part of backward passes."""

    def backward(
        self, call: Call, collector: Collector, waiting: Iterable[Call], *, is_kept: bool
    ) -> AbstractContextManager[Executor]: ...


class GraphRunner:
    """Runs a captured piece of a model as AOTAutograd calls it.

    AOTAutograd's first call of a graph stands inside a mode that looks for custom operators which return their inputs.
    A Python scalar that passes through a mode becomes a tensor, which no plan has room for, so modes are left.

    Args:
        piece: the graph and how its inputs and outputs are numbered.
        calls: where calls wait for their backward pass.
        choose_executor: asked before every forward pass, with its arguments.
        before_backward: called before every backward pass.
        updates: asked before every backward pass what runs it; None if all gradients are delivered.
    """

    def __init__(
        self,
        piece: GraphPiece,
        calls: Calls,
        choose_executor: ChooseExecutor,
        before_backward: Callable[[], None],
        updates: Updates | None = None,
    ) -> None:
        self.piece = piece
        self._updates = updates
        self._updated_graphs: dict[Rules, TrainingGraph] = {}
        self._calls = calls
        self._choose_executor = choose_executor
        self._before_backward = before_backward

    def graph(self, rules: Rules = ()) -> TrainingGraph:
        """The piece's graph with updates of parameters in it."""
        if not rules:
            return self.piece.graph
        if rules not in self._updated_graphs:
            self._updated_graphs[rules] = _with_updates(self.piece.graph, rules)
        return self._updated_graphs[rules]

    def forward(self, args: list[Any]) -> list[Any]:
        """The forward half: the results and a token."""
        executor = self._choose_executor(self, args)
        with self._calls.undone_on_failure(is_forward=True):
            table, results = self._run_forward(executor, args)
        returned = {id(result) for result in results}
        exposed = [i for i, tensor in enumerate(table) if id(tensor) in returned]
        versions = [
            (index, tensor._version)
            for index in (*exposed, *_watched_values(executor))
            if (tensor := table[index]) is not None and not tensor.is_inference()
        ]
        # Autograd makes a returned tensor lead to the token. Were it in the table as well, neither would ever be freed.
        results = _distinct(results, {id(tensor) for tensor in table})
        return [*results, self._calls.keep(Call(executor, table, versions))]

    def inference(self, args: list[Any]) -> list[Any]:
        """A graph without backward: the results."""
        table, results = self._run_forward(self._choose_executor(self, args), args)
        return _distinct(results, {id(tensor) for tensor in table})

    def backward(self, args: list[Any]) -> list[torch.Tensor | None]:
        """The backward half, from a token and the tangents: the gradients."""
        token, *tangents = args
        args.clear()
        self._before_backward()
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        call = self._calls.find(token, and_drop=not is_kept)
        _check_versions(call)
        table = list(call.table) if is_kept else call.table
        for index, tensor in zip(self.piece.tangents, tangents, strict=True):
            if index is not None:
                table[index] = tensor
        tangents.clear()
        collector = Collector()
        running: AbstractContextManager[Executor] = nullcontext(call.executor)
        if self._updates is not None:
            running = self._updates.backward(call, collector, self._calls.waiting.values(), is_kept=is_kept)
        undone = self._calls.undone_on_failure(is_forward=False)
        with undone, running as executor, _disable_current_modes():
            executor.run_backward(table, collector)
        for gradient in collector.tensors.values():
            memory.tag(gradient, "gradient")
        return [collector.tensors.get(i) for i in range(self.piece.gradient_count)]

    def _run_forward(self, executor: Executor, args: list[Any]) -> tuple[Table, list[Any]]:
        table = executor.new_table()
        for index, argument in zip(self.piece.forward_inputs, args, strict=True):
            if index is not None:
                table[index] = argument
        args.clear()
        collector = Collector()
        with _disable_current_modes():
            executor.run_forward(table, collector)
        return table, self._results(collector)

    def _results(self, collector: Collector) -> list[Any]:
        return [r.value if isinstance(r, Constant) else collector.tensors[r] for r in self.piece.results]


def _with_updates(graph: TrainingGraph, rules: Rules) -> TrainingGraph:
    """The graph with updates; its values keep their numbers, so that the piece's inputs are those of both."""
    targets = dict(rules)
    named = [
        replace(v, kind="parameter") if v.kind == "input" and str(v.target) in targets else v for v in graph.values
    ]
    # Whether a gradient may be used up is only known when the backward pass runs.
    updated = with_updates(replace(graph, values=named), targets, may_fuse=False)
    assert [value.name for value in updated.values[: len(graph.values)]] == [value.name for value in graph.values]
    return updated


def boxed(function: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Marks a function as one that takes its arguments in a list, which it empties."""

    def call(args: list[Any]) -> list[Any]:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _distinct(results: Sequence[Any], taken: set[int]) -> list[Any]:
    """The results as tensor objects of their own, each returned once and none of them among those taken."""
    seen = set(taken)
    found = []
    for result in results:
        if isinstance(result, torch.Tensor) and id(result) in seen:
            result = result.detach()
        seen.add(id(result))
        found.append(result)
    return found


def _watched_values(executor: Executor) -> list[int]:
    """What belongs to the caller and may be read in the backward half: inputs, and views of inputs."""
    if "watched_values" not in executor.__dict__:
        graph, schedule = executor.graph, executor.schedule
        read: set[int] = set()
        for instruction in schedule.instructions[schedule.boundary :]:
            if isinstance(instruction, Run) and graph.ops[instruction.op].target != UPDATE:
                read.update(graph.ops[instruction.op].reads)
            elif isinstance(instruction, Deliver):
                read.add(graph.outputs[instruction.output].value)
        kinds = ("parameter", "buffer", "input")
        executor.__dict__["watched_values"] = [i for i in read if graph.values[graph.values[i].base].kind in kinds]
    return executor.__dict__["watched_values"]


def _check_versions(call: Call) -> None:
    for index, version in call.versions:
        tensor = call.table[index]
        if tensor is not None and tensor._version != version:
            value = call.executor.graph.values[index]
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{value.name} of shape {tuple(value.shape)} is at version {tensor._version}; expected {version}"
            )
