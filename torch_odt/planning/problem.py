"""A training graph as planners see it: storages instead of tensors, integers instead of objects.

Memory belongs to storages; views cost nothing and come for free wherever their storage is. So planners work on
`Problem`, in which views are gone: steps (ops that do something) read and produce storages, each named by the value
that owns it. `lower` (in lowering.py) puts the views back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from torch_odt.capture.costs import Costs, OpCost, TransferCosts
from torch_odt.capture.estimates import estimate
from torch_odt.capture.graph import Op, TrainingGraph
from torch_odt.capture.update_in_backward import UPDATES

Gradients = Literal["keep", "accumulate"]

BOUNDARY = -1
"""Stands among the steps where the forward pass ends."""

_REMEMBERED = 4


@dataclass(frozen=True)
class PageSteps:
    """The steps that move one storage.

    Attributes:
        out: begins to write it to the file. It leaves memory afterwards, unless something touches it later.
        let_go: touches it, and nothing else: until here it may be written.
        back: begins to read it from the file.
    """

    out: int
    let_go: int
    back: int


@dataclass
class Problem:
    """The arrays that planners work on. Lists are indexed by value (storages) or by op (steps).

    Attributes:
        graph: what they were made from.
        steps: the ops to execute in program order, without views and dead ops, with `BOUNDARY` after the forward
            pass.
        boundary: the position of `BOUNDARY` in `steps`.
        reads: storages that an op needs in memory; those of `BOUNDARY` are the new contents of buffers.
        results: storages that an op allocates and that somebody uses.
        seconds: of an op.
        transient_bytes: the most that an op allocates at once, its results included.
        nbytes: of a storage.
        rerun: the op that brings an evicted storage back, or -1.
        rank: a topological order of the ops, rematerializers included.
        uses: the positions in `steps` at which a storage is read, ascending.
        born: the position in `steps` at which a storage is first computed.
        is_sticky: the storage leaves the graph, so that it stays allocated until the end of the step.
        fragile: for each storage, the set (as bits) of storages that must be in memory for it to be recomputable,
            because they cannot be recomputed themselves.
        fragile_bit: the bit of a storage that cannot be recomputed, 0 for others.
        fragile_storages: which storage has which bit.
        apart_bytes: what leaves the step, when it is counted apart: on top of everything else, all the time.
        holds: for each storage, the positions of those bits whose storages the program stops using before this one:
            while it is recomputed after an eviction, they must stay for it.
        paging: the steps that move a storage to a file and back; empty where nothing is paged.
        transfers: what that costs.
    """

    graph: TrainingGraph
    steps: list[int]
    boundary: int
    reads: dict[int, tuple[int, ...]]
    results: dict[int, tuple[int, ...]]
    seconds: dict[int, float]
    transient_bytes: dict[int, int]
    nbytes: list[int]
    rerun: list[int]
    rank: list[tuple[int, int]]
    uses: list[list[int]]
    born: list[int]
    is_sticky: list[bool]
    fragile: list[int]
    fragile_bit: list[int]
    fragile_storages: list[int]
    holds: list[tuple[int, ...]]
    apart_bytes: int = 0
    paging: Mapping[int, PageSteps] = field(default_factory=dict)
    transfers: TransferCosts | None = None

    @property
    def program_seconds(self) -> float:
        return sum(self.seconds[op] for op in self.steps if op != BOUNDARY)

    @cached_property
    def rerun_readers(self) -> dict[int, list[int]]:
        """For each storage, the ops that bring others back from it."""
        readers: dict[int, list[int]] = {}
        for op in dict.fromkeys(op for op in self.rerun if op >= 0):
            for source in self.reads[op]:
                readers.setdefault(source, []).append(op)
        return readers

    def storages(self) -> list[int]:
        """Every storage, in the order in which the program computes them."""
        return [s for op in self.steps if op != BOUNDARY for s in self.results[op]]


_RECENT: OrderedDict[tuple[int, int, str, bool], tuple[TrainingGraph, Costs, Problem]] = OrderedDict()


def problem_of(graph: TrainingGraph, costs: Costs, gradients: Gradients = "keep", *, apart: bool = False) -> Problem:
    """The problem that a graph and its costs pose; the last few are remembered, because planners run in series.

    Args:
        graph: the step.
        costs: of its ops; ops that are missing are estimated.
        gradients: whether delivered gradients stay in memory ("keep") or are added to existing ones ("accumulate").
        apart: count what leaves the step on top of everything else, as for an arena that stays as large as it ever
            was. Otherwise the peak is that of the sum.
    """
    key = (id(graph), id(costs), gradients, apart)
    known = _RECENT.get(key)
    if known is not None:
        return known[2]
    problem = make_problem(graph, costs, gradients)
    problem = _set_apart(problem, costs) if apart else problem
    problem = problem if costs.transfers is None else _with_paging(problem, costs.transfers)
    _RECENT[key] = (graph, costs, problem)
    while len(_RECENT) > _REMEMBERED:
        _RECENT.popitem(last=False)
    return problem


def forget_problems() -> None:
    """Let go of those that are remembered."""
    _RECENT.clear()


def _set_apart(problem: Problem, costs: Costs) -> Problem:
    graph = problem.graph
    transient_bytes = dict(problem.transient_bytes)
    nbytes = list(problem.nbytes)
    for index, produced in problem.results.items():
        leaving = {s for s in produced if problem.is_sticky[s]}
        if not leaving or index >= graph.program_length:
            continue
        op = graph.ops[index]
        cost = costs.ops.get(index) or estimate(graph, op)
        ordinals = {o for v, o in zip(op.writes, cost.result_ordinals, strict=False) if v in leaving}
        transient_bytes[index] = peak_without(cost, ordinals)
        for storage in leaving:
            nbytes[storage] = 0
    apart_bytes = sum(n for s, n in enumerate(problem.nbytes) if problem.is_sticky[s])
    return replace(problem, nbytes=nbytes, transient_bytes=transient_bytes, apart_bytes=apart_bytes)


def unmovable_storages(graph: TrainingGraph) -> set[int]:
    """What is never paged: what leaves the step, and what an op writes into: the file would have the old contents."""
    written_into = {graph.values[op.overwrites].base for op in graph.ops if op.overwrites is not None}
    return written_into | {graph.values[value].base for value in graph.output_values}


def _with_paging(problem: Problem, costs: TransferCosts) -> Problem:
    """The same problem, in which storages may be paged as well; steps of transfers have ids behind its ops'.

    Left out are storages that take nothing or are never read.
    """
    graph = problem.graph
    unmovable = unmovable_storages(graph)
    reads, results = dict(problem.reads), dict(problem.results)
    seconds, transient_bytes = dict(problem.seconds), dict(problem.transient_bytes)
    rank = list(problem.rank)
    paging: dict[int, PageSteps] = {}
    for storage in problem.storages():
        nbytes = problem.nbytes[storage]
        if nbytes == 0 or storage in unmovable or not problem.uses[storage]:
            continue
        steps = PageSteps(len(rank), len(rank) + 1, len(rank) + 2)
        rank += [problem.rank[graph.values[storage].producer or 0]] * 3
        for step in (steps.out, steps.let_go):
            reads[step], results[step], seconds[step], transient_bytes[step] = (storage,), (), 0.0, 0
        reads[steps.back], results[steps.back] = (), (storage,)
        seconds[steps.out], seconds[steps.back] = costs.write_seconds(nbytes), costs.read_seconds(nbytes)
        transient_bytes[steps.back] = nbytes
        paging[storage] = steps
    return replace(
        problem,
        reads=reads,
        results=results,
        seconds=seconds,
        transient_bytes=transient_bytes,
        rank=rank,
        paging=paging,
        transfers=costs,
    )


def peak_without(cost: OpCost, ordinals: Collection[int | None]) -> int:
    """The most bytes that a call holds at once, leaving out some of its blocks."""
    live = peak = 0
    for ordinal, size in cost.events:
        if ordinal not in ordinals:
            live += size
            peak = max(peak, live)
    return peak


def is_alias(graph: TrainingGraph, op: Op) -> bool:
    """Whether all that an op returns lives in storage that exists already."""
    if op.overwrites is not None:
        return False
    return op.is_view or (bool(op.results) and all(graph.values[v].base != v for v in op.results))


def live_ops(graph: TrainingGraph) -> set[int]:
    """Program ops that an output depends on, and those that have an effect of their own."""
    live: set[int] = set()
    wanted = set(graph.output_values)
    for op in reversed(graph.program):
        if op.is_random or not op.writes or op.target in UPDATES or not wanted.isdisjoint(op.results):
            live.add(op.index)
            wanted.update(op.reads)
    return live


def maker_of(graph: TrainingGraph, value: int) -> int | None:
    """The op that computes the storage of a value, behind all views; None if it belongs to the caller."""
    producer = graph.values[value].producer
    while producer is not None and is_alias(graph, graph.ops[producer]):
        reads = graph.ops[producer].reads
        producer = graph.values[reads[0]].producer if reads else None
    return producer


def storage_needs(graph: TrainingGraph) -> list[tuple[int, ...]]:
    """For each value, the storages that must be in memory to read it (its own; none if it belongs to the caller)."""
    needs: list[tuple[int, ...]] = [()] * len(graph.values)
    for op in graph.program:
        alias = is_alias(graph, op)
        inherited = tuple(dict.fromkeys(s for v in op.reads for s in needs[v])) if alias else ()
        for value in op.results:
            if op.overwrites is not None and graph.values[value].base != value:
                needs[value] = needs[op.overwrites]
            else:
                needs[value] = inherited if alias else (value,)
    return needs


def block_bytes(graph: TrainingGraph, op: Op, cost: OpCost) -> dict[int, int]:
    """The bytes of each storage that an op allocates for its results."""
    blocks = cost.block_bytes
    found: dict[int, int] = {}
    for position, value in enumerate(op.writes):
        if value is None or graph.values[value].base != value:
            continue
        ordinal = cost.result_ordinals[position] if position < len(cost.result_ordinals) else None
        found[value] = 0 if ordinal is None else blocks.get(ordinal, 0)
    return found


def make_problem(graph: TrainingGraph, costs: Costs, gradients: Gradients = "keep") -> Problem:
    """Compile a graph and its costs into a `Problem`."""
    live = live_ops(graph)
    needs = storage_needs(graph)
    worked = [op for op in graph.ops if not is_alias(graph, op)]
    cost_of = {op.index: costs.ops.get(op.index) or estimate(graph, op) for op in worked}
    steps, boundary = _steps(graph, live)

    reads = {op.index: tuple(dict.fromkeys(s for v in op.reads for s in needs[v])) for op in worked}
    reads[BOUNDARY] = _boundary_reads(graph, needs)
    helpers = [index for index in reads if index >= graph.program_length]
    used = {s for op in (*steps, *helpers) for s in reads[op]} | {s for v in graph.output_values for s in needs[v]}
    results = {op.index: tuple(v for v in op.results if graph.values[v].base == v and v in used) for op in worked}

    nbytes = [0] * len(graph.values)
    for op in worked:
        if op.index in live:
            for storage, size in block_bytes(graph, op, cost_of[op.index]).items():
                nbytes[storage] = size
    uses: list[list[int]] = [[] for _ in graph.values]
    born = [-1] * len(graph.values)
    for position, index in enumerate(steps):
        for storage in reads[index]:
            uses[storage].append(position)
        for storage in results.get(index, ()):
            born[storage] = position
    leaving = ("loss", "result", "gradient") if gradients == "keep" else ("loss", "result")
    is_sticky = [False] * len(graph.values)
    for output in graph.outputs:
        if output.kind in leaving:
            for storage in needs[output.value]:
                is_sticky[storage] = True

    rerun = _rerun_ops(graph, results, is_sticky)
    _keep_what_is_drawn_from(rerun, steps, boundary, results, reads, uses, nbytes)
    rank = [_rank(graph, op) for op in graph.ops]
    fragile, fragile_bit, fragile_storages = _fragility(graph, steps, results, reads, rerun, rank)
    return Problem(
        graph=graph,
        steps=steps,
        boundary=boundary,
        reads=reads,
        results=results,
        seconds={index: cost.seconds for index, cost in cost_of.items()},
        transient_bytes={index: cost.peak_bytes for index, cost in cost_of.items()},
        nbytes=nbytes,
        rerun=rerun,
        rank=rank,
        uses=uses,
        born=born,
        is_sticky=is_sticky,
        fragile=fragile,
        fragile_bit=fragile_bit,
        fragile_storages=fragile_storages,
        holds=_holds(uses, is_sticky, fragile, fragile_storages),
    )


def _steps(graph: TrainingGraph, live: set[int]) -> tuple[list[int], int]:
    ops = [op for op in graph.program if op.index in live and not is_alias(graph, op)]
    forward = [op.index for op in ops if op.phase == "forward"]
    return [*forward, BOUNDARY, *(op.index for op in ops if op.phase == "backward")], len(forward)


def _boundary_reads(graph: TrainingGraph, needs: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What is handed over at the end of the forward pass: new buffers, and gradients that no backward op computes."""
    found: dict[int, None] = {}
    for output in graph.outputs:
        maker = maker_of(graph, output.value)
        early = maker is not None and graph.ops[maker].phase == "forward"
        if output.kind == "mutation" or (output.kind == "gradient" and early):
            found.update(dict.fromkeys(needs[output.value]))
    return tuple(found)


