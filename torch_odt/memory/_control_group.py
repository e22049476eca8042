"""The control groups that limit this process, version 1 and 2: how much they allow, and how much of it is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from torch_odt.memory._files import SYSTEM_ROOT, field, read_number, read_text

# Version 1 has no word for "unlimited": it reports the largest page-aligned number. Nothing real comes near.
UNLIMITED_BYTES = 1 << 60

Version = Literal["cgroup_v2", "cgroup_v1"]


@dataclass(frozen=True)
class ControlGroupLevel:
    """A control group on the way from the process to the root.

    Attributes:
        limit_bytes: what all its processes may take together; None where it does not limit.
        used_bytes: what they take, pages of files that the kernel can drop left out; None where it does not limit, or
            does not say.
    """

    folder: Path
    limit_bytes: int | None
    used_bytes: int | None

    @property
    def headroom_bytes(self) -> int | None:
        """What is left; None where it does not limit."""
        if self.limit_bytes is None or self.used_bytes is None:
            return None
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class ControlGroup:
    """The process's group in one hierarchy; `levels` are it and all that contain it, from the inside out."""

    version: Version
    levels: tuple[ControlGroupLevel, ...]


def control_groups(*, root: Path = SYSTEM_ROOT) -> list[ControlGroup]:
    """The groups that could limit this process's memory.

    Args:
        root: where `proc` and `sys` lie, for tests.
    """
    found: list[ControlGroup] = []
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            # In a hybrid system the unified hierarchy has a mount of its own and no memory controller.
            levels = map(_level_v2, _folders(root / "sys/fs/cgroup", path))
            found.append(ControlGroup("cgroup_v2", tuple(levels)))
        elif "memory" in controllers.split(","):
            levels = map(_level_v1, _folders(root / "sys/fs/cgroup/memory", path))
            found.append(ControlGroup("cgroup_v1", tuple(levels)))
    return found


def _folders(mount: Path, path: str) -> Iterator[Path]:
    """A group's folder and those of all that contain it, up to the mount.

    Inside a container the path may name folders that only the host can see; the mount itself is then the container's.
    """
    relative = PurePosixPath(path.lstrip("/"))
    if ".." not in relative.parts:
        for part in (relative, *relative.parents):
            if part != PurePosixPath("."):
                yield mount / part
    yield mount


def _level_v2(folder: Path) -> ControlGroupLevel:
    limits = [read_number(folder / "memory.max"), read_number(folder / "memory.high")]
    limit = min((limit for limit in limits if limit is not None), default=None)
    return ControlGroupLevel(folder, limit, None if limit is None else _used(folder, "memory.current", "inactive_file"))


def _level_v1(folder: Path) -> ControlGroupLevel:
    limit = read_number(folder / "memory.limit_in_bytes")
    if limit is None or limit >= UNLIMITED_BYTES:
        return ControlGroupLevel(folder, None, None)
    return ControlGroupLevel(folder, limit, _used(folder, "memory.usage_in_bytes", "total_inactive_file"))


def _used(folder: Path, usage: str, reclaimable: str) -> int | None:
    used_bytes = read_number(folder / usage)
    if used_bytes is None:
        return None
    return max(0, used_bytes - (field(read_text(folder / "memory.stat"), reclaimable) or 0))
