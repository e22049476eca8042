"""The package's own operators, one documented function each.

Every one exists twice: compiled, in csrc, and in plain torch, for installations without a compiler. Importing this
package makes all of them available under `torch.ops.torch_odt`, with shapes for tracing and, where they have one, their
gradients.
"""

from __future__ import annotations

from torch_odt.ops.batch_norm import batch_norm_normalize
from torch_odt.ops.bits import pack_bits, unpack_bits
from torch_odt.ops.fused_batch_norm import batch_norm_act, batch_norm_act_backward, batch_norm_act_normalize
from torch_odt.ops.random_bits import bernoulli_bits

__all__ = [
    "batch_norm_act",
    "batch_norm_act_backward",
    "batch_norm_act_normalize",
    "batch_norm_normalize",
    "bernoulli_bits",
    "pack_bits",
    "unpack_bits",
]
