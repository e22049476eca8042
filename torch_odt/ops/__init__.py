"""The package's own operators, one documented function each.

Every one exists twice: compiled, in csrc, and in plain torch, for installations without a compiler. Importing this
package makes all of them available under `torch.ops.torch_odt`, with shapes for tracing and gradients.
"""

from __future__ import annotations

from torch_odt.ops.batch_norm import batch_norm_normalize

__all__ = ["batch_norm_normalize"]
