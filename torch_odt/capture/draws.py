"""Random numbers that are drawn for a whole batch, and each micro-batch's slice of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from torch_odt.capture.graph import Op, Value, map_refs
from torch_odt.capture.operators import resolve
from torch_odt.capture.separation import laid_out
from torch_odt.capture.strides import same_layout
from torch_odt.ops import bernoulli_bits, pack_bits, unpack_bits
from torch_odt.ops.random_bits import draws_like_torch

DROPOUT = "aten.native_dropout.default"
# Operators that use their first argument for its shape, strides and dtype alone.
LIKE = frozenset(
    f"aten.{name}"
    for name in [
        "bernoulli.p",
        "rand_like.default",
        "randn_like.default",
        "randint_like.default",
        "randint_like.low_dtype",
        "uniform.default",
        "normal_functional.default",
        "exponential.default",
    ]
)
# Operators that take no tensor.
FREE = frozenset(f"aten.{name}" for name in ["rand.default", "randn.default", "randint.default", "randint.low"])
# What fills a tensor without looking at data: the probabilities of `bernoulli.default` may come from these.
CREATORS = frozenset(
    f"aten.{name}"
    for name in [
        "full.default",
        "zeros.default",
        "ones.default",
        "scalar_tensor.default",
        "full_like.default",
        "ones_like.default",
        "zeros_like.default",
        "new_full.default",
        "new_ones.default",
        "new_zeros.default",
        "fill.Scalar",
        "empty.memory_format",
        "empty_like.default",
        "new_empty.default",
        "expand.default",
        "view.default",
    ]
)


@dataclass(frozen=True, slots=True)
class Layout:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, value: Value) -> Layout:
        return cls(value.shape, value.stride, value.dtype)

    def is_dense_outside(self, dim: int) -> bool:
        """Whether the elements fill their memory, and those of one index along `dim` lie together."""
        if prod(self.shape) == 0:
            return False
        expected = 1
        order = sorted((axis for axis in range(len(self.shape)) if axis != dim), key=self.stride.__getitem__)
        for axis in (*order, dim):
            if self.shape[axis] != 1 or axis == dim:
                if self.stride[axis] != expected:
                    return False
                expected *= self.shape[axis]
        return True

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers that the full step draws.

    Attributes:
        op: the random operator of the full graph.
        value: the hoisted graph's input that holds a micro-batch's slice of them.
        dim: the batch axis; None when all micro-batches share them.
        outer: how many runs of all samples lie along `dim`.
        rows: elements along `dim` for each sample in each run.
        stride: of the numbers for a micro-batch.
        layout: of the numbers for the whole batch.
        like: what the operator is given where it looks at no data of it.
        needs: the ops that make the arguments of the operator.
    """

    op: Op
    value: int
    dim: int | None
    outer: int
    rows: int
    stride: tuple[int, ...]
    layout: Layout
    like: Layout | None
    needs: tuple[Op, ...]

    @property
    def is_known(self) -> bool:
        """Whether it is one that `hoist_random` makes; of those from elsewhere this must be asked."""
        operators = {DROPOUT, *LIKE, *FREE, "aten.bernoulli.default"}
        return self.op.target in operators and CREATORS.issuperset(op.target for op in self.needs)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.layout.dtype)

    @property
    def is_packed(self) -> bool:
        """Whether the numbers are kept as bits: a mask in which every micro-batch is one run of memory."""
        if self.dim is None or self.outer != 1 or self.dtype != torch.bool:
            return False
        return self.layout.is_dense_outside(self.dim)

    @property
    def is_drawn_as_bits(self) -> bool:
        """Whether no booleans exist in between."""
        return self.is_packed and self.op.target == DROPOUT and drops_out(self.op) is not False and draws_like_torch()

    @property
    def drawing_bytes(self) -> int:
        """What drawing takes beside what is kept."""
        return self._whole_bytes if self.is_packed and not self.is_drawn_as_bits else 0

    @property
    def kept_bytes(self) -> int:
        """The numbers for the whole batch, as they are kept during the step."""
        return (prod(self.shape) + 7) // 8 if self.is_packed else self._whole_bytes

    @property
    def _whole_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def slice_bytes(self, samples: int) -> int:
        """What a micro-batch's slice takes beside them: nothing where it is a view."""
        if self.dim is None:
            return 0
        shape = list(self.shape)
        shape[self.dim] = self.outer * self.rows * samples
        is_view = not self.is_packed and self.outer == 1 and same_layout(shape, self.layout.stride, self.stride)
        return 0 if is_view else prod(shape) * self.dtype.itemsize

    def draw(self) -> torch.Tensor:
        """The numbers for the whole batch, from torch's default generator as in the full step, for `slice`."""
        with torch.no_grad():
            if self.is_drawn_as_bits:
                # `bernoulli_` goes through the elements in the order of memory, and so do bits.
                return bernoulli_bits(prod(self.shape), 1.0 - self.op.args[1])
            drawn = self._draw_whole()
            return pack_bits(drawn.as_strided((drawn.numel(),), (1,))) if self.is_packed else drawn

    def _draw_whole(self) -> torch.Tensor:
        if self.op.target == DROPOUT:
            mask = self.layout.empty()
            return mask.fill_(True) if drops_out(self.op) is False else mask.bernoulli_(1.0 - self.op.args[1])
        if self.like is not None:
            return resolve(self.op.target)(self.like.empty(), *self.op.args[1:], **self.op.kwargs)
        return _evaluate(self.needs, self.op)

    def slice(self, kept: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The part of what was drawn for the micro-batch of the samples from `start` to `stop`, a view if possible."""
        if self.dim is None:
            return kept
        first, count = start * self.rows, (stop - start) * self.rows
        if self.is_packed:
            shape = tuple(count if dim == self.dim else n for dim, n in enumerate(self.shape))
            outermost = self.layout.stride[self.dim]
            bits = unpack_bits(kept, first * outermost, count * outermost)
            return laid_out(bits.as_strided(shape, self.layout.stride), self.stride)
        if self.outer == 1:
            return laid_out(kept.narrow(self.dim, first, count), self.stride)
        runs = kept.unflatten(self.dim, (self.outer, -1)).narrow(self.dim + 1, first, count)
        return laid_out(runs.flatten(self.dim, self.dim + 1), self.stride)


def drops_out(op: Op) -> bool | None:
    """Whether a call of `native_dropout` drops anything; None where it does not say."""
    return op.args[2] if len(op.args) > 2 else op.kwargs.get("train")


def _evaluate(ops: tuple[Op, ...], last: Op) -> torch.Tensor:
    table: dict[int, torch.Tensor] = {}

    def call(op: Op) -> Any:
        return resolve(op.target)(*map_refs(op.args, table.__getitem__), **map_refs(op.kwargs, table.__getitem__))

    for op in ops:
        (value,) = op.results
        table[value] = call(op)
    return call(last)
