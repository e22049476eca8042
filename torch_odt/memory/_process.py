"""What the process holds and what it may still have, asked of the operating system."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from torch_odt.memory._control_group import ControlGroup, control_groups
from torch_odt.memory._files import SYSTEM_ROOT, field, read_text


def _status_bytes(root: Path, name: str) -> int | None:
    kib = field(read_text(root / "proc/self/status"), name)
    return None if kib is None else kib * 1024


def process_bytes(*, root: Path = SYSTEM_ROOT) -> int:
    """What this process holds and the kernel cannot take back: anonymous and shared memory, in bytes.

    When to choose it: to compare with a budget. Clean pages of files (the code of torch's libraries) are not counted,
    because the kernel drops them when memory is short.

    Args:
        root: where `proc` lies, for tests.

    Returns:
        RssAnon + RssShmem on Linux. Elsewhere the whole resident size, which is more.
    """
    status = read_text(root / "proc/self/status")
    anonymous_kib = field(status, "RssAnon")
    if anonymous_kib is None:
        return int(psutil.Process().memory_info().rss)
    return (anonymous_kib + (field(status, "RssShmem") or 0)) * 1024


def peak_process_bytes(*, root: Path = SYSTEM_ROOT) -> int:
    """The most that was resident since the process began or since `reset_process_peak`, in bytes.

    The kernel keeps this mark for all resident pages together, those of files included, so it is above `process_bytes`
    even when nothing has been freed. Compare it with its own value from before.

    Args:
        root: where `proc` lies, for tests.

    Returns:
        VmHWM on Linux, otherwise the resource usage's maximum, which cannot be reset.
    """
    peak = _status_bytes(root, "VmHWM")
    if peak is not None:
        return peak
    return most_resident_bytes()


def most_resident_bytes() -> int:
    """The most that was resident at any time since the last `reset_process_peak`, in bytes.

    When to choose it: to see within a microsecond that a process is far from a limit, before `process_bytes` asks.

    Returns:
        The resource usage's maximum, which begins with that of the program that started this one, and may lag behind
        what is held now by the pages that processors have not yet counted.
    """
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def reset_process_peak(*, root: Path = SYSTEM_ROOT) -> bool:
    """Starts the mark of `peak_process_bytes` anew from what is resident now.

    Args:
        root: where `proc` lies, for tests.

    Returns:
        Whether it was possible: False where the kernel has no such mark or does not permit it.
    """
    path = root / "proc/self/clear_refs"
    if not path.exists():
        return False
    try:
        path.write_text("5")
    except OSError:
        return False
    return True


def children_bytes(*, root: Path = SYSTEM_ROOT) -> int:
    """What this process's children hold for themselves and share with nobody, in bytes.

    When to choose it: to count the workers of a DataLoader where they share a limit with the process.

    Args:
        root: where `proc` lies, for tests.

    Returns:
        The sum of their private pages that the kernel cannot take back; 0 where the system does not say.
    """
    children: set[str] = set()
    for listing in (root / "proc/self/task").glob("*/children"):
        children.update((read_text(listing) or "").split())
    fields = (field(read_text(root / "proc" / pid / "smaps_rollup"), "Private_Dirty") for pid in children)
    return sum(kib * 1024 for kib in fields if kib is not None)


def _control_group_headrooms(groups: Sequence[ControlGroup]) -> dict[str, int]:
    """The smallest headroom of the process's control group and all that contain it, by version."""
    found: dict[str, int] = {}
    for group in groups:
        headrooms = [level.headroom_bytes for level in group.levels if level.headroom_bytes is not None]
        if headrooms:
            found[group.version] = min(headrooms)
    return found


def _rlimit_headrooms(root: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for source, limit, name in (
        ("rlimit_as", resource.RLIMIT_AS, "VmSize"),
        ("rlimit_data", resource.RLIMIT_DATA, "VmData"),
    ):
        soft_bytes, _ = resource.getrlimit(limit)
        if soft_bytes == resource.RLIM_INFINITY:
            continue
        used_bytes = _status_bytes(root, name)
        if used_bytes is not None:
            found[source] = max(0, soft_bytes - used_bytes)
    return found


def available_detail(*, root: Path = SYSTEM_ROOT) -> dict[str, int]:
    """How many more bytes this process may have, by who limits it.

    When to choose it: to explain `available`.

    Args:
        root: where `proc` and `sys` lie, for tests.

    Returns:
        "system" (what the machine has free), "cgroup_v2" and "cgroup_v1" (the tightest control group above this
        process), "rlimit_as" and "rlimit_data" (limits of the process). What does not exist, or does not limit, is
        absent.

    Example:
        >>> sorted(available_detail())[-1]
        'system'
    """
    return limits_of(int(psutil.virtual_memory().available), control_groups(root=root), root=root)


def limits_of(system_bytes: int, groups: Sequence[ControlGroup], *, root: Path = SYSTEM_ROOT) -> dict[str, int]:
    """What `available_detail` says, where the system and the groups have been asked already."""
    return {"system": system_bytes} | _control_group_headrooms(groups) | _rlimit_headrooms(root)


def available(*, root: Path = SYSTEM_ROOT) -> int:
    """How many more bytes this process may have: the smallest of all limits that hold for it.

    When to choose it: to decide how much to spend. The operating system promises nothing: leave a reserve, as the
    budget "auto" does.

    Args:
        root: where `proc` and `sys` lie, for tests.

    Returns:
        Bytes, from `available_detail`.
    """
    return min(available_detail(root=root).values())
