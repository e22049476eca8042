"""What every op of a graph costs on this machine: its seconds, and its allocations one by one.

Ops are run alone, on synthetic inputs, one at a time, so that profiling needs no more memory than the largest op.
Calls with the same signature are measured once; a cache carries them over to the next process.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from torch_odt import _extensions, memory
from torch_odt.capture.cost_table import (
    FORMAT,
    RememberedCosts,
    apply_costs,
    cost_to_text,
    costs_from_json,
    costs_to_json,
    signature,
    table_of,
    view_cost,
)
from torch_odt.capture.costs import Costs, OpCost, ResultLayout
from torch_odt.capture.estimates import estimate
from torch_odt.capture.graph import Op, TrainingGraph
from torch_odt.capture.layouts import RealLayouts, layout_of
from torch_odt.capture.machine import cache_bytes, machine_name, settings_name
from torch_odt.capture.overwrite import function_of
from torch_odt.capture.synthetic import SyntheticInputs
from torch_odt.errors import first_line

__all__ = ["apply_costs", "costs_from_json", "costs_to_json", "machine_name", "profile", "settings_name", "table_of"]

_MOST_REPEATS = 20
_RECORDED_RUNS = 2
_ARENA_SLACK_BYTES = 256 << 20
# Less than this may be the rounding of two mappings to huge pages.
_LIBRARY_BYTES = 4 << 20
# Emptying the caches takes longer than most calls: small ones are measured less often.
_MOST_SECONDS = 0.03

Events = tuple[tuple[int, int], ...]
Ordinals = tuple[int | None, ...]


class ProfileCache(Protocol):
    """Where measurements outlive the process: `torch_odt.cache.Cache`."""

    def load_profile(self, key: str) -> dict[str, Any]: ...
    def save_profile(self, key: str, ops: dict[str, Any]) -> None: ...


class DynamicArena(Protocol):
    """The part of an arena that profiling needs: memory that is mapped once, so that timings hold no page faults."""

    @property
    def resident_bytes(self) -> int: ...
    def dynamic(self, on: bool, limit_bytes: int = -1, refuses: bool = False) -> None: ...
    def release(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...


Progress = Callable[[int, int, str], None]
"""(ops done, ops in the graph, the operator that is next)"""


def profile(
    graph: TrainingGraph,
    *,
    cache: ProfileCache | None = None,
    repeats: int = 3,
    min_seconds: float = 0.002,
    arena: DynamicArena | None = None,
    progress: Progress | None = None,
    limit_bytes: Callable[[], int] | None = None,
) -> Costs:
    """Measure every op of a graph, rematerializers included.

    Views are not run and cost nothing. An op that fails on synthetic inputs is estimated, and the notes name it. The
    state of torch's random generator is as before afterwards.

    Args:
        graph: as it will be planned.
        cache: where to look for measurements first, and where to put new ones.
        repeats: timed calls of each op, at least; the cost is their median.
        min_seconds: an op is timed at least this long in total, or 20 times.
        arena: where results lie while ops are timed; by default one is made and dropped again.
        progress: called before each op.
        limit_bytes: asked what measuring may take when there is something to measure. An op that takes more is
            estimated, and counts as one that needs more than that.
    """
    machine, key = machine_name(), profile_key()
    known = RememberedCosts({} if cache is None else cache.load_profile(key))
    remembered = _remembered(graph, known)
    if remembered is not None:
        return Costs(remembered, machine, _notes_of(known.damaged))
    limit = None if limit_bytes is None else limit_bytes()
    with _quiet_state(), _tracking() as recorder:
        bench = _Bench(graph, recorder, arena or _arena_for(graph, recorder), repeats, min_seconds, limit)
        ops = {}
        for op in graph.ops:
            if progress is not None:
                progress(op.index, len(graph.ops), op.target)
            ops[op.index] = bench.cost(op, known)
        fresh, notes, too_large = bench.fresh, bench.notes, bench.too_large
        del bench
    notes += _notes_of(known.damaged)
    if too_large:
        notes.append(
            f"{too_large} operators were estimated: measuring one of them would have taken more than there is room for"
        )
    if cache is not None and fresh:
        cache.save_profile(key, {name: cost_to_text(cost) for name, cost in fresh.items()})
    return Costs(ops, machine, list(dict.fromkeys(notes)), too_large)


def _remembered(graph: TrainingGraph, known: RememberedCosts) -> dict[int, OpCost] | None:
    """The costs of all ops if every one has been measured before."""
    layouts, found = RealLayouts(graph), {}
    for op in graph.ops:
        cost = view_cost(op) if op.is_view else known.get(signature(op, layouts))
        if cost is None:
            return None
        found[op.index] = cost
        layouts.learn(op, cost)
    return found


def _notes_of(damaged: int) -> list[str]:
    notes = []
    if _extensions.memory_module is None:
        notes.append("torch_odt._memory is absent: what operators allocate inside is not seen, results alone count")
    if damaged:
        notes.append(f"{damaged} damaged measurements in the cache were measured anew")
    return notes


def profile_key() -> str:
    """What measurements are stored under: they hold for this machine, with these settings."""
    seen = "all allocations" if _extensions.memory_module is not None else "results alone"
    kernels = f"kernels {_extensions.instruction_set() or 'absent'}, {cache_bytes() >> 20} MiB of cache emptied"
    return f"{machine_name()}; {settings_name()}; {kernels}; {seen}; format {FORMAT}"


class _Bench:
    """Runs ops alone and watches them.

    Attributes:
        fresh: what was measured, by signature.
        notes: what was not possible, and why.
        too_large: how many ops were left out for their size.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        recorder: ModuleType | None,
        arena: DynamicArena | None,
        repeats: int,
        min_seconds: float,
        limit_bytes: int | None,
    ) -> None:
        self.fresh: dict[str, OpCost] = {}
        self.notes: list[str] = []
        self._graph = graph
        self._recorder = recorder
        self._arena = arena
        self._repeats = repeats
        self._min_seconds = min_seconds
        self._layouts = RealLayouts(graph)
        self._limit_bytes = limit_bytes
        self._inputs = SyntheticInputs(graph, self._layouts, limit_bytes=limit_bytes)
        self.too_large = 0
        self._failed: dict[str, str] = {}
        self._other_data = torch.zeros((cache_bytes() if limit_bytes is None else 0) // 4)

    def cost(self, op: Op, known: RememberedCosts) -> OpCost:
        """The cost of the next op of the graph; measured if neither `known` nor met before."""
        if op.is_view:
            cost = view_cost(op)
        else:
            name = signature(op, self._layouts)
            found = known.get(name) or self.fresh.get(name)
            cost = found if found is not None else self._new_cost(name, op)
        self._layouts.learn(op, cost)
        return cost

    def _new_cost(self, name: str, op: Op) -> OpCost:
        if self._limit_bytes is not None and self._bytes_of(op) > self._limit_bytes:
            self.too_large += 1
        elif name not in self._failed:
            try:
                self.fresh[name] = self._measure_within(op)
                return self.fresh[name]
            except torch.OutOfMemoryError as error:
                if self._limit_bytes is None:
                    self._note_failure(name, op, error)
                else:
                    self.too_large += 1
                    return _beyond(estimate(self._graph, op), self._limit_bytes)
            except Exception as error:
                self._note_failure(name, op, error)
        return estimate(self._graph, op)

    def _note_failure(self, name: str, op: Op, error: Exception) -> None:
        self._failed[name] = f"{type(error).__name__}: {first_line(error)}"
        self.notes.append(f"{op.target} could not be measured and was estimated: {self._failed[name]}")

    def _bytes_of(self, op: Op) -> int:
        return sum(self._graph.values[v].nbytes for v in (*op.reads, *op.results))

    def _measure_within(self, op: Op) -> OpCost:
        """What the op costs, measured inside the limit; with caches as they are if emptying them takes too much."""
        if self._limit_bytes is None:
            return self._measure_somehow(op)
        spare_bytes = self._limit_bytes - self._bytes_of(op)
        with suppress(torch.OutOfMemoryError):
            self._make_room(op, min(cache_bytes(), spare_bytes // 2))
            return self._measure_somehow(op)
        # Not while the error is handled: its traceback holds what the first attempt has made.
        self._make_room(op, 0)
        return self._measure_somehow(op)

    def _make_room(self, op: Op, other_bytes: int) -> None:
        """Inputs and results of other calls must not stand beside this one's where that is too much."""
        assert self._limit_bytes is not None
        is_kept = other_bytes // 2 <= self._other_data.nbytes <= other_bytes
        if not is_kept:
            self._other_data = torch.empty(0)
        held = self._inputs.held_bytes + (0 if self._arena is None else self._arena.resident_bytes)
        if held + other_bytes + self._bytes_of(op) > self._limit_bytes:
            self._inputs.clear()
            if self._arena is not None:
                self._arena.release()
        if not is_kept:
            self._other_data = torch.zeros(other_bytes // 4)

    def _measure_somehow(self, op: Op) -> OpCost:
        try:
            return self._measure(op, self._inputs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, ZeroDivisionError):
            self._inputs.clear()
        # Zero is a valid index, but no valid divisor or size.
        return self._measure(op, SyntheticInputs(self._graph, self._layouts, integer=1))

    def _measure(self, op: Op, inputs: SyntheticInputs) -> OpCost:
        function = function_of(op)
        args, kwargs = inputs.arguments(op, function, self._opaque_inputs(op))
        if self._arena is not None:
            # Pages that earlier results have left untouched would count as the library's when this call touches them.
            self._arena.release()
        with self._in_arena(inputs.held_bytes):
            layouts, library_bytes = self._first_call(op, function, args, kwargs)
            timed: list[_Timed] = []
            runs: list[tuple[Events, Ordinals]] = []
            began = time.perf_counter()
            while not self._is_enough(timed, time.perf_counter() - began):
                # In a step, what an op reads has long left the caches; calls would look too good.
                self._other_data.add_(1.0)
                taken_away = _times_taken_away()
                if len(runs) < _RECORDED_RUNS:
                    elapsed, run = self._record(op, function, args, kwargs)
                    runs.append(run)
                else:
                    elapsed = _time(function, args, kwargs)
                timed.append(_Timed(elapsed, _times_taken_away() > taken_away))
        inputs.forget_written(op)
        if runs[0] != runs[-1]:
            self.notes.append(f"the allocations of {op.target} vary from call to call; the most are planned for")
        events, ordinals = max(runs, key=lambda run: OpCost(0.0, *run).peak_bytes)
        return OpCost(_typical(timed), events, ordinals, layouts=layouts, library_bytes=library_bytes)

    def _first_call(
        self, op: Op, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[ResultLayout | None, ...], int]:
        """What the op returns, and what the math library takes while it runs: scratch memory of its own."""
        memory.reset_process_peak()
        before = memory.peak_process_bytes()
        layouts = tuple(map(layout_of, _as_list(function(*args, **kwargs), op)))
        arena_bytes = 0 if self._arena is None else self._arena.resident_bytes
        taken = memory.peak_process_bytes() - before - arena_bytes
        return layouts, taken if self._arena is not None and taken >= _LIBRARY_BYTES else 0

    def _is_enough(self, timed: list[_Timed], elapsed: float) -> bool:
        least = max(1, self._repeats)
        if len(timed) >= least and (elapsed >= _MOST_SECONDS or len(timed) >= _MOST_REPEATS):
            return True
        alone = [run.seconds for run in timed if not run.was_disturbed]
        return len(alone) >= least and sum(alone) >= self._min_seconds

    def _record(
        self, op: Op, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[float, tuple[Events, Ordinals]]:
        """One call: its seconds, its allocations, and which of them its results live in."""
        begin = time.perf_counter
        if self._recorder is None:
            start = begin()
            outcome = function(*args, **kwargs)
            elapsed = begin() - start
            return elapsed, _events_of_results(_as_list(outcome, op), (args, kwargs))
        self._recorder.record_begin()
        try:
            start = begin()
            outcome = function(*args, **kwargs)
            elapsed = begin() - start
        finally:
            recorded = self._recorder.record_end()
        blocks = {address: ordinal for ordinal, address in enumerate(self._recorder.record_addresses())}
        events = tuple((o, size if what == "alloc" else -size) for what, o, size in recorded if o >= 0)
        return elapsed, (events, tuple(blocks.get(_address(tensor)) for tensor in _as_list(outcome, op)))

    def _opaque_inputs(self, op: Op) -> dict[int, torch.Tensor]:
        """Inputs that only their real producers can make."""
        return {value: self._produce(value) for value in op.reads if self._layouts.is_opaque(value)}

    def _produce(self, value: int) -> torch.Tensor:
        index = self._graph.values[value].producer
        assert index is not None
        producer = self._graph.ops[index]
        function = function_of(producer)
        args, kwargs = self._inputs.arguments(producer, function, self._opaque_inputs(producer))
        tensor = _as_list(function(*args, **kwargs), producer)[producer.writes.index(value)]
        assert tensor is not None
        return tensor

    @contextmanager
    def _in_arena(self, held_bytes: int) -> Iterator[None]:
        """Inside, what a call allocates lies in the arena; beside so many bytes, more than the limit is refused."""
        if self._arena is None:
            yield
            return
        if self._limit_bytes is None:
            self._arena.dynamic(True)
        else:
            left_bytes = self._limit_bytes - held_bytes - self._other_data.nbytes
            self._arena.dynamic(True, max(0, left_bytes), refuses=True)
        refused = self._arena.stats()["dynamic_misses"]
        try:
            yield
        except RuntimeError as error:
            # What crosses the stable ABI, out of an operator of our own, has lost its class.
            is_refusal = self._limit_bytes is not None and self._arena.stats()["dynamic_misses"] > refused
            if not is_refusal or isinstance(error, torch.OutOfMemoryError):
                raise
            raise torch.OutOfMemoryError(first_line(error)) from None
        finally:
            self._arena.dynamic(False)


def _beyond(cost: OpCost, nbytes: int) -> OpCost:
    """The same cost for a call that needs more than so many bytes at once."""
    scratch = 1 + max(cost.block_bytes, default=-1)
    return replace(cost, events=((scratch, nbytes), (scratch, -nbytes), *cost.events))


class _Timed(NamedTuple):
    """One timed call, and whether other processes took the processor from it meanwhile."""

    seconds: float
    was_disturbed: bool


def _typical(timed: Sequence[_Timed]) -> float:
    """The median of the calls that nothing disturbed; where there is none, the one that was disturbed least."""
    alone = [run.seconds for run in timed if not run.was_disturbed]
    return median(alone) if alone else min(run.seconds for run in timed)


def _times_taken_away() -> int:
    """How often the processor has been taken from a thread of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _time(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    start = time.perf_counter()
    results = function(*args, **kwargs)
    elapsed = time.perf_counter() - start
    del results
    return elapsed


def _as_list(results: Any, op: Op) -> list[torch.Tensor | None]:
    """What an operator returned; None stands for a gradient that its mask left out."""
    listed = [results] if isinstance(results, torch.Tensor) else list(results)
    if len(listed) != len(op.writes):
        raise RuntimeError(f"{len(listed)} results where the trace has {len(op.writes)}")
    return listed


def _address(tensor: torch.Tensor | None) -> int:
    """Where the data begins; 0 where there is none."""
    return 0 if tensor is None else tensor.untyped_storage().data_ptr()


def _events_of_results(results: Sequence[torch.Tensor | None], arguments: Any) -> tuple[Events, Ordinals]:
    """What can be told without a recorder: the results' own storages."""
    given = {_address(t) for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)}
    ordinals: dict[int, int] = {}
    events: list[tuple[int, int]] = []
    found: list[int | None] = []
    for tensor in results:
        address = _address(tensor)
        if tensor is None or address == 0 or address in given:
            found.append(None)
            continue
        if address not in ordinals:
            ordinals[address] = len(events)
            events.append((ordinals[address], tensor.untyped_storage().nbytes()))
        found.append(ordinals[address])
    return tuple(events), tuple(found)


@contextmanager
def _quiet_state() -> Iterator[None]:
    """No autograd, no autocast, and the random generator as it was.

    Modes are left too: `torch.compile` calls its backend inside one, and a Python scalar that passes through a mode
    becomes a tensor there, an allocation that the op does not make when the graph runs.
    """
    random_state = torch.get_rng_state()
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), _disable_current_modes():
            yield
    finally:
        torch.set_rng_state(random_state)


@contextmanager
def _tracking() -> Iterator[ModuleType | None]:
    """The allocator's recorder, if there is one; the allocator is put back as it was."""
    module = _extensions.memory_module
    if module is None:
        yield None
        return
    was_installed = module.is_installed()
    module.install()
    try:
        yield module
    finally:
        if not was_installed:
            module.uninstall()


def _arena_for(graph: TrainingGraph, recorder: ModuleType | None) -> DynamicArena | None:
    """An arena that takes what the largest op allocates; address space alone, until it is used."""
    if recorder is None:
        return None
    values = graph.values
    largest = max((sum(values[v].nbytes for v in (*op.reads, *op.results)) for op in graph.ops), default=0)
    arena: DynamicArena = recorder.Arena(4 * largest + _ARENA_SLACK_BYTES)
    return arena
