"""What this process holds, as the kernel counts it (Linux)."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def status() -> dict[str, int]:
    """VmRSS, VmHWM, RssAnon, RssFile and RssShmem in bytes."""
    wanted = {"VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem"}
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[0][:-1] in wanted}


def anonymous() -> int:
    """Bytes that the kernel cannot take back."""
    now = status()
    return now["RssAnon"] + now["RssShmem"]


def reset_high_water_mark() -> None:
    """Start VmHWM anew from the present resident size."""
    _CLEAR.write_text("5")


def settle() -> None:
    """Return what is free already, so that the level below a measurement is the lowest there is."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Sampler(threading.Thread):
    """Samples the anonymous memory every five milliseconds and keeps the highest."""

    def __init__(self, seconds: float = 0.005) -> None:
        super().__init__(daemon=True)
        self.highest = 0
        self._seconds = seconds
        self._done = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        while not self._done.wait(self._seconds):
            self._look()

    def reset(self) -> int:
        """The highest so far; starts anew."""
        self._look()
        with self._lock:
            highest, self.highest = self.highest, 0
        return highest

    def finish(self) -> int:
        """Stop sampling; returns the highest since the last reset."""
        self._done.set()
        self.join()
        return self.reset()

    def _look(self) -> None:
        seen = anonymous()
        with self._lock:
            self.highest = max(self.highest, seen)
