"""Which operators a graph from elsewhere may name.

Many of torch's operators trust their arguments: they open files, follow numbers as addresses, or read past a tensor
that is smaller than they were promised. So only those are taken that traces hold and that have been looked through;
what some of these do not check themselves, `execute.operator_guards` checks before each call.
"""

from __future__ import annotations

from typing import Any

import torch

# Elementwise operators need not be named: torch tags them.
_ATEN_NAMES = """
    alias as_strided detach diagonal expand permute select slice split split_with_sizes squeeze t transpose
    unbind unsafe_split unsafe_split_with_sizes unsqueeze view _unsafe_view lift_fresh as_strided_scatter cat
    clone constant_pad_nd copy fill flip lift_fresh_copy pixel_shuffle pixel_unshuffle repeat roll
    select_backward select_scatter slice_backward slice_scatter stack tril triu _to_copy arange empty empty_like
    eye full full_like linspace new_empty new_empty_strided new_full new_ones new_zeros ones ones_like
    scalar_tensor zeros zeros_like bernoulli exponential native_dropout normal_functional rand rand_like randint
    randint_like randn randn_like randperm uniform all amax amin any argmax argmin cumprod cumsum
    linalg_vector_norm logsumexp max mean median min norm prod sort std std_mean sum topk var var_mean addbmm
    addmm addmv baddbmm bmm dot mm mv _trilinear embedding embedding_dense_backward gather index index_add
    index_copy index_fill index_put index_select scatter scatter_add scatter_reduce _unsafe_index _unsafe_index_put
    convolution convolution_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
    max_pool3d_with_indices_backward reflection_pad1d reflection_pad2d reflection_pad2d_backward
    replication_pad2d replication_pad2d_backward upsample_bilinear2d upsample_bilinear2d_backward
    upsample_nearest2d upsample_nearest2d_backward _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    fake_quantize_per_channel_affine_cachemask _fake_quantize_learnable_per_tensor_affine
    _fake_quantize_learnable_per_tensor_affine_backward _fake_quantize_learnable_per_channel_affine
    _fake_quantize_learnable_per_channel_affine_backward native_batch_norm native_batch_norm_backward
    _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward _log_softmax
    _log_softmax_backward_data _safe_softmax _softmax _softmax_backward_data _prelu_kernel
    _prelu_kernel_backward elu_backward hardsigmoid_backward hardswish hardswish_backward leaky_relu_backward
    hardtanh_backward hardshrink_backward log_sigmoid_backward log_sigmoid_forward mish_backward softplus_backward
    softshrink_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward
    binary_cross_entropy binary_cross_entropy_backward huber_loss huber_loss_backward mse_loss mse_loss_backward
    nll_loss_backward nll_loss_forward nll_loss2d_backward nll_loss2d_forward smooth_l1_loss
    smooth_l1_loss_backward
"""
_OWN_NAMES = """
    batch_norm_act batch_norm_act_backward batch_norm_act_normalize batch_norm_add_act_backward clamp_with_mask
    clamp_with_mask_backward depthwise_conv2d depthwise_conv2d_grad_input depthwise_conv2d_grad_weight
    max_pool2d_with_offsets max_pool2d_with_offsets_backward pointwise_conv2d pointwise_conv2d_grad_input
    pointwise_conv2d_grad_weight stored_pointwise_conv2d stored_pointwise_conv2d_grad_input scale_masked int8_quantize
    int8_dequantize int8_layer int8_layer_to_float int8_layer_backward int8_add int8_multiply
    int8_multiply_backward int8_clamp int8_look_up int8_look_up_backward int8_drop int8_max_pool
    int8_max_pool_backward int8_average_pool int8_average_pool_backward int8_adaptive_average_pool
    int8_adaptive_average_pool_backward int8_concatenate int8_concatenate_backward int8_training_conv2d
    int8_training_conv2d_backward niti_quantize niti_dequantize niti_layer niti_layer_backward niti_add niti_relu
    niti_relu_backward niti_max_pool2d niti_max_pool2d_backward niti_avg_pool2d niti_avg_pool2d_backward
    niti_cross_entropy octo_conv2d octo_conv2d_backward observed_range weight_steps learned_steps
"""
_ATEN, _OWN = frozenset(_ATEN_NAMES.split()), frozenset(_OWN_NAMES.split())
# Words that an operator compares with those that it knows, or names in its errors.
_WORDS = {
    "gelu": "approximate",
    "gelu_backward": "approximate",
    "div": "rounding_mode",
    "scatter": "reduce",
    "scatter_reduce": "reduce",
    "batch_norm_act": "activation",
    "batch_norm_act_backward": "activation",
    "batch_norm_act_normalize": "activation",
    "octo_conv2d": "layer",
    "octo_conv2d_backward": "layer",
    "observed_range": "layer",
    "learned_steps": "layer",
    "weight_steps": "layer",
}
_TYPES = frozenset({"Tensor", "number", "int", "float", "bool", "SymInt"})
_CALLER_TYPES = frozenset({"ScalarType", "Layout", "Device", "MemoryFormat", "Generator"})


def may_be_carried(overload: torch._ops.OpOverload) -> bool:
    """Whether a graph from elsewhere may call an operator: a known one that makes tensors of tensors and numbers."""
    namespace, _, name = overload._schema.name.partition("::")
    if namespace == "aten":
        is_elementwise = torch.Tag.pointwise in overload.tags and not name.startswith("_")
        is_known = is_elementwise or name in _ATEN
    else:
        is_known = namespace == "torch_odt" and name in _OWN
    schema = overload._schema
    if not is_known or schema.is_mutable or not schema.returns:
        return False
    if any(_element(result.type) != "Tensor" for result in schema.returns):
        return False
    return all(
        _element(argument.type) in _TYPES | _CALLER_TYPES
        or (_element(argument.type) == "str" and _WORDS.get(name) == argument.name)
        for argument in schema.arguments
    )


def are_plain(arguments: Any) -> bool:
    """Whether (nested) arguments ask for nothing but ordinary tensors in this machine's memory."""
    if isinstance(arguments, (list, tuple)):
        return all(map(are_plain, arguments))
    if isinstance(arguments, dict):
        return all(map(are_plain, arguments.values()))
    if isinstance(arguments, torch.device):
        return arguments.type == "cpu"
    return not isinstance(arguments, torch.layout) or arguments is torch.strided


def _element(kind: Any) -> str:
    """A schema's type without what says that there may be none of it, or several."""
    while isinstance(kind, (torch.OptionalType, torch.ListType)):
        kind = kind.getElementType()
    return str(kind)