def _rerun_ops(graph: TrainingGraph, results: Mapping[int, tuple[int, ...]], is_sticky: Sequence[bool]) -> list[int]:
    """The op that brings each storage back; ops whose other results have left the step do not run again."""
    rerun = [-1] * len(graph.values)
    for produced in results.values():
        for storage in produced:
            op = graph.recompute_op(storage)
            if op is None or storage not in results.get(op.index, ()):
                continue
            if not any(is_sticky[s] for s in results[op.index]):
                rerun[storage] = op.index
    return rerun


def _keep_what_is_drawn_from(
    rerun: list[int],
    steps: Sequence[int],
    boundary: int,
    results: Mapping[int, tuple[int, ...]],
    reads: Mapping[int, tuple[int, ...]],
    uses: Sequence[list[int]],
    nbytes: Sequence[int],
) -> None:
    """Where what comes from a random draw is smaller than the draw (a mask), it is that which is never recomputed.

    Otherwise the draw would have to stay in memory for as long as anything behind it may be recomputed.
    """
    storages = [s for op in steps if op != BOUNDARY for s in results[op]]
    readers: dict[int, list[int]] = {}
    for storage in storages:
        for source in reads[rerun[storage]] if rerun[storage] >= 0 else ():
            readers.setdefault(source, []).append(storage)
    for storage in storages:
        if rerun[storage] >= 0 or (uses[storage] and uses[storage][-1] > boundary):
            continue
        following = [s for s in readers.get(storage, ()) if rerun[s] >= 0]
        if sum(nbytes[s] for s in following) < nbytes[storage]:
            for reader in following:
                rerun[reader] = -1


