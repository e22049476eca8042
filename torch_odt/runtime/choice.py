"""Which number of threads on which cores: a few settings are tried on the training's own steps, the best one stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from torch_odt.runtime.cores import Core, core_sets
from torch_odt.runtime.neighbours import Load, mean_load

_WARM_STEPS = 1
_MEASURED_STEPS = 2
_HOPELESS = 2.0
_WINDOW_SECONDS = 1.0
# One window may be like no other; a neighbour stays longer.
_USUAL_WINDOWS = 3
_OTHER_WINDOWS = 2
# Trying takes at most a third of the time at first and, where it keeps to change nothing, less than a hundredth.
_FIRST_WAIT = 2
_MOST_WAIT = 128
# Steps that take so many times as long as when their setting was chosen, or so many times less.
_MOVED = 1.5
_MOVED_STEPS = 2


@dataclass(frozen=True)
class Setting:
    """What a step runs with.

    Attributes:
        threads: of torch.
        cores: that they may run on; None where the system does not bind them.
    """

    threads: int
    cores: frozenset[int] | None = None


def settings_to_try(cores: Iterable[Core], threads: int, *, fixed_threads: int | None = None) -> tuple[Setting, ...]:
    """Settings worth a try, those of few threads first: beside a busy neighbour many threads can be very slow.

    Args:
        threads: the most that torch is to have.
        fixed_threads: the only count to try.

    Example:
        >>> settings_to_try([], 2)
        (Setting(threads=1, cores=None), Setting(threads=2, cores=None))
    """
    sets: tuple[frozenset[int] | None, ...] = core_sets(cores) or (None,)
    found = []
    for numbers in sets:
        most = threads if numbers is None else min(threads, len(numbers))
        counts = {1, (most + 1) // 2, most} if fixed_threads is None else {fixed_threads}
        found += [Setting(count, numbers) for count in counts]
    return tuple(dict.fromkeys(sorted(found, key=lambda setting: setting.threads)))


@dataclass
class Chooser:
    """Tries settings for a few real steps each, keeps the best, and tries again when a neighbour has come or gone.

    Where trying again has only confirmed the choice, as beside a neighbour that comes and goes all the time, the next
    time is put off: for twice as long as trying took, and twice that after each further time. Steps that take half as
    long again as they did, or so much less, are tried anew all the same.

    Args:
        settings: to try, in this order.
        apply: makes a setting take effect.
        look: what others did since the last look.
        cost: what a step took, in one unit for all; None takes its seconds, and so does a cost that says None.
        clock: seconds, for tests.

    Attributes:
        current: the setting in force; None before the first.
        choices: the settings that were chosen so far.
    """

    settings: tuple[Setting, ...]
    apply: Callable[[Setting], object]
    look: Callable[[], Load]
    cost: Callable[[float], float | None] | None = None
    clock: Callable[[], float] = time.monotonic
    current: Setting | None = None
    choices: list[Setting] = field(default_factory=list)
    _waiting: list[Setting] = field(default_factory=list)
    _seen: list[float] = field(default_factory=list)
    _found: dict[Setting, float] = field(default_factory=dict)
    _usual: list[Load] = field(default_factory=list)
    _others: int = 0
    _window_began_seconds: float = 0.0
    _began_seconds: float = 0.0
    _wait: int = 0
    _put_off_until_seconds: float = 0.0
    _rests_until_seconds: float = 0.0
    _moved: int = 0

    def begin(self) -> None:
        """Try all settings, from now on."""
        self._began_seconds = self.clock()
        self._found.clear()
        self._waiting = list(self.settings)
        self._try_next()

    def step_done(self, seconds: float) -> None:
        """A step has been made with the current setting."""
        spent = seconds if self.cost is None else self.cost(seconds)
        if spent is None:
            # What was found so far was found in another unit.
            self.cost = None
            self.begin()
        elif self.current is not None and self.current not in self._found and not self._is_settled:
            self._measure(self.current, spent)
        elif self._has_moved(spent):
            self.begin()
        elif self.clock() - self._window_began_seconds >= _WINDOW_SECONDS:
            self._watch()

    @property
    def _is_settled(self) -> bool:
        return len(self._found) == len(self.settings)

    def _measure(self, setting: Setting, spent: float) -> None:
        self._seen.append(spent)
        hopeless = bool(self._found) and spent > _HOPELESS * min(self._found.values())
        if hopeless or len(self._seen) == _WARM_STEPS + _MEASURED_STEPS:
            self._found[setting] = median(self._seen[_WARM_STEPS:] or self._seen)
            self._try_next()

    def _try_next(self) -> None:
        if self._waiting:
            self._switch(self._waiting.pop(0))
            return
        best = min(self.settings, key=self._found.__getitem__)
        self._put_off(is_confirmed=self.choices[-1:] == [best])
        self.choices.append(best)
        self._switch(best)
        self._usual, self._others = [], 0
        self._begin_window()
        self.look()

    def _put_off(self, *, is_confirmed: bool) -> None:
        now_seconds = self.clock()
        self._rests_until_seconds = now_seconds + _FIRST_WAIT * (now_seconds - self._began_seconds)
        self._moved = 0
        self._wait = min(_MOST_WAIT, max(_FIRST_WAIT, 2 * self._wait)) if is_confirmed else 0
        self._put_off_until_seconds = now_seconds + self._wait * (now_seconds - self._began_seconds)

    def _has_moved(self, spent: float) -> bool:
        """Whether the last steps took so much more or less than when their setting was chosen that another is tried,
        however often that was in vain.
        """
        usual = 0.0 if self.current is None else self._found.get(self.current, 0.0)
        if usual <= 0:
            return False
        self._moved = 0 if 1 / _MOVED <= spent / usual <= _MOVED else self._moved + 1
        return self._moved >= _MOVED_STEPS and self.clock() >= self._rests_until_seconds

    def _switch(self, setting: Setting) -> None:
        self._seen = []
        if setting != self.current:
            self.apply(setting)
            self.current = setting

    def _watch(self) -> None:
        load = self.look()
        self._begin_window()
        if len(self._usual) < _USUAL_WINDOWS:
            self._usual.append(load)
            return
        self._others = self._others + 1 if load.differs_from(mean_load(self._usual)) else 0
        if self._others >= _OTHER_WINDOWS and self.clock() >= self._put_off_until_seconds:
            self.begin()

    def _begin_window(self) -> None:
        self._window_began_seconds = self.clock()
