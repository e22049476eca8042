"""Runs captured steps in a plain interpreter: whole, and as the sum of their micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from torch_odt.capture.batch_axis import Separation, analyse, valid_targets
from torch_odt.capture.graph import TrainingGraph, map_refs
from torch_odt.capture.operators import resolve
from torch_odt.capture.randomness import HoistedGraph, hoist_random
from torch_odt.capture.rewrite import rewrite
from torch_odt.capture.trace import trace_step

Step = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[torch.Tensor, Any]]


@dataclass
class Outcome:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    results: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Captured:
    model: nn.Module
    batch: tuple[tuple[Any, ...], dict[str, Any]]
    full: TrainingGraph
    micro: TrainingGraph
    separation: Separation


def capture(model: nn.Module, compute: Step, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> TrainingGraph:
    return rewrite(trace_step(model, None, compute, batch).graph)


def cut(batch: Any, start: int, stop: int, axes: dict[int, int] | None = None) -> Any:
    leaves, spec = pytree.tree_flatten(batch)
    axes = axes or {}
    cut_leaves = [
        leaf.narrow(axes.get(i, 0), start, stop - start).clone() if isinstance(leaf, torch.Tensor) else leaf
        for i, leaf in enumerate(leaves)
    ]
    return pytree.tree_unflatten(cut_leaves, spec)


def separate(
    model: nn.Module, compute: Step, *args: Any, size: int, micro_size: int, axes: Any = None, **kwargs: Any
) -> Captured:
    batch = (args, kwargs)
    full = capture(model, compute, batch)
    micro = capture(model, compute, cut(batch, 0, micro_size, axes))
    return Captured(model, batch, full, micro, analyse(full, micro, size, micro_size))


def interpret(graph: TrainingGraph, table: dict[int, torch.Tensor]) -> Outcome:
    table = dict(table)
    table.update(graph.constants)
    with torch.no_grad():
        for op in graph.program:
            for value in op.shape_reads:
                v = graph.values[value]
                table.setdefault(value, torch.empty_strided(v.shape, v.stride, dtype=getattr(torch, v.dtype)))
            args, kwargs = map_refs((op.args, op.kwargs), table.__getitem__)
            results = resolve(op.target)(*args, **kwargs)
            several = results if isinstance(results, (list, tuple)) else (results,)
            for value, tensor in zip(op.writes, several, strict=True):
                if value is not None:
                    expected = graph.values[value]
                    # The notes that a recurrent layer takes for its backward have a shape of their own.
                    assert tuple(tensor.shape) == expected.shape or expected.dtype == "uint8"
                    table[value] = tensor
    outcome = Outcome(next(table[o.value] for o in graph.outputs_of("loss")))
    outcome.gradients = {str(o.target): table[o.value] for o in graph.outputs_of("gradient")}
    outcome.results = {int(o.target): table[o.value] for o in graph.outputs_of("result")}
    return outcome


def fill(graph: TrainingGraph, model: nn.Module, leaves: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """What the caller gives to a graph; inputs made by hoisting are left out."""
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    table: dict[int, torch.Tensor] = {}
    given = iter(leaves)
    for value in graph.inputs:
        v = graph.values[value]
        if v.kind in ("parameter", "buffer"):
            table[value] = state[str(v.target)].detach()
        elif v.kind == "tangent":
            table[value] = torch.ones(v.shape)
        elif not str(v.target).startswith("random:"):
            table[value] = next(given)
    return table


def run_full(captured: Captured) -> Outcome:
    return interpret(captured.full, fill(captured.full, captured.model, _tensors(captured.batch)))


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def run_micro(captured: Captured) -> Outcome:
    """The step as a loop over micro-batches, as a caller of `analyse` and `hoist_random` writes it."""
    hoisted: HoistedGraph = hoist_random(captured.micro, captured.full, captured.separation)
    graph, separation = hoisted.graph, hoisted.separation
    assert not any(op.target == draw.op.target for op in graph.program for draw in hoisted.draws)
    whole = fill(graph, captured.model, _tensors(captured.batch))
    kept = [(draw, draw.draw()) for draw in hoisted.draws]
    outcomes: list[Outcome] = []
    shares: list[float] = []
    for start in range(0, separation.batch, separation.micro_batch):
        table = dict(whole)
        for value in separation.input_axes:
            table[value] = separation.take(graph, value, whole[value], start)
        stop = start + separation.micro_batch
        table |= {draw.value: draw.slice(numbers, start, stop) for draw, numbers in kept}
        if separation.count_value is not None:
            shares.append(float(valid_targets(graph, separation, table)))
        else:
            shares.append(float(separation.micro_batch))
        outcomes.append(interpret(graph, table))
    weights = [1.0 if separation.loss_kind == "sum" else share / sum(shares) for share in shares]
    total = Outcome(sum(w * o.loss for w, o in zip(weights, outcomes, strict=True) if w))  # type: ignore[arg-type]
    for name in outcomes[0].gradients:
        total.gradients[name] = sum(w * o.gradients[name] for w, o in zip(weights, outcomes, strict=True) if w)  # type: ignore[assignment]
    for position, dim in separation.result_axes.items():
        if dim is not None:
            total.results[position] = torch.cat([o.results[position] for o in outcomes], dim)
    return total


def check_equal(captured: Captured, tolerance: float = 2e-5) -> None:
    """Loss, gradients and results agree, and so does the state of the generator afterwards."""
    torch.manual_seed(7)
    full = run_full(captured)
    generator = torch.get_rng_state()
    torch.manual_seed(7)
    micro = run_micro(captured)
    assert torch.equal(generator, torch.get_rng_state())
    torch.testing.assert_close(micro.loss, full.loss, rtol=1e-5, atol=1e-6)
    assert micro.gradients.keys() == full.gradients.keys()
    norm = sum(float(g.double().norm() ** 2) for g in full.gradients.values()) ** 0.5
    for name, gradient in full.gradients.items():
        distance = float((micro.gradients[name] - gradient).double().norm())
        # Sums that cancel leave rounding, of which a tensor's own norm says nothing.
        allowed = tolerance * max(float(gradient.double().norm()), 1e-3 * norm) + 1e-6
        assert distance <= allowed, (name, distance)
    for position, result in micro.results.items():
        torch.testing.assert_close(result, full.results[position], rtol=1e-4, atol=1e-5)
