"""Batch splitting (Mandheling): an operator whose tensors outgrow the cache runs in parts of its batch.

D. Xu et al., MobiCom 2022. There each part is rescaled on its own, and the parts are aligned to the largest exponent
afterwards, which rounds twice. Here the parts share the exponent that is held, and where a check finds that one part
outgrows it, all are computed anew: the bits are those of the operator in one piece.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
SMALLEST = 1 << 20  # what is assumed where the system tells nothing
# What the int32 result of a weight's gradient holds whatever the operands are.
MOST_PIXELS = 65535
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cache_bytes(folder: Path = CACHES) -> int:
    """The bytes of the last cache that belongs to one core, which is what an operator's working set should fit into.

    Args:
        folder: where Linux describes the caches of a core; elsewhere the system is asked for its second level's size.

    Example:
        >>> cache_bytes() > 0
        True
    """
    found: dict[int, int] = {}
    for cache in sorted(folder.glob("index*")):
        try:
            if (cache / "type").read_text().strip() == "Instruction":
                continue
            found[int((cache / "level").read_text())] = _bytes((cache / "size").read_text().strip())
        except (OSError, ValueError):
            continue
    if 2 in found:
        return found[2]
    name = "SC_LEVEL2_CACHE_SIZE"
    told = os.sysconf(name) if name in os.sysconf_names else 0
    return max(found.values(), default=0) or max(told, 0) or SMALLEST


def parts_of(batch: int, sample_bytes: int, weight_bytes: int, part_bytes: int) -> list[slice]:
    """Slices of a batch, each of which fits into so many bytes together with the weight; a sample is never cut.

    Args:
        batch: samples.
        sample_bytes: what one of them reads and writes.
        weight_bytes: what all of them read.
        part_bytes: what there is; 0 does not split.

    Example:
        >>> parts_of(5, 100, 50, 250)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    if not batch or not part_bytes or batch * sample_bytes + weight_bytes <= part_bytes:
        return [slice(0, batch)]
    size = max(1, (part_bytes - weight_bytes) // max(sample_bytes, 1))
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Parts of a batch in one tensor, in channels_last where they have rows and columns."""
    return parts[0] if len(parts) == 1 else torch.cat(parts).contiguous(memory_format=torch.channels_last)


def _bytes(size: str) -> int:
    return int(size[:-1]) * _UNITS[size[-1]] if size and size[-1] in _UNITS else int(size)
