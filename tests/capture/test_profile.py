from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.capture.profiles import captured, fast, graph_of, needs_recorder, wide
from torch_odt import _extensions, memory
from torch_odt.cache import Cache
from torch_odt.capture import operators
from torch_odt.capture import profile as profile_module
from torch_odt.capture.cost_table import (
    CostTable,
    RememberedCosts,
    apply_costs,
    cost_from_list,
    cost_to_list,
    cost_to_text,
    costs_from_json,
    costs_to_json,
    signature,
    table_of,
)
from torch_odt.capture.costs import OpCost
from torch_odt.capture.graph import Op, Ref
from torch_odt.capture.layouts import RealLayouts
from torch_odt.capture.machine import machine_name, settings_name
from torch_odt.capture.operators import resolve
from torch_odt.capture.profile import profile
from torch_odt.capture.synthetic import SyntheticInputs
from torch_odt.errors import PlanError


@needs_recorder
@pytest.mark.parametrize("name", ["mobilenet_v2", "lstm", "tied_language_model", "dropout", "views_and_aliases"])
def test_every_op_is_measured(name: str) -> None:
    graph = captured(name)
    costs = fast(graph)
    assert costs.ops.keys() == {op.index for op in graph.ops}
    assert costs.notes == []
    assert all(cost.source == "measured" for cost in costs.ops.values())
    for op in graph.ops:
        cost = costs.ops[op.index]
        assert len(cost.result_ordinals) == len(op.writes)
        assert (cost.seconds == 0.0) == op.is_view


@needs_recorder
def test_results_are_found_among_the_allocations() -> None:
    graph = captured("mobilenet_v2")
    costs = fast(graph)
    for op in graph.ops:
        cost = costs.ops[op.index]
        for value, ordinal in zip(op.writes, cost.result_ordinals, strict=True):
            if value is not None and graph.values[value].base == value and graph.values[value].nbytes:
                assert ordinal is not None, op.target
                assert cost.block_bytes[ordinal] == graph.values[value].nbytes, op.target
        freed = {ordinal for ordinal, size in cost.events if size < 0}
        assert freed | set(cost.result_ordinals) >= cost.block_bytes.keys(), f"{op.target} leaks"


@needs_recorder
def test_workspaces_are_seen() -> None:
    # In float64 there is no fused kernel: softmax of a transposed tensor makes it contiguous first.
    x = torch.randn(64, 128).t()
    graph = graph_of("aten._softmax.default", [x], [torch._softmax(x, 1, False)], [Ref(0), 1, False])
    cost = fast(graph).ops[0]
    assert cost.peak_bytes >= 2 * x.nbytes
    assert cost.block_bytes[cost.result_ordinals[0] or 0] == x.nbytes


@needs_recorder
def test_results_unlike_the_trace_are_passed_on_as_they_are() -> None:
    graph = captured("lstm")
    costs = fast(graph)
    layers = [op for op in graph.ops if op.target == "aten.mkldnn_rnn_layer.default"]
    if not layers:
        pytest.skip("this build of torch runs LSTMs without oneDNN")
    for op in layers:
        workspace = costs.ops[op.index].layouts[3]
        assert workspace is not None and op.writes[3] is not None
        assert workspace.shape != graph.values[op.writes[3]].shape, "tracing does not know the size of the workspace"


@needs_recorder
def test_results_of_another_type_than_the_trace_has_are_passed_on_as_they_are() -> None:
    graph = captured("used_twice", autocast=True)
    costs = fast(graph)
    assert costs.notes == []
    backward = [op for op in graph.ops if op.target == "aten.native_batch_norm_backward.default"]
    statistics = [argument.value for op in backward for argument in op.args[5:7]]
    assert {graph.values[value].dtype for value in statistics} == {"bfloat16"}
    layouts = RealLayouts(graph)
    for op in graph.ops:
        layouts.learn(op, costs.ops[op.index])
    assert {layouts.real(value).dtype for value in statistics} == {torch.float32}


