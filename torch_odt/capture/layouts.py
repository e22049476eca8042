"""Shapes, strides and types as they are when the graph runs, where these differ from the trace.

Tracing predicts them without running anything, and now and then it is wrong: some operators choose other strides for
their results (hardtanh_backward with a contiguous gradient and a channels_last input), BatchNorm saves the statistics
of bfloat16 inputs in float32, oneDNN's recurrent layers return workspaces that tracing takes for empty. What an op
costs depends on what it really gets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_odt.capture.costs import OpCost, ResultLayout
from torch_odt.capture.graph import Op, TrainingGraph, Value, map_refs
from torch_odt.capture.operators import resolve


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """What a tensor is, but for its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class RealLayouts:
    """The layouts of a graph's values, corrected op by op.

    Walk the program in order: ask for the layouts of an op's inputs, then `learn` what its cost says of its results.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self._graph = graph
        self._corrected: dict[int, TensorLayout] = {}

    def of_input(self, op: Op, value: int) -> TensorLayout:
        """What `op` is given for a value. A value that it reads the shape of is given as traced."""
        return self.traced(value) if value in op.shape_reads else self.real(value)

    def traced(self, value: int) -> TensorLayout:
        v = self._graph.values[value]
        return TensorLayout(v.shape, v.stride, getattr(torch, v.dtype))

    def real(self, value: int) -> TensorLayout:
        return self._corrected.get(value) or self.traced(value)

    def is_opaque(self, value: int) -> bool:
        """Whether tracing did not even know the shape: then nothing but its producer can make one."""
        return self.real(value).shape != self._graph.values[value].shape

    def learn(self, op: Op, cost: OpCost) -> None:
        """Correct the layouts of an op's results."""
        if op.is_view:
            self._learn_views(op)
            return
        for value, layout in zip(op.writes, cost.layouts, strict=False):
            if value is not None and layout is not None and not _is_as_traced(self._graph.values[value], layout):
                self._corrected[value] = TensorLayout(layout.shape, layout.stride, getattr(torch, layout.dtype))

    def _learn_views(self, op: Op) -> None:
        if op.reads[0] not in self._corrected:
            return
        try:
            results = resolve(op.target)(*map_refs(op.args, self._meta), **map_refs(op.kwargs, self._meta))
        except RuntimeError:
            # The view is impossible with these strides; running the graph will say so.
            return
        for value, tensor in zip(op.writes, [results] if isinstance(results, torch.Tensor) else results, strict=True):
            if value is not None:
                self._corrected[value] = TensorLayout(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _meta(self, value: int) -> torch.Tensor:
        layout = self.real(value)
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def layout_of(tensor: torch.Tensor | None) -> ResultLayout | None:
    """What an operator returned."""
    if tensor is None:
        return None
    return ResultLayout(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))


def _is_as_traced(value: Value, layout: ResultLayout) -> bool:
    # Strides of dimensions of size 1 count: convolutions look at them to choose a layout for what they return.
    return (layout.shape, layout.stride, layout.dtype) == (value.shape, value.stride, value.dtype)
