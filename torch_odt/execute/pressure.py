"""A step that gives memory back while it runs.

The room is looked at again at borders between instructions, and where less is allowed than the step takes, the rest of
it is made anew: what lies in memory and is cheap to bring back is evicted, its pages go back to the system at once, and
it is recomputed when it is needed (SAGE's eviction, Gim, Ko, MobiSys 2022). The planned addresses are no longer used
then: the rest runs in ordinary memory, and each block that is left in the arena takes its pages along when it ends.
"""

from __future__ import annotations

import math
import time
import warnings
from bisect import bisect_right
from types import TracebackType
from typing import TYPE_CHECKING

from torch_odt import memory
from torch_odt.capture.costs import Costs
from torch_odt.errors import OdtWarning, first_line
from torch_odt.execute.executor import Executor, Receiver, Table
from torch_odt.planning.rest import Checked, rest_within
from torch_odt.planning.schedule import Run

if TYPE_CHECKING:
    from torch_odt.execute.request import StepRequest
    from torch_odt.planning.plan import Plan
    from torch_odt.runtime.controller import Controller

# Between two looks at least, and ...
_INTERVAL_SECONDS = 0.05
# ... so much of a step's time at most for looking and planning.
_LOOKING_SHARE = 0.01
# Instructions are run in pieces of about so long.
_PIECE_SECONDS = 0.02
# What gives back less of what is lacking is not worth its recomputation.
_LEAST_FREED_SHARE = 1 / 4


