"""The graph passes: what each of them takes away, and that not a bit of any output changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_odt.capture.costs import Costs
from torch_odt.capture.graph import Op, TrainingGraph, map_refs
from torch_odt.capture.operators import resolve
from torch_odt.capture.rewrite import describe, inexact_rewrites, rewrite
from torch_odt.capture.trace import trace_step
from torch_odt.execute.executor import Executor
from torch_odt.execute.loss import make_compute
from torch_odt.planning.keep_all import keep_all
from torch_odt.planning.registry import get_planner
from torch_odt.planning.schedule import Run

CONVOLUTION_BACKWARD = "aten.convolution_backward.default"


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def capture(
    model: nn.Module, *args: Tensor, loss_fn: Any = F.mse_loss, drop: Any = ("result",), disabled: Any = ()
) -> TrainingGraph:
    return rewrite(trace_step(model, loss_fn, make_compute(loss_fn), (args, {})).graph, drop=drop, disabled=disabled)


def ops_named(graph: TrainingGraph, target: str) -> list[Op]:
    return [op for op in graph.program if op.target == target]


class Collected:
    """What a step delivers, by kind and target."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, Any], Tensor] = {}

    def deliver(self, output: Any, tensor: Tensor) -> None:
        self.found[output.kind, output.target] = tensor.clone()


def execute(graph: TrainingGraph, model: nn.Module, args: tuple[Tensor, ...]) -> dict[tuple[str, Any], Tensor]:

    executor = Executor(graph, keep_all(graph, Costs({}), 0))
    table = executor.new_table()
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for index in graph.inputs:
        value = graph.values[index]
        if value.kind in ("parameter", "buffer"):
            table[index] = state[str(value.target)].detach()
        else:
            table[index] = torch.ones(value.shape) if value.kind == "tangent" else args[int(value.target)]
    collected = Collected()
    executor.run(table, collected)
    return collected.found


def check_against_plain(
    model: nn.Module, *args: Tensor, loss_fn: Any = F.mse_loss, disabled: Any = ()
) -> TrainingGraph:
    """Without rewrites that round, loss, gradients, buffers and random state are plain PyTorch's, bit for bit."""
    graph = capture(model, *args, loss_fn=loss_fn, disabled={*disabled, *inexact_rewrites()})
    plain = copy.deepcopy(model)
    state = torch.get_rng_state()
    found = execute(graph, model, args)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    loss = loss_fn(plain(*args[:-1]), args[-1])
    loss.backward()
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(found["loss", 0], loss.detach())
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert {target for kind, target in found if kind == "gradient"} == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found["gradient", name], gradient, rtol=0, atol=0)
    buffers = dict(plain.named_buffers())
    for kind, target in found:
        if kind == "mutation":
            assert torch.equal(found[kind, target], buffers[target])
    return graph


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).clone().mul_(2) + self.layer(x.clone()).relu_()


def test_copies_are_removed() -> None:
    graph = check_against_plain(InPlace(), torch.randn(3, 4), torch.randn(3, 4))
    counted = describe(graph)
    assert counted["aten.clone.default"] == counted["aten.detach.default"] == counted["aten.alias.default"] == 0
    assert any("copies" in note for note in graph.notes)


@pytest.mark.parametrize("bias", [False, True])
def test_a_frozen_convolution_does_not_keep_its_input(bias: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=True), nn.Conv2d(4, 5, 3), nn.Flatten())
    model[1].weight.requires_grad_(False)
    model[1].bias.requires_grad_(bias)
    x, y = torch.randn(2, 3, 8, 8), torch.randn(2, 80)
    graph = capture(model, x, y)
    frozen = next(op for op in ops_named(graph, CONVOLUTION_BACKWARD) if not op.args[10][1])
    assert list(frozen.args[10]) == [True, False, False]
    kept = frozen.args[1].value
    assert kept in frozen.shape_reads and kept not in frozen.reads
    assert not any(op.phase == "backward" for op in (graph.ops[i] for i in graph.consumers[kept]))
    found = execute(graph, model, (x, y))
    F.mse_loss(model(x), y).backward()
    assert (("gradient", "1.bias") in found) is bias
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found["gradient", name], parameter.grad, rtol=1e-6, atol=1e-7)


def test_a_frozen_linear_layer_does_not_keep_its_input() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh())
    model[2].weight.requires_grad_(False)
    x, y = torch.randn(3, 4), torch.randn(3, 5)
    graph = capture(model, x, y)
    (frozen,) = [
        op for op in ops_named(graph, "aten.addmm.default") if graph.values[op.args[0].value].target == "2.bias"
    ]
    # The activation is still needed for Tanh's own gradient, but by no matrix product.
    backward = [graph.ops[i] for i in graph.consumers[frozen.args[1].value] if graph.ops[i].phase == "backward"]
    assert {op.target for op in backward if not op.is_view} == {"aten.tanh_backward.default"}
    found = execute(graph, model, (x, y))
    F.mse_loss(model(x), y).backward()
    assert ("gradient", "2.weight") not in found
    for name in ("0.weight", "2.bias"):
        torch.testing.assert_close(found["gradient", name], model.get_parameter(name).grad, rtol=1e-6, atol=1e-7)


def test_a_frozen_first_convolution_has_no_backward_but_a_sum() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    model[0].weight.requires_grad_(False)
    x, y = torch.randn(2, 3, 8, 8), torch.randn(2, 144)
    graph = capture(model, x, y)
    assert ops_named(graph, CONVOLUTION_BACKWARD) == []
    F.mse_loss(model(x), y).backward()
    torch.testing.assert_close(execute(graph, model, (x, y))["gradient", "0.bias"], model[0].bias.grad)


