"""Train in int8: post-training quantization to a graph that trains, and the methods that keep its accuracy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_odt.quant.fake_quant import fake_quantize_
    from torch_odt.quant.octo import Octo, octo_

__all__ = [
    "Octo",
    "fake_quantize_",
    "octo_",
]

# Loaded when first used.
_LAZY = {
    "Octo": "octo",
    "fake_quantize_": "fake_quant",
    "octo_": "octo",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
