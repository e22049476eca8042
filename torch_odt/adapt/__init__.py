"""Train less of a model, and hold less for it.

Verbs change a model in place and return an `Adaptation`, which says what trains and takes the change back. The online
ones leave the model alone and return a layer behind it, which learns from a stream.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_odt.adapt.adaptation import Adaptation, Footprint
    from torch_odt.adapt.add_lite_residuals import add_lite_residuals_
    from torch_odt.adapt.bias_only import bias_only_
    from torch_odt.adapt.blocks import Blockwise, Stage, blockwise
    from torch_odt.adapt.contributions import Contributions, FineTuning, measure_contributions
    from torch_odt.adapt.detached_batch_norm import DetachedBatchNorm
    from torch_odt.adapt.distillation import DistillationLoss, distillation_loss
    from torch_odt.adapt.drift import FadingMean, PageHinkley
    from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm
    from torch_odt.adapt.heterofl import MaskedCrossEntropy, estimate_batch_norm_, heterofl_
    from torch_odt.adapt.hints import WithHints
    from torch_odt.adapt.outputs_writer import store_outputs
    from torch_odt.adapt.running_statistics import RunningStatistics
    from torch_odt.adapt.scheme import Scheme
    from torch_odt.adapt.scheme_memory import SchemeMemory
    from torch_odt.adapt.scheme_search import FoundScheme, search_scheme
    from torch_odt.adapt.sparse_update import sparse_update_
    from torch_odt.adapt.split_mix import Mix
    from torch_odt.adapt.stored_outputs import StoredOutputs
    from torch_odt.adapt.stream_autoencoder import AnomalyStep, OnlineAutoencoder, online_autoencoder
    from torch_odt.adapt.stream_head import OnlineHead, OnlineStep, online_head
    from torch_odt.adapt.sub_model import SubModel
    from torch_odt.adapt.sub_model_merge import ClientUpdate, merge_sub_models
    from torch_odt.adapt.tinytl import tinytl_

__all__ = [
    "Adaptation",
    "AnomalyStep",
    "Blockwise",
    "ClientUpdate",
    "Contributions",
    "DetachedBatchNorm",
    "DistillationLoss",
    "FadingMean",
    "FineTuning",
    "Footprint",
    "FoundScheme",
    "FrozenBatchNorm",
    "MaskedCrossEntropy",
    "Mix",
    "OnlineAutoencoder",
    "OnlineHead",
    "OnlineStep",
    "PageHinkley",
    "RunningStatistics",
    "Scheme",
    "SchemeMemory",
    "Stage",
    "StoredOutputs",
    "SubModel",
    "WithHints",
    "add_lite_residuals_",
    "bias_only_",
    "blockwise",
    "distillation_loss",
    "estimate_batch_norm_",
    "heterofl_",
    "measure_contributions",
    "merge_sub_models",
    "online_autoencoder",
    "online_head",
    "search_scheme",
    "sparse_update_",
    "store_outputs",
    "tinytl_",
]

# Loaded when first used.
_LAZY = {
    "Adaptation": "adaptation",
    "AnomalyStep": "stream_autoencoder",
    "Blockwise": "blocks",
    "ClientUpdate": "sub_model_merge",
    "Contributions": "contributions",
    "DetachedBatchNorm": "detached_batch_norm",
    "DistillationLoss": "distillation",
    "FadingMean": "drift",
    "FineTuning": "contributions",
    "Footprint": "adaptation",
    "FoundScheme": "scheme_search",
    "FrozenBatchNorm": "frozen_batch_norm",
    "MaskedCrossEntropy": "heterofl",
    "Mix": "split_mix",
    "OnlineAutoencoder": "stream_autoencoder",
    "OnlineHead": "stream_head",
    "OnlineStep": "stream_head",
    "PageHinkley": "drift",
    "RunningStatistics": "running_statistics",
    "Scheme": "scheme",
    "SchemeMemory": "scheme_memory",
    "Stage": "blocks",
    "StoredOutputs": "stored_outputs",
    "SubModel": "sub_model",
    "WithHints": "hints",
    "add_lite_residuals_": "add_lite_residuals",
    "bias_only_": "bias_only",
    "blockwise": "blocks",
    "distillation_loss": "distillation",
    "estimate_batch_norm_": "heterofl",
    "heterofl_": "heterofl",
    "measure_contributions": "contributions",
    "merge_sub_models": "sub_model_merge",
    "online_autoencoder": "stream_autoencoder",
    "online_head": "stream_head",
    "search_scheme": "scheme_search",
    "sparse_update_": "sparse_update",
    "store_outputs": "outputs_writer",
    "tinytl_": "tinytl",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
