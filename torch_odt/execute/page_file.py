"""The file that a step pages to: where it lies, how large it may become, how fast it is."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from torch_odt._extensions import memory_module
from torch_odt.capture.costs import TransferCosts
from torch_odt.memory._units import format_bytes, parse_bytes
from torch_odt.planning.simulate import Simulation

if TYPE_CHECKING:
    from torch_odt.capture.device import Device

TORN_UPDATES = "a transfer that fails must not leave some parameters updated"
"""Why the optimizer makes its step after the backward pass of a step that pages."""

_SHARE_OF_FREE = 0.5
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_USABLE_SHARE = 0.9
# So long nobody waits for a device that works.
_PATIENCE_SECONDS = 120.0
# Enough for latency not to matter, little enough for a slow card.
_PROBE_BYTES = 2 << 20
_PROBES = 3


@dataclass(frozen=True)
class PageFile:
    """A file to which tensors may go while a step does not need them.

    Choose it where recomputation alone does not reach a budget, or costs more than a transfer. Flash memory wears: a
    step writes what its plan names, each time. The file has no name and is gone with the process.

    Args:
        folder: on a device of its own memory; not in a file system that lies in RAM.
        limit: the most that the file may hold, in bytes or as "2GiB"; half of what is free there if None.
        packs: words that are zero take one bit in the file, at the price of some time of the processor.

    Example:
        >>> PageFile("/data/pages", limit="2GiB").limit
        '2GiB'
    """

    folder: str | Path
    limit: int | str | None = None
    packs: bool = False

    @classmethod
    def of_value(cls, value: str | Path | PageFile | None) -> PageFile | None:
        """What a user may write in its place: a folder, or None for no paging."""
        if value is None or isinstance(value, PageFile):
            return value
        if isinstance(value, (str, Path)):
            return cls(value)
        raise TypeError(f"page_to takes a folder or a PageFile, not {value!r}")


@dataclass(frozen=True)
class OpenPageFile:
    """A page file in use.

    Attributes:
        pager: the compiled one; None where another device is only planned for.
        costs: of transfers, measured, or the device's.
    """

    pager: Any
    costs: TransferCosts


def open_page_file(page_file: PageFile) -> OpenPageFile:
    """Make the file and measure how fast it is.

    Raises:
        NotADirectoryError: there is no such folder.
        ValueError: the folder lies in memory, or has no room, or the limit is no number of bytes.
        RuntimeError: the allocator, and with it the pager, is not built; or no file can be made.
    """
    if memory_module is None:
        raise RuntimeError("paging needs torch_odt's compiled allocator; `torch-odt doctor` says why it is missing")
    folder = Path(page_file.folder)
    if not folder.is_dir():
        raise NotADirectoryError(f"page_to: there is no folder {str(folder)!r}")
    if _file_system(folder) in _IN_MEMORY:
        raise ValueError(
            f"page_to: {str(folder)!r} lies in memory ({_file_system(folder)}): paging there frees nothing"
        )
    free_bytes = shutil.disk_usage(folder).free
    limit_bytes = int(_SHARE_OF_FREE * free_bytes) if page_file.limit is None else parse_bytes(page_file.limit)
    if min(limit_bytes, free_bytes) < _PROBE_BYTES:
        raise ValueError(
            f"page_to: a file in {str(folder)!r} may hold {format_bytes(limit_bytes)}, {format_bytes(free_bytes)} are "
            f"free; {format_bytes(_PROBE_BYTES)} are the least"
        )
    pager = memory_module.Pager(
        os.fspath(folder), limit_bytes, threads=2, packs=page_file.packs, patience_seconds=_PATIENCE_SECONDS
    )
    # Pages of several sizes leave holes in the file.
    return OpenPageFile(pager, _measure(pager, int(_USABLE_SHARE * limit_bytes)))


def page_file_on(page_file: PageFile, device: Device) -> OpenPageFile:
    """The page file of a device that is planned for: nothing is opened here, and its folder need not exist.

    Raises:
        ValueError: the device has no storage, or the limit is no number of bytes.
    """
    storage = device.storage
    if storage is None:
        raise ValueError(f"page_to: {device.description} has no storage to page to")
    if page_file.limit is not None:
        limit_bytes = int(_USABLE_SHARE * parse_bytes(page_file.limit))
        storage = replace(storage, limit_bytes=min(storage.limit_bytes, limit_bytes))
    return OpenPageFile(None, storage)


def paging_notes(simulation: Simulation) -> tuple[str, ...]:
    """What a schedule pages, for people; nothing where it does not."""
    if not simulation.written_bytes:
        return ()
    written, read = format_bytes(simulation.written_bytes), format_bytes(simulation.read_bytes)
    return (f"{written} are paged out and {read} in; operators wait {1000 * simulation.wait_seconds:.0f} ms for it",)


def _measure(pager: Any, limit_bytes: int) -> TransferCosts:
    """Seconds of small and of large transfers, the median of a few, and what follows for others."""
    small_bytes = 4096
    # Not of zeros, which some devices do not store; and nobody's random numbers are drawn for it.
    block = torch.arange(_PROBE_BYTES // 8).mul_(0x9E3779B97F4A7C1).view(torch.uint8)
    target = torch.empty_like(block)
    seconds: dict[tuple[str, int], float] = {}
    for nbytes in (small_bytes, _PROBE_BYTES):
        writes, reads = [], []
        for _ in range(_PROBES):
            start = time.perf_counter()
            page = pager.page_out(block.data_ptr(), nbytes, block)
            page.wait()
            written = time.perf_counter()
            page.page_in(target.data_ptr(), target)
            page.wait()
            reads.append(time.perf_counter() - written)
            writes.append(written - start)
            del page
        seconds["write", nbytes], seconds["read", nbytes] = sorted(writes)[1], sorted(reads)[1]
    speeds = {
        way: (_PROBE_BYTES - small_bytes) / max(seconds[way, _PROBE_BYTES] - seconds[way, small_bytes], 1e-9)
        for way in ("write", "read")
    }
    return TransferCosts(
        write_latency_seconds=seconds["write", small_bytes],
        write_bytes_per_second=speeds["write"],
        read_latency_seconds=seconds["read", small_bytes],
        read_bytes_per_second=speeds["read"],
        limit_bytes=limit_bytes,
    )


def _file_system(folder: Path) -> str:
    """The type of the file system that a folder lies in."""
    resolved = folder.resolve()
    parents = {resolved, *resolved.parents}
    mounted = [p for p in psutil.disk_partitions(all=True) if Path(p.mountpoint) in parents]
    # Of several at one place, the last one is what is seen.
    return max(reversed(mounted), key=lambda p: len(p.mountpoint)).fstype if mounted else ""
