"""Train in int8: post-training quantization to a graph that trains, and the methods that keep its accuracy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_odt.quant.convert import Conversion, convert_, dequantize_
    from torch_odt.quant.qas import Int8Training, scale_gradients_, train_int8_
    from torch_odt.quant.saturated import Saturation, saturation

__all__ = [
    "Conversion",
    "Int8Training",
    "Saturation",
    "convert_",
    "dequantize_",
    "saturation",
    "scale_gradients_",
    "train_int8_",
]

# Loaded when first used.
_LAZY: dict[str, str] = {
    "Conversion": "convert",
    "Int8Training": "qas",
    "Saturation": "saturated",
    "convert_": "convert",
    "dequantize_": "convert",
    "saturation": "saturated",
    "scale_gradients_": "qas",
    "train_int8_": "qas",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
