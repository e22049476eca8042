"""The best schedule of a small problem, by trying everything."""

from __future__ import annotations

import heapq
import math

from torch_odt.planning.paging_incumbent import PricedGoal
from torch_odt.planning.problem import BOUNDARY, Problem

State = tuple[int, tuple[int, int], frozenset[int], frozenset[int]]
"""A position in the program, the rank of what came back last before it, and what is in memory and in the file."""

_BEGIN = (-1, -1)


def least_cost(problem: Problem, budget_bytes: int, goal: PricedGoal | None = None) -> float | None:
    """What the best schedule costs above the program, by Dijkstra over everything that can be in memory.

    Before each step of the program, storages may come back in the order of their ranks, each once: computed again, or
    read from the file if they have been written. Transfers do not run beside ops. None where nothing fits.
    """
    goal = goal or PricedGoal()
    joules = goal.objective == "joules"
    op_price = goal.watts if joules else 1.0
    transfers = problem.transfers
    transfer_price = transfers.watts + transfers.waiting_watts if joules and transfers is not None else 1.0
    spare_seconds = goal.deadline_seconds - problem.program_seconds + 1e-9
    makes: dict[int, set[int]] = {}
    for storage in problem.storages():
        if problem.rerun[storage] >= 0:
            makes.setdefault(problem.rerun[storage], set()).add(storage)
    queue: list[tuple[float, float, int, State]] = [(0.0, 0.0, 0, (0, _BEGIN, frozenset(), frozenset()))]
    fastest: dict[State, float] = {}
    pushed = 0
    while queue:
        cost, seconds, _, state = heapq.heappop(queue)
        if seconds >= fastest.get(state, math.inf):
            continue
        fastest[state] = seconds
        position, rank, resident, on_file = state
        if position == len(problem.steps):
            return cost
        live = sum(problem.nbytes[s] for s in resident)
        following: list[tuple[float, float, State]] = []
        op = problem.steps[position]
        transient = 0 if op == BOUNDARY else problem.transient_bytes[op]
        if resident.issuperset(problem.reads[op]) and live + transient <= budget_bytes:
            after = resident.union(problem.results.get(op, ()))
            following.append((0.0, 0.0, (position + 1, _BEGIN, after, on_file)))
        for again, made in makes.items():
            born = all(problem.born[s] < position for s in made)
            if not born or problem.rank[again] <= rank or not resident.issuperset(problem.reads[again]):
                continue
            if live - sum(problem.nbytes[s] for s in made & resident) + problem.transient_bytes[again] <= budget_bytes:
                taken = problem.seconds[again]
                following.append((taken * op_price, taken, (position, problem.rank[again], resident | made, on_file)))
        for storage, steps in problem.paging.items():
            if storage in resident:
                if storage not in on_file:
                    taken = problem.seconds[steps.out]
                    state = (position, rank, resident, on_file | {storage})
                    following.append((taken * transfer_price, taken, state))
            elif storage in on_file and live + problem.nbytes[storage] <= budget_bytes:
                made_by = problem.rerun[storage]
                place = problem.rank[made_by] if made_by >= 0 else _BEGIN
                if place >= rank:
                    taken = problem.seconds[steps.back]
                    state = (position, place, resident | {storage}, on_file)
                    following.append((taken * transfer_price, taken, state))
        following += [
            (0.0, 0.0, (position, rank, resident - {s}, on_file))
            for s in resident
            if not problem.is_sticky[s] and problem.nbytes[s]
        ]
        for more, longer, reached in following:
            if seconds + longer <= spare_seconds:
                pushed += 1
                heapq.heappush(queue, (cost + more, seconds + longer, pushed, reached))
    return None
