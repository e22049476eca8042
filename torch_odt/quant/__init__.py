"""Train in int8: post-training quantization to a graph that trains, and the methods that keep its accuracy."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__: list[str] = []

_LAZY: dict[str, str] = {}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
