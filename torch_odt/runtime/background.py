"""Training beside other programs: it gives way to them, and is not slowed down more than it must be.

Open `Background` first. What it is made of: own_threads.py (priority and cores), choice.py (how many threads),
joules.py (what steps draw), duty.py (rests beside others), neighbours.py (who
else computes), pause.py, wait_policy.py.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from torch_odt.capture.power import find_sensors
from torch_odt.errors import OdtWarning, require_number
from torch_odt.runtime.choice import Chooser, Setting, settings_to_try
from torch_odt.runtime.cores import Core, read_cores
from torch_odt.runtime.duty import Duty
from torch_odt.runtime.joules import StepJoules
from torch_odt.runtime.neighbours import Neighbours
from torch_odt.runtime.own_threads import OwnThreads, Scheduling
from torch_odt.runtime.pause import Pauses
from torch_odt.runtime.wait_policy import warn_without_wait_policy

# They capture, plan and fill caches: what they take says nothing of a setting.
_FIRST_STEPS = 2


class Releasing(Protocol):
    """What can give memory back until it is used again, as `torch_odt.TrainStep` can."""

    def release(self) -> None: ...


@dataclass(frozen=True)
class Background:
    """How training is to live beside other programs.

    On Linux a priority that was lowered rises again only with privileges, so the process may stay nice after the
    training. A step beside programs that never pause takes as much longer as the priority is lower: `nice=0` shares
    evenly, 10 leaves the process about a tenth of a core that another one wants, `scheduling="idle"` next to nothing.

    The number of threads changes the last bits of what torch computes. Where they must not depend on the neighbours,
    fix `threads`.

    Args:
        nice: the priority, from 0 (as others) to 19; what is nicer already stays so.
        scheduling: "normal", "batch" (others go first when they wake up) or "idle" (whenever they want to run).
        idle_storage: read and write when nobody else does.
        threads: of torch; None tries some counts on the first steps, and again when neighbours come or go.
        cores: numbers of the cores to run on, or all allowed ones of a kind: "big", "little". None tries some sets.
        least: what a setting is chosen by: "seconds" of a step, or its "joules" where a sensor shows them.
            Where it turns out to be of no use, a note says so, and seconds decide.
        duty: while others keep cores busy, training computes for this share of the time and rests for the remainder:
            cores are not all that programs share. 1 never rests.
        pause_when: training waits between two steps while this says True.
        pause_signals: the signal that pauses training and the one that resumes it, such as
            `(signal.SIGUSR1, signal.SIGUSR2)`. None leaves all signals alone.
        pause_above_celsius: training waits while the processor is hotter, until it is five degrees cooler; where its
            sensors cannot be told from others, the hottest of all counts.
        pause_below_battery_percent: training waits while there is less charge and no supply, until there are five
            percent more.

    Raises:
        ValueError: an option is out of its range.

    Example:
        >>> import torch
        >>> with Background(nice=0, scheduling="normal", threads=torch.get_num_threads()).applied() as background:
        ...     for _ in range(3):
        ...         background.before_step()
        ...         background.after_step()
    """

    nice: int = 10
    scheduling: Scheduling = "batch"
    idle_storage: bool = True
    threads: int | None = None
    cores: frozenset[int] | Literal["big", "little"] | None = None
    least: Literal["seconds", "joules"] = "seconds"
    duty: float = 0.35
    pause_when: Callable[[], bool] | None = None
    pause_signals: tuple[int, int] | None = None
    pause_above_celsius: float | None = None
    pause_below_battery_percent: float | None = None

    def __post_init__(self) -> None:
        require_number("nice", self.nice, whole=True)
        require_number("duty", self.duty)
        if self.threads is not None:
            require_number("threads", self.threads, whole=True)
        for name in ("pause_above_celsius", "pause_below_battery_percent"):
            if (limit := getattr(self, name)) is not None:
                require_number(name, limit)
        if not 0 <= self.nice <= 19:
            raise ValueError(f"nice is from 0 to 19, not {self.nice}")
        if self.scheduling not in ("normal", "batch", "idle"):
            raise ValueError(f'scheduling is "normal", "batch" or "idle", not {self.scheduling!r}')
        if self.least not in ("seconds", "joules"):
            raise ValueError(f'least is "seconds" or "joules", not {self.least!r}')
        if not 0 < self.duty <= 1:
            raise ValueError(f"duty is above 0 and at most 1, not {self.duty}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        if isinstance(self.cores, str) and self.cores not in ("big", "little"):
            raise ValueError(f'cores are numbers, "big" or "little", not {self.cores!r}')
        if self.cores is not None and not self.cores:
            raise ValueError("cores names none; leave it out to run on all")
        if self.pause_signals is not None and len(set(self.pause_signals)) != 2:
            raise ValueError(f"pause_signals are two different signals, not {self.pause_signals}")
        percent = self.pause_below_battery_percent
        if percent is not None and not 0 < percent <= 100:
            raise ValueError(f"pause_below_battery_percent is above 0 and at most 100, not {percent}")

    @contextmanager
    def applied(self, step: Releasing | None = None) -> Iterator[BackgroundRun]:
        """Inside, this process runs in the background; afterwards it is as before, as far as the system permits.

        Args:
            step: gives its memory back while training waits.

        Raises:
            ValueError: this process may run on none of `cores`.
        """
        if self.threads != 1:
            warn_without_wait_policy()
        threads_before = torch.get_num_threads()
        own = OwnThreads()
        cores = _chosen_cores(self.cores, read_cores())
        count = sum(core.allowed for core in cores)
        if self.threads is not None and 0 < count < self.threads:
            own.notes.append(f"threads={self.threads} wait for each other on {count} cores: take so many at most")
            warnings.warn(own.notes[-1], OdtWarning, stacklevel=3)
        pauses = Pauses(self.pause_when, self.pause_above_celsius, self.pause_below_battery_percent)
        try:
            own.set_nice(self.nice)
            own.set_scheduling(self.scheduling)
            if self.idle_storage:
                own.set_idle_storage()
            if self.pause_signals is not None:
                pauses.listen(*self.pause_signals)
            with pauses.watching():
                joules = _joules_of_steps(own) if self.least == "joules" else None
                numbers = frozenset(core.number for core in cores if core.allowed) or None
                chooser = _chooser(self, cores, threads_before, own, joules, Neighbours(numbers=numbers))
                duty = Duty(self.duty, Neighbours(numbers=numbers).look)
                yield BackgroundRun(own, pauses, chooser, duty, step, joules)
        finally:
            pauses.ignore()
            own.restore()
            torch.set_num_threads(threads_before)


class BackgroundRun:
    """Training in the background: tell it where steps begin and end. Made by `Background.applied`.

    Both calls belong to the thread that makes the steps: torch's number of threads is the calling thread's own.
    """

    def __init__(
        self,
        own: OwnThreads,
        pauses: Pauses,
        chooser: Chooser,
        duty: Duty,
        step: Releasing | None = None,
        joules: StepJoules | None = None,
    ) -> None:
        self._own = own
        self._joules = joules
        self._pauses = pauses
        self._chooser = chooser
        self._duty = duty
        self._step = step
        self._steps = 0
        self._began_seconds = time.perf_counter()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the system has refused or does not have, one sentence each."""
        return (*self._own.notes, *self._pauses.notes)

    @property
    def setting(self) -> Setting | None:
        """What steps run with now; None before the first setting is tried."""
        return self._chooser.current

    @property
    def paused_seconds(self) -> float:
        """How long training has waited in all."""
        return self._pauses.paused_seconds

    @property
    def rested_seconds(self) -> float:
        """How long training has rested in all because others computed."""
        return self._duty.rested_seconds

    def before_step(self) -> None:
        """Return when the next step may be made: waits while there is a reason to pause, and nobody asks the process to
        end (SIGTERM, SIGINT).
        """
        if self._pauses.wait(self._give_memory_back) and self._joules is not None:
            self._joules.skip()
        self._began_seconds = time.perf_counter()
        self._duty.step_begins()

    def after_step(self, seconds: float | None = None) -> None:
        """A step has been made; the next one may run with another setting. Rests where others compute.

        Args:
            seconds: what it took; None counts from `before_step`.
        """
        taken_seconds = time.perf_counter() - self._began_seconds if seconds is None else seconds
        self._steps += 1
        if self._steps == _FIRST_STEPS:
            self._chooser.begin()
        elif self._steps > _FIRST_STEPS:
            self._chooser.step_done(taken_seconds)
        if self._duty.step_done(torch.get_num_threads()) and self._joules is not None:
            self._joules.skip()

    def _give_memory_back(self, reason: str) -> None:
        if self._step is not None:
            self._step.release()


