"""What steps draw, by a sensor that may turn out to be of no use."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_odt.capture.power import MOST_WATTS, Sensor


class StepJoules:
    """The joules of one step after the other; a loop that waits for its data between two steps pays for that, too.

    Args:
        sensor: what is asked.
        on_failure: called once with a sentence when the sensor cannot be read any more, or shows what no machine
            draws: nothing at all, as where it is not connected, or far too much.
        clock: seconds, for tests.
    """

    def __init__(
        self, sensor: Sensor, on_failure: Callable[[str], object], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._sensor = sensor
        self._on_failure = on_failure
        self._clock = clock
        self._is_of_use = True
        self._last_seconds = clock()
        self.skip()

    def skip(self) -> None:
        """Begin anew: what has been drawn since the last step, as in a pause, is nobody's."""
        self._ask()

    def __call__(self, seconds: float) -> float | None:
        """What the step that has just been made has drawn; None where nobody knows, from now on."""
        joules, elapsed_seconds = self._ask()
        if joules is not None and not 0 < joules <= MOST_WATTS * elapsed_seconds:
            self._fail(f"it shows {joules:.3g} J for a step of {seconds:.3g} s")
            return None
        return joules

    def _ask(self) -> tuple[float | None, float]:
        now_seconds = self._clock()
        elapsed_seconds, self._last_seconds = now_seconds - self._last_seconds, now_seconds
        if not self._is_of_use:
            return None, elapsed_seconds
        try:
            return self._sensor.joules(elapsed_seconds), elapsed_seconds
        except (OSError, ValueError) as error:
            self._fail(str(error))
            return None, elapsed_seconds

    def _fail(self, why: str) -> None:
        self._is_of_use = False
        self._on_failure(f"{self._sensor.name} is of no use ({why}): settings are chosen by seconds")
