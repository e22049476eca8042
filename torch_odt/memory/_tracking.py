"""The tracking allocator's public verbs; every one is a defined no-op where the extension is missing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import torch

from torch_odt import _extensions
from torch_odt.errors import OdtWarning
from torch_odt.memory._units import parse_bytes

CategoryName = Literal["parameter", "gradient", "optimizer", "activation", "workspace", "other"]
CATEGORIES: tuple[CategoryName, ...] = get_args(CategoryName)


@dataclass(frozen=True)
class CategoryStats:
    """Bytes of one category, now and at its own peak."""

    allocated_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class ArenaStats:
    """All arenas of the process together.

    Attributes:
        reserved_bytes: address space set aside; it costs nothing until it is touched.
        live_bytes, live_blocks: what is in use in it.
        resident_bytes: memory behind it: the high water mark since it was last released.
        held_bytes: the part of that which was made resident before a step, so that no other program can have it.
        hits: allocations served at the address that the plan gave them.
        smaller: those of them that took less than the plan had room for.
        misses: allocations that the plan had no room for and that became ordinary ones, by reason.
        dynamic_hits, dynamic_misses: the same for allocations without a plan.
        yields: how often an idle arena gave its pages back to make room.
    """

    reserved_bytes: int
    live_bytes: int
    live_blocks: int
    resident_bytes: int
    held_bytes: int
    hits: int
    smaller: int
    misses: Mapping[str, int]
    dynamic_hits: int
    dynamic_misses: int
    yields: int


@dataclass(frozen=True)
class MemoryStats:
    """What the tracking allocator has counted; every count is None where nothing is tracked.

    Attributes:
        tracking: the allocator is installed.
        allocated_bytes: bytes of live tensors, exactly as requested.
        peak_bytes: the most there have been since the last `reset_peak`.
        outside_bytes: the part of `allocated_bytes` that does not live in an arena.
        allocation_count: allocations since `install`.
        by_category: bytes by what they were allocated for.
        arena: all arenas together.
    """

    tracking: bool
    allocated_bytes: int | None = None
    peak_bytes: int | None = None
    outside_bytes: int | None = None
    allocation_count: int | None = None
    by_category: Mapping[str, CategoryStats] | None = None
    arena: ArenaStats | None = None


def install() -> bool:
    """Puts the tracking allocator in the place of torch's own.

    When to choose it: first thing in a program that wants its memory counted or capped. Tensors that exist already are
    not counted, but may be freed at any time.

    Returns:
        Whether tracking is on now: False where the extension is missing.

    Example:
        >>> install() == (stats().allocated_bytes is not None)
        True
    """
    if _extensions.memory_module is None:
        return False
    _extensions.memory_module.install()
    return True


def uninstall() -> bool:
    """Restores the allocator that `install` replaced. Tensors allocated in between live on.

    Returns:
        Whether it was installed: False if there was nothing to do.

    Raises:
        RuntimeError: tensors live in an arena, which only this allocator can free.
    """
    module = _extensions.memory_module
    return module is not None and bool(module.uninstall())


def is_tracking() -> bool:
    """Whether torch's CPU allocations are counted now."""
    module = _extensions.memory_module
    return module is not None and bool(module.is_installed())


def stats() -> MemoryStats:
    """What is allocated on the CPU, in bytes, now and at the peak.

    When to choose it: to see what the tensors of a program need. It costs a few microseconds.

    Returns:
        A snapshot. Where nothing is tracked its counts are None, never 0.

    Example:
        >>> import torch
        >>> if install():
        ...     reset_peak()
        ...     x = torch.zeros(1024, 1024)
        ...     assert stats().peak_bytes >= x.nbytes
    """
    module = _extensions.memory_module
    if module is None or not module.is_installed():
        return MemoryStats(tracking=False)
    raw = module.stats()
    arena = dict(raw["arena"])
    arena["misses"] = MappingProxyType(arena["misses"])
    return MemoryStats(
        tracking=True,
        allocated_bytes=raw["allocated_bytes"],
        peak_bytes=raw["peak_bytes"],
        outside_bytes=raw["outside_bytes"],
        allocation_count=raw["allocation_count"],
        by_category=MappingProxyType({name: CategoryStats(**count) for name, count in raw["by_category"].items()}),
        arena=ArenaStats(**arena),
    )


def reset_peak() -> None:
    """Starts the peaks anew from what is allocated now. Does nothing where nothing is tracked."""
    if _extensions.memory_module is not None:
        _extensions.memory_module.reset_peak()


