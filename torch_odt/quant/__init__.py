"""Train in int8: post-training quantization to a graph that trains, and the methods that keep its accuracy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_odt.quant.co_scheduling import Placement, measure_placement
    from torch_odt.quant.niti import NitiTraining, niti_
    from torch_odt.quant.niti_functions import niti_cross_entropy
    from torch_odt.quant.niti_sgd import NitiSGD
    from torch_odt.quant.packed_weights import PackedWeights
    from torch_odt.quant.rescaling import Rescaling

__all__ = [
    "NitiSGD",
    "NitiTraining",
    "PackedWeights",
    "Placement",
    "Rescaling",
    "measure_placement",
    "niti_",
    "niti_cross_entropy",
]

_LAZY: dict[str, str] = {
    "NitiSGD": "niti_sgd",
    "NitiTraining": "niti",
    "PackedWeights": "packed_weights",
    "Placement": "co_scheduling",
    "Rescaling": "rescaling",
    "measure_placement": "co_scheduling",
    "niti_": "niti",
    "niti_cross_entropy": "niti_functions",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
