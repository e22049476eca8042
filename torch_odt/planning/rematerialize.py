"""The schedule builder that planners share: walk the program, bring back what is missing, drop what does not fit.

`build` runs the steps of a problem in program order. Whatever a step reads and is not in memory is recomputed just
before it, with everything that this needs in turn, or paged in. Storages leave memory after their last use, when the
caller said so in advance (`dropped`), or when the next op does not fit into the budget: then the storage with the
highest score goes, and the score is taken anew at every eviction, because each one changes what the others would cost
to bring back. A storage that goes is paged out where that is possible and cheaper than to recompute it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from torch_odt.capture.costs import TransferCosts
from torch_odt.errors import PlanError
from torch_odt.planning.lowering import lower
from torch_odt.planning.problem import BOUNDARY, Problem
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.spread_transfers import spread_transfers

Score = Callable[["Walk", int], float]
"""How gladly a storage is given up: (walk, storage) -> larger goes first."""


@dataclass(frozen=True)
class Built:
    """A sequence of steps and what its builder counted.

    Attributes:
        runs: ops in the order in which they run, with `BOUNDARY` among them.
        peak_bytes: the builder's own count; never below the simulator's, which frees what was evicted at its last
            use.
        recompute_seconds: of the ops that run again.
        was_cut: recomputation reached its limit, and from there on the budget was ignored.
        crossing: the storages in memory where the forward pass ends.
        budget_bytes: what the builder stayed within where it could, without what is counted apart.
    """

    runs: list[int]
    peak_bytes: int
    recompute_seconds: float
    was_cut: bool
    crossing: frozenset[int]
    budget_bytes: float = 0.0

    def schedule(self, problem: Problem, planner: str) -> Schedule:
        runs = spread_transfers(problem, self.runs, self.budget_bytes) if problem.paging else self.runs
        return lower(problem, runs, planner)


@dataclass(frozen=True)
class Start:
    """Where a build begins that is for the rest of a program.

    Attributes:
        position: in the problem's steps; those before have run.
        resident: the storages in memory.
        on_file: those that can be paged in.
    """

    position: int = 0
    resident: Collection[int] = ()
    on_file: Collection[int] = ()


def build(
    problem: Problem,
    *,
    budget_bytes: int | None = None,
    score: Score | None = None,
    dropped: Collection[int] = (),
    uses: Sequence[list[int]] | None = None,
    max_recompute_seconds: float = float("inf"),
    start: Start | None = None,
) -> Built:
    """Run the program of a problem with recomputation on demand.

    Args:
        problem: what to run.
        budget_bytes: evict before an op that would exceed it; None never evicts.
        score: which storage to evict first; needed with a budget.
        dropped: storages that leave after their last use in the forward pass although the backward pass needs them.
        uses: for each storage, the positions until which it stays, when it is to serve recomputations as well.
        max_recompute_seconds: the budget is ignored once recomputation has cost that much.
        start: where to begin; None for the beginning.
    """
    walk = Walk(problem, budget_bytes, score, dropped, uses or problem.uses, max_recompute_seconds)
    start = start or Start()
    walk.begin(start)
    for position in range(start.position, len(problem.steps)):
        walk.step(position, problem.steps[position])
    return Built(walk.runs, walk.peak_bytes, walk.recompute_seconds, walk.was_cut, walk.crossing, budget_bytes or 0.0)


class Walk:
    """The state of a build, which scores look at.

    Attributes:
        problem: what is run.
        position: of the step that is being prepared or run.
        resident: the storages in memory.
        live_bytes: of all of them.
        clock_seconds: of everything that has run so far, recomputation included.
    """

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int | None,
        score: Score | None,
        dropped: Collection[int],
        uses: Sequence[list[int]],
        max_recompute_seconds: float,
    ) -> None:
        self.problem = problem
        self.position = 0
        self.resident: dict[int, None] = {}
        self.live_bytes = 0
        self.clock_seconds = 0.0
        self.runs: list[int] = []
        self.peak_bytes = 0
        self.recompute_seconds = 0.0
        self.was_cut = False
        self.crossing: frozenset[int] = frozenset()
        self._budget_bytes = float("inf") if budget_bytes is None or score is None else budget_bytes
        self._score = score
        self._dropped = frozenset(dropped)
        self._uses = uses
        self._cursor = [0] * len(uses)
        self._max_recompute_seconds = max_recompute_seconds
        self._max_runs = 12 * len(problem.steps) + 1000
        self._evicted: set[int] = set()
        self._on_file: set[int] = set()
        self._file_bytes = 0
        self._fragile_here = 0
        self._holds = [0] * len(problem.fragile_storages)
        self._pending: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._missing_seconds: dict[int, float] = {}
        self._neighbourhood_seconds: dict[int, float] = {}
        self._lost: set[int] | None = None
        self._touched_seconds: dict[int, float] = {}

    def begin(self, start: Start) -> None:
        """Take over what somebody else has run up to a position.

        What was dropped there and is used again counts as evicted. What nobody uses goes, but for what the first step
        brings its inputs back from: a recomputation may be under way.
        """
        problem = self.problem
        self.position = start.position - 1
        for storage in start.resident:
            self._add(storage)
            self._touched_seconds[storage] = 0.0
        self._on_file = set(start.on_file)
        self._file_bytes = sum(TransferCosts.file_bytes(problem.nbytes[s]) for s in self._on_file)
        present = self._on_file.union(self.resident)
        for storage, born in enumerate(problem.born):
            if 0 <= born < start.position and storage not in present and self._following_use(storage) is not None:
                self._evicted.add(storage)
                for bit in problem.holds[storage]:
                    self._holds[bit] += 1
        if not self.resident:
            return
        first = problem.reads[problem.steps[start.position]]
        way_back = self._closure(s for s in first if s not in self.resident)
        needed = {s for op in way_back for s in problem.reads[op]}
        for storage in list(self.resident):
            if storage not in needed:
                self._drop_if_useless(storage)

    def next_use(self, storage: int) -> int:
        """The position of the step that needs a storage next; the end of the program if none does."""
        uses, cursor = self._uses[storage], self._cursor[storage]
        while cursor < len(uses) and uses[cursor] < self.position:
            cursor += 1
        self._cursor[storage] = cursor
        return uses[cursor] if cursor < len(uses) else len(self.problem.steps)

    def missing_seconds(self, storage: int) -> float:
        """The time that it takes if a storage is evicted now: to recompute it, or to page it out and in."""
        known = self._missing_seconds.get(storage)
        if known is None:
            known = min(self._recompute_seconds(storage), self._paging_seconds(storage))
            self._missing_seconds[storage] = known
        return known

    def own_seconds(self, storage: int) -> float:
        """As `missing_seconds`, but as if all that its op reads were in memory."""
        op = self.problem.rerun[storage]
        own = self.problem.seconds[op] if op >= 0 else float("inf")
        return min(own, self._paging_seconds(storage))

    def neighbourhood_seconds(self, storage: int) -> float:
        """As `missing_seconds`, with the evicted storages that are computed from this one, directly or not."""
        known = self._neighbourhood_seconds.get(storage)
        if known is None:
            known = self._paging_seconds(storage)
            if self._can_recompute(storage):
                ops = self._closure((storage,)) | self._lost_behind(storage)
                known = min(known, sum(self.problem.seconds[op] for op in ops))
            self._neighbourhood_seconds[storage] = known
        return known

    def idle_seconds(self, storage: int) -> float:
        """How long ago a storage in memory was computed or last read."""
        return self.clock_seconds - self._touched_seconds[storage]

    def can_evict(self, storage: int) -> bool:
        """Whether a storage in memory may leave it now and can be brought back later."""
        if self.problem.is_sticky[storage]:
            return False
        return self._can_recompute(storage) or self._paging_seconds(storage) < float("inf")

    def _can_recompute(self, storage: int) -> bool:
        problem = self.problem
        return problem.rerun[storage] >= 0 and not problem.fragile[storage] & ~self._fragile_here

    def _recompute_seconds(self, storage: int) -> float:
        """Of its op and all ancestors that are not in memory."""
        if not self._can_recompute(storage):
            return float("inf")
        op = self.problem.rerun[storage]
        absent = [s for s in self.problem.reads[op] if s not in self.resident]
        return self.problem.seconds[op] + sum(self.problem.seconds[o] for o in self._closure(absent) - {op})

    def _paging_seconds(self, storage: int) -> float:
        """To read a storage from the file, and to write it if it is not there yet."""
        problem = self.problem
        steps = problem.paging.get(storage)
        if steps is None or problem.transfers is None:
            return float("inf")
        if storage in self._on_file:
            return problem.seconds[steps.back]
        taken = problem.transfers.file_bytes(problem.nbytes[storage])
        if self._file_bytes + taken > problem.transfers.limit_bytes:
            return float("inf")
        return problem.seconds[steps.out] + problem.seconds[steps.back]

    def step(self, position: int, op: int) -> None:
        """Run one step of the program, with everything that it takes to have its inputs in memory."""
        self.position = position
        needs = self.problem.reads[op]
        self._pending = dict.fromkeys(needs, 1)
        missing = [s for s in needs if s not in self.resident]
        held = frozenset(needs)
        if missing:
            self._bring_back(missing, held)
        if op == BOUNDARY:
            self.runs.append(op)
            self.crossing = frozenset(self.resident)
        else:
            self._run(op, held)
        self._pending = {}
        self._fresh.clear()
        self._let_go(needs)
        self._let_go(self.problem.results.get(op, ()))

    def _bring_back(self, missing: Collection[int], held: frozenset[int]) -> None:
        """Recompute what is missing; afterwards all of it is in memory.

        What the recomputation itself needs may be evicted again where the budget leaves no other way; then it is
        brought back in turn, while `held` stays. Each nesting is for an ancestor of the one before, so it ends.
        """
        problem, pending = self.problem, self._pending
        order = sorted(self._closure(missing), key=problem.rank.__getitem__)
        for op in order:
            for storage in problem.reads[op]:
                pending[storage] = pending.get(storage, 0) + 1
        targets = frozenset(missing)
        for op in order:
            reads = problem.reads[op]
            held_now = held | targets.intersection(self.resident)
            absent = [s for s in reads if s not in self.resident]
            if absent:
                self._bring_back(absent, held_now.union(s for s in reads if s in self.resident))
            self._run(op, held_now.union(reads))
            self.recompute_seconds += problem.seconds[op]
            self._fresh.update(problem.results[op])
            for storage in reads:
                pending[storage] -= 1
                if not pending[storage]:
                    del pending[storage]
                    self._drop_if_useless(storage)
            for storage in problem.results[op]:
                if storage not in pending:
                    self._drop_if_useless(storage)
        self._missing_seconds.clear()
        self._neighbourhood_seconds.clear()
        if self.recompute_seconds > self._max_recompute_seconds or len(self.runs) > self._max_runs:
            self._budget_bytes, self.was_cut = float("inf"), True

    def _closure(self, storages: Iterable[int]) -> set[int]:
        """The ops that bring storages back, given what is in memory."""
        problem, resident = self.problem, self.resident
        ops: set[int] = set()
        stack = list(storages)
        while stack:
            storage = stack.pop()
            op = problem.paging[storage].back if storage in self._on_file else problem.rerun[storage]
            if op < 0:
                raise PlanError(
                    f"value {storage} ({problem.graph.values[storage].name}) is needed and cannot be recomputed"
                )
            if op not in ops:
                ops.add(op)
                stack.extend(s for s in problem.reads[op] if s not in resident)
        return ops

    def _lost_behind(self, storage: int) -> set[int]:
        """The ops behind a storage that must run again for something evicted."""
        problem = self.problem
        if self._lost is None:
            self._lost = self._closure(self._evicted)
        ops: set[int] = set()
        stack = [storage]
        while stack:
            for op in problem.rerun_readers.get(stack.pop(), ()):
                if op in self._lost and op not in ops:
                    ops.add(op)
                    stack.extend(s for s in problem.results[op] if s not in self.resident)
        return ops

    def _run(self, op: int, held: frozenset[int]) -> None:
        problem = self.problem
        for storage in problem.results[op]:
            if storage in self.resident and not problem.is_sticky[storage]:
                self._remove(storage)
        transient = problem.transient_bytes[op]
        if self.live_bytes + transient > self._budget_bytes:
            self._make_room(transient, held)
        self.runs.append(op)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + transient)
        self.clock_seconds += problem.seconds[op]
        for storage in problem.results[op]:
            if storage not in self.resident:
                self._add(storage)
        for storage in (*problem.reads[op], *problem.results[op]):
            self._touched_seconds[storage] = self.clock_seconds

    def _make_room(self, transient: int, held: frozenset[int]) -> None:
        """Evict until the next op fits, the highest score first; what a recomputation in progress needs comes last.

        What that recomputation has made itself stays: it is about to be read together with what is being made.
        """
        pending = self._pending
        limit = self._budget_bytes - transient
        self._evict_down_to(limit, [s for s in self.resident if s not in pending])
        if self.live_bytes > limit:
            self._evict_down_to(
                limit, [s for s in self.resident if s in pending and s not in held and s not in self._fresh]
            )

    def _evict_down_to(self, limit: float, candidates: Iterable[int]) -> None:
        score, nbytes = self._score, self.problem.nbytes
        assert score is not None
        heap = [(-score(self, s), s) for s in candidates if nbytes[s] and self.can_evict(s)]
        heapq.heapify(heap)
        while heap and self.live_bytes > limit:
            _, storage = heapq.heappop(heap)
            # Evictions only ever lower the scores of others, so the best one is the best if its own still stands.
            self._missing_seconds.pop(storage, None)
            self._neighbourhood_seconds.pop(storage, None)
            current = -score(self, storage)
            if heap and current > heap[0][0]:
                heapq.heappush(heap, (current, storage))
            elif self.can_evict(storage):
                self._evict(storage)

    def _let_go(self, storages: Iterable[int]) -> None:
        """After a step: drop what nobody uses any more, and what was to leave before the backward pass."""
        boundary = self.problem.boundary
        for storage in storages:
            if storage not in self.resident:
                continue
            following = self._following_use(storage)
            if following is None:
                self._drop_if_useless(storage)
            elif storage in self._dropped and self.position < boundary < following and self.can_evict(storage):
                self._evict(storage)

    def _following_use(self, storage: int) -> int | None:
        uses, cursor = self._uses[storage], self._cursor[storage]
        while cursor < len(uses) and uses[cursor] <= self.position:
            cursor += 1
        self._cursor[storage] = cursor
        return uses[cursor] if cursor < len(uses) else None

    def _drop_if_useless(self, storage: int) -> None:
        problem = self.problem
        if storage not in self.resident or problem.is_sticky[storage] or storage in self._pending:
            return
        if self._following_use(storage) is not None:
            return
        bit = problem.fragile_bit[storage]
        if bit and self._holds[bit.bit_length() - 1]:
            return
        self._remove(storage)
        if storage in self._on_file:
            self._on_file.discard(storage)
            self._file_bytes -= TransferCosts.file_bytes(problem.nbytes[storage])

    def _evict(self, storage: int) -> None:
        if storage in self._on_file or self._paging_seconds(storage) < self._recompute_seconds(storage):
            self._page_out(storage)
            self._remove(storage)
            return
        self._remove(storage)
        self._evicted.add(storage)
        for position in self.problem.holds[storage]:
            self._holds[position] += 1

    def _page_out(self, storage: int) -> None:
        if storage in self._on_file:
            return
        out = self.problem.paging[storage].out
        self.runs.append(out)
        self.recompute_seconds += self.problem.seconds[out]
        self._on_file.add(storage)
        self._file_bytes += TransferCosts.file_bytes(self.problem.nbytes[storage])

    def _remove(self, storage: int) -> None:
        self._lost = None
        del self.resident[storage]
        self.live_bytes -= self.problem.nbytes[storage]
        self._fragile_here &= ~self.problem.fragile_bit[storage]

    def _add(self, storage: int) -> None:
        problem = self.problem
        self._lost = None
        self.resident[storage] = None
        self.live_bytes += problem.nbytes[storage]
        self._fragile_here |= problem.fragile_bit[storage]
        if storage in self._evicted:
            self._evicted.discard(storage)
            for position in problem.holds[storage]:
                self._holds[position] -= 1
                if not self._holds[position]:
                    self._drop_if_useless(problem.fragile_storages[position])
