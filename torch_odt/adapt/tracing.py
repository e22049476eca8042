"""Traces by `torch.fx` in which layers of this package are layers, and which leave the model as it was."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx, nn

from torch_odt.adapt.adaptation import StoresWeight
from torch_odt.adapt.frozen_batch_norm import FrozenBatchNorm
from torch_odt.adapt.sparse_layers import SparseLayer

_LAYERS = (FrozenBatchNorm, SparseLayer, StoresWeight)


class LayerTracer(fx.Tracer):
    """As `torch.fx.Tracer`.

    Args:
        whole: names of further modules that are not looked into.
    """

    def __init__(self, whole: Collection[str] = ()) -> None:
        super().__init__()
        self._whole = whole

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_layer = isinstance(m, _LAYERS) or module_qualified_name in self._whole
        return is_layer or super().is_leaf_module(m, module_qualified_name)
