"""When ops and transfers of a schedule happen: transfers go one after the other, beside the ops or between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch_odt.capture.costs import TransferCosts


class Interval(NamedTuple):
    """When something happens."""

    start_seconds: float
    end_seconds: float


class TransferClock:
    """Follows a schedule's time.

    Attributes:
        seconds: now.
        op_seconds: of ops so far.
        wait_seconds: that ops have waited for transfers so far.
        transfer_joules: that transfers, and waiting for them, have taken so far.
    """

    def __init__(self, costs: TransferCosts | None) -> None:
        self.seconds = 0.0
        self.op_seconds = 0.0
        self.wait_seconds = 0.0
        self.transfer_joules = 0.0
        self._costs = costs
        self._idle_from = 0.0
        # When the transfer of a storage that has not been waited for is over.
        self._ends: dict[int, float] = {}

    def run(self, seconds: float, storages: Iterable[int]) -> None:
        """An op that touches these storages."""
        if self._ends:
            for storage in storages:
                self.wait_for(storage)
        self.seconds += seconds
        self.op_seconds += seconds

    def page_out(self, storage: int, nbytes: int) -> Interval:
        """Write a storage once the file is idle; returns when that is."""
        assert self._costs is not None
        return self._transfer(storage, self._costs.write_seconds(nbytes))

    def page_in(self, storage: int, nbytes: int) -> Interval:
        """Read a storage once the file is idle; returns when that is."""
        assert self._costs is not None
        return self._transfer(storage, self._costs.read_seconds(nbytes))

    def wait_for(self, storage: int) -> None:
        """Until nothing is under way for a storage."""
        end = self._ends.pop(storage, 0.0)
        if end > self.seconds:
            assert self._costs is not None
            self.wait_seconds += end - self.seconds
            self.transfer_joules += (end - self.seconds) * self._costs.waiting_watts
            self.seconds = end

    def _transfer(self, storage: int, seconds: float) -> Interval:
        assert self._costs is not None
        self.transfer_joules += seconds * self._costs.watts
        start = max(self._idle_from, self.seconds)
        self._idle_from = self._ends[storage] = start + seconds
        if not self._costs.overlaps:
            self.wait_for(storage)
        return Interval(start, start + seconds)
