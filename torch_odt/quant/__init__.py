"""Train in int8: post-training quantization to a graph that trains, and the methods that keep its accuracy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_odt.quant.filters import filter_scores, kept_filters
    from torch_odt.quant.pruning import Pruning, load_pruned_, prune_

__all__ = [
    "Pruning",
    "filter_scores",
    "kept_filters",
    "load_pruned_",
    "prune_",
]

_LAZY: dict[str, str] = {
    "Pruning": "pruning",
    "filter_scores": "filters",
    "kept_filters": "filters",
    "load_pruned_": "pruning",
    "prune_": "pruning",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