class Pressure:
    """Runs the micro-batches of one call, with less than was planned where a controller says so meanwhile.

    Used as a context around the call. What one micro-batch gave back is not there for those after it.

    Args:
        controller: says what is allowed.
        request: has the arena.
        plan: of the call.
    """

    def __init__(self, controller: Controller, request: StepRequest, plan: Plan) -> None:
        self._controller = controller
        self._request = request
        self._plan = plan
        self._arena_bytes = plan.arena_bytes
        self._next_look = 0.0
        self._is_lowered = self._has_kept = False
        self._failure: Exception | None = None
        # Of many calls, because to look for them takes time.
        self._borders: dict[Executor, list[int]] = {}
        self._wholes: dict[tuple[Executor, int], tuple[Executor, Checked]] = {}

    def __enter__(self) -> None:
        """
        Warns:
            OdtWarning: it could not be asked what is allowed while the last call ran.
        """
        self._vacate(False)
        self._arena_bytes = self._plan.arena_bytes
        self._is_lowered = self._has_kept = False
        self._next_look = max(self._next_look, time.perf_counter() + _INTERVAL_SECONDS)
        failure, self._failure = self._failure, None
        if failure is not None:
            self._next_look = time.perf_counter() + _INTERVAL_SECONDS
            warnings.warn(
                f"a step that ran could not give memory back: {type(failure).__name__}: {first_line(failure)}",
                OdtWarning,
                stacklevel=2,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_lowered:
            self._vacate(False)
            self._borders.clear()
            self._wholes.clear()

    def run(self, executor: Executor, checked: Checked, table: Table, receiver: Receiver) -> None:
        """Run a micro-batch.

        Args:
            executor: of the schedule as it was planned.
            checked: that schedule.
            table: holds the graph's inputs and, at the end, nothing else.
        """
        if self._is_lowered:
            executor, checked = self._whole_in_less(executor, checked)
        position = 0
        while True:
            # A new schedule may page more.
            table += [None] * (executor.table_size - len(table))
            borders = self._borders_of(executor, checked.costs)
            stop = borders[bisect_right(borders, position)]
            executor.run_part(table, receiver, position, stop)
            position = stop
            if position == borders[-1]:
                return
            if time.perf_counter() >= self._next_look:
                executor, checked = self._look(executor, checked, position)

    def _look(self, executor: Executor, checked: Checked, position: int) -> tuple[Executor, Checked]:
        """What runs from a position on."""
        began = time.perf_counter()
        followed: tuple[Executor, Checked] | None = None
        try:
            if self._is_lowered:
                # Holes in malloc's heap are filled again by what runs, and stay resident when that is freed.
                memory.trim()
            lacking_bytes = self._controller.lacking_bytes(self._request.level_bytes, self._need_bytes)
            looked = time.perf_counter()
            if lacking_bytes:
                followed = self._relieved(executor, checked, position, lacking_bytes)
        except Exception as error:
            # Parameters may have been updated already: nothing that only looks may leave such a step half done. What is
            # wrong with a policy is its error before the next step.
            self._failure, self._next_look = error, math.inf
            return executor, checked
        now = time.perf_counter()
        # Others may want still more at once; only what was in vain is not to be done again so soon.
        spent_seconds = now - began if lacking_bytes and followed is None else looked - began
        self._next_look = now + max(_INTERVAL_SECONDS, spent_seconds / _LOOKING_SHARE)
        return followed or (executor, checked)

    @property
    def _need_bytes(self) -> int:
        """What the process will hold at most until the call ends."""
        given_back = self._plan.arena_bytes - self._arena_bytes
        return self._request.level_bytes + self._plan.peak_bytes - given_back

    def _relieved(
        self, executor: Executor, checked: Checked, position: int, lacking_bytes: int
    ) -> tuple[Executor, Checked] | None:
        """What gives back, from a position on; None where that is not worth it."""
        budget_bytes = max(0, self._arena_bytes - lacking_bytes)
        rest = rest_within(checked, position, budget_bytes)
        holds_bytes = max(budget_bytes, rest.peak_bytes)
        freed_bytes = self._arena_bytes - holds_bytes
        level_bytes = self._request.level_bytes
        if freed_bytes < max(1, _LEAST_FREED_SHARE * lacking_bytes):
            if not self._has_kept:
                self._controller.evicted(level_bytes, lacking_bytes, 0)
            self._has_kept = True
            return None
        followed = executor.followed_by(rest.checked.schedule), rest.checked
        self._arena_bytes, self._is_lowered = holds_bytes, True
        self._give_back()
        try:
            self._controller.evicted(level_bytes, lacking_bytes, freed_bytes)
        except Exception as error:
            self._failure = error
        return followed

    def _vacate(self, on: bool) -> None:
        if self._request.arena is not None:
            self._request.arena.vacate(on)

    def _give_back(self) -> None:
        self._vacate(True)
        # What the rest frees is to go back as well, and what has been freed before.
        memory.tune_malloc()
        memory.trim()

    def _whole_in_less(self, executor: Executor, checked: Checked) -> tuple[Executor, Checked]:
        """A micro-batch after the one that gave back."""
        key = (executor, self._arena_bytes)
        if key not in self._wholes:
            rest = rest_within(checked, 0, self._arena_bytes)
            self._arena_bytes = max(self._arena_bytes, rest.peak_bytes)
            self._wholes[key] = executor.followed_by(rest.checked.schedule), rest.checked
        return self._wholes[key]

    def _borders_of(self, executor: Executor, costs: Costs) -> list[int]:
        """Positions between instructions at which the clock is looked at."""
        if executor not in self._borders:
            self._borders[executor] = _borders(executor, costs)
        return self._borders[executor]


def _borders(executor: Executor, costs: Costs) -> list[int]:
    """Before ops, so that what the ones before them have left to be freed has been."""
    borders: list[int] = []
    seconds = 0.0
    for position, instruction in enumerate(executor.schedule.instructions):
        if isinstance(instruction, Run):
            if position and seconds >= _PIECE_SECONDS:
                borders.append(position)
                seconds = 0.0
            cost = costs.ops.get(instruction.op)
            seconds += 0.0 if cost is None else cost.seconds
    return [*borders, len(executor.schedule.instructions)]
