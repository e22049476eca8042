"""Memory: what the process holds, and what the allocator counts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch_odt import memory
from torch_odt.measure.meter import Absent, Quantity
from torch_odt.memory._files import SYSTEM_ROOT, field, read_text

if TYPE_CHECKING:
    from torch_odt.measure.window import Window

_KIB = 1024
# What a step holds for a moment must not escape it.
_LOOK_SECONDS = 0.003


class ProcessMemory:
    """What this process holds: the kernel's own highest resident size, and what it cannot take back.

    `peak_resident_bytes` begins anew with the window where the kernel allows it; else it is absent, because the highest
    since the process began says nothing of a window.
    """

    source = "proc"

    def __init__(self, root: Path = SYSTEM_ROOT) -> None:
        self._root = root

    def begin(self) -> None:
        self._is_reset = memory.reset_process_peak(root=self._root)
        self._begin_bytes = memory.process_bytes(root=self._root)
        self._highest = self._begin_bytes

    def poll(self) -> None:
        self._highest = max(self._highest, memory.process_bytes(root=self._root))

    def end(self) -> dict[str, Quantity]:
        self.poll()
        status = self._root / "proc/self/status"
        text = read_text(status)
        peak, of_files = field(text, "VmHWM"), field(text, "RssFile")
        if self._is_reset and peak is not None and of_files is not None:
            # What came and went between two looks; pages of files stay.
            self._highest = max(self._highest, (peak - of_files) * _KIB)
        found: dict[str, Quantity] = {
            "begin_bytes": self._begin_bytes,
            "peak_bytes": self._highest,
            "peak_resident_bytes": Absent(f"{status} has no VmHWM") if peak is None else peak * _KIB,
        }
        if not self._is_reset:
            clear_refs = self._root / "proc/self/clear_refs"
            found["peak_resident_bytes"] = Absent(f"the peak could not be reset by {clear_refs}")
        return found


class AllocatedMemory:
    """What torch allocates, by category, as this package's allocator counts it."""

    source = "allocator"

    def begin(self) -> None:
        memory.install()
        memory.reset_peak()

    def poll(self) -> None:
        """The allocator counts."""

    def end(self) -> dict[str, Quantity]:
        found = memory.stats()
        if found.allocated_bytes is None or found.peak_bytes is None:
            why = Absent("the tracking allocator is not in use: see torch-odt doctor")
            return {"allocated_bytes": why, "peak_allocated_bytes": why}
        by_category = found.by_category or {}
        return {
            "allocated_bytes": found.allocated_bytes,
            "peak_allocated_bytes": found.peak_bytes,
            **{f"peak_{name}_bytes": category.peak_bytes for name, category in by_category.items()},
        }


def memory_window() -> Window:
    """A window that looks at nothing but what this process holds, often."""
    from torch_odt.measure.window import Window

    return Window([ProcessMemory()], poll_seconds=_LOOK_SECONDS)


def levels(window: Window) -> tuple[int, int]:
    """What the process held when a window of `memory_window` began, and the most since."""
    found = window.quantities[ProcessMemory.source]
    begin, peak = found["begin_bytes"], found["peak_bytes"]
    assert isinstance(begin, int) and isinstance(peak, int)
    return begin, peak
