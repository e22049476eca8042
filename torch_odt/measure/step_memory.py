"""Memory over one step, by what it is for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from torch_odt import memory
from torch_odt.measure.record import CATEGORIES, Trace

_NAMES = {
    "parameter": "weights", "gradient": "gradients", "optimizer": "optimizer", "activation": "activations",
    "workspace": "workspace", "other": "other",
}  # fmt: skip
_LOOK_SECONDS = 0.0005
# So much of the peak may be missed without another look, or a note.
_WORTH_TELLING = 0.01
_MOST_STEPS, _MOST_SECONDS = 20, 1.0


@dataclass
class StepMemory:
    """Bytes of all tensors over a step.

    Attributes:
        at_seconds: of each reading, from the step's start.
        bytes: by `CATEGORIES`, one number for each reading; their sum is what is allocated.
        process_bytes: what the process held at each reading.
        peak_bytes: what the allocator counts as the most of the step.
        notes: what is to be known of it.
    """

    at_seconds: list[float] = field(default_factory=list)
    bytes: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in CATEGORIES})
    process_bytes: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, at_seconds: float, counts: Mapping[str, int], process_bytes: int) -> None:
        self.at_seconds.append(at_seconds)
        self.process_bytes.append(process_bytes)
        for name in CATEGORIES:
            self.bytes[name].append(counts[name])

    @property
    def at_peak(self) -> dict[str, int]:
        """The bytes of each category at the moment of the most."""
        totals = [sum(counts) for counts in zip(*self.bytes.values(), strict=True)]
        if not totals:
            return {}
        where = totals.index(max(totals))
        return {name: counts[where] for name, counts in self.bytes.items()}

    @property
    def misses_bytes(self) -> int:
        """What the highest reading is below the peak; 0 where that is next to nothing."""
        missed = self.peak_bytes - sum(self.at_peak.values())
        return missed if missed > _WORTH_TELLING * self.peak_bytes else 0

    def traces(self, *, base_bytes: int = 0, most_points: int = 600) -> list[Trace]:
        """One trace for each category and one for the process, thinned out; the moment of the tensors' peak stays.

        Args:
            base_bytes: what the process held before the step was made: its trace is above that.
        """
        kept = self._kept(most_points)
        seconds = [round(self.at_seconds[index], 6) for index in kept]
        above = [max(0, held - base_bytes) for held in self.process_bytes]
        return [
            Trace(quantity="memory", label=name, unit="bytes", at_seconds=seconds, values=[counts[i] for i in kept])
            for name, counts in {**self.bytes, "process": above}.items()
        ]

    def _kept(self, most_points: int) -> Sequence[int]:
        """The highest reading of every so many."""
        totals = [sum(counts) for counts in zip(*self.bytes.values(), strict=True)]
        stride = max(1, -(-len(totals) // most_points))
        groups = [range(start, min(start + stride, len(totals))) for start in range(0, len(totals), stride)]
        return [max(group, key=totals.__getitem__) for group in groups]


def follow_operators(step: Callable[[], Any]) -> StepMemory | None:
    """Makes one step of plain PyTorch and reads the allocator after each operator.

    What an operator holds until it ends is "workspace". None where nothing is tracked.
    """
    if not memory.is_tracking():
        return None
    follower = _Follower()
    with follower:
        step()
    return follower.found


class _Follower(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = StepMemory()
        self._start = time.perf_counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        memory.reset_peak()
        result = func(*args, **(kwargs or {}))
        stats = memory.stats()
        counts = _counts(stats)
        # An operator's result may have begun as part of its workspace: what is there afterwards is not counted twice.
        transient = max(0, (stats.peak_bytes or 0) - (stats.allocated_bytes or 0))
        now, held_bytes = time.perf_counter() - self._start, memory.process_bytes()
        if transient:
            self.found.add(now, {**counts, "workspace": counts["workspace"] + transient}, held_bytes)
        self.found.add(now, counts, held_bytes)
        self.found.peak_bytes = max(self.found.peak_bytes, stats.peak_bytes or 0)
        return result


def sample(step: Callable[[], Any]) -> StepMemory | None:
    """Makes a step and reads the allocator from another thread, twice a millisecond as far as threads are let.

    For steps whose operators must not be watched one by one, because they run by a plan. Of a short one little may be
    seen: it is made again until its peak is, and the one of which most was seen counts. None where nothing is tracked.
    """
    if not memory.is_tracking():
        return None
    end = time.perf_counter() + _MOST_SECONDS
    found = _sampled(step)
    for _ in range(_MOST_STEPS - 1):
        if not found.misses_bytes or time.perf_counter() > end:
            break
        found = min(found, _sampled(step), key=lambda each: each.misses_bytes)
    if found.misses_bytes:
        found.notes.append(f"the allocator's own peak is {found.misses_bytes} bytes above what was seen in a step")
    return found


def _sampled(step: Callable[[], Any]) -> StepMemory:
    found, ended = StepMemory(), threading.Event()
    start = time.perf_counter()

    def look() -> None:
        while not ended.is_set():
            found.add(time.perf_counter() - start, _counts(memory.stats()), memory.process_bytes())
            ended.wait(_LOOK_SECONDS)

    memory.reset_peak()
    thread = threading.Thread(target=look, name="torch_odt step memory", daemon=True)
    thread.start()
    try:
        step()
    finally:
        ended.set()
        thread.join()
    found.peak_bytes = memory.stats().peak_bytes or 0
    return found


def _counts(stats: memory.MemoryStats) -> dict[str, int]:
    by_category = stats.by_category or {}
    return {name: by_category[ours].allocated_bytes for ours, name in _NAMES.items()}
