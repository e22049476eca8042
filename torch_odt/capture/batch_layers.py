"""How the batch axis goes through layers and losses, and through their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch_odt.capture.batch_rules import rule
from torch_odt.capture.batch_state import (
    SAMPLES,
    Call,
    NotSeparable,
    Operand,
    State,
    Unit,
    align,
    contracted,
    linear,
    require_exact,
    scaled,
)

_MEAN, _SUM = 1, 2


def _optional(call: Call, *names: str) -> list[Operand]:
    return [operand for name in names if isinstance(operand := call.micro[name], Operand)]


def _leading(call: Call, operands: Iterable[Operand], dim: int = 0) -> State:
    """The state when every operand has the batch at `dim`; "same" when none has a batch."""
    operands = list(operands)
    if all(operand.kind == "same" for operand in operands):
        return State("same")
    if any(operand.kind != "slice" or operand.axis != (dim, operands[0].state.outer) for operand in operands):
        raise call.refuse("does not have the batch where it is expected")
    return State("slice", dim, outer=operands[0].state.outer)


def _require_same(call: Call, operands: Iterable[Operand], what: str) -> None:
    operands = list(operands)
    require_exact(call, operands)
    if any(operand.kind != "same" for operand in operands):
        raise call.refuse(f"has {what} that differ from sample to sample")


def _as_part(state: State) -> State:
    """The state of a weight's gradient, given the one of the gradient that flows back."""
    return State("part", scale=state.scale) if state.kind == "slice" else state


# Convolutions


@rule("convolution", "torch_odt::depthwise_conv2d", "torch_odt::pointwise_conv2d")
def _convolution(call: Call) -> State:
    return _convolved(call, call.operand("weight"))


@rule("torch_odt::stored_pointwise_conv2d")
def _stored_convolution(call: Call) -> State:
    return _convolved(call, call.operand("codes"), call.operand("scale"))


def _convolved(call: Call, *weights: Operand) -> State:
    operand, bias = call.operand("input"), _optional(call, "bias")
    _require_same(call, [*weights, *bias], "weights")
    if bias:
        require_exact(call, [operand])
    return linear(call, operand, weights, lambda: _leading(call, [operand]))


@rule("convolution_backward")
def _convolution_backward(call: Call) -> list[State]:
    gradient, operand, weight = (call.operand(n) for n in ("grad_output", "input", "weight"))
    _require_same(call, [weight], "weights")
    state = linear(call, gradient, [operand], lambda: _leading(call, [gradient, operand]))
    return [state, _as_part(state), _as_part(state)]


@rule("torch_odt::depthwise_conv2d_grad_input", "torch_odt::pointwise_conv2d_grad_input")
def _convolution_grad_input(call: Call) -> State:
    return _propagated(call, call.operand("weight"))


@rule("torch_odt::stored_pointwise_conv2d_grad_input")
def _stored_convolution_grad_input(call: Call) -> State:
    return _propagated(call, call.operand("codes"), call.operand("scale"))


def _propagated(call: Call, *weights: Operand) -> State:
    gradient = call.operand("grad_output")
    _require_same(call, weights, "weights")
    return linear(call, gradient, [], lambda: _leading(call, [gradient]))


@rule("torch_odt::depthwise_conv2d_grad_weight", "torch_odt::pointwise_conv2d_grad_weight")
def _convolution_grad_weight(call: Call) -> State:
    gradient, operand = call.operand("grad_output"), call.operand("input")
    return _as_part(linear(call, gradient, [operand], lambda: _leading(call, [gradient, operand])))


# Normalisation


@rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(call: Call) -> State:
    operand = call.operand("input")
    _require_same(
        call, _optional(call, "weight", "bias") if "bias" in call.micro else _optional(call, "weight"), "weights"
    )
    require_exact(call, [operand])
    _require_before_normalised(call, operand)
    return operand.state


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(call: Call) -> list[State]:
    gradient, operand = call.operand("grad_out"), call.operand("input")
    saved = _optional(call, *(n for n in ("mean", "rstd") if n in call.micro))
    _require_same(call, _optional(call, *(n for n in ("weight", "bias") if n in call.micro)), "weights")
    _require_before_normalised(call, operand)
    state = linear(call, gradient, [operand, *saved], lambda: align(call, [gradient, operand, *saved], operand.ndim))
    return [state, _as_part(state), _as_part(state)][: len(call.results)]


