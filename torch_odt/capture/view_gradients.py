"""Gradients of strided views of whole tensors as views, in place of zeros into which they are written.

Autograd knows nothing of a view made by sizes and strides but its addresses, and so writes the gradient into zeros of
the storage's size and looks at these. Pooling to one pixel ends in such a view where images are channels_last. The
same elements lie in the same order in the gradient itself, which every bit of the result is one of. Axes of size 1 are
squeezed on the way, of a single sample the batch's as well: such a step would be another program than that of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch_odt.capture.graph import Op, Ref, TrainingGraph
from torch_odt.capture.strides import same_layout
from torch_odt.capture.uses import Uses

AS_STRIDED = "aten.as_strided.default"
VIEW = "aten.view.default"
SCATTER = "aten.as_strided_scatter.default"
_COPY = "aten.copy.default"
_ZEROS = "aten.new_zeros.default"
_SQUEEZE = ("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")


def view_gradients(graph: TrainingGraph) -> str | None:
    """What is written into zeros, all of which it fills, is looked at itself by who looks at these."""
    uses = Uses(graph)
    leaving = {graph.values[value].base for value in graph.output_values}
    count = 0
    for op in graph.ops:
        if op.target != AS_STRIDED:
            continue
        scattered = op.reads[0]
        written = _written(graph, uses, op)
        if written is None or scattered in leaving or uses.readers(scattered) != [op]:
            continue
        source = graph.values[written]
        # By its shape: a kernel may have laid the source out otherwise than the trace says.
        op.target, op.args, op.kwargs, op.reads = VIEW, (Ref(written), list(source.shape)), {}, (written,)
        graph.values[op.results[0]].stride = source.stride
        for value in graph.values:
            if value.base == scattered and value.index != scattered:
                value.base, value.nbytes = source.base, source.nbytes
        count += 1
    return f"{count} gradients are looked at where they are, not written into zeros" if count else None


def _written(graph: TrainingGraph, uses: Uses, view: Op) -> int | None:
    """The value that a view of written zeros shows: of its shape, and laid out as it is."""
    scatter = uses.producer(view.reads[0])
    if scatter is None or scatter.target != SCATTER or _offset(scatter) or _offset(view):
        return None
    zeros, source = (uses.producer(argument.value) for argument in scatter.args[:2])
    if zeros is None or zeros.target != _ZEROS or source is None or source.target != _COPY:
        return None
    shape, stride = view.args[1:3]
    axes = [(size, step) for size, step in zip(shape, stride, strict=True) if size != 1]
    sizes, strides = scatter.args[2:4]
    if axes != list(zip(sizes, strides, strict=True)) or not _fills(sizes, strides, prod(zeros.args[1])):
        return None
    value = source.args[1].value
    while graph.values[value].shape != tuple(shape):
        producer = uses.producer(value)
        if producer is None or producer.target not in _SQUEEZE:
            return None
        value = producer.reads[0]
    found = graph.values[value]
    is_alike = found.dtype == graph.values[view.results[0]].dtype and same_layout(shape, found.stride, stride)
    return value if is_alike and graph.values[found.base].kind == "computed" else None


def _offset(op: Op) -> int:
    """Where in the storage a view begins, which is the last argument."""
    position = 3 if op.target == AS_STRIDED else 4
    given = op.args[position] if len(op.args) > position else op.kwargs.get("storage_offset")
    return given or 0


def _fills(sizes: Sequence[int], strides: Sequence[int], elements: int) -> bool:
    """Whether such a view shows each of so many elements once."""
    expected = 1
    for step, size in sorted(zip(strides, sizes, strict=True)):
        if step != expected:
            return False
        expected *= size
    return expected == elements