def test_max_pooling_keeps_its_indices_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten())
    batch = torch.randn(2, 3, 8, 8), torch.randn(2, 36)
    graph = check_against_plain(model, *batch, disabled=["narrow_pool_indices"])
    (op,) = ops_named(graph, "aten.max_pool2d_with_indices_backward.default")
    assert op.args[1].value in op.shape_reads
    assert {graph.values[v].dtype for v in op.reads} == {"float32", "int64"} and len(op.reads) == 2


def test_gradients_that_nobody_asked_for_are_masked() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    model[1].bias.requires_grad_(False)
    graph = check_against_plain(model, torch.randn(2, 3, 8, 8), torch.randn(2, 144))
    (first,) = ops_named(graph, CONVOLUTION_BACKWARD)
    assert not first.args[10][0], "the batch wants no gradient"
    assert not any(o.kind == "gradient" and o.target == "1.bias" for o in graph.outputs)


def test_dead_ops_are_removed() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            torch.sin(self.idle(x))
            return self.layer(x)

    graph = check_against_plain(Idle(), torch.randn(3, 4), torch.randn(3, 4))
    assert describe(graph)["aten.sin.default"] == 0


class IdleDraw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        torch.bernoulli(torch.sigmoid(x))
        return F.dropout(self.layer(x), 0.5)


def test_draws_that_nobody_reads_stay() -> None:
    graph = check_against_plain(IdleDraw(), torch.randn(3, 4), torch.randn(3, 4))
    assert sum(op.is_random for op in graph.program) == 3
    assert describe(graph)["aten.sigmoid.default"] == 1, "what a draw reads stays with it"


@pytest.mark.parametrize("name", ["chen", "melon", "min-cut", "keep-all"])
def test_planners_run_draws_that_nobody_reads(name: str) -> None:
    graph = capture(IdleDraw(), torch.randn(3, 4), torch.randn(3, 4))
    schedule = get_planner(name)(graph, Costs({}), 1)
    runs = [i.op for i in schedule.instructions if isinstance(i, Run)]
    assert [i for i in runs if graph.ops[i].is_random] == [op.index for op in graph.program if op.is_random]


def recompute(graph: TrainingGraph, target: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Each output that has a rematerializer, and what that makes of the values of one run."""
    table: dict[int, Any] = dict(graph.constants)
    for index in graph.inputs:
        value = graph.values[index]
        table[index] = torch.randn(value.shape).abs().to(getattr(torch, value.dtype))
    for op in graph.program:
        if op.phase == "backward":
            break
        args, kwargs = map_refs((op.args, op.kwargs), table.__getitem__)
        results = resolve(op.target)(*args, **kwargs)
        for value, tensor in zip(op.writes, results if isinstance(results, (tuple, list)) else [results], strict=True):
            if value is not None:
                table[value] = tensor
    for value, index in graph.rematerializers.items():
        again = graph.ops[index]
        assert again.target == target
        yield table[value], resolve(target)(*map_refs(again.args, table.__getitem__))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_norm_comes_back_bit_for_bit(affine: bool, channels_last: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=affine), nn.ReLU(), nn.Flatten())
    x = torch.randn(2, 3, 8, 8)
    if channels_last:
        x, model = x.to(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)
    graph = capture(model, x, torch.randn(2, 144), disabled=["fuse_batch_norm"])
    pairs = list(recompute(graph, "odt.batch_norm_normalize"))
    assert len(pairs) == 1
    for first, second in pairs:
        assert torch.equal(first, second) and first.stride() == second.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_comes_back_bit_for_bit(dtype: torch.dtype, p: float) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(p), nn.Linear(64, 4)).to(dtype)
    graph = capture(model, torch.randn(8, 16, dtype=dtype), torch.randn(8, 4, dtype=dtype))
    pairs = list(recompute(graph, "odt.dropout_apply"))
    assert len(pairs) == 1
    for first, second in pairs:
        assert first.dtype == dtype and torch.equal(first, second)


class MovingScale(nn.Module):
    """Scales by a buffer whose old content its backward needs, and then changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.5)
        return y


def test_a_changed_buffer_that_backward_reads_is_copied_first() -> None:
    graph = check_against_plain(MovingScale(), torch.randn(3, 4), torch.randn(3, 4))
    first = graph.program[0]
    assert first.target == "aten.clone.default" and first.is_pinned
    (buffer,) = (i for i in graph.inputs if graph.values[i].kind == "buffer")
    assert first.reads == (buffer,)
    assert all(graph.ops[i].phase == "forward" for i in graph.consumers[buffer])


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 4)),
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Hardswish(inplace=True), nn.Linear(8, 4)),
        lambda: nn.Sequential(nn.Linear(4, 8), nn.RReLU(), nn.Softmax(1), nn.Linear(8, 4)),
    ],
)
def test_rewritten_steps_keep_every_bit(make: Callable[[], nn.Module]) -> None:
    check_against_plain(make(), torch.randn(6, 4), torch.randn(6, 4))


def test_numbers_are_consistent_after_renumbering() -> None:
    graph = capture(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)), torch.randn(3, 4), torch.ones(3, 8)
    )
    assert [op.index for op in graph.ops] == list(range(len(graph.ops)))
    assert [v.index for v in graph.values] == list(range(len(graph.values)))
    for op in graph.program:
        assert all(graph.values[v].producer == op.index for v in op.results)
        assert all(graph.values[v].producer is None or graph.values[v].producer < op.index for v in op.reads)
    assert set(graph.rematerializers.values()) == set(range(graph.program_length, len(graph.ops)))