def test_a_cost_tells_the_layout_to_whatever_trace_it_is_given() -> None:
    x = torch.randn(4, 6)
    right, wrong = (graph_of("aten.clone.default", [x], [y], [Ref(0)]) for y in (x, x.t().contiguous().t()))
    assert signature(right.ops[0], RealLayouts(right)) == signature(wrong.ops[0], RealLayouts(wrong))
    layouts = RealLayouts(wrong)
    layouts.learn(wrong.ops[0], fast(right).ops[0])
    assert layouts.traced(1).stride != x.stride()
    assert layouts.real(1).stride == x.stride()


class PassThrough(TorchDispatchMode):
    """As `torch.compile` has one on when it calls its backend."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@needs_recorder
def test_a_mode_around_the_measurement_is_not_measured() -> None:
    graph = captured("several_inputs")
    assert any(op.target == "aten.mul.Tensor" and isinstance(op.args[1], float) for op in graph.ops)
    plain = fast(graph)
    with PassThrough():
        inside = fast(graph)
    assert {op: cost.events for op, cost in inside.ops.items()} == {op: cost.events for op, cost in plain.ops.items()}


@needs_recorder
def test_the_most_is_planned_for_where_calls_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = itertools.cycle([1000, 3000])

    def moody(x: torch.Tensor) -> torch.Tensor:
        torch.empty(next(sizes), dtype=torch.uint8)
        return x.clone()

    monkeypatch.setitem(operators._OWN, "odt.moody", moody)
    x = torch.randn(4)
    costs = profile(graph_of("odt.moody", [x], [x], [Ref(0)]), repeats=4, min_seconds=0.0)
    assert costs.ops[0].peak_bytes == 3000
    assert costs.notes == ["the allocations of odt.moody vary from call to call; the most are planned for"]


def test_the_random_stream_is_left_alone() -> None:
    graph = captured("dropout")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    fast(graph)
    assert torch.equal(torch.get_rng_state(), state)


@needs_recorder
def test_the_allocator_is_left_as_it_was() -> None:
    was_tracking = memory.is_tracking()
    fast(captured("dropout"))
    assert memory.is_tracking() == was_tracking


def test_a_second_run_measures_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured("mobilenet_v2")
    first = fast(graph, cache=Cache(tmp_path))

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(profile_module._Bench, "_measure", refuse)
    again = profile(graph, cache=Cache(tmp_path))
    assert again.ops == first.ops
    assert again.notes == first.notes


def test_same_calls_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured("mobilenet_v2")
    measured: list[str] = []
    original = profile_module._Bench._measure

    def count(self: Any, op: Op, inputs: SyntheticInputs) -> Any:
        measured.append(signature(op, RealLayouts(graph)))
        return original(self, op, inputs)

    monkeypatch.setattr(profile_module._Bench, "_measure", count)
    fast(graph)
    assert len(measured) < 0.7 * sum(not op.is_view for op in graph.ops)


def test_measurements_of_other_graphs_are_not_read() -> None:
    cost = OpCost(0.5, ((0, 64),), (0,))
    costs = RememberedCosts({"mine": cost_to_text(cost), "damaged": "[", "another": "["})
    assert costs.get("mine") is costs.get("mine") and costs.get("mine") == cost
    assert costs.get("unknown") is None and costs.damaged == 0
    assert costs.get("damaged") is None and costs.get("damaged") is None and costs.damaged == 1


@pytest.mark.parametrize("damaged", ["[1.0,[0],[null],[]]", "[1.0,", None])
def test_damaged_measurements_are_made_anew(damaged: Any, tmp_path: Any) -> None:
    graph = captured("dropout")
    store = Cache(tmp_path)
    fast(graph, cache=store)
    key = profile_module.profile_key()
    ops = store.load_profile(key)
    name = next(iter(ops))
    store.save_profile(key, {name: damaged})
    costs = fast(graph, cache=store)
    assert costs.notes == ["1 damaged measurements in the cache were measured anew"]
    assert store.load_profile(key)[name] != damaged


def test_an_op_that_fails_is_estimated_and_named() -> None:
    x = torch.randn(4, 5)
    graph = graph_of("aten.mm.default", [x, x], [torch.empty(4, 4)], [Ref(0), Ref(1)])
    costs = fast(graph)
    assert costs.ops[0].source == "estimated"
    assert costs.ops[0].seconds > 0
    assert costs.ops[0].block_bytes == {0: 64}
    (note,) = costs.notes
    assert note.startswith("aten.mm.default could not be measured and was estimated: RuntimeError: ")
    assert "4x5 and 4x5" in note


def test_zero_divisors_are_avoided() -> None:
    x = torch.ones(8, dtype=torch.int64)
    args = [Ref(0), Ref(1)]
    graph = graph_of("aten.floor_divide.default", [x, x], [x], args)
    assert fast(graph).ops[0].source == "measured"


def test_without_the_extension_results_alone_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extensions, "memory_module", None)
    graph = captured("dropout")
    costs = fast(graph)
    assert any("torch_odt._memory is absent" in note for note in costs.notes)
    for op in graph.ops:
        for value, ordinal in zip(op.writes, costs.ops[op.index].result_ordinals, strict=True):
            if value is not None and graph.values[value].base == value and ordinal is not None:
                assert costs.ops[op.index].block_bytes[ordinal] == graph.values[value].nbytes


def test_progress_is_reported() -> None:
    graph = captured("dropout")
    reports: list[tuple[int, int, str]] = []
    fast(graph, progress=lambda done, total, target: reports.append((done, total, target)))
    assert [done for done, _, _ in reports] == list(range(len(graph.ops)))
    assert {total for _, total, _ in reports} == {len(graph.ops)}


@needs_recorder
def test_a_given_arena_takes_the_results() -> None:
    arena = _extensions.memory_module.Arena(64 << 20)  # type: ignore[union-attr]
    fast(captured("mobilenet_v2"), arena=arena)
    assert arena.stats()["dynamic_hits"] > 0
    assert arena.live_blocks == 0


def test_costs_survive_json_and_fit_another_graph() -> None:
    graph = captured("mobilenet_v2")
    costs = fast(graph)
    table = costs_from_json(costs_to_json(table_of(graph, costs, settings="2 threads")))
    assert (table.machine, table.settings) == (costs.machine, "2 threads")
    applied = apply_costs(graph, table)
    assert applied.ops == costs.ops
    assert applied.notes == [f"costs measured elsewhere: {costs.machine}; 2 threads"]

    other = apply_costs(captured("dropout"), table)
    assert other.ops.keys() == {op.index for op in captured("dropout").ops}
    assert "not in the table and were estimated: " in other.notes[1]
    assert "aten.native_dropout.default" in other.notes[1]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 3}', '{"format": 3, "machine": "", "settings": "", "ops": {"a": [1]}}']
)
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="no table of costs"):
        costs_from_json(text)


def test_a_table_of_the_future_is_refused() -> None:
    with pytest.raises(PlanError, match="format 99"):
        costs_from_json('{"format": 99}')


@pytest.mark.parametrize(
    "entry",
    [
        [-1.0, [], [], []],
        [1.0, [0, 8], [1], []],
        [1.0, [0, -8], [], []],
        [1.0, [0], [], []],
        [1.0, [], []],
        [1.0, [], [None], [[[2], [1, 1], "float32"]]],
        [1.0, [], [None], [[[2], [1], "Tensor"]]],
        None,
    ],
)
def test_costs_that_contradict_themselves_are_refused(entry: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        cost_from_list(entry)


def test_a_cost_survives_its_list() -> None:
    for cost in fast(captured("lstm")).ops.values():
        assert cost_from_list(cost_to_list(cost)) == cost


def test_signatures_tell_calls_apart() -> None:
    def of(x: torch.Tensor, dim: int) -> str:
        graph = graph_of("aten._softmax.default", [x], [x], [Ref(0), dim, False])
        return signature(graph.ops[0], RealLayouts(graph))

    x = torch.randn(4, 6)
    names = [of(x, 1), of(x, 0), of(x.double(), 1), of(torch.randn(6, 4).t(), 1), of(torch.randn(4, 7), 1)]
    assert len(set(names)) == len(names)
    assert of(x, 1) == of(torch.zeros(4, 6), 1)


def test_a_read_of_the_shape_alone_costs_no_memory() -> None:
    x = torch.randn(512, 512)
    graph = graph_of("aten.zeros_like.default", [x], [x], [Ref(0)])
    graph.ops[0].reads, graph.ops[0].shape_reads = (), (0,)
    args, _ = SyntheticInputs(graph, RealLayouts(graph)).arguments(graph.ops[0], resolve("aten.zeros_like.default"), {})
    assert args[0].shape == x.shape
    assert "~" in signature(graph.ops[0], RealLayouts(graph))
    assert fast(graph).ops[0].source == "measured"


def synthetic(target: str, inputs: list[torch.Tensor], args: list[Any]) -> tuple[Any, ...]:
    graph = graph_of(target, inputs, [torch.empty(1)], args)
    return SyntheticInputs(graph, RealLayouts(graph)).arguments(graph.ops[0], resolve(target), {})[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 1).expand(3, 7),
        lambda: torch.randn(0, 4),
        lambda: torch.tensor(1.0),
        lambda: torch.ones(3, dtype=torch.bool),
        lambda: torch.ones(3, 3, dtype=torch.int64),
        lambda: torch.randn(5, dtype=torch.bfloat16),
        lambda: torch.randn(5, dtype=torch.complex64),
    ],
)
def test_synthetic_inputs_have_the_layout_of_the_value(make: Callable[[], torch.Tensor]) -> None:
    x = make()
    (made,) = synthetic("aten.clone.default", [x], [Ref(0)])
    assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)
    assert made.untyped_storage().nbytes() == x.untyped_storage().nbytes()


def test_synthetic_inputs_do_not_alias() -> None:
    x = torch.randn(100)
    first, second = synthetic("aten.add.Tensor", [x, x], [Ref(0), Ref(1)])
    assert first.data_ptr() != second.data_ptr()


def test_synthetic_variances_are_positive_and_indices_valid() -> None:
    x, stats = torch.randn(2, 64, 4, 4), torch.randn(64)
    args = [Ref(0), Ref(1), Ref(2), Ref(3), Ref(4), False, 0.1, 1e-5]
    made = synthetic("aten.native_batch_norm.default", [x, stats, stats, stats, stats], args)
    assert (made[4] > 0).all() and not (made[3] > 0).all()

    weight, index = torch.randn(10, 4), torch.zeros(50, dtype=torch.int64)
    _, made_index = synthetic("aten.embedding.default", [weight, index], [Ref(0), Ref(1)])
    assert made_index.min() >= 0 and 5 < made_index.max() < 10


def test_the_machine_has_a_name() -> None:
    assert torch.backends.cpu.get_cpu_capability() in machine_name()
    assert f"torch {torch.__version__}" in settings_name()
    assert f"{torch.get_num_threads()} threads" in settings_name()


def test_an_empty_table_names_everything_missing() -> None:
    graph = captured("dropout")
    costs = apply_costs(graph, CostTable("nowhere", "none"))
    count = sum(not op.is_view for op in graph.ops)
    assert costs.notes[1].startswith(f"{count} of {len(graph.ops)} ops are not in the table")


@needs_recorder
def test_scratch_memory_of_the_library_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = wide(64)
    peaks = iter([100 << 20, 120 << 20])
    monkeypatch.setattr(profile_module.memory, "reset_process_peak", lambda: True)
    monkeypatch.setattr(profile_module.memory, "peak_process_bytes", lambda: next(peaks))
    costs = fast(graph)
    assert 19 << 20 <= costs.library_bytes <= 20 << 20, "less what the arena holds"
