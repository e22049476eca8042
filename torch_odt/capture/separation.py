"""How a step is cut into micro-batches once that is proved: what `batch_axis` finds, and what runs need of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from torch_odt.capture.graph import Op, TrainingGraph, map_refs
from torch_odt.capture.operators import resolve
from torch_odt.capture.strides import same_layout
from torch_odt.errors import CaptureError


class NotSeparable(CaptureError):
    """Micro-batches of a step would not add up to the step; the text says why."""


@dataclass(frozen=True, slots=True)
class RandomPair:
    """A random operator: its positions in the full and in the micro graph, and the batch axis of what it draws.

    `dim` is None for a draw that all micro-batches share. Along it lie `outer` runs of all samples.
    """

    full_op: int
    micro_op: int
    dim: int | None
    outer: int = 1


@dataclass(frozen=True, slots=True)
class Separation:
    """The proof that micro-batches add up to the step, and how to add them.

    Attributes:
        batch, micro_batch: the sizes that the two graphs were captured with.
        loss_kind: "sum": loss and gradients are the sums of the micro-batches' ones. "mean": each micro-batch counts
            with its share, which is its share of the samples, or of the valid targets where `count_value` is given.
        input_axes: micro graph's input value -> the axis to slice, None for an input that every micro-batch gets whole.
        result_axes: position among the model's results -> the axis along which to join them, None if there is none.
        count_value: the micro graph's value that holds the class indices, some of which may be `ignore_index`; None
            when samples are counted. A micro-batch without a valid target has share 0 and a loss that is not a number:
            skip it.
        ignore_index: the class index that does not count.
        random_ops: the random operators, in the order in which the full step draws.
    """

    batch: int
    micro_batch: int
    loss_kind: Literal["mean", "sum"]
    input_axes: dict[int, int | None]
    result_axes: dict[int, int | None]
    count_value: int | None = None
    ignore_index: int | None = None
    random_ops: tuple[RandomPair, ...] = ()

    def take(self, graph: TrainingGraph, value: int, tensor: torch.Tensor, start: int) -> torch.Tensor:
        """The part of an input for the micro-batch whose first sample is `start`.

        Args:
            graph: the graph that the separation speaks about.
            value: the graph's input, a key of `input_axes`.
            tensor: the input for the full batch.

        Returns:
            A view, or a copy where the graph was captured with other strides than a view has.
        """
        where = self.slice_of(graph, value, start, start + self.micro_batch)
        return tensor if where is None else laid_out(tensor.narrow(*where), graph.values[value].stride)

    def slice_of(self, graph: TrainingGraph, value: int, start: int, stop: int) -> tuple[int, int, int] | None:
        """The axis, first element and length of the samples `start` to `stop` in an input; None if it is not sliced."""
        dim = self.input_axes[value]
        if dim is None:
            return None
        rows = graph.values[value].shape[dim] // self.micro_batch
        return dim, start * rows, (stop - start) * rows


def laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor itself when it has these strides, otherwise a copy of it that does."""
    if same_layout(tensor.shape, tensor.stride(), stride):
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def valid_targets(graph: TrainingGraph, separation: Separation, inputs: Mapping[int, torch.Tensor]) -> int:
    """How many class indices of a micro-batch count in the loss: its weight among the micro-batches.

    Args:
        graph: the graph that `separation` speaks about (after hoisting, the hoisted one).
        inputs: the micro-batch's inputs by value; only those that the class indices depend on are read.

    Raises:
        ValueError: the separation counts samples, not targets.
        NotSeparable: the class indices depend on something else than inputs.
    """
    if separation.count_value is None:
        raise ValueError("the loss counts samples, not targets")
    table: dict[int, torch.Tensor] = {**graph.constants, **inputs}
    with torch.no_grad():
        for op in ancestors(graph, separation.count_value, table):
            results = resolve(op.target)(
                *map_refs(op.args, table.__getitem__), **map_refs(op.kwargs, table.__getitem__)
            )
            several = results if isinstance(results, (list, tuple)) else (results,)
            table |= {v: t for v, t in zip(op.writes, several, strict=True) if v is not None}
    targets = table[separation.count_value]
    return int(torch.count_nonzero(torch.ne(targets, separation.ignore_index or 0)))


def ancestors(graph: TrainingGraph, value: int, known: Iterable[int]) -> list[Op]:
    """The ops that compute a value from known ones, in program order."""
    found: set[int] = set()
    known, waiting = set(known), [value]
    while waiting:
        current = waiting.pop()
        if current in known:
            continue
        producer = graph.values[current].producer
        if producer is None or graph.ops[producer].is_random:
            raise NotSeparable("the number of targets that count depends on something else than the inputs")
        found.add(producer)
        waiting.extend((*graph.ops[producer].reads, *graph.ops[producer].shape_reads))
        known.add(current)
    return [graph.ops[index] for index in sorted(found)]


def with_values(separation: Separation, new_index: Mapping[int, int], **changes: Any) -> Separation:
    """The separation of a graph whose values were numbered anew; `changes` replace other attributes."""
    inputs = {new_index[v]: dim for v, dim in separation.input_axes.items()}
    count = separation.count_value
    return replace(separation, input_axes=inputs, count_value=None if count is None else new_index[count], **changes)