def _chosen_cores(wanted: frozenset[int] | str | None, cores: tuple[Core, ...]) -> tuple[Core, ...]:
    if wanted is None or not cores:
        return cores
    found = tuple(
        core
        for core in cores
        if core.allowed and (core.kind == wanted if isinstance(wanted, str) else core.number in wanted)
    )
    if not found:
        allowed = {core.number: core.kind for core in cores if core.allowed}
        raise ValueError(f"this process may run on none of the cores {wanted!r}; it may on {allowed}")
    return found


def _chooser(
    options: Background,
    cores: tuple[Core, ...],
    threads: int,
    own: OwnThreads,
    joules: StepJoules | None,
    neighbours: Neighbours,
) -> Chooser:
    settings = settings_to_try(cores, threads, fixed_threads=options.threads)
    if options.cores is not None and cores:
        everywhere = frozenset(core.number for core in cores)
        settings = tuple(dict.fromkeys(Setting(setting.threads, everywhere) for setting in settings))

    def apply(setting: Setting) -> None:
        torch.set_num_threads(setting.threads)
        if setting.cores is not None:
            own.set_cores(setting.cores)

    return Chooser(settings, apply, neighbours.look, joules)


def _joules_of_steps(own: OwnThreads) -> StepJoules | None:
    sensor = next(iter(find_sensors()), None)
    if sensor is None:
        own.notes.append("no power sensor can be read: settings are chosen by seconds")
        return None
    return StepJoules(sensor, own.notes.append)
