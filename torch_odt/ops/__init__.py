"""The package's own operators, one documented function each.

Every one exists twice: compiled, in csrc, and in plain torch, for installations without a compiler. Importing this
package makes all of them available under `torch.ops.torch_odt`, with shapes for tracing and, where they have one, their
gradients.
"""

from __future__ import annotations

from torch_odt.ops.batch_norm import batch_norm_normalize
from torch_odt.ops.bits import pack_bits, unpack_bits
from torch_odt.ops.depthwise import depthwise_conv2d, depthwise_conv2d_grad_input, depthwise_conv2d_grad_weight
from torch_odt.ops.fused_batch_norm import (
    batch_norm_act,
    batch_norm_act_backward,
    batch_norm_act_normalize,
    batch_norm_add_act_backward,
)
from torch_odt.ops.int8_arguments import (
    ConvolutionGradients,
    Quantized,
    QuantizedGradient,
    WeightGradient,
)
from torch_odt.ops.int8_backward import int8_conv2d_backward
from torch_odt.ops.int8_convolution import (
    int8_conv2d,
    int8_conv2d_quantized,
    int8_conv2d_scaled,
)
from torch_odt.ops.int8_descent import int8_descend_
from torch_odt.ops.int8_gradients import (
    int8_conv2d_grad_input,
    int8_conv2d_grad_input_quantized,
    int8_conv2d_grad_input_scaled,
    int8_conv2d_grad_weight,
    int8_conv2d_grad_weight_scaled,
    int8_conv2d_update_weight_,
)
from torch_odt.ops.int8_integers import int8_keep_between, int8_shift_sums, int8_take_off_
from torch_odt.ops.int8_linear_layers import (
    int8_linear,
    int8_linear_grad_input,
    int8_linear_grad_input_quantized,
    int8_linear_grad_input_scaled,
    int8_linear_grad_weight,
    int8_linear_grad_weight_scaled,
    int8_linear_quantized,
    int8_linear_scaled,
    int8_linear_update_weight_,
)
from torch_odt.ops.int8_packing import (
    PackedInt8Weight,
    int8_pack_weight,
)
from torch_odt.ops.int8_rows import (
    Int8Gradient,
    int8_quantize_gradient,
    int8_store_rounded_,
)
from torch_odt.ops.int8_training import int8_training_conv2d
from torch_odt.ops.masked import (
    clamp_with_mask,
    clamp_with_mask_,
    clamp_with_mask_backward,
    clamp_with_mask_backward_,
    scale_masked,
)
from torch_odt.ops.max_pool import max_pool2d_with_offsets, max_pool2d_with_offsets_backward
from torch_odt.ops.overwriting_batch_norm import batch_norm_act_backward_, batch_norm_add_act_backward_
from torch_odt.ops.pointwise import (
    pointwise_conv2d,
    pointwise_conv2d_grad_input,
    pointwise_conv2d_grad_weight,
    stored_pointwise_conv2d,
    stored_pointwise_conv2d_grad_input,
)
from torch_odt.ops.random_bits import bernoulli_bits

__all__ = [
    "ConvolutionGradients",
    "Int8Gradient",
    "PackedInt8Weight",
    "Quantized",
    "QuantizedGradient",
    "WeightGradient",
    "batch_norm_act",
    "batch_norm_act_backward",
    "batch_norm_act_backward_",
    "batch_norm_act_normalize",
    "batch_norm_add_act_backward",
    "batch_norm_add_act_backward_",
    "batch_norm_normalize",
    "bernoulli_bits",
    "clamp_with_mask",
    "clamp_with_mask_",
    "clamp_with_mask_backward",
    "clamp_with_mask_backward_",
    "depthwise_conv2d",
    "depthwise_conv2d_grad_input",
    "depthwise_conv2d_grad_weight",
    "int8_conv2d",
    "int8_conv2d_backward",
    "int8_conv2d_grad_input",
    "int8_conv2d_grad_input_quantized",
    "int8_conv2d_grad_input_scaled",
    "int8_conv2d_grad_weight",
    "int8_conv2d_grad_weight_scaled",
    "int8_conv2d_quantized",
    "int8_conv2d_scaled",
    "int8_conv2d_update_weight_",
    "int8_descend_",
    "int8_keep_between",
    "int8_linear",
    "int8_linear_grad_input",
    "int8_linear_grad_input_quantized",
    "int8_linear_grad_input_scaled",
    "int8_linear_grad_weight",
    "int8_linear_grad_weight_scaled",
    "int8_linear_quantized",
    "int8_linear_scaled",
    "int8_linear_update_weight_",
    "int8_pack_weight",
    "int8_quantize_gradient",
    "int8_shift_sums",
    "int8_store_rounded_",
    "int8_take_off_",
    "int8_training_conv2d",
    "max_pool2d_with_offsets",
    "max_pool2d_with_offsets_backward",
    "pack_bits",
    "pointwise_conv2d",
    "pointwise_conv2d_grad_input",
    "pointwise_conv2d_grad_weight",
    "scale_masked",
    "stored_pointwise_conv2d",
    "stored_pointwise_conv2d_grad_input",
    "unpack_bits",
]
