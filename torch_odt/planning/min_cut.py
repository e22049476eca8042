"""min-cut: the keep-set that is cheapest when every kept byte has a price.

After the min-cut partitioner of AOTAutograd (He et al.), but for seconds: there, the fewest saved bytes are sought
and operators are recomputable or not; here an op costs its measured seconds and a kept byte costs a price, so that
the sum is minimal exactly, as a minimum cut: a storage that the backward pass needs is either kept (bytes x price) or
recomputed (seconds, and then all inputs of its op are needed, too). Raising the price traces the lower hull of kept
bytes against recomputed seconds.

Optimal when the peak lies at the boundary of forward and backward and everything is recomputed at most once, which is
the case down to about a third of keep-all's peak for most convolutional networks. Below that, what is recomputed at
once in the backward pass outgrows what is kept, and evictions on demand take over.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import TrainingGraph
from torch_odt.planning.keep_set import forward_storages
from torch_odt.planning.max_flow import MaxFlow
from torch_odt.planning.problem import Problem, problem_of
from torch_odt.planning.registry import planner
from torch_odt.planning.schedule import Schedule
from torch_odt.planning.search import Search

_NEGLIGIBLE_SHARE = 2e-5
_PRICES = 24


def keep_sets(problem: Problem) -> Iterator[frozenset[int]]:
    """Optimal keep-sets for ascending prices of a byte, from one that keeps nearly all to one that keeps least."""
    network = _Network(problem)
    if not network.keep_edges:
        return
    cheapest, dearest = network.price_range()
    seen: set[frozenset[int]] = set()
    for step in range(_PRICES + 1):
        kept = network.solve(cheapest * (dearest / cheapest) ** (step / _PRICES))
        if kept not in seen:
            seen.add(kept)
            yield kept


@planner("min-cut")
def min_cut(graph: TrainingGraph, costs: Costs, budget_bytes: int) -> Schedule:
    """The optimal keep-set of the lowest price that fits. Choose it for moderate budgets of large graphs."""
    search = Search(problem_of(graph, costs), budget_bytes)
    candidates = list(keep_sets(search.problem))
    for kept in candidates:
        search.try_keeping(kept, evict=False)
    if not search.best.fits:
        for kept in candidates:
            search.try_keeping(kept)
    return search.schedule("min-cut")


class _Network:
    """The flow network: for each storage whether it is needed and whether it is recomputed, and the ops between them.

    The source side of a cut means yes. Cutting needed -> recomputed keeps a storage; cutting op -> sink pays for the
    op.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.flow = MaxFlow()
        self.source, self.sink = self.flow.add_node(), self.flow.add_node()
        self.keep_edges: dict[int, int] = {}
        self._negligible = _NEGLIGIBLE_SHARE * sum(problem.nbytes[s] for s in problem.storages())
        self._price = 0.0
        members = self._ancestors(self._demanded())
        self._recomputed: dict[int, int] = {}
        self._connect(members)

    def price_range(self) -> tuple[float, float]:
        """Prices below and above which the keep-set does not change."""
        problem = self.problem
        rates = [problem.seconds[problem.rerun[s]] / problem.nbytes[s] for s in self.keep_edges]
        longest = sum({problem.rerun[s]: problem.seconds[problem.rerun[s]] for s in self.keep_edges}.values())
        dearest = longest / min(problem.nbytes[s] for s in self.keep_edges)
        return max(min(rates), 1e-4 * max(rates)) + 1e-18, max(min(dearest, 30 * max(rates)), 1e-17)

    def solve(self, price: float) -> frozenset[int]:
        """The cheapest keep-set at a price in seconds per byte, which must not be lower than in the last call."""
        for storage, edge in self.keep_edges.items():
            self.flow.raise_capacity(edge, (price - self._price) * self.problem.nbytes[storage])
        self._price = price
        self.flow.maximize(self.source, self.sink)
        side = self.flow.source_side(self.source)
        return frozenset(forward_storages(self.problem)) - {s for s, node in self._recomputed.items() if side[node]}

    def _demanded(self) -> list[int]:
        problem = self.problem
        crossing = (s for s in forward_storages(problem) if problem.uses[s] and problem.uses[s][-1] > problem.boundary)
        return [s for s in crossing if self._has_choice(s)]

    def _has_choice(self, storage: int) -> bool:
        problem = self.problem
        can_drop = problem.rerun[storage] >= 0 and not problem.is_sticky[storage]
        return can_drop and problem.nbytes[storage] > self._negligible

    def _ancestors(self, storages: list[int]) -> list[int]:
        """What may have to be in memory for these storages to come back, they themselves included."""
        found: dict[int, None] = {}
        stack = list(storages)
        while stack:
            storage = stack.pop()
            if storage not in found:
                found[storage] = None
                stack += [s for s in self.problem.reads[self.problem.rerun[storage]] if self._has_choice(s)]
        return list(found)

    def _connect(self, members: list[int]) -> None:
        problem, flow = self.problem, self.flow
        infinite = float("inf")
        needed = {s: flow.add_node() for s in members}
        self._recomputed = {s: flow.add_node() for s in members}
        ops = {op: flow.add_node() for op in dict.fromkeys(problem.rerun[s] for s in members)}
        for storage in self._demanded():
            flow.add_edge(self.source, needed[storage], infinite)
        for storage in members:
            self.keep_edges[storage] = flow.add_edge(needed[storage], self._recomputed[storage], 0.0)
            flow.add_edge(self._recomputed[storage], ops[problem.rerun[storage]], infinite)
        for op, node in ops.items():
            flow.add_edge(node, self.sink, problem.seconds[op])
            for source in problem.reads[op]:
                if source in needed:
                    flow.add_edge(node, needed[source], infinite)
