"""Training graphs made by hand, one op at a time, for tests that need a known sequence of allocations."""

from __future__ import annotations

from collections.abc import Sequence

from torch_odt.capture.costs import Costs, OpCost
from torch_odt.capture.graph import Op, Output, OutputKind, Ref, TrainingGraph, Value

Events = Sequence[tuple[int, int]]


class StepBuilder:
    """Adds values and ops; `graph()` and `costs()` are what came of it."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.outputs: list[Output] = []
        self.op_costs: dict[int, OpCost] = {}
        self.backward_from: int | None = None

    def given(self, nbytes: int, kind: str = "input") -> int:
        return self._value(nbytes, kind, None, None)

    def op(
        self,
        reads: Sequence[int],
        sizes: Sequence[int | None],
        *,
        events: Events | None = None,
        ordinals: Sequence[int | None] | None = None,
        seconds: float = 1e-3,
        target: str = "test.op.default",
    ) -> list[int]:
        """An op with results of these sizes (None for one that nobody uses); returns the used ones."""
        index = len(self.ops)
        writes = tuple(None if size is None else self._value(size, "computed", None, index) for size in sizes)
        if events is None:
            events = [(i, size) for i, size in enumerate(sizes) if size]
        if ordinals is None:
            ordinals = [i if size else None for i, size in enumerate(sizes)]
        self._add(index, reads, writes, target, is_view=False)
        self.op_costs[index] = OpCost(seconds, tuple(events), tuple(ordinals))
        return [w for w in writes if w is not None]

    def view(self, of: int) -> int:
        index = len(self.ops)
        base = self.values[of].base
        result = self._value(self.values[base].nbytes, "computed", base, index)
        self._add(index, (of,), (result,), "aten.view.default", is_view=True)
        self.op_costs[index] = OpCost(0.0, (), (None,))
        return result

    def start_backward(self) -> None:
        self.backward_from = len(self.ops)

    def output(self, value: int, kind: OutputKind, target: str | int = 0) -> int:
        self.outputs.append(Output(value, kind, target))
        return len(self.outputs) - 1

    def graph(self) -> TrainingGraph:
        inputs = [v.index for v in self.values if v.kind != "computed"]
        boundary = len(self.ops) if self.backward_from is None else self.backward_from
        return TrainingGraph(self.ops, self.values, inputs, self.outputs, boundary, len(self.ops))

    def costs(self) -> Costs:
        return Costs(self.op_costs, "a test")

    def _value(self, nbytes: int, kind: str, base: int | None, producer: int | None) -> int:
        index = len(self.values)
        shape = (nbytes,)
        self.values.append(
            Value(index, f"v{index}", shape, (1,), "uint8", nbytes, kind, index if base is None else base, producer)  # type: ignore[arg-type]
        )
        return index

    def _add(
        self, index: int, reads: Sequence[int], writes: tuple[int | None, ...], target: str, *, is_view: bool
    ) -> None:
        phase = "forward" if self.backward_from is None else "backward"
        args = tuple(Ref(v) for v in reads)
        self.ops.append(
            Op(index, target, args, {}, tuple(reads), (), writes, is_view=is_view, phase=phase)  # type: ignore[arg-type]
        )
