"""What a step is to be prepared for, and the memory that its plans share."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from torch_odt import memory
from torch_odt._extensions import memory_module
from torch_odt.cache import Cache
from torch_odt.capture.cost_table import CostTable
from torch_odt.capture.trace import Compute
from torch_odt.errors import OdtWarning
from torch_odt.execute.optimizer_cost import OptimizerCost
from torch_odt.execute.optimizer_updates import OptimizerUpdates
from torch_odt.execute.page_file import OpenPageFile
from torch_odt.planning.objective import FASTEST, Goal
from torch_odt.planning.plan import Plan
from torch_odt.runtime.budget import Allotment, Budget, ResolvedBudget

if TYPE_CHECKING:
    # A start from a plan does without.
    from torch_odt.capture.device import Device
    from torch_odt.capture.power import Power
    from torch_odt.execute.retries import Lowered

# What is held at once at least.
_PIECE_BYTES = 8 << 20
# What is less has often been given back a moment ago.
_TELLING_BYTES = 16 << 20
# Twice what was seen of the slowest; what takes longer was kept from running, and says nothing of the next time.
_MOST_SECONDS_PER_BYTE = 6e-9
# Of what holding cost before, beside what it costs now.
_PAST_WEIGHT = 0.5


@dataclass(frozen=True)
class Refused:
    """What was said of the smallest plan when a budget was refused.

    Attributes:
        fewest_bytes: that it takes.
        budget_bytes: of the smallest budget that was named.
    """

    fewest_bytes: int
    budget_bytes: int


@dataclass
class Holding:
    """What it has cost to hold pages, the last ones counting most.

    Within a virtual machine that hands free pages on to its host they cost ten times what they cost elsewhere.
    """

    _nbytes: float = 0.0
    _seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """So many bytes more have been held, and took so long; few tell nothing of what many would."""
        if nbytes < _TELLING_BYTES:
            return
        self._nbytes = _PAST_WEIGHT * self._nbytes + nbytes
        self._seconds = _PAST_WEIGHT * self._seconds + min(seconds, nbytes * _MOST_SECONDS_PER_BYTE)

    @property
    def seconds_per_byte(self) -> float:
        """0 where none has been held yet."""
        return self._seconds / self._nbytes if self._nbytes else 0.0


@dataclass
class StepRequest:
    """What a step is to be prepared for, and the memory that all preparations of it share.

    Attributes:
        compute: `compute(model, args, kwargs) -> (loss, outputs)`.
        level_bytes: what the process held when the step object was made.
        optimizer_cost: what the optimizer holds; None where there is none.
        disabled_rewrites: names of rewrites that are not to be made.
        updates: what of the optimizer's step can be made in the backward pass; None where nothing is to be.
        accumulates: gradients of several calls are summed before an optimizer step.
        transactional: a call that fails is undone.
        page_file: what may be paged to; None where nothing is.
        device: what is planned for; None for this machine.
        power: what this machine draws; None where joules do not matter.
        goal: what a step is to spend least of.
        planning_seconds: how long to look for a better plan than the one that is found at once.
        refused: what was said of the smallest plan where a budget was refused, by the graph's fingerprint.
        holding: what it has cost to hold pages of the arena.
    """

    model: nn.Module
    loss_fn: Any
    compute: Compute
    budget: Budget | Allotment
    level_bytes: int
    optimizer_cost: OptimizerCost | None
    planner: str
    disabled_rewrites: frozenset[str]
    micro_batch: int | None
    accumulates: bool
    cache: Cache
    transactional: bool = False
    updates: OptimizerUpdates | None = None
    costs: CostTable | None = None
    page_file: OpenPageFile | None = None
    device: Device | None = None
    power: Power | None = None
    goal: Goal = FASTEST
    planning_seconds: float = 0.0
    arena: Any = None
    scratch_allowed: bool = False
    scratch_misused: bool = False
    refused: dict[str, Refused] = field(default_factory=dict)
    holding: Holding = field(default_factory=Holding)
    _reported: bool = False
    _copies: int = 0

    def resolve_budget(self) -> ResolvedBudget:
        return self.budget.resolve(self.level_bytes)

    @property
    def has_arena(self) -> bool:
        return memory_module is not None

    def place(self, nbytes: int) -> Any:
        """The arena, at least so large; None without the extension."""
        if memory_module is None or nbytes == 0:
            return self.arena
        if self.arena is None:
            self.arena = memory_module.Arena(max(nbytes, 1))
        elif self.arena.reserve_bytes < nbytes:
            self.arena.resize(nbytes)
        return self.arena

    @property
    def held_bytes(self) -> int:
        """The arena's pages that are resident so that no other program can have them."""
        return 0 if self.arena is None else int(self.arena.held_bytes)

    def allot(self, budget: Allotment) -> None:
        """Follow another budget; as many of the held pages stay as it has room for."""
        if budget != self.budget:
            self.keep_held(max(0, memory.process_bytes() - budget.total_bytes))
        self.budget = budget

    def hold(self, nbytes: int, room_bytes: Callable[[], int]) -> int:
        """Hold so many bytes of the arena before a step that will use them, and give back what is held beyond.

        Other programs may take memory at the same time: what is free is asked for again before each piece, so that
        a race costs a piece and never the process, which a control group ends when it touches more than there is.

        Args:
            room_bytes: says what the process may take at this moment.

        Returns:
            Bytes that are lacking; 0 where all are held.
        """
        if self.arena is None:
            return 0
        self.arena.release(nbytes)
        before_bytes, seconds = self.held_bytes, 0.0
        while (lacking := nbytes - self.held_bytes) > 0:
            room = room_bytes()
            piece = min(lacking, max(_PIECE_BYTES, room // 8))
            if room < piece:
                break
            began = time.perf_counter()
            self.arena.hold(self.held_bytes + piece)
            seconds += time.perf_counter() - began
        self.holding.add(self.held_bytes - before_bytes, seconds)
        return max(0, lacking)

    def keep_held(self, less_bytes: int = 0) -> None:
        """Give the arena's pages back but for those that are held, and so many of these."""
        if self.arena is not None:
            self.arena.release(max(0, self.held_bytes - less_bytes))

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Inside, allocations lie in the arena, which is idle between two steps.

        An optimizer's first step makes its state, which must not: the arena's pages are given back for it instead; of
        those that are held, as many as its temporaries take.
        """
        if self.arena is None or not self.scratch_allowed:
            self.keep_held(self._workspace_bytes)
            in_place = self.optimizer_cost is not None and self.optimizer_cost.keeps_state_in_place
            self.scratch_allowed = in_place and not self.scratch_misused
            yield
            return
        self.arena.dynamic(True, self.arena.resident_bytes)
        try:
            yield
        finally:
            self.arena.dynamic(False)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Inside, copies are made that are gone before the next step: they lie in the arena.

        Where the optimizer's own temporaries must not lie there, only as many of its pages stay as the copies take.
        """
        if self.arena is None:
            yield
            return
        if not self.scratch_allowed:
            self.keep_held(self._workspace_bytes)
        self.arena.dynamic(True, self.arena.resident_bytes if self.scratch_allowed else -1)
        try:
            yield
        finally:
            self.arena.dynamic(False)
        self._copies = self.arena.live_blocks

    def check_scratch(self) -> None:
        """After an optimizer step: a hook may have made a tensor in the arena that stays."""
        copies, self._copies = self._copies, 0
        if self.arena is not None and self.scratch_allowed and self.arena.live_blocks > copies:
            self.scratch_allowed, self.scratch_misused = False, True

    def leave_arena(self) -> None:
        """After an exception that may have come between the arena's beginning and the code that ends it.

        The optimizer's next step may have to make its state again, which must not lie there.
        """
        self.scratch_allowed = False
        if self.arena is not None:
            self.arena.end()
            self.arena.dynamic(False)
            self.arena.vacate(False)
            self._copies = 0

    @contextmanager
    def lowered(self, to: Lowered | None) -> Iterator[None]:
        """Inside, plans are made for what an attempt is to do with; None for the budget as it is."""
        budget, page_file = self.budget, self.page_file
        if to is not None:
            self.budget = budget if to.growth_bytes is None else Budget(to.growth_bytes, of="training")
            self.page_file = page_file if to.pages else None
        try:
            yield
        finally:
            self.budget, self.page_file = budget, page_file

    def report_misses(self, plan: Plan) -> None:
        """Say once when allocations depart from the plan: the step stays right, but takes more than was planned."""
        text = "" if self._reported else departures(self.arena)
        if text:
            self._reported = True
            plan.notes = (*plan.notes, text)
            warnings.warn(text, OdtWarning, stacklevel=5)

    def unload(self, tables: Iterable[int]) -> None:
        """Forget addresses in the arena."""
        for table in tables:
            self.arena.unload(table)

    def renew(self, optimizer_cost: OptimizerCost, updates: OptimizerUpdates | None) -> None:
        """Before another preparation: the arena's pages are free for it, but for those that are held, and the optimizer
        may have made its state.
        """
        self.optimizer_cost = optimizer_cost
        self.updates = updates
        self.scratch_allowed = False
        self.keep_held()

    def release(self) -> None:
        if self.arena is not None:
            self.arena.release()
            self.arena = None

    @property
    def _workspace_bytes(self) -> int:
        return 0 if self.optimizer_cost is None else self.optimizer_cost.workspace_bytes


def departures(arena: Any) -> str:
    """Why allocations departed from the plan, in words; empty where none has."""
    misses = {} if arena is None else arena.stats()["misses"]
    reasons = ", ".join(f"{count} {reason}" for reason, count in misses.items() if count)
    if not reasons:
        return ""
    return f"allocations departed from the plan ({reasons}); they are ordinary ones, beside the planned bytes"
