"""Numbers for CPU memory: what is allocated, what the peak was, and a cap that raises instead of waking the OOM killer.

The counts come from an allocator that takes the place of torch's own (`install`). It sees every tensor that torch
allocates from then on. It does not see memory that torch did not allocate: arrays of numpy, mapped checkpoints, shared
memory, buffers inside libraries. For what the process holds in total, ask `process_bytes`.
"""

from __future__ import annotations

from torch_odt.memory._phantom import phantom_tensor
from torch_odt.memory._process import (
    available,
    available_detail,
    children_bytes,
    most_resident_bytes,
    peak_process_bytes,
    process_bytes,
    reset_process_peak,
)
from torch_odt.memory._tracking import (
    ArenaStats,
    CategoryName,
    CategoryStats,
    MemoryStats,
    cap,
    category,
    install,
    is_tracking,
    reset_peak,
    stats,
    tag,
    trim,
    tune_malloc,
    uninstall,
)

__all__ = [
    "ArenaStats",
    "CategoryName",
    "CategoryStats",
    "MemoryStats",
    "available",
    "available_detail",
    "cap",
    "category",
    "children_bytes",
    "install",
    "is_tracking",
    "most_resident_bytes",
    "peak_process_bytes",
    "phantom_tensor",
    "process_bytes",
    "reset_peak",
    "reset_process_peak",
    "stats",
    "tag",
    "trim",
    "tune_malloc",
    "uninstall",
]
