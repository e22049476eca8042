"""Names in torch's profiles for what a profiler cannot tell by itself: which half of a step operators belong to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

BACKWARD = "torch_odt backward"
UPDATE = "Optimizer.step#in the backward pass"


def marked(name: str) -> AbstractContextManager[object]:
    """A block's name in the profile, if there is one; it costs nothing otherwise."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()
