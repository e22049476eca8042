"""How the batch axis goes through look-ups: embeddings, gather, scatter and indexing with tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch_odt.capture.batch_rules import rule, wrap_dim
from torch_odt.capture.batch_state import Call, Operand, State, align, linear, require_exact


@rule("embedding")
def _embedding(call: Call) -> State:
    weight, indices = call.operand("weight"), call.operand("indices")
    require_exact(call, [indices])
    if weight.kind != "same":
        raise call.refuse("looks samples up across the batch")
    return replace(indices.state, scale=weight.state.scale)


@rule("embedding_dense_backward")
def _embedding_backward(call: Call) -> State:
    gradient, indices = call.operand("grad_output"), call.operand("indices")
    if call.micro["scale_grad_by_freq"] and indices.kind != "same":
        raise call.refuse("divides gradients by how often an index stands in the batch")
    require_exact(call, [indices])
    if "slice" not in (gradient.kind, indices.kind):
        return gradient.state
    if gradient.kind != indices.kind or gradient.axis != indices.axis:
        raise call.refuse("looks samples up across the batch")
    return State("part", scale=gradient.state.scale)


@rule("index_select")
def _index_select(call: Call) -> State:
    operand, index = call.operand("self"), call.operand("index")
    require_exact(call, [index])
    dim = wrap_dim(call.micro["dim"], operand.ndim)
    if index.kind == "same" and not (operand.kind == "slice" and operand.dim == dim) and operand.kind != "index":
        return operand.state
    if index.kind == "slice" and operand.kind == "same":
        return State("slice", dim, operand.state.scale, outer=index.state.outer)
    raise call.refuse("looks samples up across the batch")


@rule("index_add")
def _index_add(call: Call) -> State:
    operand, index, source = call.operand("self"), call.operand("index"), call.operand("source")
    require_exact(call, [index])
    dim = wrap_dim(call.micro["dim"], operand.ndim)
    return _scattered(call, operand, index, source, dim, index_dim=dim if index.kind == "slice" else None)


@rule("gather")
def _gather(call: Call) -> State:
    operand, index = call.operand("self"), call.operand("index")
    require_exact(call, [index])
    dim = wrap_dim(call.micro["dim"], operand.ndim)
    if index.kind == "same" and operand.kind in ("same", "part"):
        return operand.state
    if index.kind == "slice":
        if operand.kind == "slice" and operand.axis == index.axis and index.dim != dim:
            return operand.state
        if operand.kind == "same" and index.dim == dim:
            return State("slice", dim, operand.state.scale, outer=index.state.outer)
    raise call.refuse("looks samples up across the batch")


@rule("scatter_add")
def _scatter_add(call: Call) -> State:
    operand, index, source = call.operand("self"), call.operand("index"), call.operand("src")
    require_exact(call, [index])
    dim = wrap_dim(call.micro["dim"], operand.ndim)
    return _scattered(call, operand, index, source, dim, index_dim=index.dim if index.kind == "slice" else None)


def _scattered(
    call: Call, operand: Operand, index: Operand, source: Operand, dim: int, *, index_dim: int | None
) -> State:
    """Sums of elements of `source` at the places that `index` names along `dim`, into zeros."""
    if not operand.state.zero:
        raise call.refuse("adds to a tensor that is not known to be zero")
    if index_dim is None and source.kind in ("same", "part"):
        return source.state
    if source.kind == "slice" and (index.kind == "same" or index.state.outer == source.state.outer):
        if source.dim == dim and index_dim == dim and operand.kind == "same":
            return State("part", scale=source.state.scale)
        if (
            source.dim != dim
            and index_dim in (None, source.dim)
            and operand.kind == "slice"
            and operand.axis == source.axis
        ):
            return source.state
    raise call.refuse("looks samples up across the batch")


@rule("scatter.value", "scatter.src", "scatter.value_reduce", "scatter.reduce")
def _scatter(call: Call) -> State:
    operands = call.operands
    require_exact(call, operands)
    dim = wrap_dim(call.micro["dim"], operands[0].ndim)
    if all(o.kind == "same" for o in operands):
        return operands[0].state
    if all(o.kind == "slice" for o in operands) and len({o.axis for o in operands}) == 1 and operands[0].dim != dim:
        return replace(operands[0].state, zero=False)
    raise call.refuse("looks samples up across the batch")


@dataclass(frozen=True, slots=True)
class _Indexed:
    """Where the axes of an indexed tensor stand in the result.

    Attributes:
        tensors: the index tensor of each axis, None for an axis that is kept.
        start: where the axes of the index tensors stand in the result.
        ndim: how many axes they have when broadcast.
    """

    tensors: Sequence[Operand | None]
    start: int
    ndim: int

    def kept(self, dim: int) -> int:
        """Where an axis that is not indexed stands in the result."""
        before = sum(t is None for t in self.tensors[:dim]) + max(0, dim - len(self.tensors))
        return before + (self.ndim if before >= self.start else 0)

    def at(self, dim: int) -> Operand | None:
        return self.tensors[dim] if dim < len(self.tensors) else None


def _indexed(call: Call) -> _Indexed:
    tensors: list[Operand | None] = list(call.micro["indices"])
    present = [t for t in tensors if t is not None]
    if any(t.full.dtype in ("bool", "uint8") for t in present):
        raise call.refuse("selects elements by a mask")
    positions = [i for i, t in enumerate(tensors) if t is not None]
    adjacent = positions == list(range(positions[0], positions[-1] + 1))
    return _Indexed(tensors, positions[0] if adjacent else 0, max(t.ndim for t in present))


def _element_axis(call: Call, operand: Operand, indexed: _Indexed) -> State:
    """The batch axis of the elements that `operand[indices]` names: "slice" in the result, or "same"."""
    present = [t for t in indexed.tensors if t is not None]
    if operand.kind == "slice":
        numbers = indexed.at(operand.dim)
        if numbers is None:
            if any(t.kind != "same" for t in present):
                raise call.refuse("looks samples up across the batch")
            return State("slice", indexed.kept(operand.dim), outer=operand.state.outer)
        if (
            operand.state.outer != 1
            or numbers.kind != "index"
            or numbers.full.shape[numbers.dim] != operand.full.shape[operand.dim]
        ):
            raise call.refuse("looks samples up across the batch")
        present = [replace(t, state=State("slice", t.dim)) if t is numbers else t for t in present]
    require_exact(call, present)
    state = align(call, present, indexed.ndim)
    return replace(state, dim=state.dim + indexed.start) if state.kind == "slice" else state


@rule("index.Tensor")
def _index(call: Call) -> State:
    operand, indexed = call.operand("self"), _indexed(call)
    present = [t for t in indexed.tensors if t is not None]
    if operand.kind == "part":
        return linear(call, operand, present, lambda: operand.state)
    if operand.kind not in ("same", "slice"):
        raise call.refuse("uses the position of a sample in the batch")
    return replace(_element_axis(call, operand, indexed), scale=operand.state.scale, zero=operand.state.zero)


@rule("index_put", "_unsafe_index_put")
def _index_put(call: Call) -> State:
    """The gradient of indexing: values added into zeros."""
    operand, values, indexed = call.operand("self"), call.operand("values"), _indexed(call)
    if not operand.state.zero:
        raise call.refuse("changes single elements of a tensor")
    if operand.kind == "same" and values.kind in ("same", "part"):
        require_exact(call, [t for t in indexed.tensors if t is not None])
        if any(t is not None and t.kind != "same" for t in indexed.tensors):
            raise call.refuse("looks samples up across the batch")
        return replace(values.state, zero=False)
    axis = _element_axis(call, operand, indexed)
    if axis.kind != "slice" or values.kind != "slice":
        raise call.refuse("looks samples up across the batch")
    ndim = operand.ndim - sum(t is not None for t in indexed.tensors) + indexed.ndim
    if (values.dim + ndim - values.ndim, values.state.outer) != (axis.dim, axis.outer):
        raise call.refuse("looks samples up across the batch")
    if operand.kind == "slice":
        return replace(operand.state, scale=values.state.scale, zero=False)
    if not call.micro["accumulate"]:
        raise call.refuse("overwrites elements that other samples may write too")
    return State("part", scale=values.state.scale)
