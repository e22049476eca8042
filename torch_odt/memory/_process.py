"""What the process holds and what it may still have, asked of the operating system."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

SYSTEM_ROOT = Path("/")

# Version 1 has no word for "unlimited": it reports the largest page-aligned number. Nothing real comes near.
UNLIMITED_BYTES = 1 << 60


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _read_bytes(path: Path) -> int | None:
    """A number from a control file; None if it is absent or says "max"."""
    text = (_read_text(path) or "").strip()
    return int(text) if text.isdigit() else None


def _field(text: str | None, name: str) -> int | None:
    """The number behind a name in a file of `name value` lines."""
    for line in (text or "").splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def _status_bytes(root: Path, name: str) -> int | None:
    kib = _field(_read_text(root / "proc/self/status"), name)
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
    anonymous = _status_bytes(root, "RssAnon")
    if anonymous is None:
        return int(psutil.Process().memory_info().rss)
    return anonymous + (_status_bytes(root, "RssShmem") or 0)


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
        children.update((_read_text(listing) or "").split())
    fields = (_field(_read_text(root / "proc" / pid / "smaps_rollup"), "Private_Dirty") for pid in children)
    return sum(kib * 1024 for kib in fields if kib is not None)


def _levels(mount: Path, path: str) -> Iterator[Path]:
    """A cgroup's folder and those of all that contain it, up to the mount.

    Inside a container the path may name folders that only the host can see; the mount itself is then the container's.
    """
    relative = PurePosixPath(path.lstrip("/"))
    if ".." not in relative.parts:
        for part in (relative, *relative.parents):
            if part != PurePosixPath("."):
                yield mount / part
    yield mount


def _headroom_v2(folder: Path) -> int | None:
    limits = [_read_bytes(folder / "memory.max"), _read_bytes(folder / "memory.high")]
    known = [limit for limit in limits if limit is not None]
    used = _read_bytes(folder / "memory.current")
    if not known or used is None:
        return None
    reclaimable = _field(_read_text(folder / "memory.stat"), "inactive_file") or 0
    return max(0, min(known) - max(0, used - reclaimable))


def _headroom_v1(folder: Path) -> int | None:
    limit = _read_bytes(folder / "memory.limit_in_bytes")
    used = _read_bytes(folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= UNLIMITED_BYTES:
        return None
    reclaimable = _field(_read_text(folder / "memory.stat"), "total_inactive_file") or 0
    return max(0, limit - max(0, used - reclaimable))


def _cgroup_headrooms(root: Path) -> dict[str, int]:
    """The smallest headroom of the process's control group and all that contain it, by version."""
    found: dict[str, int] = {}
    for line in (_read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            # In a hybrid system the unified hierarchy has a mount of its own and no memory controller.
            source, mount, headroom_of = "cgroup_v2", root / "sys/fs/cgroup", _headroom_v2
        elif "memory" in controllers.split(","):
            source, mount, headroom_of = "cgroup_v1", root / "sys/fs/cgroup/memory", _headroom_v1
        else:
            continue
        headrooms = [headroom_of(folder) for folder in _levels(mount, path)]
        known = [headroom for headroom in headrooms if headroom is not None]
        if known:
            found[source] = min(known)
    return found


def _rlimit_headrooms(root: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for source, limit, field in (
        ("rlimit_as", resource.RLIMIT_AS, "VmSize"),
        ("rlimit_data", resource.RLIMIT_DATA, "VmData"),
    ):
        soft_bytes, _ = resource.getrlimit(limit)
        used_bytes = _status_bytes(root, field)
        if soft_bytes != resource.RLIM_INFINITY and used_bytes is not None:
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
    system = {"system": int(psutil.virtual_memory().available)}
    return system | _cgroup_headrooms(root) | _rlimit_headrooms(root)


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
