"""The process's memory as the operating system counts it, read in the background while something runs."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from torch_odt.memory import children_bytes, process_bytes

INTERVAL_SECONDS = 0.005
CHILDREN_INTERVAL_SECONDS = 0.25


class MemoryGauge:
    """Samples what this process holds (anonymous and shared pages) and remembers the most.

    Choose it to compare programs of any kind: it knows nothing of allocators or plans. What lasts less than its
    interval may escape it.

    Attributes:
        base_bytes: the level when it was started.
        peak_bytes: the highest level since.
        children_bytes: what child processes (workers, a capture on the side) hold for themselves now.
        children_peak_bytes: the most that they held.
        family_peak_bytes: the highest level of process and children together.
    """

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self.base_bytes = self.peak_bytes = self.family_peak_bytes = process_bytes()
        self.children_bytes = self.children_peak_bytes = 0
        self._interval_seconds = interval_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory gauge", daemon=True)

    def __enter__(self) -> MemoryGauge:
        self.base_bytes = self.peak_bytes = self.family_peak_bytes = process_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def now_bytes(self) -> int:
        """The level at this moment."""
        return self._sample()

    def _sample(self) -> int:
        level = process_bytes()
        self.peak_bytes = max(self.peak_bytes, level)
        self.family_peak_bytes = max(self.family_peak_bytes, level + self.children_bytes)
        return level

    def _watch(self) -> None:
        children_due = 0.0
        while not self._stopped.wait(self._interval_seconds):
            if time.monotonic() >= children_due:
                self.children_bytes = children_bytes()
                self.children_peak_bytes = max(self.children_peak_bytes, self.children_bytes)
                children_due = time.monotonic() + CHILDREN_INTERVAL_SECONDS
            self._sample()
