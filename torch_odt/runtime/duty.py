"""Computing for a part of the time while others compute: what threads share beside the cores is memory's bandwidth.

A lower priority gives cores away, but a step on a core that nobody else wants still takes bandwidth and caches from
the program on the core beside it. Steps are therefore followed by rests for as long as others keep a core busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch_odt.runtime.neighbours import Load

# Less is what a system does for itself, and what short requests take: beside those a rest helps nobody.
_BUSY_CORES = 0.25
_WINDOW_SECONDS = 0.5
_MOST_REST_SECONDS = 2.0


@dataclass
class Duty:
    """Rests after steps, while others compute.

    Args:
        share: of the time, that training computes beside others, above 0; 1 never rests.
        look: what others did since the last look.
        clock, sleep, own_seconds: a test gives its own; the last is the processor's seconds of this process.

    Attributes:
        is_shared: others computed when it was last looked.
        rested_seconds: how long training has rested in all.
    """

    share: float
    look: Callable[[], Load]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    own_seconds: Callable[[], float] = time.process_time
    is_shared: bool = False
    rested_seconds: float = 0.0
    _window_began_seconds: float = float("-inf")
    _own_began_seconds: float = 0.0

    def step_begins(self) -> None:
        """A step is about to be made."""
        self._own_began_seconds = self.own_seconds()

    def step_done(self, threads: int) -> bool:
        """A step has been made; returns when the next one may be.

        Args:
            threads: that made it.

        Returns:
            Whether it has rested.
        """
        if self.share >= 1:
            return False
        now = self.clock()
        if now - self._window_began_seconds >= _WINDOW_SECONDS:
            self._window_began_seconds = now
            others_cores = self.look().others_cores
            self.is_shared = others_cores is not None and others_cores > _BUSY_CORES
        if self.is_shared:
            # What a step waited for a core was no computing: it has rested already.
            computed_seconds = (self.own_seconds() - self._own_began_seconds) / max(1, threads)
            rest_seconds = min(_MOST_REST_SECONDS, computed_seconds * (1 / self.share - 1))
            self.sleep(rest_seconds)
            self.rested_seconds += rest_seconds
        return self.is_shared