def _require_before_normalised(call: Call, operand: Operand) -> None:
    if operand.kind == "slice" and operand.dim >= operand.ndim - len(call.micro["normalized_shape"]):
        raise call.refuse("takes its statistics over the whole batch")


@rule("native_group_norm", free=("N",))
def _group_norm(call: Call) -> State:
    operand = call.operand("input")
    _require_same(call, _optional(call, "weight", "bias"), "weights")
    require_exact(call, [operand])
    return _leading(call, [operand])


@rule("native_group_norm_backward", free=("N",))
def _group_norm_backward(call: Call) -> list[State]:
    gradient, *data = (call.operand(n) for n in ("grad_out", "input", "mean", "rstd"))
    _require_same(call, _optional(call, "weight"), "weights")
    state = linear(call, gradient, data, lambda: _leading(call, [gradient, *data]))
    return [state, _as_part(state), _as_part(state)]


@rule("_native_batch_norm_legit_no_training", "native_batch_norm", "_native_batch_norm_legit_functional")
@rule("_native_batch_norm_legit.no_stats", "_native_batch_norm_legit")
def _batch_norm(call: Call) -> list[State]:
    operand, others = call.operand("input"), call.operands[1:]
    require_exact(call, call.operands)
    if call.micro.get("training", False):
        channels = _batch_as_channels(call, [operand], others)
        return [operand.state, channels, channels, *[State("opaque")] * (len(call.results) - 3)]
    _require_same(call, others, "weights")
    return [_leading(call, [operand]), *[State("same")] * (len(call.results) - 1)]


@rule("native_batch_norm_backward")
def _batch_norm_backward(call: Call) -> list[State]:
    gradient, operand = call.operand("grad_out"), call.operand("input")
    others = _optional(call, "weight", "running_mean", "running_var", "save_mean", "save_invstd")
    require_exact(call, [operand, *others])
    if call.micro["train"]:
        channels = replace(_batch_as_channels(call, [gradient, operand], others), scale=gradient.state.scale)
        return [gradient.state, channels, channels]
    _require_same(call, others, "weights")
    state = linear(call, gradient, [operand], lambda: _leading(call, [gradient, operand]))
    return [state, _as_part(state), _as_part(state)]


def _batch_as_channels(call: Call, data: list[Operand], others: list[Operand]) -> State:
    """InstanceNorm is a BatchNorm in which every channel of every sample is a channel."""
    if all(operand.kind == "same" for operand in [*data, *others]):
        return State("same")
    if any(operand.kind != "slice" or operand.axis != (1, data[0].state.outer) for operand in data):
        raise NotSeparable("BatchNorm in training mode takes its statistics over the whole batch")
    return _leading(call, others) if others else State("slice", 0, outer=data[0].state.outer)


# Pooling and the like: each sample for itself

_PLANES = [
    "max_pool2d_with_indices",
    "torch_odt::max_pool2d_with_offsets",
    "max_pool3d_with_indices",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "im2col",
    "col2im",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "grid_sampler_2d",
    "grid_sampler_3d",
    "pixel_shuffle",
    "pixel_unshuffle",
    "channel_shuffle",
    "_cdist_forward",
]
_LINEAR_PLANES = [
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "adaptive_avg_pool1d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "mean_pool",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact2d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
]
_PLANES_BACKWARD = [
    "max_pool2d_with_indices_backward",
    "torch_odt::max_pool2d_with_offsets_backward",
    "max_pool3d_with_indices_backward",
    "adaptive_max_pool2d_backward",
    "avg_pool2d_backward",
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "upsample_nearest1d_backward",
    "upsample_nearest2d_backward",
    "upsample_nearest3d_backward",
    "_upsample_nearest_exact2d_backward",
    "upsample_linear1d_backward",
    "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward",
    "_upsample_bilinear2d_aa_backward",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "replication_pad2d_backward",
    "adaptive_max_pool3d_backward",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
]


