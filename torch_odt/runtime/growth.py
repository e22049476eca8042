"""When more memory is worth another plan.

More must have been there for a while, so that plans do not flutter; and it must have been missed. To make a plan takes
time, and so does to hold what it takes; whether the memory stays for long enough to repay that nobody knows: so another
plan waits until the present one has lost as much time as the change takes, which never costs more than twice what who
knew the future would pay (the rule of who rents skis until he has paid the price of a pair).

What a plan loses is predicted from what it recomputes. Where two plans have run lately, their steps tell more: what is
recomputed just before it is used lies in the caches, and takes less time than when it was made first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

# A plan this near to what every operator once takes has nothing to gain.
_HARDLY_SLOWER = 1.02
# A machine's speed changes within minutes: what took so long before says little of now.
_LATELY_SECONDS = 120.0


@dataclass(frozen=True)
class Need:
    """What the present plan takes.

    Attributes:
        total_bytes: that the process holds with it at most.
        slowdown: its predicted time over that of what has all the memory it can use; None where that is not known.
        plan_seconds: that it took to make it.
        seconds_per_byte: that it took to hold more.
        step_seconds: that a step takes; None where that has not been measured.
        measured_slowdown: that over the predicted time of what has all the memory it can use.
    """

    total_bytes: int
    slowdown: float | None = None
    plan_seconds: float = 0.0
    seconds_per_byte: float = 0.0
    step_seconds: float | None = None
    measured_slowdown: float | None = None

    @property
    def has_all(self) -> bool:
        """More memory would not make it faster."""
        return self.slowdown is not None and self.slowdown <= _HARDLY_SLOWER

    def lost_share(self, growth_bytes: int, wanted_bytes: int, measured_slowdown: float | None = None) -> float:
        """The share of its time that it would not take within more.

        What recomputation takes falls about with the square of the bytes that there are for the step.

        Args:
            measured_slowdown: of what ran within so much, or within more; None where nothing did.
        """
        if wanted_bytes <= growth_bytes:
            return 0.0
        slower = 1.0 if self.slowdown is None else max(0.0, 1.0 - 1.0 / self.slowdown)
        predicted = slower * (1.0 - (growth_bytes / wanted_bytes) ** 2)
        if measured_slowdown is None or self.measured_slowdown is None:
            return predicted
        return min(predicted, max(0.0, 1.0 - measured_slowdown / self.measured_slowdown))


@dataclass(frozen=True)
class Known:
    """A plan that has been made already.

    Attributes:
        taken_bytes: what the process holds with it at most.
        measured_slowdown: as for a `Need`.
        measured_at: when it ran last, in seconds.
    """

    taken_bytes: int
    measured_slowdown: float | None = None
    measured_at: float = 0.0


@dataclass(frozen=True)
class _Offer:
    """A plan that could be followed.

    Attributes:
        taken_bytes: what would be held with it.
        lost_share: the share of its time that the present one would not take then.
        change_seconds: what it takes to make it and to hold its bytes.
    """

    taken_bytes: int
    lost_share: float
    change_seconds: float


class Growth:
    """Follows how much more is allowed than a step holds.

    Args:
        after_seconds: how long more must have been there before it is used.
    """

    def __init__(self, after_seconds: float) -> None:
        self._after_seconds = after_seconds
        self._begun_at: float | None = None
        self._last = 0.0
        # By what plans were made for, None for one that would have to be made: what was lost without it.
        self._lost_seconds: dict[int | None, float] = {}
        # When how much was allowed, of the last while; what less came after is left out: the first is the least.
        self._least: deque[tuple[float, int]] = deque()

    def stop(self) -> None:
        """No more is allowed than is held."""
        self._begun_at = None
        self._lost_seconds.clear()
        self._least.clear()

    def look(
        self,
        now: float,
        wanted_bytes: int,
        current_bytes: int,
        level_bytes: int,
        need: Need | None,
        known: Mapping[int, Known],
    ) -> int | None:
        """What to grow to; None for nothing yet. To be asked once a step.

        Args:
            now: in seconds.
            wanted_bytes: what is allowed, above `current_bytes`.
            current_bytes: what may be held at present.
            level_bytes: what is held without training.
            need: what the present plan takes; None where there is none.
            known: the plans that have been made already, by what they were made for.
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
        passed, self._last = now - self._last, now
        is_lasting = now - self._begun_at >= self._after_seconds
        if need is None:
            return lasting if is_lasting else None
        if need.step_seconds is not None:
            # What the loop does between two steps no plan makes faster.
            passed = min(passed, need.step_seconds)
        offers = _offers(now, lasting, current_bytes, level_bytes, need, known)
        for total, offer in offers.items():
            self._lost_seconds[total] = self._lost_seconds.get(total, 0.0) + offer.lost_share * passed
        repaid = [total for total, offer in offers.items() if self._lost_seconds[total] >= offer.change_seconds]
        if not (is_lasting and repaid):
            return None
        best = max(repaid, key=lambda total: (self._lost_seconds[total], offers[total].taken_bytes))
        return lasting if best is None else best

    def seconds(self, now: float) -> float:
        """For how long more has been allowed."""
        return 0.0 if self._begun_at is None else now - self._begun_at


def _offers(
    now: float, lasting: int, current_bytes: int, level_bytes: int, need: Need, known: Mapping[int, Known]
) -> dict[int | None, _Offer]:
    """The plans that fit in what lasts, by what they were made for; None for one that would have to be made."""
    measured = {
        total: plan.measured_slowdown
        for total, plan in known.items()
        if plan.measured_slowdown is not None and now - plan.measured_at <= _LATELY_SECONDS
    }
    # What ran last may have been a larger one, which gave back while it did.
    taken_bytes = min(need.total_bytes, current_bytes)
    growth_bytes = current_bytes - level_bytes
    offers: dict[int | None, _Offer] = {}
    for total, plan in known.items():
        if taken_bytes < plan.taken_bytes <= lasting:
            share = need.lost_share(growth_bytes, plan.taken_bytes - level_bytes, measured.get(total))
            offers[total] = _Offer(plan.taken_bytes, share, need.seconds_per_byte * (plan.taken_bytes - taken_bytes))
    if any(total >= lasting for total in offers if total is not None):
        # One that had more to be made for, and takes no more.
        return offers
    fastest = min((slowdown for total, slowdown in measured.items() if total >= lasting), default=None)
    share = need.lost_share(growth_bytes, lasting - level_bytes, fastest)
    # What a new plan will use of all that there is nobody knows, but twice the bytes win most of what can be won.
    more_bytes = min(lasting - taken_bytes, taken_bytes - level_bytes)
    offers[None] = _Offer(lasting, share, need.plan_seconds + need.seconds_per_byte * more_bytes)
    return offers


def best_known(known: Mapping[int, Known], least_bytes: int, most_bytes: int) -> int | None:
    """What the largest plan was made for of those that take so much; None where there is none."""
    fitting = {total: plan.taken_bytes for total, plan in known.items()}
    fitting = {total: taken for total, taken in fitting.items() if least_bytes <= taken <= most_bytes}
    return max(fitting, key=lambda total: fitting[total], default=None)
