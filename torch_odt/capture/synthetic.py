"""Inputs for running one op on its own: tensors of the right shape, strides and type, with harmless content.

Floats are small normal numbers (positive where the op takes a variance), indices are valid, masks are true. Large
inputs are views of a few flat buffers that are filled once, so that making them costs nothing and memory stays within
what the largest op reads.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from math import prod
from typing import Any

import torch

from torch_odt import memory
from torch_odt.capture.graph import Op, Ref, TrainingGraph, map_refs
from torch_odt.capture.layouts import RealLayouts

# Arguments that are variances or their inverse roots, of which a negative one would give NaN, or sizes of int8's steps.
_POSITIVE_ARGUMENTS = frozenset(
    {"running_var", "save_var", "save_invstd", "save_rstd", "invstd", "rstd", "var", "steps", "relative_steps"}
)
_TILE_ELEMENTS = 1 << 18


def argument_names(function: Callable[..., Any]) -> list[str]:
    """The names of an operator's arguments, in order."""
    if isinstance(function, torch._ops.OpOverload):
        return [argument.name for argument in function._schema.arguments]
    return list(inspect.signature(function).parameters)


class SyntheticInputs:
    """Makes the arguments of a graph's ops.

    Args:
        graph: whose ops are to run.
        layouts: of its values; what is learned of them counts from then on.
        integer: the content of integer tensors; 0 is valid wherever an index is expected.
        limit_bytes: what the buffers may take together; at most what the largest op reads.
    """

    def __init__(
        self, graph: TrainingGraph, layouts: RealLayouts, *, integer: int = 0, limit_bytes: int | None = None
    ) -> None:
        self._graph = graph
        self._layouts = layouts
        self._integer = integer
        self._buffers: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._rank: dict[int, int] = {}
        largest = max((self._input_bytes(op) for op in graph.ops), default=0)
        self._limit_bytes = largest if limit_bytes is None else min(largest, limit_bytes)

    def arguments(
        self, op: Op, function: Callable[..., Any], given: dict[int, torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for a call of `op`; `given` tensors stand for their values."""
        tensors = dict(given) | self._special(op, function, given)
        for value in op.shape_reads:
            if value not in tensors:
                traced = self._layouts.traced(value)
                tensors[value] = memory.phantom_tensor(traced.shape, traced.stride, traced.dtype)
        missing = [v for v in op.reads if v not in tensors]
        # The largest input of every op is a view of the same buffer, so that the buffers together stay small.
        missing.sort(key=lambda v: -self._graph.values[v].nbytes)
        self._make_room(missing)
        self._rank = {value: rank for rank, value in enumerate(missing)}
        for value, rank in self._rank.items():
            tensors[value] = self._from_buffer(value, rank)
        return map_refs(op.args, tensors.__getitem__), map_refs(op.kwargs, tensors.__getitem__)

    def forget_written(self, op: Op) -> None:
        """What the op of the last `arguments` has overwritten is not to be another one's input."""
        written = op.reads if not op.writes else () if op.overwrites is None else (op.overwrites,)
        for value in written:
            if value in self._rank:
                self._buffers.pop((self._layouts.real(value).dtype, self._rank[value]), None)

    @property
    def held_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def clear(self) -> None:
        self._buffers.clear()

    def _special(self, op: Op, function: Callable[..., Any], given: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Tensors that the op wants a certain content of, and the constants of the graph."""
        found = {v: self._graph.constants[v] for v in op.reads if v in self._graph.constants and v not in given}
        for name, argument in zip(argument_names(function), op.args, strict=False):
            if not isinstance(argument, Ref) or argument.value in given or argument.value in op.shape_reads:
                continue
            if name in _POSITIVE_ARGUMENTS:
                flat = self._flat(argument.value)
                found[argument.value] = self._shaped(flat.normal_(0, 0.3).abs_().add_(0.5), argument.value)
        bound = _index_bound(self._graph, op)
        if bound is not None and bound[0] not in given:
            index, limit = bound
            flat = self._flat(index)
            spread = torch.arange(len(flat), dtype=torch.int64).mul_(7919).remainder_(limit)
            found[index] = self._shaped(flat.copy_(spread), index)
        return found

    def _elements(self, value: int) -> int:
        """How many elements a value's storage holds, and at least as many as its strides reach."""
        layout = self._layouts.real(value)
        if 0 in layout.shape:
            return 0
        reach = 1 + sum((size - 1) * step for size, step in zip(layout.shape, layout.stride, strict=True))
        return max(reach, self._graph.values[value].nbytes // layout.dtype.itemsize)

    def _flat(self, value: int) -> torch.Tensor:
        return torch.empty(self._elements(value), dtype=self._layouts.real(value).dtype)

    def _shaped(self, flat: torch.Tensor, value: int) -> torch.Tensor:
        layout = self._layouts.real(value)
        return flat.as_strided(layout.shape, layout.stride)

    def _from_buffer(self, value: int, rank: int) -> torch.Tensor:
        elements, dtype = self._elements(value), self._layouts.real(value).dtype
        if elements == 0:
            return self._shaped(self._flat(value), value)
        buffer = self._buffers.get((dtype, rank))
        if buffer is None or buffer.numel() < elements:
            del buffer
            self._buffers.pop((dtype, rank), None)
            buffer = self._buffers[dtype, rank] = _filled(elements, dtype, self._integer)
        return self._shaped(_front(buffer, elements), value)

    def _make_room(self, values: list[int]) -> None:
        """Drop the buffers that this op does not use if together they would be more than the largest op needs."""
        wanted = {(self._layouts.real(v).dtype, rank): self._graph.values[v].nbytes for rank, v in enumerate(values)}
        held = {key: buffer.nbytes for key, buffer in self._buffers.items()}
        after = sum(max(held.get(key, 0), wanted.get(key, 0)) for key in held.keys() | wanted.keys())
        if after > self._limit_bytes:
            self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in wanted}

    def _input_bytes(self, op: Op) -> int:
        return sum(self._graph.values[v].nbytes for v in op.reads)


def _front(buffer: torch.Tensor, elements: int) -> torch.Tensor:
    """The first elements of a buffer, in a storage of just that size: some ops copy all of an input's storage."""
    window = (ctypes.c_char * (elements * buffer.itemsize)).from_address(buffer.data_ptr())
    window.owner = buffer  # type: ignore[attr-defined]
    return torch.frombuffer(window, dtype=buffer.dtype)


def _filled(elements: int, dtype: torch.dtype, integer: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.ones(elements, dtype=dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.full((elements,), integer, dtype=dtype)
    # Random numbers are slow to draw: a few are repeated.
    tile = torch.randn(min(elements, _TILE_ELEMENTS)).mul_(0.5).to(dtype)
    buffer = torch.empty(elements, dtype=dtype)
    whole = elements // len(tile) * len(tile)
    buffer[:whole].view(-1, len(tile)).copy_(tile)
    buffer[whole:].copy_(tile[: elements - whole])
    return buffer


def _index_bound(graph: TrainingGraph, op: Op) -> tuple[int, int] | None:
    """The value that holds indices, and their bound, of ops whose speed depends on how the indices are spread."""
    if op.target == "aten.embedding.default":
        weight, index = op.args[:2]
        return index.value, graph.values[weight.value].shape[0]
    if op.target == "aten.embedding_dense_backward.default":
        return op.args[1].value, op.args[2]
    if op.target == "odt.accumulate_embedding":
        return op.args[2].value, graph.values[op.args[0].value].shape[0]
    if op.target == "aten.max_pool2d_with_indices_backward.default":
        return op.args[7].value, prod(graph.values[op.args[1].value].shape[-2:])
    if op.target == "torch_odt.max_pool2d_with_offsets_backward.default":
        return op.args[7].value, prod(op.args[2])
    return None
