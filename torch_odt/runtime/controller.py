"""Follows what the machine has left while training runs: decides before each step what it may hold.

Plans are switched between two batches (Melon, section 4.3); while a batch runs, what is too much is evicted (SAGE).
Less memory is given back at once; more is taken only when it has been there for a while and was missed (`growth`).
Amounts lie on a ladder of fixed rungs, six to each doubling: what comes back to an amount finds the plan that was made
for it.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Any, Literal

from torch_odt.errors import OdtWarning, require_number
from torch_odt.runtime.budget import Allotment, Budget
from torch_odt.runtime.growth import Growth, Known, Need, best_known
from torch_odt.runtime.monitor import Reading, read_system
from torch_odt.runtime.policies import AnyPolicy, Policy, policy_of

__all__ = ["Action", "Controller", "Decision", "Need"]

Action = Literal["begin", "shrink", "overtaken", "grow", "retreat", "scarce", "evict", "keep"]
RUNGS_PER_DOUBLING = 6
GROW_AFTER_SECONDS = 1.0
# What a plan was refused or failed at is not tried again so soon.
_RETREAT_SECONDS = 30.0
# What the smallest plan takes changes only with what else the process holds.
_SMALLEST_SECONDS = 300.0
_MOST_REMEMBERED = 1000
# Others take in much less time what has been given back; who still wants more then is given more at once.
_PRESSED_STEPS = 4
_MORE_RUNGS = 2
# Where they leave less free than this share of what training takes, they took what there was: what they want is not
# known, and to find it out rung by rung takes a plan each time.
_EXHAUSTED_SHARE = 1 / 8
_EXHAUSTED_RUNGS = RUNGS_PER_DOUBLING
# So much of what can be had is enough at first where there is a plan for it already: it grows when that is missed.
_KNOWN_SHARE = 0.5
# While a step runs, less is not worth to make the rest of it anew: what a process holds varies as well.
_LEAST_LACKING_SHARE = 1 / 16


@dataclass(frozen=True)
class Decision:
    """A change of what training may hold.

    Attributes:
        step: how many steps have been begun before it.
        at_seconds: since the epoch.
        action: "begin"; "shrink" and "grow" to what the policy allows; "overtaken" where others took what a plan was
            chosen for before it could be held; "retreat" after a step that was out of memory; "scarce" where the
            smallest plan takes more than is allowed, and is followed all the same; "evict" where a step gave back while
            it ran, and "keep" where it was to, but there was nothing to be gained.
        reason: in words.
        budget_bytes: what the process may hold from now on.
        allowed_bytes: what the policy said.
        process_bytes, available_bytes: of the reading that it was decided by.
        freed_bytes: that the rest of a step takes less.
    """

    step: int
    at_seconds: float
    action: Action
    reason: str
    budget_bytes: int
    allowed_bytes: int
    process_bytes: int
    available_bytes: int
    freed_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Controller:
    """Decides between two steps what training may hold, by a policy.

    Choose it where memory comes and goes while training runs: give it, or the policy alone, as the `budget` of a
    `TrainStep`. One controller follows one step.

    Args:
        policy: a policy; or what `Budget` takes ("80%"); or a function from a `Reading` to bytes, None for no opinion.
        grow_after_seconds: how long more memory must have been there before it is used.
        log: a file; each decision is appended to it as a line of JSON.
        on_decision: called with each decision, for logs of other kinds.
        read: what is asked before each step; a test, or a program that knows better, gives a function of its own.
        clock: seconds that only go forward.

    Raises:
        TypeError, ValueError: `policy` is none.
        ValueError: `grow_after_seconds` is negative.
        OSError: `log` cannot be written.

    Example:
        >>> controller = Controller("50%")
        >>> controller.begin(level_bytes=0).total_bytes > 0
        True
        >>> [decision.action for decision in controller.decisions]
        ['begin']

    Attributes:
        decisions: the last ones.
    """

    def __init__(
        self,
        policy: object,
        *,
        grow_after_seconds: float = GROW_AFTER_SECONDS,
        log: str | Path | None = None,
        on_decision: Callable[[Decision], object] | None = None,
        read: Callable[[], Reading] = read_system,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_number("grow_after_seconds", grow_after_seconds)
        if not grow_after_seconds >= 0:
            raise ValueError(f"grow_after_seconds must not be negative: {grow_after_seconds}")
        self.policy: Policy = policy_of(policy)
        self.decisions: deque[Decision] = deque(maxlen=_MOST_REMEMBERED)
        self._growth = Growth(grow_after_seconds)
        self._log = None if log is None else Path(log)
        if self._log is not None:
            # What cannot be written is to be known before training begins.
            self._log.open("a").close()
        self._on_decision = on_decision
        self._read = read
        self._clock = clock
        self._steps = 0
        self._current: Allotment | None = None
        self._ceiling_bytes: float = math.inf
        self._ceiling_until = 0.0
        self._smallest_bytes, self._smallest_until = 0, 0.0
        # The plans that have run, by what they were made for, and what the one was made for that runs.
        self._known: dict[int, Known] = {}
        self._running = 0
        self._is_scarce = False
        self._has_told_of_log = False
        self._lowered_at = -_PRESSED_STEPS
        self._rungs_below = 0
        self._pressing: tuple[Reading, int] | None = None
        self._last_allowed = 0

    @classmethod
    def of_value(cls, value: object) -> Controller:
        """A controller from itself or from a policy."""
        return value if isinstance(value, cls) else cls(value)

    @property
    def current(self) -> Allotment:
        """What was decided last.

        Raises:
            RuntimeError: nothing has been decided yet.
        """
        if self._current is None:
            raise RuntimeError("nothing has been decided before the first step")
        return self._current

    def begin(self, level_bytes: int) -> Allotment:
        """What the process may hold in its first step.

        Args:
            level_bytes: what it held before training.

        Raises:
            ValueError: the policy says nothing, or what it says is no number of bytes.
        """
        reading = self._read()
        allowed = self._allowed(reading, level_bytes)
        self._decide("begin", "training begins", _on_ladder(allowed, level_bytes), allowed, reading)
        return self.current

    def before_step(self, level_bytes: int, need: Need | None) -> Allotment:
        """What the process may hold during the next step.

        Args:
            level_bytes: what it held before training.
            need: what the present plan takes; None where there is none yet.

        Raises:
            RuntimeError: it has not begun.
            ValueError: what the policy says is no number of bytes.
        """
        current = self.current
        if need is not None:
            self._known[self._running] = Known(need.total_bytes, need.measured_slowdown, self._clock())
        reading = self._read()
        allowed = self._allowed(reading, level_bytes)
        self._is_scarce = self._is_scarce and allowed < current.total_bytes
        wanted = int(min(_on_ladder(allowed, level_bytes), self._ceiling()))
        if self._must_shrink(allowed, need):
            self._shrink("shrink", "less is allowed than the plan takes", allowed, allowed, level_bytes, reading)
        elif wanted <= current.total_bytes:
            self._growth.stop()
        else:
            now = self._clock()
            more = self._growth.look(now, wanted, current.total_bytes, level_bytes, need, self._known)
            if more is not None:
                reason = f"more has been allowed for {self._growth.seconds(now):.1f} s"
                self._decide("grow", reason, more, allowed, reading)
        self._steps += 1
        self._running = self.current.total_bytes
        return self.current

    @property
    def is_scarce(self) -> bool:
        """Whether the smallest plan is followed although it takes more than is allowed."""
        return self._is_scarce

    def room_bytes(self, level_bytes: int) -> int:
        """What the process may take at this moment beside what it holds: what the policy leaves of it, or all that is
        available where even the smallest plan takes more than that.

        Args:
            level_bytes: what it held before training.
        """
        reading = self._read()
        if self.is_scarce:
            return reading.available_bytes
        return self._allowed(reading, level_bytes) - reading.process_bytes

    def overtaken(self, level_bytes: int, growth_bytes: int) -> Allotment:
        """Others have taken what a plan was chosen for, before it could be held.

        Args:
            level_bytes: what the process held before training.
            growth_bytes: what training can have above that, as far as it could be held.
        """
        reading = self._read()
        allowed = self._allowed(reading, level_bytes)
        had_bytes = min(allowed, level_bytes + growth_bytes)
        self._shrink("overtaken", "others took what the plan was chosen for", had_bytes, allowed, level_bytes, reading)
        return self.current

    def lacking_bytes(self, level_bytes: int, need_bytes: int) -> int:
        """By how much a step that runs takes more than what is allowed now; 0 where that is not worth a new plan.

        Args:
            level_bytes: what the process held before training.
            need_bytes: what it will hold at most until the step ends.
        """
        if self.is_scarce:
            return 0
        reading = self._read()
        allowed = self._allowed(reading, level_bytes)
        if need_bytes - allowed <= _LEAST_LACKING_SHARE * (need_bytes - level_bytes):
            return 0
        self._pressing = reading, allowed
        return need_bytes - max(_on_ladder(allowed, level_bytes), level_bytes)

    def evicted(self, level_bytes: int, lacking_bytes: int, freed_bytes: int) -> None:
        """A step that runs has given back, or could not: the next one is planned for what is allowed.

        Args:
            level_bytes: what the process held before training.
            lacking_bytes: what `lacking_bytes` said.
            freed_bytes: that the rest of the step takes less.
        """
        assert self._pressing is not None
        reading, allowed = self._pressing
        current_bytes = self.current.total_bytes
        if not freed_bytes:
            reason = "less is allowed than the step takes, and what it holds cannot be evicted"
            self._decide("keep", reason, current_bytes, allowed, reading)
            return
        reason = "less is allowed than the step takes"
        if freed_bytes < lacking_bytes:
            reason += "; more cannot be evicted"
        # Less than the smallest plan takes would only be refused, though there may be more by then.
        total_bytes = min(current_bytes, max(self._lower(allowed, level_bytes, reading), self._smallest_bytes))
        self._lowered_at = self._steps
        self._decide("evict", reason, total_bytes, allowed, reading, freed_bytes)

    def out_of_memory(self, smaller_bytes: int) -> Allotment:
        """A step had no room in what was allowed: nothing above this is tried for some time."""
        reading = self._read()
        self._ceiling_bytes, self._ceiling_until = smaller_bytes, self._clock() + _RETREAT_SECONDS
        self._known.pop(self._running, None)
        self._decide("retreat", "a step was out of memory", smaller_bytes, self.current.total_bytes, reading)
        return self.current

    def refused(self, smallest_bytes: int) -> Allotment:
        """No plan fits into what was decided: the smallest one is followed, even if that is more than is allowed."""
        self._known.pop(self.current.total_bytes, None)
        self._smallest_bytes, self._smallest_until = smallest_bytes, self._clock() + _SMALLEST_SECONDS
        self._decide_for_smallest(self._last_allowed, self._read())
        return self.current

    def _allowed(self, reading: Reading, level_bytes: int) -> int:
        said = self.policy.allowed_bytes(reading, level_bytes)
        if said is None and self._current is not None:
            # A limit that is lifted while training runs is no reason to end it, nor a number to grow to.
            return min(self._current.total_bytes, reading.process_bytes + reading.available_bytes)
        if said is None:
            raise ValueError(
                f"{self.policy} says nothing of this process: combine it with one that does, "
                "such as Smallest(..., ShareOfAvailable())"
            )
        if isinstance(said, bool) or not isinstance(said, int) or said < 0:
            raise ValueError(f"{self.policy} must say a whole number of bytes, 0 or more, not {said!r}")
        self._last_allowed = said
        return said

    def _must_shrink(self, allowed: int, need: Need | None) -> bool:
        """A plan that takes less than it may stays until what it takes is too much."""
        current = self.current.total_bytes
        taken = current if need is None else min(need.total_bytes, current)
        return allowed < taken and not self.is_scarce

    def _shrink(
        self, action: Action, reason: str, had_bytes: int, allowed: int, level_bytes: int, reading: Reading
    ) -> None:
        """Decide for a rung below what can be had, or for what there is a plan for not far below that."""
        lower = self._lower(had_bytes, level_bytes, reading)
        self._lowered_at = self._steps
        if lower < self._smallest_bytes and self._clock() < self._smallest_until:
            # To find once more that nothing fits takes longer than to make a plan.
            self._decide_for_smallest(had_bytes, reading)
        else:
            self._decide(action, reason, lower, allowed, reading)

    def _lower(self, had_bytes: int, level_bytes: int, reading: Reading) -> int:
        """What to follow where so much can be had: further below each time that this comes soon after the last time.

        What is given back is taken at once by whom it was given for, and what they still want does not show.
        """
        is_pressed = self._steps - self._lowered_at < _PRESSED_STEPS
        self._rungs_below = self._rungs_below + _MORE_RUNGS if is_pressed else 0
        exhausted_bytes = _EXHAUSTED_SHARE * (self.current.total_bytes - level_bytes)
        is_first = not is_pressed and reading.available_bytes < exhausted_bytes
        lower = _on_ladder(had_bytes, level_bytes, rungs_below=_EXHAUSTED_RUNGS if is_first else self._rungs_below)
        if self._smallest_bytes <= had_bytes:
            # What others may still want is a guess, what the smallest plan takes is not.
            lower = max(lower, self._smallest_bytes)
        least = level_bytes + _KNOWN_SHARE * (lower - level_bytes)
        known = best_known(self._known, int(least), lower)
        return lower if known is None else known

    def _decide_for_smallest(self, had_bytes: int, reading: Reading) -> None:
        if self._smallest_bytes <= had_bytes:
            self._decide("shrink", "down to the smallest plan", self._smallest_bytes, had_bytes, reading)
        else:
            reason = "the smallest plan takes more than is allowed"
            self._decide("scarce", reason, self._smallest_bytes, had_bytes, reading)

    def _ceiling(self) -> float:
        """What is not to be exceeded for some time."""
        if self._clock() >= self._ceiling_until:
            self._ceiling_bytes = math.inf
        return self._ceiling_bytes

    def _decide(
        self, action: Action, reason: str, total_bytes: int, allowed: int, reading: Reading, freed_bytes: int = 0
    ) -> None:
        self._current = Allotment(total_bytes)
        if action != "evict":
            self._running = total_bytes
        self._growth.stop()
        decision = Decision(
            step=self._steps,
            at_seconds=time.time(),
            action=action,
            reason=reason,
            budget_bytes=total_bytes,
            allowed_bytes=allowed,
            process_bytes=reading.process_bytes,
            available_bytes=reading.available_bytes,
            freed_bytes=freed_bytes,
        )
        self.decisions.append(decision)
        self._is_scarce = action == "scarce"
        try:
            self._tell(decision)
        except OSError as error:
            if not self._has_told_of_log:
                self._has_told_of_log = True
                warnings.warn(
                    f"a decision could not be written down: {error}; training goes on", OdtWarning, stacklevel=2
                )

    def _tell(self, decision: Decision) -> None:
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(dumps(decision.to_dict()) + "\n")
        if self._on_decision is not None:
            self._on_decision(decision)


def _on_ladder(total_bytes: int, level_bytes: int, *, rungs_below: int = 0) -> int:
    """The highest rung above the level that is not above so many bytes, or one below that."""
    growth_bytes = total_bytes - level_bytes
    if growth_bytes <= 0:
        return total_bytes
    rung = math.floor(RUNGS_PER_DOUBLING * math.log2(growth_bytes)) - rungs_below
    return level_bytes + min(growth_bytes, math.ceil(2 ** (rung / RUNGS_PER_DOUBLING)))


BudgetValue = int | str | Budget | AnyPolicy | Controller
"""What a `budget=` may be given: bytes, or what changes while training runs."""
