"""A window of time in which several meters measure."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from torch_odt.measure.clock import Clock, Events, Pressure
from torch_odt.measure.devices import DeviceMemory
from torch_odt.measure.energy import Battery, Board, Nvml, Rapl
from torch_odt.measure.memory import AllocatedMemory, ProcessMemory
from torch_odt.measure.meter import Absent, Meter, Quantity
from torch_odt.measure.processors import Frequency, Temperature, Utilization
from torch_odt.memory._files import SYSTEM_ROOT

POLL_SECONDS = 0.1


def find_meters(root: Path = SYSTEM_ROOT, *, device: str = "cpu") -> list[Meter]:
    """A meter of every kind; those that find no sensor say so in what they return.

    Args:
        device: on which what is measured computes, as torch names it.
    """
    return [
        Clock(),
        Events(),
        Pressure(root),
        ProcessMemory(root),
        AllocatedMemory(),
        DeviceMemory(device),
        Utilization(),
        Frequency(root),
        Temperature(root),
        Rapl(root),
        Board(root),
        Battery(root),
        Nvml(device),
    ]


class Window:
    """Measures what happens inside a `with` block.

    Choose it to measure a piece of code with whatever this machine can measure. The meters are polled from a thread,
    which takes a tenth of a per cent of a processor or so.

    Args:
        meters: by default one of every kind.
        poll_seconds: how often meters look.

    Attributes:
        quantities: what was measured, by source and name, once the block has ended.

    Example:
        >>> with Window([Clock()]) as window:
        ...     _ = sum(range(1000))
        >>> sorted(window.quantities["clock"])
        ['system_seconds', 'user_seconds', 'wall_seconds']
    """

    def __init__(self, meters: Sequence[Meter] | None = None, *, poll_seconds: float = POLL_SECONDS) -> None:
        if not poll_seconds > 0:
            raise ValueError(f"poll_seconds={poll_seconds}: it is a time above 0")
        self._meters = find_meters() if meters is None else list(meters)
        self._poll_seconds = poll_seconds
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self.quantities: dict[str, dict[str, Quantity]] = {}

    def __enter__(self) -> Window:
        if self._thread is not None:
            raise RuntimeError("a window is opened once: make another one")
        for meter in self._meters:
            meter.begin()
        self._thread = threading.Thread(target=self._poll, name="torch_odt meters", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._thread is not None
        self._ended.set()
        self._thread.join()
        # In the order in which they began: the clock is first, and what others take to end is not in it.
        for meter in self._meters:
            found = self.quantities.setdefault(meter.source, {})
            try:
                found.update(meter.end())
            except Exception as failure:
                self._failed = self._failed or failure
        if self._failed is not None and kind is None:
            raise self._failed

    def record(self) -> dict[str, dict[str, int | float | dict[str, str]]]:
        """What was measured, as JSON has it: what is absent is `{"absent": reason}`."""
        return {
            source: {name: {"absent": q.reason} if isinstance(q, Absent) else q for name, q in quantities.items()}
            for source, quantities in self.quantities.items()
        }

    def _poll(self) -> None:
        try:
            while not self._ended.wait(self._poll_seconds):
                for meter in self._meters:
                    meter.poll()
        except BaseException as error:
            self._failed = error
