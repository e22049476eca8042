"""A model's weights in a few characters."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


def weights_digest(model: nn.Module, prefix: str = "", *, but: str | None = None) -> str:
    """The same for the same names, shapes, types and bits of a model's parameters and buffers, and for no others.

    Args:
        prefix: what else is to make a difference.
        but: the name of a module whose own make none.
    """
    digest = hashlib.sha256(prefix.encode())
    for name, tensor in model.state_dict().items():
        if but is not None and f"{name}.".startswith(f"{but}."):
            continue
        if isinstance(tensor, Tensor):
            add_to_digest(digest, name, tensor)
        else:
            # What a module keeps by get_extra_state.
            digest.update(f"{name} {tensor!r}".encode())
    return digest.hexdigest()[:16]


def add_to_digest(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    """A tensor's name, shape, type and bits."""
    digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