@rule(*_PLANES)
def _planes(call: Call) -> State:
    require_exact(call, call.operands)
    return _leading(call, _with_space(call))


@rule(*_LINEAR_PLANES, *(f"{n}.vec" for n in _LINEAR_PLANES if "upsample" in n))
@rule(*_PLANES_BACKWARD, free=("input_size",))
def _linear_planes(call: Call) -> State:
    first, *others = _with_space(call)
    return linear(call, first, others, lambda: _leading(call, [first, *others]))


def _with_space(call: Call) -> list[Operand]:
    """The operands, each of which must have an axis of its own for the batch."""
    operands = call.operands
    shuffles = call.name.endswith("shuffle") or call.name in ("im2col", "col2im")
    if any(
        operand.kind == "slice" and operand.ndim < (4 if shuffles and call.name != "col2im" else 3)
        for operand in operands
    ):
        raise call.refuse("does not have the batch where it is expected")
    return operands


# Attention and recurrence


@rule("_scaled_dot_product_flash_attention_for_cpu")
def _attention(call: Call) -> State:
    query, key, value = (call.operand(n) for n in ("query", "key", "value"))
    mask = _optional(call, "attn_mask")
    require_exact(call, [query, key, value, *mask])
    state = _leading(call, [query, key, value])
    return align(call, [query, key, value, *mask], query.ndim) if state.kind == "slice" else _unbatched(call, mask)


def _unbatched(call: Call, mask: list[Operand]) -> State:
    """Attention between tensors without a batch; a mask must not bring one."""
    _require_same(call, mask, "masks")
    return State("same")


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def _attention_backward(call: Call) -> State:
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    gradient, *others = (call.operand(n) for n in names)
    mask = _optional(call, "attn_mask")

    def aligned() -> State:
        state = _leading(call, [gradient, *others])
        align(call, [gradient, *mask], gradient.ndim)
        return state

    return linear(call, gradient, [*others, *mask], aligned)


@rule("mkldnn_rnn_layer")
def _rnn_layer(call: Call) -> list[State]:
    data = [call.operand(n) for n in ("input", "hx_", "cx_")]
    _require_rnn(call)
    require_exact(call, data)
    state = _recurrent(call, data)
    return [*_recurrent_results(call, state, 3), State("opaque")]


@rule("mkldnn_rnn_layer_backward")
def _rnn_layer_backward(call: Call) -> list[State]:
    data = [call.operand(n) for n in ("input", "hx_", "cx_tmp", "output", "hy_", "cy_")]
    _require_rnn(call)
    require_exact(call, data)
    gradients = _optional(call, "grad_output", "grad_hy", "grad_cy")
    for gradient in gradients:
        require_exact(call, [replace(gradient, state=replace(gradient.state, scale=()))])
    scales = {gradient.state.scale for gradient in gradients}
    if len(scales) != 1:
        raise call.refuse("adds values that depend differently on the size of the batch")
    state = replace(_recurrent(call, [*data, *gradients]), scale=scales.pop())
    first, *_, hidden, cell = _recurrent_results(call, state, 7)
    return [first, *[_as_part(state)] * 4, hidden, cell]


def _recurrent(call: Call, operands: list[Operand]) -> State:
    """The batch is the axis before the last one, in sequences as in single states."""
    return _leading(call, [replace(o, state=replace(o.state, dim=o.dim - o.ndim + 3)) for o in operands], 1)


def _recurrent_results(call: Call, state: State, count: int) -> list[State]:
    results = call.results[:count]
    if state.kind != "slice":
        return [state] * count
    return [state if result is None else replace(state, dim=len(result[0].shape) - 2) for result in results]


def _require_rnn(call: Call) -> None:
    _require_same(call, _optional(call, *(n for n in call.micro if n.startswith("weight"))), "weights")
    if call.micro["batch_sizes"]:
        raise call.refuse("works on packed sequences")


