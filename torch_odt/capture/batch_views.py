"""How the batch axis moves through views and the other operators that only move elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from torch_odt.capture.batch_rules import rule, with_dim, wrap_dim, wrap_dims
from torch_odt.capture.batch_state import Call, Operand, State, added, differing_dim, require_exact
from torch_odt.capture.graph import Value
from torch_odt.capture.strides import is_contiguous, same_layout


@rule("view", "_unsafe_view", "_reshape_alias", "reshape", free=("size", "stride"))
def _view(call: Call) -> State:
    return _viewed(call, call.operand("self"))


def _viewed(call: Call, operand: Operand) -> State:
    """The batch axis may be merged with its neighbours, and separated from them again."""
    full, micro = call.first_result
    dim = differing_dim(full.shape, micro.shape, call.batch, call.micro_batch)
    if operand.kind not in ("slice", "index"):
        return operand.state
    if dim is None:
        raise call.refuse("removes the batch axis")
    before = prod(operand.full.shape[: operand.dim]) * operand.state.outer
    outer, rest = divmod(before, prod(full.shape[:dim]))
    if rest or full.shape[dim] % outer or micro.shape[dim] % outer:
        raise call.refuse("mixes the batch axis with others")
    inner = prod(operand.full.shape[operand.dim + 1 :])
    if operand.kind == "index" and (
        outer != 1 or full.shape[dim] != operand.full.shape[operand.dim] or prod(full.shape[dim + 1 :]) != inner
    ):
        raise call.refuse("numbers the samples of the batch")
    return replace(operand.state, dim=dim, outer=outer)


@rule("as_strided", free=("size", "stride"))
def _as_strided(call: Call) -> State:
    operand = call.operand("self")
    for source, result in ((call.full["self"].value, call.first_result[0]), (operand.micro, call.first_result[1])):
        if not _same_elements(source, result, call.micro["storage_offset"]):
            raise call.refuse("addresses the memory of its argument")
    return _viewed(call, operand)


@rule("as_strided_scatter", free=("size", "stride"))
def _as_strided_scatter(call: Call) -> State:
    source = call.operand("src")
    for whole, part in zip(call.first_result, (call.full["src"].value, source.micro), strict=True):
        if not (is_contiguous(whole.shape, whole.stride) and is_contiguous(part.shape, part.stride)):
            raise call.refuse("addresses the memory of its argument")
        if prod(whole.shape) != prod(part.shape) or call.micro["storage_offset"]:
            raise call.refuse("addresses the memory of its argument")
    for sizes, strides in ((call.full["size"], call.full["stride"]), (call.micro["size"], call.micro["stride"])):
        if not is_contiguous(sizes, strides):
            raise call.refuse("addresses the memory of its argument")
    return _viewed(call, source)


def _same_elements(source: Value, result: Value, offset: int | None) -> bool:
    if offset is not None and (offset or source.is_view):
        return False
    if source.shape == result.shape:
        return same_layout(source.shape, source.stride, result.stride)
    whole = prod(source.shape) == prod(result.shape)
    return whole and is_contiguous(source.shape, source.stride) and is_contiguous(result.shape, result.stride)


@rule("expand", "repeat", free=("size", "repeats"))
def _expand(call: Call) -> State:
    return _expanded(call, call.operand("self"))


def _expanded(call: Call, operand: Operand) -> State:
    full, micro = call.first_result
    shift = len(full.shape) - operand.ndim
    dim = differing_dim(full.shape, micro.shape, call.batch, call.micro_batch)
    if operand.kind in ("slice", "index"):
        if dim != operand.dim + shift or full.shape[dim] != operand.full.shape[operand.dim]:
            raise call.refuse("repeats the batch")
        return with_dim(operand.state, dim)
    if dim is None:
        return operand.state
    # A repeated tensor is a slice too: the slice of each sample holds whole copies.
    spread = dim < shift or operand.full.shape[dim - shift] == 1 or call.name == "repeat"
    if operand.kind != "same" or not spread:
        raise call.refuse("spreads a sum or mean over the batch to its samples")
    return replace(operand.state, kind="slice", dim=dim)


def _remapped(call: Call, operand: Operand, order: Sequence[int | None]) -> State:
    """`order`: for each axis of the result, the operand's axis that it is."""
    if operand.kind not in ("slice", "index"):
        return operand.state
    if operand.dim not in order:
        raise call.refuse("removes the batch axis")
    return with_dim(operand.state, list(order).index(operand.dim))


@rule("permute")
def _permute(call: Call) -> State:
    operand = call.operand("self")
    return _remapped(call, operand, wrap_dims(call.micro["dims"], operand.ndim) if operand.ndim else [])


@rule("transpose.int", "t")
def _transpose(call: Call) -> State:
    operand = call.operand("self")
    order: list[int | None] = list(range(operand.ndim))
    if operand.ndim > 1:
        a = wrap_dim(call.micro.get("dim0", 0), operand.ndim)
        b = wrap_dim(call.micro.get("dim1", 1), operand.ndim)
        order[a], order[b] = order[b], order[a]
    return _remapped(call, operand, order)


@rule("unsqueeze")
def _unsqueeze(call: Call) -> State:
    operand = call.operand("self")
    order: list[int | None] = list(range(operand.ndim))
    order.insert(wrap_dim(call.micro["dim"], operand.ndim + 1), None)
    return _remapped(call, operand, order)


