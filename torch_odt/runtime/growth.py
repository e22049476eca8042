"""When more memory is worth another plan.

More must have been there for a while, so that plans do not flutter; and it must have been missed. To make a plan takes
time, and so does to hold what it takes; whether the memory stays for long enough to repay that nobody knows: so another
plan waits until the present one has lost as much time as the change takes, which never costs more than twice what who
knew the future would pay (the rule of who rents skis until he has paid the price of a pair).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

# A plan this near to what every operator once takes has nothing to gain.
_HARDLY_SLOWER = 1.02


@dataclass(frozen=True)
class Need:
    """What the present plan takes.

    Attributes:
        total_bytes: that the process holds with it at most.
        slowdown: its time over that of what has all the memory it can use; None where that is not known.
        plan_seconds: that it took to make it.
        seconds_per_byte: that it took to hold more.
    """

    total_bytes: int
    slowdown: float | None = None
    plan_seconds: float = 0.0
    seconds_per_byte: float = 0.0

    @property
    def has_all(self) -> bool:
        """More memory would not make it faster."""
        return self.slowdown is not None and self.slowdown <= _HARDLY_SLOWER

    def lost_share(self, growth_bytes: int, wanted_bytes: int) -> float:
        """The share of its time that it would not take within more.

        What recomputation takes falls about with the square of the bytes that there are for the step.
        """
        if wanted_bytes <= growth_bytes:
            return 0.0
        slower = 1.0 if self.slowdown is None else max(0.0, 1.0 - 1.0 / self.slowdown)
        return slower * (1.0 - (growth_bytes / wanted_bytes) ** 2)


class Growth:
    """Follows how much more is allowed than a step holds.

    Args:
        after_seconds: how long more must have been there before it is used.
    """

    def __init__(self, after_seconds: float) -> None:
        self._after_seconds = after_seconds
        self._begun_at: float | None = None
        self._last = 0.0
        self._lost_seconds = 0.0
        # When how much was allowed, of the last while; what less came after is left out: the first is the least.
        self._least: deque[tuple[float, int]] = deque()

    def stop(self) -> None:
        """No more is allowed than is held."""
        self._begun_at = None
        self._lost_seconds = 0.0
        self._least.clear()

    def look(
        self,
        now: float,
        wanted_bytes: int,
        current_bytes: int,
        level_bytes: int,
        need: Need | None,
        known: Mapping[int, int],
    ) -> int | None:
        """What to grow to; None for nothing yet.

        Args:
            now: in seconds.
            wanted_bytes: what is allowed, above `current_bytes`.
            current_bytes: what may be held at present.
            level_bytes: what is held without training.
            need: what the present plan takes; None where there is none.
            known: what plans take that have been made already, by what they were made for.
        """
        if need is not None and need.has_all and need.total_bytes <= current_bytes:
            self.stop()
            return None
        if self._begun_at is None:
            self._begun_at = self._last = now
        while self._least and self._least[-1][1] >= wanted_bytes:
            self._least.pop()
        self._least.append((now, wanted_bytes))
        while self._least[0][0] < now - self._after_seconds:
            self._least.popleft()
        lasting = self._least[0][1]
        if need is not None:
            self._lost_seconds += need.lost_share(current_bytes - level_bytes, lasting - level_bytes) * (
                now - self._last
            )
        self._last = now
        if now - self._begun_at < self._after_seconds:
            return None
        if need is None:
            return lasting
        # What ran last may have been a larger one, which gave back while it did.
        taken_bytes = min(need.total_bytes, current_bytes)
        made = best_known(known, taken_bytes + 1, lasting)
        if made is not None:
            change_seconds = need.seconds_per_byte * (known[made] - taken_bytes)
            return made if self._lost_seconds >= change_seconds else None
        # What a new plan will use of all that there is nobody knows, but twice the bytes win most of what can be won.
        more_bytes = min(lasting - taken_bytes, taken_bytes - level_bytes)
        change_seconds = need.plan_seconds + need.seconds_per_byte * more_bytes
        return lasting if self._lost_seconds >= change_seconds else None

    def seconds(self, now: float) -> float:
        """For how long more has been allowed."""
        return 0.0 if self._begun_at is None else now - self._begun_at


def best_known(known: Mapping[int, int], least_bytes: int, most_bytes: int) -> int | None:
    """What the largest plan was made for of those that take so much; None where there is none."""
    fitting = {total: taken for total, taken in known.items() if least_bytes <= taken <= most_bytes}
    return max(fitting, key=lambda total: fitting[total], default=None)
