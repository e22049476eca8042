"""A memory control group for a child process, of version 1 or 2."""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class ControlGroup:
    """A new group with a memory limit; remove it with `close`.

    Raises:
        OSError: groups cannot be made here; the text says why.
    """

    def __init__(self) -> None:
        self._version_1 = (ROOT / "memory" / "memory.limit_in_bytes").exists()
        parent = ROOT / "memory" if self._version_1 else ROOT
        if not self._version_1 and not (ROOT / "cgroup.controllers").exists():
            raise OSError(f"no memory control groups under {ROOT}")
        self.path = parent / f"torch_odt_test_{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        if not (self.path / self._limit_name).exists():
            self.path.rmdir()
            raise OSError(f"the memory controller is not enabled for the children of {parent}")

    @property
    def _limit_name(self) -> str:
        return "memory.limit_in_bytes" if self._version_1 else "memory.max"

    def limit(self, limit_bytes: int) -> None:
        """Memory, page cache included, and no swap beside it."""
        (self.path / self._limit_name).write_text(str(limit_bytes))
        # Absent where the kernel does not account for swap: then there is none to forbid.
        with contextlib.suppress(OSError):
            swap, most = ("memory.memsw.limit_in_bytes", limit_bytes) if self._version_1 else ("memory.swap.max", 0)
            (self.path / swap).write_text(str(most))

    def unreclaimable_bytes(self) -> int:
        """What the group holds without page cache: anonymous and shared memory, by the kernel's own statistics."""
        fields = self._statistics()
        if self._version_1:
            return fields["total_rss"] + fields.get("total_shmem", 0)
        return fields["anon"] + fields["shmem"]

    def cached_bytes(self) -> int:
        """The page cache that counts as the group's."""
        fields = self._statistics()
        return fields["total_cache"] - fields.get("total_shmem", 0) if self._version_1 else fields["file"]

    def used_bytes(self) -> int:
        """What it holds, without pages of files that the kernel would drop first."""
        used, dropped = (
            ("memory.usage_in_bytes", "total_inactive_file") if self._version_1 else ("memory.current", "inactive_file")
        )
        return int((self.path / used).read_text()) - self._statistics()[dropped]

    def events(self) -> dict[str, int]:
        """How often it was short of memory."""
        if not self._version_1:
            return self._pairs("memory.events")
        kills = self._pairs("memory.oom_control")["oom_kill"]
        return {"failcnt": int((self.path / "memory.failcnt").read_text()), "oom_kill": kills}

    def _statistics(self) -> dict[str, int]:
        return self._pairs("memory.stat")

    def _pairs(self, name: str) -> dict[str, int]:
        lines = (line.split() for line in (self.path / name).read_text().splitlines())
        return {name: int(value) for name, value in lines}

    def close(self) -> None:
        """Remove the group; its processes must have ended."""
        for _ in range(50):
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)