@rule("squeeze", "squeeze.dim", "squeeze.dims")
def _squeeze(call: Call) -> State:
    operand = call.operand("self")
    dims = wrap_dims(call.micro.get("dim"), operand.ndim)
    return _remapped(call, operand, [d for d in range(operand.ndim) if d not in dims or operand.full.shape[d] != 1])


@rule("slice.Tensor", free=("end",))
def _slice(call: Call) -> State:
    return _along(call, call.operand("self"), "takes some samples of the batch")


@rule("slice_backward", free=("input_sizes", "end"))
def _slice_backward(call: Call) -> State:
    return _along(call, call.operand("grad_output"), "takes some samples of the batch")


@rule("slice_scatter", free=("end",))
def _slice_scatter(call: Call) -> State:
    operand, source = call.operand("self"), call.operand("src")
    state = added(call, [operand, source])
    if state.kind == "slice":
        _along(call, replace(source, state=state), "changes some samples of the batch")
    return state


def _along(call: Call, operand: Operand, reason: str) -> State:
    """A slice: along the batch it must be all of it, elsewhere its bounds must not depend on the batch."""
    dim, size = wrap_dim(call.micro["dim"], operand.ndim), call.first_result
    sizes = (
        [s.shape[dim] for s in size] if call.name != "slice" else [operand.full.shape[dim], operand.micro.shape[dim]]
    )
    ends = [_end(call.full["end"], sizes[0]), _end(call.micro["end"], sizes[1])]
    if operand.kind in ("slice", "index") and operand.dim == dim:
        if (call.micro["start"] or 0) != 0 or call.micro["step"] != 1 or ends != sizes:
            raise call.refuse(reason)
    elif ends[0] != ends[1]:
        raise call.refuse("takes a slice whose end depends on the batch")
    return operand.state


def _end(end: int | None, size: int) -> int:
    return size if end is None else min(wrap_dim(end, size), size)


@rule("select.int", "unbind.int")
def _select(call: Call) -> State:
    operand = call.operand("self")
    dim = wrap_dim(call.micro["dim"], operand.ndim)
    if operand.kind in ("slice", "index") and operand.dim == dim:
        raise call.refuse("takes single samples of the batch")
    return _remapped(call, operand, [d for d in range(operand.ndim) if d != dim])


@rule("select_backward", free=("input_sizes",))
def _select_backward(call: Call) -> State:
    operand = call.operand("grad_output")
    dim = wrap_dim(call.micro["dim"], operand.ndim + 1)
    order: list[int | None] = list(range(operand.ndim))
    order.insert(dim, None)
    return _remapped(call, operand, order)


@rule("select_scatter")
def _select_scatter(call: Call) -> State:
    operand, source = call.operand("self"), call.operand("src")
    dim = wrap_dim(call.micro["dim"], operand.ndim)
    moved = replace(source.state, dim=source.dim + (source.dim >= dim)) if source.kind == "slice" else source.state
    states = [operand.state, moved]
    if any(s.kind not in ("same", "slice") for s in states) or len({s.scale for s in states if not s.zero}) > 1:
        raise call.refuse("combines samples with a sum or mean over the batch")
    axes = {(s.dim, s.outer) for s in states if s.kind == "slice"}
    if len(axes) > 1 or dim in {axis for axis, _ in axes}:
        raise call.refuse("changes some samples of the batch")
    scale = next((s.scale for s in states if not s.zero), ())
    return replace(moved if moved.kind == "slice" else operand.state, scale=scale, zero=False)


@rule("split.Tensor", "split_with_sizes", "unsafe_split.Tensor", "unsafe_split_with_sizes", "unsafe_chunk")
def _split(call: Call) -> State:
    operand = call.operand("self")
    if operand.kind in ("slice", "index") and operand.dim == wrap_dim(call.micro["dim"], operand.ndim):
        raise call.refuse("splits the batch")
    return operand.state


@rule("cat", "stack")
def _cat(call: Call) -> State:
    operands = [o for o in call.operands if prod(o.full.shape)]
    is_stack = call.name == "stack"
    dim = wrap_dim(call.micro["dim"], operands[0].ndim + is_stack)
    kinds = {o.kind for o in operands}
    if kinds == {"same"} or kinds == {"part"}:
        return added(call, [replace(o, full=operands[0].full, micro=operands[0].micro) for o in operands])
    if kinds != {"slice"} or len({o.axis for o in operands}) != 1:
        raise call.refuse("joins samples with a tensor that is not divided with the batch")
    axis = operands[0].dim
    if axis == dim and not is_stack:
        raise call.refuse("joins tensors along the batch axis")
    scales = {o.state.scale for o in operands if not o.state.zero}
    if len(scales) > 1:
        raise call.refuse("joins values that depend differently on the size of the batch")
    zero = all(o.state.zero for o in operands)
    return State("slice", axis + (is_stack and dim <= axis), next(iter(scales), ()), zero, operands[0].state.outer)


@rule("constant_pad_nd")
def _pad(call: Call) -> State:
    operand, pad = call.operand("self"), call.micro["pad"]
    padded = {operand.ndim - 1 - i // 2 for i, n in enumerate(pad) if n}
    if operand.kind == "slice" and operand.dim in padded:
        raise call.refuse("adds samples to the batch")
    if call.micro["value"] != 0:
        require_exact(call, [operand])
    return replace(operand.state, zero=operand.state.zero and call.micro["value"] == 0)


@rule("copy")
def _copy(call: Call) -> State:
    return _expanded(call, call.operand("src"))
