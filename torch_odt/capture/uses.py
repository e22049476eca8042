"""Who makes and who reads the values of a graph: what patterns of several ops ask."""

from __future__ import annotations

from collections.abc import Iterable

from torch_odt.capture.graph import Op, TrainingGraph


class Uses:
    """The readers and producers of a graph's values, as the graph is when this is made."""

    def __init__(self, graph: TrainingGraph) -> None:
        self._readers: dict[int, list[Op]] = {}
        self._producers: dict[int, Op] = {}
        self._positions = {op.index: position for position, op in enumerate(graph.ops)}
        for op in graph.ops:
            for value in (*op.reads, *op.shape_reads):
                self._readers.setdefault(value, []).append(op)
            for value in op.results:
                self._producers[value] = op
        views = [value for value in map(graph.values.__getitem__, self._producers) if value.is_view]
        # What leaves the graph, and what a view looks into, cannot go.
        self._seen = set(graph.output_values) | {value.base for value in views}

    def readers(self, value: int) -> list[Op]:
        """The ops that read a value, or its shape alone, in program order."""
        return self._readers.get(value, [])

    def producer(self, value: int) -> Op | None:
        """The op that computes a value."""
        return self._producers.get(value)

    def exists_before(self, value: int, op: Op) -> bool:
        """Whether a value is there when an op runs."""
        producer = self.producer(value)
        return producer is None or self._positions[producer.index] < self._positions[op.index]

    def is_for(self, value: int, ops: Iterable[Op]) -> bool:
        """Whether nothing but these ops needs a value."""
        return value not in self._seen and {op.index for op in self.readers(value)} <= {op.index for op in ops}
