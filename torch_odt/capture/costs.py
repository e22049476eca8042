"""What an operator costs: the types that profiling fills in and that planners read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK_BYTES = 4096
"""What a file of pages is divided into."""


class ResultLayout(NamedTuple):
    """What an operator really returned; `dtype` is torch's name, as in `Value.dtype`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class OpCost:
    """The measured cost of one operator call.

    Attributes:
        seconds: median time of a call.
        events: the allocations that the call makes, in order: (ordinal, bytes) when block `ordinal` is allocated,
            (ordinal, -bytes) when it is freed inside the call. The results are among them.
        result_ordinals: for each of the op's results, the ordinal of the block it lives in; None when the result
            allocates nothing (a view, an empty tensor).
        source: "measured", or "estimated" from the shapes where nothing could be measured.
        layouts: for each of the op's results, what it really was; None where the operator returned nothing. Empty
            where nothing was run.
        library_bytes: what the math library takes while the call runs, unseen by any allocator of torch's: scratch
            memory for packing and for partial sums.
    """

    seconds: float
    events: tuple[tuple[int, int], ...]
    result_ordinals: tuple[int | None, ...]
    source: str = "measured"
    layouts: tuple[ResultLayout | None, ...] = ()
    library_bytes: int = 0

    @property
    def block_bytes(self) -> dict[int, int]:
        return {ordinal: size for ordinal, size in self.events if size > 0}

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the call holds at once, results included, inputs not."""
        live = peak = 0
        for _, size in self.events:
            live += size
            peak = max(peak, live)
        return peak


@dataclass(frozen=True)
class TransferCosts:
    """What it costs to move memory to a file and back, on one device.

    Attributes:
        write_latency_seconds, read_latency_seconds: of each transfer, however small.
        write_bytes_per_second, read_bytes_per_second: of large transfers.
        limit_bytes: the most that the file may hold at once.
        overlaps: transfers run beside ops; otherwise ops wait for them.
        watts: what the storage draws while it transfers.
        waiting_watts: what the device draws while ops wait for a transfer.
    """

    write_latency_seconds: float
    write_bytes_per_second: float
    read_latency_seconds: float
    read_bytes_per_second: float
    limit_bytes: int
    overlaps: bool = True
    watts: float = 0.0
    waiting_watts: float = 0.0

    @staticmethod
    def file_bytes(nbytes: int) -> int:
        """What so many bytes of memory take in the file: whole blocks."""
        return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def name(self) -> str:
        """About what they are: measured anew, the same device has the same name most of the time."""
        speeds = (self.write_bytes_per_second, self.read_bytes_per_second)
        return f"{self.limit_bytes} {self.overlaps} " + " ".join(str(round(math.log2(speed))) for speed in speeds)

    def write_seconds(self, nbytes: int) -> float:
        return self.write_latency_seconds + nbytes / self.write_bytes_per_second

    def read_seconds(self, nbytes: int) -> float:
        return self.read_latency_seconds + nbytes / self.read_bytes_per_second


@dataclass
class Costs:
    """The costs of every op of a graph, by op index, and the machine that they were measured on.

    Attributes:
        too_large: how many ops were estimated because one call of them needs more than measuring was allowed.
        transfers: what paging costs; None where there is to be none.
        watts: what is drawn while ops run; 0 where nobody knows.
    """

    ops: Mapping[int, OpCost]
    machine: str = ""
    notes: list[str] = field(default_factory=list)
    too_large: int = 0
    transfers: TransferCosts | None = None
    watts: float = 0.0

    @property
    def library_bytes(self) -> int:
        """The most that the math library takes while a call runs."""
        return max((cost.library_bytes for cost in self.ops.values()), default=0)

    def seconds(self, op: int) -> float:
        return self.ops[op].seconds
