"""Train in int8: post-training quantization to a graph that trains, and the methods that keep its accuracy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_odt.quant.co_scheduling import Placement, measure_placement
    from torch_odt.quant.convert import Conversion, convert_, dequantize_
    from torch_odt.quant.fake_quant import fake_quantize_
    from torch_odt.quant.feature_store import FeatureStore, feature_range, store_features
    from torch_odt.quant.filters import filter_scores, kept_filters
    from torch_odt.quant.int8_range import Int8Range
    from torch_odt.quant.int8_weights import load_int8_weights_, restore_float_weights_, store_int8_weights_
    from torch_odt.quant.minilearn import MiniLearn, MiniLearned, minilearn_, train_on_features
    from torch_odt.quant.niti import NitiTraining, niti_
    from torch_odt.quant.niti_functions import niti_cross_entropy
    from torch_odt.quant.niti_sgd import NitiSGD
    from torch_odt.quant.octo import Octo, octo_
    from torch_odt.quant.packed_weights import PackedWeights
    from torch_odt.quant.pruning import Pruning, keep_outputs_, load_pruned_, prune_
    from torch_odt.quant.qas import Int8Training, scale_gradients_, train_int8_
    from torch_odt.quant.rescaling import Rescaling
    from torch_odt.quant.saturated import Saturation, saturation

__all__ = [
    "Conversion",
    "FeatureStore",
    "Int8Range",
    "Int8Training",
    "MiniLearn",
    "MiniLearned",
    "NitiSGD",
    "NitiTraining",
    "Octo",
    "PackedWeights",
    "Placement",
    "Pruning",
    "Rescaling",
    "Saturation",
    "convert_",
    "dequantize_",
    "fake_quantize_",
    "feature_range",
    "filter_scores",
    "keep_outputs_",
    "kept_filters",
    "load_int8_weights_",
    "load_pruned_",
    "measure_placement",
    "minilearn_",
    "niti_",
    "niti_cross_entropy",
    "octo_",
    "prune_",
    "restore_float_weights_",
    "saturation",
    "scale_gradients_",
    "store_features",
    "store_int8_weights_",
    "train_int8_",
    "train_on_features",
]

_LAZY: dict[str, str] = {
    "Conversion": "convert",
    "FeatureStore": "feature_store",
    "Int8Range": "int8_range",
    "Int8Training": "qas",
    "MiniLearn": "minilearn",
    "MiniLearned": "minilearn",
    "NitiSGD": "niti_sgd",
    "NitiTraining": "niti",
    "Octo": "octo",
    "PackedWeights": "packed_weights",
    "Placement": "co_scheduling",
    "Pruning": "pruning",
    "Rescaling": "rescaling",
    "Saturation": "saturated",
    "convert_": "convert",
    "dequantize_": "convert",
    "fake_quantize_": "fake_quant",
    "feature_range": "feature_store",
    "filter_scores": "filters",
    "keep_outputs_": "pruning",
    "kept_filters": "filters",
    "load_int8_weights_": "int8_weights",
    "load_pruned_": "pruning",
    "measure_placement": "co_scheduling",
    "minilearn_": "minilearn",
    "niti_": "niti",
    "niti_cross_entropy": "niti_functions",
    "octo_": "octo",
    "prune_": "pruning",
    "restore_float_weights_": "int8_weights",
    "saturation": "saturated",
    "scale_gradients_": "qas",
    "store_features": "feature_store",
    "store_int8_weights_": "int8_weights",
    "train_int8_": "qas",
    "train_on_features": "minilearn",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