@contextmanager
def cap(limit: int | str) -> Iterator[None]:
    """Bounds the bytes that are allocated inside the block; what would pass the bound raises and allocates nothing.

    When to choose it: to try out whether something fits, and to fail in Python, where it can be caught, instead of
    being killed. It counts the tensors of the whole process, all threads, that were allocated since `install`. Caps
    nest: the smallest holds. It installs the tracking allocator if need be, and leaves it installed.

    Args:
        limit: bytes, as an int or as text such as "400MiB".

    Raises:
        torch.OutOfMemoryError: inside the block, by the allocation that would pass the cap. Training can go on.
        ValueError: `limit` is not a positive number of bytes.

    Warns:
        OdtWarning: the extension is missing, so that nothing is capped.

    Example:
        >>> with cap("400MiB"):
        ...     x = torch.zeros(1024)
    """
    limit_bytes = parse_bytes(limit)
    module = _extensions.memory_module
    if module is None:
        reason = _extensions.status()["_memory"].reason
        warnings.warn(f"memory is not capped: torch_odt._memory is {reason}", OdtWarning, stacklevel=3)
        yield
        return
    module.install()
    outer_bytes = module.set_cap(limit_bytes)
    if 0 <= outer_bytes < limit_bytes:
        module.set_cap(outer_bytes)
    try:
        yield
    finally:
        module.set_cap(outer_bytes)


def number_of(name: CategoryName) -> int:
    if name not in CATEGORIES:
        raise ValueError(f"unknown category {name!r}: one of {', '.join(CATEGORIES)}")
    return CATEGORIES.index(name)


@contextmanager
def category(name: CategoryName) -> Iterator[None]:
    """Counts what this thread allocates inside the block under a category.

    When to choose it: to see in `stats().by_category` what the bytes are for. Blocks keep their category until they are
    freed, and nest. Threads that torch starts for one operator count under "other".

    Args:
        name: "parameter", "gradient", "optimizer", "activation", "workspace" or "other" (the default outside).

    Raises:
        ValueError: there is no such category.

    Example:
        >>> with category("optimizer"):
        ...     momentum = torch.zeros(1000)
    """
    number = number_of(name)
    module = _extensions.memory_module
    if module is None:
        yield
        return
    outer = module.set_category(number)
    try:
        yield
    finally:
        module.set_category(outer)


def current_category() -> CategoryName:
    """What this thread's allocations count under now."""
    module = _extensions.memory_module
    if module is None:
        return "other"
    number: int = module.set_category(number_of("other"))
    module.set_category(number)
    return CATEGORIES[number]


def set_category(name: CategoryName) -> None:
    """Counts what this thread allocates from now on under a category.

    When to choose it: to put a category back that an interrupt has left, which may come before the block of `category`
    is entered, or when it is left.
    """
    if _extensions.memory_module is not None:
        _extensions.memory_module.set_category(number_of(name))


def tag(tensor: torch.Tensor, name: CategoryName) -> bool:
    """Moves the memory of a tensor that exists to another category.

    Args:
        tensor: any tensor; its whole storage moves.
        name: the category, as for `category`.

    Returns:
        Whether it moved: False if its memory is not tracked.

    Raises:
        ValueError: there is no such category.
    """
    return tagger(name)(tensor)


def tagger(name: CategoryName) -> Callable[[torch.Tensor], bool]:
    """A function that does to any tensor what `tag` does.

    When to choose it: where tensors are tagged by the hundred in each step.

    Raises:
        ValueError: there is no such category.
    """
    number = number_of(name)
    module = _extensions.memory_module
    if module is None:
        return lambda tensor: False
    move = module.tag
    return lambda tensor: bool(move(tensor.untyped_storage().data_ptr(), number))


def tune_malloc() -> bool:
    """Makes the C library return freed blocks of 256 KiB and more to the system at once, for the whole process.

    When to choose it: where what the process holds must follow what is allocated. Left alone, glibc keeps hundreds of
    MiB after a training step, because it raises its thresholds with the largest block freed so far. The price is page
    faults: steps that are not served from an arena become slower. It cannot be undone.

    Returns:
        Whether it took effect: False where the extension is missing or the C library is not glibc.
    """
    module = _extensions.memory_module
    return module is not None and bool(module.tune_malloc())


def trim() -> bool:
    """Returns the free pages of the C library's heap to the system.

    Returns:
        Whether there were any: False also where the extension is missing or the C library is not glibc.
    """
    module = _extensions.memory_module
    return module is not None and bool(module.trim())
