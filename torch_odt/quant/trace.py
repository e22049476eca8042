"""A model as a graph of its layers, and what its tensors hold over calibration batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from torch_odt.quant.both_modes import trace_in_both_modes
from torch_odt.quant.ranges import Observer, Range


@dataclass
class TracedModule:
    """A module, or part of a model, that was followed symbolically.

    Attributes:
        name: its name in the model; "" for the model itself.
        module: the module.
        graph: what it computes, of its layers and of functions.
        ranges: of each tensor, by the node that makes it.
        shapes: their shapes in the last batch.
    """

    name: str
    module: nn.Module
    graph: fx.Graph
    ranges: dict[fx.Node, Range] = field(default_factory=dict)
    shapes: dict[fx.Node, torch.Size] = field(default_factory=dict)


def trace_parts(model: nn.Module, kept: dict[str, str]) -> list[TracedModule]:
    """The model as one graph, or where its code branches on data, the largest parts that do not.

    Args:
        kept: gets the layers that are in no graph, with the reason.
    """
    parts: list[TracedModule] = []
    _trace_into(model, "", parts, kept)
    return parts


def _trace_into(module: nn.Module, name: str, parts: list[TracedModule], kept: dict[str, str]) -> None:
    try:
        graph = trace_in_both_modes(module)
    except Exception as error:
        reason = f"{name or 'the model'} cannot be traced ({type(error).__name__}: {_first_line(error)})"
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if any(True for _ in child.children()):
                _trace_into(child, path, parts, kept)
            elif any(True for _ in child.parameters()):
                kept[path] = reason
        return
    parts.append(TracedModule(name, module, graph))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


class _Observing(fx.Interpreter):
    def __init__(self, part: TracedModule, observer: Observer) -> None:
        super().__init__(part.module, garbage_collect_values=True, graph=part.graph)
        self._part, self._observer = part, observer
        # What fx reports of an error is a print of the graph.
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and result.is_floating_point():
            self._part.ranges.setdefault(n, Range(self._observer)).add(result)
            self._part.shapes[n] = result.shape
        return result


def calibrate(model: nn.Module, parts: list[TracedModule], batches: Iterable[Any], observer: Observer) -> int:
    """Run the model on batches, in evaluation mode and without gradients, and note the ranges of its parts' tensors.

    Args:
        batches: each a tensor, or what a loader gives: a tuple whose first element is the input, or a dict of
            keyword arguments.

    Returns:
        How many batches there were.
    """
    if isinstance(batches, (Tensor, dict)):
        raise ValueError(f"calibration_batches is a {type(batches).__name__}: give a list of batches, or a loader")
    count = 0
    with evaluating(model), torch.no_grad(), contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(_observed(part, observer))
        for batch in batches:
            count += feed(model, batch)
    return count


def feed(model: nn.Module, batch: Any) -> bool:
    """Run the model on a batch, see `calibrate`; True, to be counted."""
    if isinstance(batch, dict):
        model(**batch)
    else:
        model(batch[0] if isinstance(batch, (tuple, list)) else batch)
    return True


@contextlib.contextmanager
def _observed(part: TracedModule, observer: Observer) -> Iterator[None]:
    """While it lasts, calls of the part run its graph, node by node."""
    observing = _Observing(part, observer)
    names = [str(node.target) for node in part.graph.nodes if node.op == "placeholder"]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        return observing.run(*[given.get(name, *_default(part.graph, name)) for name in names])

    part.module.__dict__["forward"] = run
    try:
        yield
    finally:
        del part.module.__dict__["forward"]


def _default(graph: fx.Graph, name: str) -> tuple[Any, ...]:
    return next((node.args for node in graph.nodes if node.op == "placeholder" and node.target == name), ())


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While it lasts, the model is in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