def _rank(graph: TrainingGraph, op: Op) -> tuple[int, int]:
    """A rematerializer comes right after the op that it stands in for: it may read that op's other results."""
    if op.index < graph.program_length:
        return (op.index, op.index)
    producers = [graph.values[v].producer for v in op.results]
    return (max((p for p in producers if p is not None), default=op.index), op.index)


def _fragility(
    graph: TrainingGraph,
    steps: Sequence[int],
    results: dict[int, tuple[int, ...]],
    reads: dict[int, tuple[int, ...]],
    rerun: Sequence[int],
    rank: Sequence[tuple[int, int]],
) -> tuple[list[int], list[int], list[int]]:
    storages = [s for op in steps if op != BOUNDARY for s in results[op]]
    bits = [0] * len(graph.values)
    fragile_storages = [s for s in storages if rerun[s] < 0]
    for position, storage in enumerate(fragile_storages):
        bits[storage] = 1 << position
    fragile = list(bits)
    # A rematerializer may read what its own program op returns, so it comes after that op's other results.
    for storage in sorted((s for s in storages if rerun[s] >= 0), key=lambda s: rank[rerun[s]]):
        for source in reads[rerun[storage]]:
            fragile[storage] |= fragile[source]
    return fragile, bits, fragile_storages


def _holds(
    uses: Sequence[list[int]], is_sticky: Sequence[bool], fragile: Sequence[int], fragile_storages: Sequence[int]
) -> list[tuple[int, ...]]:
    last = [positions[-1] if positions else -1 for positions in uses]
    ending = sorted((last[s], bit) for bit, s in enumerate(fragile_storages) if not is_sticky[s])
    ends = [end for end, _ in ending]
    # early[i]: the bits of the first i fragile storages to end.
    early = [0]
    for _, bit in ending:
        early.append(early[-1] | 1 << bit)
    return [bits_of(mask & early[bisect_left(ends, last[s])]) if mask else () for s, mask in enumerate(fragile)]


def bits_of(mask: int) -> tuple[int, ...]:
    """The positions of the bits that are set, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)
