"""Train less of a model, and hold less for it.

Verbs change a model in place and return an `Adaptation`, which says what trains and takes the change back.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_odt.adapt.adaptation import Adaptation, Footprint
    from torch_odt.adapt.bias_only import bias_only_
    from torch_odt.adapt.blocks import Blockwise, Stage, blockwise
    from torch_odt.adapt.contributions import Contributions, FineTuning, measure_contributions
    from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm
    from torch_odt.adapt.heterofl import MaskedCrossEntropy, estimate_batch_norm_, heterofl_
    from torch_odt.adapt.scheme import Scheme
    from torch_odt.adapt.scheme_memory import SchemeMemory
    from torch_odt.adapt.scheme_search import FoundScheme, search_scheme
    from torch_odt.adapt.sparse_update import sparse_update_
    from torch_odt.adapt.split_mix import Mix
    from torch_odt.adapt.sub_model import SubModel
    from torch_odt.adapt.sub_model_merge import ClientUpdate, merge_sub_models
    from torch_odt.adapt.tinytl import tinytl_

__all__ = [
    "Adaptation",
    "Blockwise",
    "ClientUpdate",
    "Contributions",
    "FineTuning",
    "Footprint",
    "FoundScheme",
    "FrozenBatchNorm",
    "MaskedCrossEntropy",
    "Mix",
    "Scheme",
    "SchemeMemory",
    "Stage",
    "SubModel",
    "bias_only_",
    "blockwise",
    "estimate_batch_norm_",
    "heterofl_",
    "measure_contributions",
    "merge_sub_models",
    "search_scheme",
    "sparse_update_",
    "tinytl_",
]

# Loaded when first used.
_LAZY = {
    "Adaptation": "adaptation",
    "Blockwise": "blocks",
    "ClientUpdate": "sub_model_merge",
    "Contributions": "contributions",
    "FineTuning": "contributions",
    "Footprint": "adaptation",
    "FoundScheme": "scheme_search",
    "FrozenBatchNorm": "frozen_batch_norm",
    "MaskedCrossEntropy": "heterofl",
    "Mix": "split_mix",
    "Scheme": "scheme",
    "SchemeMemory": "scheme_memory",
    "Stage": "blocks",
    "SubModel": "sub_model",
    "bias_only_": "bias_only",
    "blockwise": "blocks",
    "estimate_batch_norm_": "heterofl",
    "heterofl_": "heterofl",
    "measure_contributions": "contributions",
    "merge_sub_models": "sub_model_merge",
    "search_scheme": "scheme_search",
    "sparse_update_": "sparse_update",
    "tinytl_": "tinytl",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
