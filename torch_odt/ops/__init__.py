"""The package's own operators, one documented function each.

Every one exists twice: compiled, in csrc, and in plain torch, for installations without a compiler. Importing this
package makes all of them available under `torch.ops.torch_odt`, with shapes for tracing and, where they have one, their
gradients.
"""

from __future__ import annotations

from torch_odt.ops.batch_norm import batch_norm_normalize
from torch_odt.ops.bits import pack_bits, unpack_bits
from torch_odt.ops.fused_batch_norm import (
    batch_norm_act,
    batch_norm_act_backward,
    batch_norm_act_normalize,
    batch_norm_add_act_backward,
)
from torch_odt.ops.masked import clamp_with_mask, clamp_with_mask_backward, scale_masked
from torch_odt.ops.max_pool import max_pool2d_with_offsets, max_pool2d_with_offsets_backward
from torch_odt.ops.overwriting_batch_norm import batch_norm_act_backward_, batch_norm_add_act_backward_
from torch_odt.ops.random_bits import bernoulli_bits

__all__ = [
    "batch_norm_act",
    "batch_norm_act_backward",
    "batch_norm_act_backward_",
    "batch_norm_act_normalize",
    "batch_norm_add_act_backward",
    "batch_norm_add_act_backward_",
    "batch_norm_normalize",
    "bernoulli_bits",
    "clamp_with_mask",
    "clamp_with_mask_backward",
    "max_pool2d_with_offsets",
    "max_pool2d_with_offsets_backward",
    "pack_bits",
    "scale_masked",
    "unpack_bits",
]
