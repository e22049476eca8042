"""Train less of a model, and hold less for it.

Verbs change a model in place and return an `Adaptation`, which says what trains and takes the change back. The online
ones leave the model alone and return a layer behind it, which learns from a stream.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_odt.adapt.adaptation import Adaptation, Footprint
    from torch_odt.adapt.bias_only import bias_only_
    from torch_odt.adapt.blocks import Blockwise, Stage, blockwise
    from torch_odt.adapt.contributions import Contributions, FineTuning, measure_contributions
    from torch_odt.adapt.distillation import DistillationLoss, distillation_loss
    from torch_odt.adapt.drift import FadingMean, PageHinkley
    from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm
    from torch_odt.adapt.hints import WithHints
    from torch_odt.adapt.outputs_writer import store_outputs
    from torch_odt.adapt.running_statistics import RunningStatistics
    from torch_odt.adapt.scheme import Scheme
    from torch_odt.adapt.scheme_memory import SchemeMemory
    from torch_odt.adapt.scheme_search import FoundScheme, search_scheme
    from torch_odt.adapt.sparse_update import sparse_update_
    from torch_odt.adapt.stored_outputs import StoredOutputs
    from torch_odt.adapt.stream_autoencoder import AnomalyStep, OnlineAutoencoder, online_autoencoder
    from torch_odt.adapt.stream_head import OnlineHead, OnlineStep, online_head
    from torch_odt.adapt.tinytl import tinytl_

__all__ = [
    "Adaptation",
    "AnomalyStep",
    "Blockwise",
    "Contributions",
    "DistillationLoss",
    "FadingMean",
    "FineTuning",
    "Footprint",
    "FoundScheme",
    "FrozenBatchNorm",
    "OnlineAutoencoder",
    "OnlineHead",
    "OnlineStep",
    "PageHinkley",
    "RunningStatistics",
    "Scheme",
    "SchemeMemory",
    "Stage",
    "StoredOutputs",
    "WithHints",
    "bias_only_",
    "blockwise",
    "distillation_loss",
    "measure_contributions",
    "online_autoencoder",
    "online_head",
    "search_scheme",
    "sparse_update_",
    "store_outputs",
    "tinytl_",
]

# Loaded when first used.
_LAZY = {
    "Blockwise": "blocks",
    "Stage": "blocks",
    "blockwise": "blocks",
    "Adaptation": "adaptation",
    "AnomalyStep": "stream_autoencoder",
    "Contributions": "contributions",
    "FadingMean": "drift",
    "FineTuning": "contributions",
    "DistillationLoss": "distillation",
    "Footprint": "adaptation",
    "FoundScheme": "scheme_search",
    "FrozenBatchNorm": "frozen_batch_norm",
    "OnlineAutoencoder": "stream_autoencoder",
    "OnlineHead": "stream_head",
    "OnlineStep": "stream_head",
    "PageHinkley": "drift",
    "RunningStatistics": "running_statistics",
    "Scheme": "scheme",
    "SchemeMemory": "scheme_memory",
    "StoredOutputs": "stored_outputs",
    "WithHints": "hints",
    "bias_only_": "bias_only",
    "distillation_loss": "distillation",
    "measure_contributions": "contributions",
    "online_autoencoder": "stream_autoencoder",
    "online_head": "stream_head",
    "search_scheme": "scheme_search",
    "sparse_update_": "sparse_update",
    "store_outputs": "outputs_writer",
    "tinytl_": "tinytl",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
