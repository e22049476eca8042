"""Graphs from elsewhere are what they say, or refused before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from models import CASES, ModelCase
from torch import nn

from torch_odt.cache import Cache
from torch_odt.capture.graph import Op, Output, Ref, TrainingGraph
from torch_odt.capture.graph_check import check_graph
from torch_odt.capture.graph_data import graph_from_data, graph_to_data
from torch_odt.capture.rewrite import for_whole_batch, rewrite
from torch_odt.capture.trace import trace_step
from torch_odt.capture.trace_cache import remembered_trace
from torch_odt.errors import PlanError
from torch_odt.execute.loss import make_compute


@functools.cache
def _traced() -> TrainingGraph:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 2)
    )

    def compute(model: nn.Module, args: tuple[torch.Tensor], kwargs: object) -> tuple[torch.Tensor, None]:
        return model(*args).square().sum(), None

    traced = trace_step(model, None, compute, ((torch.ones(2, 3, 6, 6),), {}))
    return for_whole_batch(rewrite(traced.graph, drop=("result",)))


def copied() -> TrainingGraph:
    """The graph of a small step, from data."""
    return graph_from_data(graph_to_data(_traced(), most_constant_bytes=1 << 20))


def find(graph: TrainingGraph, target: str) -> int:
    return next(op.index for op in graph.ops if op.target == target)


def test_a_graph_survives_as_data_and_is_what_it_says() -> None:
    graph = copied()
    check_graph(graph)
    assert graph.fingerprint == _traced().fingerprint
    assert (graph.ops, graph.values, graph.outputs) == (_traced().ops, _traced().values, _traced().outputs)


def retarget(target: str) -> Callable[[TrainingGraph], None]:
    def change(graph: TrainingGraph) -> None:
        graph.ops[0].target = target

    return change


def reads_the_shape_alone(graph: TrainingGraph) -> None:
    """An operator that reads its argument gets an address without memory."""
    op = graph.ops[find(graph, "aten.convolution.default")]
    op.shape_reads, op.reads = op.reads[:1], op.reads[1:]


def strides_over_all(graph: TrainingGraph) -> None:
    op = graph.ops[find(graph, "aten.convolution.default")]
    op.args = (*op.args[:3], [1000, 1 << 20], *op.args[4:])


def strides_over_all_backward(graph: TrainingGraph) -> None:
    op = graph.ops[find(graph, "aten.convolution_backward.default")]
    op.args = (*op.args[:4], [1 << 20, 1], *op.args[5:])


def forgets_a_read(graph: TrainingGraph) -> None:
    op = graph.ops[find(graph, "aten.convolution.default")]
    op.reads = op.reads[:1]


def reads_beyond(graph: TrainingGraph) -> None:
    op = graph.ops[find(graph, "aten.convolution.default")]
    op.args = (Ref(len(graph.values)), *op.args[1:])


def counts_backwards(graph: TrainingGraph) -> None:
    graph.inputs[0] = -1


def is_said_to_be_a_view(graph: TrainingGraph) -> None:
    graph.ops[find(graph, "aten.convolution.default")].is_view = True


def is_said_not_to_be_random(graph: TrainingGraph) -> None:
    next(op for op in graph.ops if op.is_random).is_random = False


def writes_nowhere(graph: TrainingGraph) -> None:
    op = graph.ops[find(graph, "aten.convolution.default")]
    op.writes = (len(graph.values) + 3,)


def delivers_nothing(graph: TrainingGraph) -> None:
    graph.outputs.append(Output(len(graph.values), "gradient", "0.weight"))


def takes_more(graph: TrainingGraph) -> None:
    op = graph.ops[find(graph, "aten.convolution.default")]
    op.args = (*op.args, 1, 2, 3)


def takes_an_unknown_word(graph: TrainingGraph) -> None:
    graph.ops[find(graph, "aten.convolution.default")].kwargs["loudly"] = True


def has_a_negative_shape(graph: TrainingGraph) -> None:
    graph.values[0] = replace(graph.values[0], shape=(-1,) * len(graph.values[0].shape))


def has_no_dtype(graph: TrainingGraph) -> None:
    graph.values[0].dtype = "load"


def comes_from_nowhere(graph: TrainingGraph) -> None:
    graph.inputs.pop()


def overwrites_where_it_cannot(graph: TrainingGraph) -> None:
    op = graph.ops[find(graph, "aten.convolution.default")]
    op.overwrites = op.reads[0]


def asks_for_another_device(graph: TrainingGraph) -> None:
    next(op for op in graph.ops if op.target == "aten.convolution.default").kwargs["device"] = torch.device("meta")


def drops_out_a_number(graph: TrainingGraph) -> None:
    op = next(op for op in graph.ops if op.target == "odt.packed_dropout")
    op.args, op.reads = (-1, *op.args[1:]), ()


def returns_too_little(graph: TrainingGraph) -> None:
    op = graph.ops[find(graph, "aten.convolution.default")]
    op.writes = (*op.writes, None)


def adds_to_a_parameter(graph: TrainingGraph) -> None:
    op = graph.ops[find(graph, "aten.convolution.default")]
    op.target, op.args, op.kwargs = "odt.accumulate_mm", (*op.args[:3], False), {}
    op.reads = tuple(dict.fromkeys(a.value for a in op.args if isinstance(a, Ref)))


@pytest.mark.parametrize(
    "change",
    [
        strides_over_all,
        strides_over_all_backward,
        asks_for_another_device,
        drops_out_a_number,
        returns_too_little,
        adds_to_a_parameter,
        retarget("aten.no_such_operator.default"),
        retarget("aten.add"),
        retarget("load_library.__call__.__call__"),
        retarget("aten.convolution.__class__"),
        retarget("odt.no_such_operator"),
        retarget("aten.add_.Tensor"),
        retarget("aten.from_file.default"),
        retarget(""),
        reads_the_shape_alone,
        forgets_a_read,
        reads_beyond,
        counts_backwards,
        is_said_to_be_a_view,
        is_said_not_to_be_random,
        writes_nowhere,
        delivers_nothing,
        takes_more,
        takes_an_unknown_word,
        has_a_negative_shape,
        has_no_dtype,
        comes_from_nowhere,
        overwrites_where_it_cannot,
    ],
)
def test_what_is_not_what_it_says_is_refused(change: Callable[[TrainingGraph], None]) -> None:
    graph = copied()
    change(graph)
    with pytest.raises(PlanError):
        check_graph(graph)


def overwriting() -> tuple[TrainingGraph, Op]:
    """A graph with an op that overwrites a gradient, and that op."""

    def compute(model: nn.Module, args: tuple[torch.Tensor], kwargs: object) -> tuple[torch.Tensor, None]:
        return model(*args).square().sum(), None

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    graph = for_whole_batch(
        rewrite(trace_step(model, None, compute, ((torch.ones(3, 4),), {})).graph, drop=("result",))
    )
    check_graph(graph)
    return graph, next(op for op in graph.ops if op.overwrites is not None)


def is_called_a_part_of_a_parameter(graph: TrainingGraph) -> None:
    parameter = next(value.index for value in graph.values if value.kind == "parameter")
    next(value for value in graph.values if value.kind == "computed" and not value.is_view).base = parameter


def is_called_a_view_of_another_parameter(graph: TrainingGraph) -> None:
    view = next(value for value in graph.values if value.kind == "computed" and value.is_view)
    view.base = next(v.index for v in graph.values if v.kind == "parameter" and v.index != view.base)


def is_called_another_ops_result(graph: TrainingGraph) -> None:
    found = [value for value in graph.values if value.kind == "computed"]
    found[-1].producer = found[0].producer


def writes_to_a_parameter(graph: TrainingGraph) -> None:
    parameter = next(value.index for value in graph.values if value.kind == "parameter")
    op = next(op for op in graph.program if len(op.results) == 1)
    op.writes = (parameter,)


def writes_what_another_has_written(graph: TrainingGraph) -> None:
    first, second = [op for op in graph.program if len(op.results) == 1][:2]
    second.writes = first.writes


def reads_what_comes_later(graph: TrainingGraph) -> None:
    last = graph.program[-1]
    first = next(op for op in graph.program if op.reads)
    first.reads = (*first.reads, last.results[0])


def gives_a_parameter_twice(graph: TrainingGraph) -> None:
    one, other = [value for value in graph.values if value.kind == "parameter"][:2]
    one.target = other.target


def gives_a_part_of_another(graph: TrainingGraph) -> None:
    one, other = [value for value in graph.values if value.kind == "parameter"][:2]
    one.base = other.index


def belongs_to_no_half(graph: TrainingGraph) -> None:
    graph.ops[0].phase = "x"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("forge", "text"),
    [
        (is_called_a_part_of_a_parameter, "other memory than its op says"),
        (is_called_a_view_of_another_parameter, "other memory than its op says"),
        (is_called_another_ops_result, r"is computed by op \d+, and not by \d+"),
        (writes_to_a_parameter, "is computed"),
        (writes_what_another_has_written, r"is computed by ops \d+ and \d+"),
        (reads_what_comes_later, "before it is computed"),
        (gives_a_parameter_twice, "a second time"),
        (gives_a_part_of_another, "a part of another one"),
        (belongs_to_no_half, "belongs to no half of the step"),
    ],
)
def test_where_a_value_comes_from_is_not_taken_on_trust(forge: Callable[[TrainingGraph], None], text: str) -> None:
    graph = copied()
    check_graph(graph)
    forge(graph)
    with pytest.raises(PlanError, match=text):
        check_graph(graph)


def test_a_parameter_is_not_overwritten() -> None:
    graph, op = overwriting()
    parameter = next(value.index for value in graph.values if value.kind == "parameter")
    op.args, op.reads, op.overwrites = (Ref(parameter), *op.args[1:]), (parameter, *op.reads[1:]), parameter
    base = graph.values[op.results[0]].base
    for value in graph.values:
        value.base = parameter if value.base == base and value.index != base else value.base
    with pytest.raises(PlanError, match=f"{op.target}, overwrites what is not its own"):
        check_graph(graph)


def test_what_others_read_is_not_overwritten() -> None:
    graph, op = overwriting()
    assert op.overwrites is not None
    graph.ops.append(replace(op, index=len(graph.ops), overwrites=None))
    with pytest.raises(PlanError, match=f"{op.target}, overwrites what is not its own"):
        check_graph(graph)


@pytest.mark.parametrize(
    "target",
    [
        "aten.save.default",
        "aten.from_file.default",
        "aten.fbgemm_linear_fp16_weight.default",
        "aten._reshape_alias.default",
        "aten._ctc_loss.default",
        "aten._cdist_backward.default",
        "aten._embedding_bag.default",
        "aten._sparse_coo_tensor_unsafe.default",
        "aten.segment_reduce.default",
        "aten.resize.default",
        "aten.set_.source_Tensor",
        "aten._local_scalar_dense.default",
        "aten.equal.default",
        "aten.rand.names",
        "prim.Print.default",
        "prim.device.default",
        "profiler._record_function_enter_new.default",
        "prims.copy_to.default",
        "quantized.linear_unpack.default",
        "torch_odt.batch_norm_act_backward_.default",
        "torch_odt.draw_bits.default",
        "evil.write_file.default",
    ],
)
def test_an_operator_that_no_file_may_carry_is_named(target: str) -> None:
    graph = copied()
    retarget(target)(graph)
    with pytest.raises(PlanError, match=rf"{target}.*(carry|no operator in this process)"):
        check_graph(graph)


def test_operators_of_other_packages_are_refused() -> None:
    with torch.library._scoped_library("evil", "FRAGMENT") as library:
        library.define("read_file(str name) -> Tensor")
        library.define("relu(Tensor x) -> Tensor")
        for name in ("read_file", "relu"):
            graph = copied()
            retarget(f"evil.{name}.default")(graph)
            with pytest.raises(PlanError, match=f"evil.{name}.default, .* may carry"):
                check_graph(graph)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.captured], ids=lambda case: case.name)
def test_every_model_of_the_table_can_be_carried(case: ModelCase) -> None:
    compute, (batch,) = make_compute(case.loss_fn), case.batches(1)
    traced = remembered_trace(Cache(), case.model(), case.loss_fn, compute, batch).graph
    check_graph(rewrite(traced, drop=("result",)))
    check_graph(for_whole_batch(rewrite(traced, drop=("result",))))
