"""Small training graphs by hand, random ones for hypothesis, and an executor that knows what each op must return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from torch_odt.capture.costs import Costs, OpCost
from torch_odt.capture.graph import Op, Output, OutputKind, Ref, TrainingGraph, Value, ValueKind
from torch_odt.planning.schedule import Deliver, Free, PageIn, PageOut, Run, Schedule

MB = 1 << 20


@dataclass
class GraphMaker:
    """Puts a graph together op by op. Values are named by their index."""

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    workspace: dict[int, int] = field(default_factory=dict)
    rematerializers: list[tuple[int, tuple[int, ...], float]] = field(default_factory=list)
    phase: str = "forward"

    def give(self, kind: ValueKind = "input", name: str = "") -> int:
        value = self._value(name or f"{kind}{len(self.inputs)}", 4, kind)
        self.inputs.append(value)
        return value

    def op(
        self,
        *reads: int,
        nbytes: int | Sequence[int] = MB,
        seconds: float = 1.0,
        workspace: int = 0,
        shape_reads: tuple[int, ...] = (),
        is_random: bool = False,
        is_pinned: bool = False,
        target: str = "test.compute",
    ) -> Any:
        """An op with one result per size in `nbytes`; returns the value, or the values."""
        index = len(self.ops)
        sizes = [nbytes] if isinstance(nbytes, int) else list(nbytes)
        results = [self._value(f"op{index}_{i}", size, "computed", producer=index) for i, size in enumerate(sizes)]
        self.ops.append(
            Op(
                index=index,
                target=target,
                args=tuple(Ref(v) for v in (*reads, *shape_reads)),
                kwargs={},
                reads=tuple(dict.fromkeys(reads)),
                shape_reads=shape_reads,
                writes=tuple(results),
                is_random=is_random,
                is_pinned=is_pinned,
                phase=self.phase,  # type: ignore[arg-type]
            )
        )
        self.seconds[index] = seconds
        self.workspace[index] = workspace
        return results[0] if isinstance(nbytes, int) else results

    def view(self, source: int) -> int:
        index = len(self.ops)
        base = self.values[source].base
        result = self._value(f"view{index}", self.values[source].nbytes, "computed", producer=index, base=base)
        self.ops.append(
            Op(
                index=index,
                target="test.view",
                args=(Ref(source),),
                kwargs={},
                reads=(source,),
                shape_reads=(),
                writes=(result,),
                is_view=True,
                phase=self.phase,  # type: ignore[arg-type]
            )
        )
        return result

    def rematerialize(self, value: int, *reads: int, seconds: float) -> None:
        self.rematerializers.append((value, reads, seconds))

    def output(self, value: int, kind: OutputKind, target: str | int | None = None) -> None:
        self.outputs.append(Output(value, kind, len(self.outputs) if target is None else target))

    def backward(self) -> int:
        """Begin the backward pass; returns its tangent."""
        self.phase = "backward"
        return self.give("tangent")

    def finish(self) -> tuple[TrainingGraph, Costs]:
        program_length = len(self.ops)
        ops = list(self.ops)
        table: dict[int, int] = {}
        for value, reads, seconds in self.rematerializers:
            index = len(ops)
            ops.append(Op(index, "test.rematerialize", tuple(Ref(v) for v in reads), {}, reads, (), (value,)))
            table[value] = index
            self.seconds[index] = seconds
        graph = TrainingGraph(
            ops=ops,
            values=self.values,
            inputs=self.inputs,
            outputs=self.outputs,
            boundary=sum(op.phase == "forward" for op in self.ops),
            program_length=program_length,
            rematerializers=table,
        )
        return graph, Costs({op.index: self._cost(op) for op in ops})

    def _cost(self, op: Op) -> OpCost:
        if op.is_view:
            return OpCost(0.0, (), (None,) * len(op.writes))
        sizes = [self.values[v].nbytes for v in op.results]
        events = [(i, size) for i, size in enumerate(sizes)]
        workspace = self.workspace.get(op.index, 0)
        if workspace:
            events += [(len(sizes), workspace), (len(sizes), -workspace)]
        return OpCost(self.seconds[op.index], tuple(events), tuple(range(len(sizes))))

    def _value(
        self, name: str, nbytes: int, kind: ValueKind, *, producer: int | None = None, base: int | None = None
    ) -> int:
        index = len(self.values)
        self.values.append(
            Value(index, name, (nbytes,), (1,), "uint8", nbytes, kind, index if base is None else base, producer)
        )
        return index


def chain(length: int, nbytes: int = MB, seconds: float = 1.0) -> tuple[TrainingGraph, Costs]:
    """A chain of equal layers, each of whose backward reads its input; the gradients are small."""
    make = GraphMaker()
    activations = [make.give()]
    for _ in range(length):
        activations.append(make.op(activations[-1], nbytes=nbytes, seconds=seconds))
    make.output(make.op(activations[-1], nbytes=4, seconds=0.0), "loss", 0)
    gradient = make.backward()
    for layer in reversed(range(length)):
        make.output(make.op(activations[layer], gradient, nbytes=8, seconds=seconds), "gradient", f"w{layer}")
        gradient = make.op(activations[layer], gradient, nbytes=nbytes, seconds=seconds)
    make.output(gradient, "gradient", "input")
    return make.finish()


def residual(blocks: int) -> tuple[TrainingGraph, Costs]:
    """Blocks with a skip connection, a dear and a cheap op each."""
    make = GraphMaker()
    x = make.give()
    saved = []
    for _ in range(blocks):
        dear = make.op(x, seconds=5.0)
        cheap = make.op(dear, seconds=0.1)
        saved.append((x, dear, cheap))
        x = make.op(x, cheap, seconds=0.2)
    make.output(make.op(x, nbytes=4, seconds=0.0), "loss", 0)
    gradient = make.backward()
    for block, (start, dear, cheap) in reversed(list(enumerate(saved))):
        inner = make.op(gradient, cheap, seconds=0.1)
        inner = make.op(inner, dear, seconds=0.1)
        make.output(make.op(inner, start, nbytes=16, seconds=4.0), "gradient", f"w{block}")
        gradient = make.op(inner, gradient, seconds=4.0)
    make.output(gradient, "gradient", "input")
    return make.finish()


def normalised(layers: int) -> tuple[TrainingGraph, Costs]:
    """Layers of a dear op, a normalisation with a rematerializer, a view, and a buffer that is updated."""
    make = GraphMaker()
    x = make.give()
    saved = []
    for layer in range(layers):
        buffer = make.give("buffer", f"running{layer}")
        y = make.op(x, nbytes=4 * MB, seconds=3.0)
        out, mean = make.op(y, buffer, nbytes=(4 * MB, 64), seconds=1.0, is_pinned=True)
        make.rematerialize(out, y, mean, seconds=0.5)
        make.output(make.op(mean, buffer, nbytes=64, seconds=0.01, is_pinned=True), "mutation", f"running{layer}")
        active = make.op(make.view(out), nbytes=4 * MB, seconds=0.5)
        saved.append((x, y, mean, out, active))
        x = active
    make.output(make.op(x, nbytes=4, seconds=0.1), "loss", 0)
    gradient = make.backward()
    for layer, (source, y, mean, out, active) in reversed(list(enumerate(saved))):
        inner = make.op(gradient, active, nbytes=4 * MB, seconds=0.5)
        inner = make.op(make.view(inner), y, mean, nbytes=4 * MB, seconds=1.0, shape_reads=(out,))
        gradient, weight = make.op(inner, source, nbytes=(4 * MB, 128), seconds=6.0, workspace=MB)
        make.output(make.view(weight), "gradient", f"w{layer}")
    make.output(gradient, "gradient", "input")
    return make.finish()


@st.composite
def random_graphs(draw: st.DrawFn, most_ops: int = 14) -> tuple[TrainingGraph, Costs]:
    """Directed acyclic graphs with views, several results, random and pinned ops, rematerializers and mutations.

    `most_ops` are in each half of the step.
    """
    make = GraphMaker()
    values = [make.give(), make.give("parameter")]
    buffers = [make.give("buffer", f"b{i}") for i in range(draw(st.integers(0, 1)))]

    def grow(count: int) -> None:
        for _ in range(count):
            kind = draw(st.sampled_from(("op", "op", "op", "op", "view", "two", "random", "pinned", "normalise")))
            recent = values[-6:] if draw(st.booleans()) else values
            reads = draw(st.lists(st.sampled_from(recent), min_size=1, max_size=3, unique=True))
            nbytes = draw(st.integers(0, 9))
            seconds = float(draw(st.integers(0, 5)))
            if kind == "view":
                values.append(make.view(reads[0]))
            elif kind == "two":
                values.extend(make.op(*reads, nbytes=(nbytes, 3), seconds=seconds, workspace=draw(st.integers(0, 5))))
            elif kind == "normalise":
                out, mean = make.op(*reads, nbytes=(nbytes, 1), seconds=seconds, is_pinned=draw(st.booleans()))
                make.rematerialize(out, *reads, mean, seconds=seconds / 2)
                values.extend((out, mean))
            else:
                flags = {"is_random": kind == "random", "is_pinned": kind == "pinned"}
                values.append(make.op(*reads, nbytes=nbytes, seconds=seconds, **flags))

    grow(draw(st.integers(1, most_ops)))
    make.output(values[-1], "loss", 0)
    computed = [v for v in values if make.values[v].kind == "computed"]
    for position in range(draw(st.integers(0, 2))):
        make.output(draw(st.sampled_from(computed)), "result", position)
    for position, _ in enumerate(buffers):
        make.output(draw(st.sampled_from(computed)), "mutation", f"b{position}")
    forward = len(values)
    values.append(make.backward())
    grow(draw(st.integers(1, most_ops)))
    late = [v for v in values[forward + 1 :] if make.values[v].kind == "computed"]
    candidates = late + computed if late else computed
    for position in range(draw(st.integers(1, 4))):
        make.output(draw(st.sampled_from(candidates)), "gradient", f"w{position}")
    return make.finish()


@st.composite
def small_steps(draw: st.DrawFn, most_ops: int = 5) -> tuple[TrainingGraph, Costs]:
    """Steps in which most of what the forward pass makes is read again and can be recomputed."""
    make = GraphMaker()
    values = [make.give()]
    for _ in range(draw(st.integers(2, most_ops))):
        reads = draw(st.lists(st.sampled_from(values[-3:]), min_size=1, max_size=2, unique=True))
        kind = draw(st.sampled_from(("op", "op", "op", "random", "two", "normalise")))
        nbytes, seconds = draw(st.integers(1, 9)), float(draw(st.integers(1, 5)))
        if kind in ("op", "random"):
            values.append(make.op(*reads, nbytes=nbytes, seconds=seconds, is_random=kind == "random"))
        else:
            out, second = make.op(*reads, nbytes=(nbytes, 2), seconds=seconds, workspace=1)
            if kind == "normalise":
                make.rematerialize(out, *reads, second, seconds=seconds / 2)
            values.extend((out, second))
    make.output(make.op(values[-1], nbytes=1), "loss", 0)
    gradient = make.backward()
    for position, value in enumerate(reversed(values)):
        reads = (gradient, value) if draw(st.booleans()) else (gradient,)
        gradient = make.op(*reads, nbytes=draw(st.integers(1, 9)), seconds=float(draw(st.integers(0, 3))))
        if draw(st.booleans()):
            make.output(make.op(value, gradient, nbytes=1), "gradient", f"w{position}")
    make.output(gradient, "gradient", "input")
    return make.finish()


def evaluate(graph: TrainingGraph) -> list[int]:
    """The content of every value when the program runs straight through, as numbers."""
    contents = _given(graph)
    draws = 0
    for op in graph.program:
        for value, content in zip(op.writes, _contents(graph, op, contents, draws), strict=True):
            if value is not None:
                contents[value] = content
        draws += op.is_random
    return [contents[v.index] for v in graph.values]


def execute(graph: TrainingGraph, schedule: Schedule) -> dict[int, int]:
    """Run a schedule instruction by instruction; returns what each output delivers.

    A value that is not in memory cannot be read, a tangent not before the boundary, and random numbers come in the
    order in which they are drawn.
    """
    memory: dict[int, int] = {}
    file: dict[int, int] = {}
    given = _given(graph)
    delivered: dict[int, int] = {}
    draws = 0
    for position, instruction in enumerate(schedule.instructions):
        readable = {
            v: c for v, c in given.items() if position >= schedule.boundary or graph.values[v].kind != "tangent"
        }
        if isinstance(instruction, Run):
            op = graph.ops[instruction.op]
            contents = {v: memory[v] if graph.values[v].kind == "computed" else readable[v] for v in op.reads}
            for value, content in zip(op.writes, _contents(graph, op, contents, draws), strict=True):
                if value is not None:
                    memory[value] = content
            draws += op.is_random
        elif isinstance(instruction, Free):
            del memory[instruction.value]
        elif isinstance(instruction, Deliver):
            value = graph.outputs[instruction.output].value
            assert instruction.output not in delivered
            delivered[instruction.output] = memory[value] if value in memory else readable[value]
        elif isinstance(instruction, PageOut):
            file[instruction.value] = memory[instruction.value]
        elif isinstance(instruction, PageIn):
            memory[instruction.value] = file[instruction.value]
    assert not memory
    return delivered


def _given(graph: TrainingGraph) -> dict[int, int]:
    return {v: hash(("given", v)) for v in graph.inputs}


def _contents(graph: TrainingGraph, op: Op, contents: dict[int, int], draws: int) -> list[int]:
    """What an op returns. A rematerializer returns what the op that it stands in for does."""
    if op.index >= graph.program_length:
        original = graph.ops[graph.values[op.results[0]].producer]  # type: ignore[index]
        position = original.writes.index(op.results[0])
        known = _given(graph) | contents
        return [_mix(original, position, [known[v] for v in original.reads], 0)]
    return [_mix(op, position, [contents[v] for v in op.reads], draws) for position in range(len(op.writes))]


def _mix(op: Op, position: int, inputs: list[int], draws: int) -> int:
    return hash((op.index, position, tuple(inputs), draws if op.is_random else 0))
