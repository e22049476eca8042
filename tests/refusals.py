"""Allocations that are refused on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_odt._extensions import memory_module


@contextmanager
def refused(after: int, *, lasts: bool = False) -> Iterator[None]:
    """The allocation that comes after so many others is refused; all behind it as well if that lasts."""
    assert memory_module is not None
    memory_module.refuse_after(after, lasts)
    try:
        yield
    finally:
        memory_module.refuse_after(-1)
