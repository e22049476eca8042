"""Train in int8: post-training quantization to a graph that trains, and the methods that keep its accuracy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_odt.quant.feature_store import FeatureStore, feature_range, store_features
    from torch_odt.quant.filters import filter_scores, kept_filters
    from torch_odt.quant.int8_range import Int8Range
    from torch_odt.quant.int8_weights import load_int8_weights_, restore_float_weights_, store_int8_weights_
    from torch_odt.quant.minilearn import MiniLearn, MiniLearned, minilearn_, train_on_features
    from torch_odt.quant.pruning import Pruning, keep_outputs_, load_pruned_, prune_

__all__ = [
    "FeatureStore",
    "Int8Range",
    "MiniLearn",
    "MiniLearned",
    "Pruning",
    "feature_range",
    "filter_scores",
    "keep_outputs_",
    "kept_filters",
    "load_int8_weights_",
    "load_pruned_",
    "minilearn_",
    "prune_",
    "restore_float_weights_",
    "store_features",
    "store_int8_weights_",
    "train_on_features",
]

_LAZY: dict[str, str] = {
    "FeatureStore": "feature_store",
    "Int8Range": "int8_range",
    "MiniLearn": "minilearn",
    "MiniLearned": "minilearn",
    "Pruning": "pruning",
    "feature_range": "feature_store",
    "filter_scores": "filters",
    "keep_outputs_": "pruning",
    "kept_filters": "filters",
    "load_int8_weights_": "int8_weights",
    "load_pruned_": "pruning",
    "minilearn_": "minilearn",
    "prune_": "pruning",
    "restore_float_weights_": "int8_weights",
    "store_features": "feature_store",
    "store_int8_weights_": "int8_weights",
    "train_on_features": "minilearn",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
