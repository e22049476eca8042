"""Images in one memory format from end to end, where their convolutions gain by it.

A model that never asks for `torch.channels_last` computes on contiguous images, which the math library reorders at each
convolution and back again, and which BatchNorm and pooling read channel by channel. Here the layout is chosen once for
the whole graph: convolutions read channels_last copies of what enters the model, what follows a convolution
(normalisation, pooling, elementwise operators, concatenation) goes on in its layout, and whatever depends on strides
gets them as they were: views that would be impossible, random draws, operators of which nothing is known, and all that
leaves the graph. Parameters stay as they are.

Convolutions of the two layouts add in different orders: results agree within rounding, not bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from torch_odt.capture.graph import Op, Ref, TrainingGraph, Value, map_refs, refs
from torch_odt.capture.operators import convolves_by_onednn, resolve
from torch_odt.capture.strides import channels_last_stride, contiguous_stride, counts_as_channels_last, same_layout

# What converting back and forth may move, as a share of what convolutions move, in a batch of so many samples: every
# size of micro-batches has to be laid out alike.
MOST_COPIED = 0.1
SAMPLES = 16

_CLONE = "aten.clone.default"
_CONVOLUTION, _CONVOLUTION_BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
# Beside elementwise operators: their results have the layout of their images.
_FOLLOWERS = frozenset(
    f"aten.{name}.default"
    for name in (
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool2d_backward",
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training",
        "_to_copy",
        "avg_pool2d",
        "avg_pool2d_backward",
        "cat",
        "constant_pad_nd",
        "elu_backward",
        "hardsigmoid_backward",
        "hardswish",
        "hardswish_backward",
        "hardtanh_backward",
        "leaky_relu_backward",
        "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward",
        "native_batch_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "softplus_backward",
        "upsample_bilinear2d",
        "upsample_bilinear2d_backward",
        "upsample_nearest2d",
        "upsample_nearest2d_backward",
    )
)
# Views whose elements do not depend on the strides of what they look into.
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "_unsafe_view.default",
        "expand.default",
        "permute.default",
        "select.int",
        "slice.Tensor",
        "split.Tensor",
        "split_with_sizes.default",
        "squeeze.dim",
        "squeeze.dims",
        "transpose.int",
        "unsqueeze.default",
        "view.default",
    )
)


def choose_layouts(graph: TrainingGraph) -> str | None:
    """Images go through the graph as channels_last where its convolutions gain more by that than copies cost."""
    if not any(_gains(graph, op) for op in graph.ops):
        return None
    try:
        walk = _ChannelsLast(graph)
    except _LayoutIsFixed:
        return None
    if not walk.changed or walk.copied_bytes > MOST_COPIED * walk.convolved_bytes:
        return None
    walk.apply()
    return f"{walk.convolutions} convolutions read and write channels_last, with {walk.copies} copies around them"


def _gains(graph: TrainingGraph, op: Op) -> bool:
    return op.target == _CONVOLUTION and convolves_by_onednn(graph.values[op.reads[0]].dtype)


class _LayoutIsFixed(Exception):
    """Something needs strides that no copy brings back."""


class _ChannelsLast:
    """A walk over the program, which changes nothing in the graph until `apply`.

    Attributes:
        changed: the values whose strides become others.
        copies: conversions.
        copied_bytes: of all conversions, in a batch of `SAMPLES`.
        convolutions: how many there are.
        convolved_bytes: the images that they read and write, in such a batch.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self._graph = graph
        self._values = [replace(value) for value in graph.values]
        self._ops: list[Op] = []
        self._next_op = 1 + max(op.index for op in graph.ops)
        self._copy_of: dict[tuple[int, torch.memory_format], int] = {}
        self._delivered: dict[int, int] = {}
        self._without_samples = {v.index for v in graph.values if v.kind == "parameter"}
        self._without_samples |= {output.value for output in graph.outputs_of("gradient")}
        self.changed: set[int] = set()
        self.copies = self.copied_bytes = 0
        self.convolutions = self.convolved_bytes = 0
        for op in graph.ops:
            self._take(op)

    def apply(self) -> None:
        self._graph.values = self._values
        self._graph.ops = self._ops
        self._graph.outputs = [replace(o, value=self._delivered.get(o.value, o.value)) for o in self._graph.outputs]

    def _take(self, op: Op) -> None:
        if op.target in (_CONVOLUTION, _CONVOLUTION_BACKWARD):
            self._take_convolution(op)
        elif op.is_view:
            self._take_view(op)
        elif _is_follower(op) and any(self._is_channels_last(v) for v in op.reads):
            self._follow(op)
        elif _reads_any_layout(op):
            self._ops.append(op)
        else:
            self._ops.append(self._with_arguments(op, {v: self._as_before(v, op) for v in op.reads}))
        self._restore_outputs(op)

    def _take_convolution(self, op: Op) -> None:
        is_forward = op.target == _CONVOLUTION
        images, weight = [a.value for a in op.args[: 1 if is_forward else 2]], op.args[1 if is_forward else 2].value
        touched = [*images, *(w for w in op.writes[:1] if w is not None)]
        self.convolved_bytes += sum(_image_bytes(self._values[v]) for v in touched)
        if not any(_has_layout(self._values[v]) for v in touched):
            given = {v: self._copy(v, torch.contiguous_format, op) for v in op.reads if v in self.changed}
            self._ops.append(self._with_arguments(op, given))
            return
        self.convolutions += is_forward
        given = {v: self._as_channels_last(v, op) for v in images}
        if _has_layout(self._values[weight]):
            given[weight] = self._as_channels_last(weight, op)
        self._ops.append(self._with_arguments(op, given))
        self._set_results(op)

    def _follow(self, op: Op) -> None:
        """All images of the operator become channels_last, so that there is no doubt about its results."""
        given = {}
        for value in op.reads:
            has_layout = _has_layout(self._values[value])
            given[value] = self._as_channels_last(value, op) if has_layout else self._as_before(value, op)
        self._ops.append(self._with_arguments(op, given))
        self._set_results(op)

    def _take_view(self, op: Op) -> None:
        source = op.reads[0]
        if source in self.changed and not self._view_changed(op):
            source = self._as_before(source, op)
        self._ops.append(self._with_arguments(op, {op.reads[0]: source}))
        for value in op.results:
            self._values[value].base = self._values[source].base

    def _view_changed(self, op: Op) -> bool:
        """Look into a source with its new strides, if that is possible."""
        if op.target not in _VIEWS:
            return False
        try:
            results = resolve(op.target)(*map_refs(op.args, self._on_meta), **op.kwargs)
        except (RuntimeError, ValueError):
            # While torch.compile traces, Python references stand in for ATen, which raise the latter.
            return False
        for value, tensor in zip(op.writes, [results] if isinstance(results, torch.Tensor) else results, strict=True):
            if value is not None:
                self._set_stride(value, tensor.stride())
        return True

    def _on_meta(self, value: int) -> torch.Tensor:
        v = self._values[value]
        return torch.empty_strided(v.shape, v.stride, dtype=getattr(torch, v.dtype), device="meta")

    def _set_results(self, op: Op) -> None:
        for value in op.results:
            if len(self._values[value].shape) == 4:
                self._set_stride(value, channels_last_stride(self._values[value].shape))

    def _set_stride(self, value: int, stride: tuple[int, ...]) -> None:
        v = self._values[value]
        if not same_layout(v.shape, stride, v.stride):
            self.changed.add(value)
        v.stride = stride

    def _restore_outputs(self, op: Op) -> None:
        for output in self._graph.outputs:
            value = output.value
            if value not in op.results or value in self._delivered:
                continue
            if value in self.changed:
                self._delivered[value] = self._as_before(value, op)
            elif output.kind == "result" and self._values[value].stride != self._graph.values[value].stride:
                # Callers see the strides of dimensions of size 1 too.
                self._delivered[value] = self._copy(value, torch.contiguous_format, op)

    def _as_channels_last(self, value: int, reader: Op) -> int:
        return value if self._is_channels_last(value) else self._copy(value, torch.channels_last, reader)

    def _is_channels_last(self, value: int) -> bool:
        return counts_as_channels_last(self._values[value].shape, self._values[value].stride)

    def _as_before(self, value: int, reader: Op) -> int:
        """A value with the strides that it had; a copy where they have become others."""
        if value not in self.changed:
            return value
        before = self._graph.values[value]
        if same_layout(before.shape, before.stride, contiguous_stride(before.shape)):
            return self._copy(value, torch.contiguous_format, reader)
        raise _LayoutIsFixed

    def _copy(self, value: int, layout: torch.memory_format, reader: Op) -> int:
        if (value, layout) in self._copy_of:
            return self._copy_of[value, layout]
        source = self._values[value]
        strides = channels_last_stride if layout == torch.channels_last else contiguous_stride
        nbytes = math.prod(source.shape) * getattr(torch, source.dtype).itemsize
        copy = Value(
            index=len(self._values),
            name=f"{source.name}_{'channels_last' if layout == torch.channels_last else 'contiguous'}",
            shape=source.shape,
            stride=strides(source.shape),
            dtype=source.dtype,
            nbytes=nbytes,
            kind="computed",
            base=len(self._values),
            producer=self._next_op,
        )
        self._values.append(copy)
        self._ops.append(
            Op(
                index=self._next_op,
                target=_CLONE,
                args=(Ref(value),),
                kwargs={"memory_format": layout},
                reads=(value,),
                shape_reads=(),
                writes=(copy.index,),
                phase=reader.phase,
            )
        )
        self._next_op += 1
        self._copy_of[value, layout] = copy.index
        self.copies += 1
        self.copied_bytes += nbytes if value in self._without_samples else _image_bytes(source)
        return copy.index

    def _with_arguments(self, op: Op, given: dict[int, int]) -> Op:
        """The operator with other values in the place of its arguments."""
        if all(old == new for old, new in given.items()):
            return op
        args, kwargs = (map_refs(a, lambda v: Ref(given.get(v, v))) for a in (op.args, op.kwargs))
        return replace(op, args=args, kwargs=kwargs, reads=tuple(dict.fromkeys(refs((args, kwargs)))))


def _image_bytes(value: Value) -> int:
    """Of a batch of `SAMPLES` images."""
    return SAMPLES * math.prod(value.shape[1:]) * int(getattr(torch, value.dtype).itemsize)


def _is_follower(op: Op) -> bool:
    if op.is_random or _makes_contiguous(op):
        return False
    function = resolve(op.target)
    is_elementwise = isinstance(function, torch._ops.OpOverload) and torch.Tag.pointwise in function.tags
    return is_elementwise or op.target in _FOLLOWERS


def _reads_any_layout(op: Op) -> bool:
    """Whether its results have the same strides whatever those of its images are."""
    if _makes_contiguous(op):
        return True
    if op.target not in ("aten.mean.dim", "aten.sum.dim_IntList"):
        return False
    return {2, 3} <= {d % 4 for d in op.args[1] or (2, 3)}


def _makes_contiguous(op: Op) -> bool:
    return op.target == _CLONE and op.kwargs.get("memory_format") == torch.contiguous_format


def _has_layout(value: Value) -> bool:
    """Whether channels_last and contiguous are different for this shape."""
    return len(value.shape) == 4 and value.shape[1] > 1 and math.prod(value.shape[2:]) > 1
