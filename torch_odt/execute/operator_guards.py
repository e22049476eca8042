"""What operators of torch's do not check themselves, looked at before each call.

Some kernels take it for granted that what a backward op is given is what the forward op has returned: they read and
write by indices that nobody compares with a size, and past the end of vectors that are shorter than a tensor has
channels. Of a graph that was traced this is true. One from a file may say anything, and the tensors themselves tell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch

from torch_odt.capture import operators
from torch_odt.capture.graph import Op, Ref, TrainingGraph
from torch_odt.capture.overwrite import function_of
from torch_odt.errors import PlanError

Named = Mapping[str, Any]
"""A call's arguments by the names of the schema."""


def guards_of(graph: TrainingGraph) -> dict[int, Callable[..., Any]]:
    """What ops of a graph from elsewhere call in the place of what the graph names: the same, checked before.

    The functions raise PlanError where an op is given what its kernel cannot cope with.
    """
    return {op.index: functools.partial(_guarded, op, function_of(op)) for op in graph.ops if needs_guard(op)}


def needs_guard(op: Op) -> bool:
    """Whether an op relies on more than its operator checks."""
    return op.target in _CHECKS or bool(op.shape_reads)


def _guarded(op: Op, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        reads_shapes_alone = not op.shape_reads or _reads_shapes_alone(op, args)
        belongs = _belongs(op, args, kwargs)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _refused(op, "has arguments of other types than its operator") from error
    if not reads_shapes_alone:
        raise _refused(op, "would read data that the plan leaves without memory")
    if not belongs:
        raise _refused(op, "is given tensors that do not belong together, or indices out of range")
    return function(*args, **kwargs)


def _belongs(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    check = _CHECKS.get(op.target)
    if check is None:
        return True
    names = [argument.name for argument in operators.of_torch(op.target)._schema.arguments]
    return check(dict(zip(names, args, strict=False)) | kwargs)


def _refused(op: Op, what: str) -> PlanError:
    return PlanError(f"op {op.index} of the graph, {op.target}, {what}: the plan file is damaged or was forged")


def _reads_shapes_alone(op: Op, args: tuple[Any, ...]) -> bool:
    """Whether it does so with the types that its tensors really have."""
    phantoms = {i for i, one in enumerate(op.args) if isinstance(one, Ref) and one.value in op.shape_reads}
    convolved: list[operators.Laid] = []
    dtype = next((argument.dtype for argument in args if isinstance(argument, torch.Tensor)), None)
    if op.target == "aten.convolution_backward.default":
        if any(tensor.dtype != dtype for tensor in args[:3]):
            return False
        convolved = [operators.Laid(tuple(tensor.shape), tensor.stride()) for tensor in args[1:3]]
    positions = operators.shape_only_positions(op.target, args, str(dtype).removeprefix("torch."), *convolved)
    return phantoms.issubset(positions)


def _batch_norm(named: Named) -> bool:
    x = named["input"]
    trains = named.get("training", True)
    vectors = [named.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
    has_running = vectors[2] is not None and vectors[3] is not None
    return x.dim() >= 2 and _have(vectors, x.shape[1]) and (trains or has_running)


def _batch_norm_frozen(named: Named) -> bool:
    return _batch_norm({**named, "training": False})


def _batch_norm_backward(named: Named) -> bool:
    x = named["input"]
    running = [named["running_mean"], named["running_var"]]
    used = [named["save_mean"], named["save_invstd"]] if named["train"] else running
    if x.dim() < 2 or named["grad_out"].shape != x.shape or any(vector is None for vector in used):
        return False
    return _have([named["weight"], *running, *used], x.shape[1])


def _have(vectors: list[torch.Tensor | None], elements: int) -> bool:
    return all(vector is None or vector.numel() == elements for vector in vectors)


def _layer_norm_backward(named: Named) -> bool:
    x, elements = named["input"], prod(named["normalized_shape"])
    rows = x.numel() // elements if elements else 0
    return named["grad_out"].shape == x.shape and _have([named["mean"], named["rstd"]], rows)


def _same_shape(named: Named) -> bool:
    return named["grad_output"].shape == named["output"].shape


def _gelu_backward(named: Named) -> bool:
    return named["grad_output"].shape == named["self"].shape


def _attention(named: Named) -> bool:
    query, key, value = named["query"], named["key"], named["value"]
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    mask = named.get("attn_mask")
    scores = (*query.shape[:3], key.shape[2])
    fits = mask is None or _is_expandable(tuple(mask.shape), scores)
    return fits and query.shape[:2] == key.shape[:2] and key.shape[:3] == value.shape[:3]


def _is_expandable(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, other) for size, other in pairs)


def _attention_backward(named: Named) -> bool:
    query = named["query"]
    alike = (named["grad_out"].shape, named["out"].shape)
    return _attention(named) and alike == (query.shape,) * 2 and named["logsumexp"].shape == query.shape[:3]


def _average_backward(named: Named, axes: int) -> bool:
    gradient, x = named["grad_output"], named["self"]
    are_alike = gradient.dim() == x.dim() > axes and gradient.shape[:-axes] == x.shape[:-axes]
    return are_alike and (x.numel() > 0 or gradient.numel() == 0)


def _fake_quantize(named: Named) -> bool:
    one_each = (named["scale"], named["zero_point"], named["fake_quant_enabled"])
    types = [tensor.dtype for tensor in one_each if tensor.numel() == 1]
    return types[:1] == [torch.float32] and set(types[1:]) <= {torch.int32, torch.int64} and len(types) == 3


def _fake_quantize_learned(named: Named, per_channel: bool) -> bool:
    x, steps = named["self"], (named["scale"], named["zero_point"])
    gradient = named.get("grad", x)
    if per_channel and not 0 <= named["axis"] < x.dim():
        return False
    count = x.shape[named["axis"]] if per_channel else 1
    are_floats = all(tensor.dtype == torch.float32 for tensor in (x, gradient, *steps))
    return are_floats and gradient.shape == x.shape and all(tensor.shape == (count,) for tensor in steps)


def _max_pool_backward(named: Named, axes: int) -> bool:
    gradient, x, indices = named["grad_output"], named["self"], named["indices"]
    if gradient.shape != indices.shape or indices.shape[:-axes] != x.shape[:-axes] or indices.dtype != torch.int64:
        return False
    return gradient.dim() == x.dim() >= axes and _are_below(indices, prod(x.shape[-axes:]))


def _nll_loss_backward(named: Named) -> bool:
    x, target, weight = named["self"], named["target"], named["weight"]
    classes = x.shape[1] if x.dim() > 1 else x.shape[0]
    if target.dtype not in (torch.int64, torch.uint8) or (weight is not None and weight.numel() != classes):
        return False
    numbers = target.numpy()
    return bool(((numbers == named["ignore_index"]) | ((numbers >= 0) & (numbers < classes))).all())


def _pad_backward(named: Named) -> bool:
    gradient, x = named["grad_output"], named["self"]
    return gradient.dim() == x.dim() and gradient.shape[:-2] == x.shape[:-2]


def _divides(named: Named) -> bool:
    """The smallest integer by -1 ends the process where the quotient is truncated."""
    operands = (named["self"], named["other"])
    types = [
        each.dtype.is_floating_point if isinstance(each, torch.Tensor) else type(each) is float for each in operands
    ]
    return named.get("rounding_mode") != "trunc" or any(types)


def _embedding_backward(named: Named) -> bool:
    return not named["scale_grad_by_freq"] or _are_below(named["indices"], named["num_weights"])


def _are_below(indices: torch.Tensor, limit: int) -> bool:
    if not indices.numel():
        return True
    # Numpy's reductions leave the arena alone.
    numbers = indices.numpy()
    return int(numbers.min()) >= 0 and int(numbers.max()) < limit


_LSTM = 2


def _rnn_layer(named: Named) -> bool:
    x, hidden = named["input"], named["hidden_size"]
    return named["mode"] == _LSTM and not named["batch_sizes"] and x.dim() == 3 and _is_layer(named, 0, hidden)


def _rnn_layer_backward(named: Named) -> bool:
    x, hidden = named["input"], named["hidden_size"]
    if named["mode"] != _LSTM or named["batch_sizes"] or x.dim() != 3 or not _is_layer(named, 1, hidden):
        return False
    states = [named["hy_"], named["cy_"], named["grad_hy"], named["grad_cy"]]
    sequences = [named["output"], named["grad_output"]]
    return _have(states, x.shape[1] * hidden) and _have(sequences, x.shape[0] * x.shape[1] * hidden)


def _is_layer(named: Named, first: int, hidden: int) -> bool:
    """Whether weights and states are those of one layer and direction of so many units."""
    x = named["input"]
    weights = [named[f"weight{first + i}"] for i in range(4)]
    states = [named["hx_"], named.get("cx_", named.get("cx_tmp"))]
    shapes = [(4 * hidden, x.shape[2]), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)]
    if any(tuple(weight.shape) != shape for weight, shape in zip(weights, shapes, strict=True)):
        return False
    return _have(states, x.shape[1] * hidden) and all(tensor.dtype == x.dtype for tensor in (*weights, *states))


_CHECKS: dict[str, Callable[[Named], bool]] = {
    "aten.native_batch_norm.default": _batch_norm,
    "aten._native_batch_norm_legit.default": _batch_norm,
    "aten._native_batch_norm_legit.no_stats": _batch_norm,
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_frozen,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._log_softmax_backward_data.default": _same_shape,
    "aten._softmax_backward_data.default": _same_shape,
    "aten.gelu_backward.default": _gelu_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten._adaptive_avg_pool2d_backward.default": functools.partial(_average_backward, axes=2),
    "aten._adaptive_avg_pool3d_backward.default": functools.partial(_average_backward, axes=3),
    "aten.avg_pool2d_backward.default": functools.partial(_average_backward, axes=2),
    "aten.avg_pool3d_backward.default": functools.partial(_average_backward, axes=3),
    "aten.max_pool2d_with_indices_backward.default": functools.partial(_max_pool_backward, axes=2),
    "aten.max_pool3d_with_indices_backward.default": functools.partial(_max_pool_backward, axes=3),
    "aten.div.Tensor_mode": _divides,
    "aten.div.Scalar_mode": _divides,
    "aten.nll_loss_backward.default": _nll_loss_backward,
    "aten.nll_loss2d_backward.default": _nll_loss_backward,
    "aten.reflection_pad2d_backward.default": _pad_backward,
    "aten.replication_pad2d_backward.default": _pad_backward,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default": _fake_quantize,
    "aten._fake_quantize_learnable_per_tensor_affine.default": functools.partial(
        _fake_quantize_learned, per_channel=False
    ),
    "aten._fake_quantize_learnable_per_tensor_affine_backward.default": functools.partial(
        _fake_quantize_learned, per_channel=False
    ),
    "aten._fake_quantize_learnable_per_channel_affine.default": functools.partial(
        _fake_quantize_learned, per_channel=True
    ),
    "aten._fake_quantize_learnable_per_channel_affine_backward.default": functools.partial(
        _fake_quantize_learned, per_channel=True
    ),
    "aten.mkldnn_rnn_layer.default": _rnn_layer,
    "aten.mkldnn_rnn_layer_backward.default": _rnn_layer_backward,
}
