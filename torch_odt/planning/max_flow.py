"""Maximum flow and minimum cut in a network with capacities that may grow (Dinic's algorithm)."""

from __future__ import annotations

from collections import deque

_EPSILON = 1e-15


class MaxFlow:
    """A flow network. The flow is kept between calls, so that raising capacities continues from it."""

    def __init__(self) -> None:
        self._out: list[list[int]] = []
        self._head: list[int] = []
        self._room: list[float] = []

    def add_node(self) -> int:
        self._out.append([])
        return len(self._out) - 1

    def add_edge(self, tail: int, head: int, capacity: float) -> int:
        """Add an edge and return its number; its reverse has the next number."""
        edge = len(self._head)
        self._head += [head, tail]
        self._room += [capacity, 0.0]
        self._out[tail].append(edge)
        self._out[head].append(edge + 1)
        return edge

    def raise_capacity(self, edge: int, by: float) -> None:
        self._room[edge] += by

    def maximize(self, source: int, sink: int) -> None:
        """Push what still can be pushed."""
        while True:
            level = self._levels(source)
            if level[sink] < 0:
                return
            self._block(source, sink, level)

    def source_side(self, source: int) -> list[bool]:
        """After `maximize`: for each node whether it is on the source's side of the minimum cut."""
        return [level >= 0 for level in self._levels(source)]

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self._out)
        level[source] = 0
        queue = deque([source])
        head, room, out = self._head, self._room, self._out
        while queue:
            node = queue.popleft()
            for edge in out[node]:
                target = head[edge]
                if level[target] < 0 and room[edge] > _EPSILON:
                    level[target] = level[node] + 1
                    queue.append(target)
        return level

    def _block(self, source: int, sink: int, level: list[int]) -> None:
        """Saturate every shortest path: depth first, with a pointer to the edge that each node tries next."""
        head, room, out = self._head, self._room, self._out
        pointer = [0] * len(out)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                amount = min(room[edge] for edge in path)
                retreat = len(path)
                for place, edge in enumerate(path):
                    room[edge] -= amount
                    room[edge ^ 1] += amount
                    if room[edge] <= _EPSILON and place < retreat:
                        retreat = place
                node = head[path[retreat] ^ 1]
                del path[retreat:]
                continue
            edges, place = out[node], pointer[node]
            while place < len(edges):
                edge = edges[place]
                if room[edge] > _EPSILON and level[head[edge]] == level[node] + 1:
                    break
                place += 1
            pointer[node] = place
            if place < len(edges):
                path.append(edges[place])
                node = head[edges[place]]
            elif path:
                last = path.pop()
                node = head[last ^ 1]
                pointer[node] += 1
            else:
                return
