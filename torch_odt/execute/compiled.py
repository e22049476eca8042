"""Models that torch.compile has been at."""

from __future__ import annotations

import sys

import torch
from torch import nn


def is_compiled(model: nn.Module) -> bool:
    """Whether it is what torch.compile returned, around the model itself."""
    return "torch._dynamo" in sys.modules and isinstance(model, torch._dynamo.OptimizedModule)


def refuse_compiled(model: nn.Module) -> None:
    """Raises TypeError for a model that calls torch.compile's code: what is planned is the model itself."""
    if is_compiled(model):
        raise TypeError("the model is what torch.compile returned; hand in the model itself, which is captured here")
    if model._compiled_call_impl is not None:
        raise TypeError("model.compile() or wrap was called on the model; hand in one that is not compiled")
