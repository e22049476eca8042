"""How an operator of this package gets its plain-torch form and its shapes for tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_odt import _extensions


def register(name: str, schema: str, in_torch: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Make `torch.ops.torch_odt.<name>` complete; without compiled parts, `in_torch` is what it calls.

    Args:
        name: the operator's name.
        schema: its arguments and results, as the compiled parts state them.
        in_torch: the same computation in plain torch.
        fake: the results' shapes, strides and dtypes.
    """
    if not _extensions.has_kernels:
        torch.library.define(f"torch_odt::{name}", schema)
        torch.library.impl(f"torch_odt::{name}", "cpu", in_torch)
    torch.library.register_fake(f"torch_odt::{name}", fake)