@rule("_cdist_backward")
def _cdist_backward(call: Call) -> State:
    gradient, *others = call.operands
    return linear(call, gradient, others, lambda: _leading(call, [gradient, *others]))


# Losses


@rule("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(call: Call) -> list[State]:
    operand, target, weight = call.operand("self"), call.operand("target"), _optional(call, "weight")
    require_exact(call, [operand, target])
    _require_same(call, weight, "weights")
    if operand.kind == "same" and target.kind == "same":
        return [State("same"), State("same")]
    state, reduction = _leading(call, [operand, target]), call.micro["reduction"]
    if weight and reduction == _MEAN:
        raise NotSeparable(
            "the loss is a mean weighted by class, whose divisor depends on the targets of the whole batch"
        )
    unit = Unit(target.root, call.micro["ignore_index"])
    if reduction == _MEAN:
        return [State("part", scale=((unit, 1),)), State("same", scale=((unit, -1),))]
    total = State("part") if reduction == _SUM else State("same")
    return [State("part") if reduction == _SUM else state, total]


@rule("nll_loss_backward", "nll_loss2d_backward")
def _nll_loss_backward(call: Call) -> State:
    gradient, data = call.operand("grad_output"), [call.operand(n) for n in ("self", "target")]
    require_exact(call, data)
    _require_same(call, _optional(call, "weight"), "weights")
    state, scale = _leading(call, data), gradient.state.scale
    if state.kind == "slice" and call.micro["reduction"] == _MEAN:
        scale = scaled(scale, call.operand("total_weight").state.scale, -1)
    return _loss_gradient(call, gradient, replace(state, scale=scale))


def _loss_gradient(call: Call, gradient: Operand, state: State) -> State:
    """A reduced loss has one gradient for all samples, an unreduced one a gradient for each."""
    reduced = call.micro["reduction"] in (_MEAN, _SUM)
    if state.kind == "slice" and gradient.kind != ("same" if reduced else "slice"):
        raise call.refuse("does not get one gradient for the loss of each micro-batch")
    if not reduced and gradient.kind == "slice":
        align(call, [gradient])
    return state


_ELEMENTWISE_LOSSES = ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"]


@rule(*_ELEMENTWISE_LOSSES, "binary_cross_entropy_with_logits")
def _elementwise_loss(call: Call) -> State:
    require_exact(call, call.operands)
    state = align(call, call.operands, max(operand.ndim for operand in call.operands))
    if state.kind == "same" or call.micro["reduction"] not in (_MEAN, _SUM):
        return state
    return State("part", scale=((SAMPLES, 1),) if call.micro["reduction"] == _MEAN else ())


@rule(*(f"{name}_backward" for name in _ELEMENTWISE_LOSSES))
def _elementwise_loss_backward(call: Call) -> State:
    gradient, *data = call.operands
    require_exact(call, data)
    ndim = max(operand.ndim for operand in data)
    state = align(call, data, ndim)
    if call.micro["reduction"] not in (_MEAN, _SUM):
        return linear(call, gradient, data, lambda: align(call, [gradient, *data], ndim))
    scale = gradient.state.scale
    if state.kind == "slice" and call.micro["reduction"] == _MEAN:
        scale = scaled(scale, ((SAMPLES, 1),))
    return _loss_gradient(call, gradient, replace(state, scale=scale))


@rule("linear")
def _linear(call: Call) -> State:
    operand, weight = call.operand("input"), call.operand("weight")
    _require_same(call, _optional(call, "bias"), "weights")
    if call.micro["bias"] is not None:
        require_exact(call, [operand])
    batch = "abcdefgh"[: operand.ndim - 1]
    return contracted(call, f"{batch}y,zy->{batch}z", [operand, weight])


# Integers


@rule("torch_odt::int8_quantize")
def _int8_quantize(call: Call) -> State:
    raise call.refuse("begins a part in int8, whose gradients are rounded to the range of the whole batch")
