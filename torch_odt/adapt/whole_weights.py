"""Layers whose weight stays a tensor of its own, because something beside the layer's own call reads it."""

from __future__ import annotations

import functools
import inspect
import re

from torch import nn


def reader_of(model: nn.Module, name: str) -> str | None:
    """What else reads the weight of the layer of that name: one that shares it, or what the layer is a part of.

    `nn.TransformerEncoderLayer` in evaluation, `nn.MultiheadAttention` and torchvision's Swin never call some of their
    layers, and compute with the layers' tensors. It is looked for in the code of the class, `self.qkv.weight` for the
    layer `qkv`.

    Returns:
        Its name in words, for an error or a note; None where nothing else does.

    Example:
        >>> model = nn.TransformerEncoderLayer(8, 2, 16)
        >>> reader_of(model, "linear1")
        'TransformerEncoderLayer'
        >>> reader_of(nn.Sequential(nn.Linear(4, 4)), "0") is None
        True
    """
    layer = model.get_submodule(name)
    weight = layer._parameters.get("weight")
    for other_name, other in model.named_modules():
        if other is not layer and any(each is weight for each in other._parameters.values() if weight is not None):
            return f"{other_name or 'the model'}, which shares it"
    parent, _, attribute = name.rpartition(".")
    kind = type(model.get_submodule(parent))
    # Classes can be hashed, though nn.Module's instances hash in their own way.
    return kind.__name__ if attribute in _read_layers(kind) else None  # type: ignore[arg-type]


@functools.cache
def _read_layers(kind: type[nn.Module]) -> frozenset[str]:
    """Attributes whose weight the class reads, but for where it makes or initialises them."""
    found: set[str] = set()
    for base in kind.__mro__:
        if not issubclass(base, nn.Module) or base is nn.Module:
            continue
        for method in vars(base).values():
            if not inspect.isfunction(method) or "init" in method.__name__ or "reset" in method.__name__:
                continue
            try:
                source = inspect.getsource(method)
            except (OSError, TypeError):
                # Code that was typed in has none.
                continue
            found.update(re.findall(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape)\b)", source))
    return frozenset(found)
