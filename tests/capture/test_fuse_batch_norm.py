"""BatchNorm and its activation function as one operator: where it happens, where it must not, and what comes out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.test_rewrite import execute, ops_named, recompute
from torch_odt.capture.batch_norm_match import BATCH_NORM, BATCH_NORM_BACKWARD
from torch_odt.capture.fuse_batch_norm import FUSED, FUSED_BACKWARD, FUSED_NORMALIZE
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.rewrite import rewrite
from torch_odt.capture.trace import trace_step
from torch_odt.execute.loss import make_compute

Make = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def capture(model: nn.Module, *args: Tensor, fuse: bool = True, loss_fn: Any = F.mse_loss) -> TrainingGraph:
    traced = trace_step(model, loss_fn, make_compute(loss_fn), (args, {})).graph
    disabled = ("choose_layouts",) if fuse else ("choose_layouts", "fuse_batch_norm")
    return rewrite(traced, drop=("result",), disabled=disabled)


def run_plainly(model: nn.Module, x: Tensor, y: Tensor) -> dict[tuple[str, Any], Tensor]:
    model = copy.deepcopy(model)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    found: dict[tuple[str, Any], Tensor] = {("loss", 0): loss.detach()}
    found |= {("gradient", name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {("mutation", name): buffer for name, buffer in model.named_buffers()}


def check(model: nn.Module, x: Tensor, y: Tensor, fused: int) -> TrainingGraph:
    """Results are no further from float64 than twice plain float32's, and so many BatchNorms have been fused."""
    plain, exact = run_plainly(model, x, y), run_plainly(copy.deepcopy(model).double(), x.double(), y.double())
    graph = capture(model, x, y)
    assert len(ops_named(graph, FUSED)) == fused
    assert bool(fused) == any(note.startswith(f"{fused} BatchNorms fused") for note in graph.notes)
    found = execute(graph, model, (x, y))
    assert set(found) == set(plain)
    scale = max(float(t.norm()) for (kind, _), t in exact.items() if kind == "gradient")
    for key, wanted in exact.items():
        distance, usual = (float((side[key].double() - wanted.double()).norm()) for side in (found, plain))
        # The gradient of a bias in front of a BatchNorm is 0 in theory and rounding in practice.
        assert distance <= 2 * usual + 1e-6 * max(float(wanted.double().norm()), 0.1 * scale), key
    return graph


def block(activation: Make, affine: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=affine), activation(), nn.Conv2d(8, 4, 3))


ACTIVATIONS: list[Make] = [
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    nn.ReLU6,
    lambda: nn.ReLU6(inplace=True),
    nn.Hardtanh,
    lambda: nn.Hardtanh(-0.5, 2.0),
    nn.Hardswish,
    lambda: nn.Hardswish(inplace=True),
    nn.SiLU,
    lambda: nn.SiLU(inplace=True),
]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_function_is_fused(activation: Make, memory_format: torch.memory_format, affine: bool) -> None:
    model = block(activation, affine).to(memory_format=memory_format)
    x, y = torch.randn(4, 3, 10, 10).to(memory_format=memory_format), torch.randn(4, 4, 6, 6)
    graph = check(model, x, y, 1)
    (backward,) = ops_named(graph, FUSED_BACKWARD)
    assert not any(ops_named(graph, target) for target in (BATCH_NORM, BATCH_NORM_BACKWARD, "aten.relu.default"))
    gone = ("threshold", "hardtanh", "hardswish", "silu")
    assert not any(op.target.startswith(f"aten.{name}") for op in graph.program for name in gone)
    (convolution, _) = ops_named(graph, "aten.convolution.default")
    assert convolution.results[0] in backward.reads, "the activation function's input comes from BatchNorm's"


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU])
def test_an_output_comes_back_bit_for_bit(activation: Make, memory_format: torch.memory_format) -> None:
    model = block(activation).to(memory_format=memory_format)
    x = torch.randn(4, 3, 10, 10).to(memory_format=memory_format)
    pairs = list(recompute(capture(model, x, torch.randn(4, 4, 6, 6)), FUSED_NORMALIZE))
    assert len(pairs) == 1
    for first, second in pairs:
        assert torch.equal(first, second) and first.stride() == second.stride()


def test_nothing_is_fused_where_that_is_switched_off() -> None:
    graph = capture(block(nn.ReLU), torch.randn(4, 3, 10, 10), torch.randn(4, 4, 6, 6), fuse=False)
    assert not any(op.target.startswith("torch_odt.") for op in graph.ops)


def test_gradients_that_nobody_asked_for_stay_away() -> None:
    model = block(nn.ReLU)
    model[1].bias.requires_grad_(False)
    graph = check(model, torch.randn(4, 3, 10, 10), torch.randn(4, 4, 6, 6), 1)
    (op,) = ops_named(graph, FUSED_BACKWARD)
    assert op.args[9] == [True, True, False] and op.writes[2] is None


def test_a_frozen_head_has_a_forward_pass_alone() -> None:
    model = block(nn.ReLU)
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    graph = check(model, torch.randn(4, 3, 10, 10), torch.randn(4, 4, 6, 6), 1)
    assert not ops_named(graph, FUSED_BACKWARD)


class Shared(nn.Module):
    """A BatchNorm whose output, or the gradient of whose output, has a second user."""

    def __init__(self, sum_of: str) -> None:
        super().__init__()
        self.sum_of = sum_of
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        normalised = self.norm(x)
        if self.sum_of == "normalised":
            return normalised + normalised.relu()
        if self.sum_of == "views":
            return normalised.relu() + normalised.flatten(1).sum(1)[:, None, None, None]
        if self.sum_of == "activated":
            activated = normalised.relu()
            return activated + activated.sigmoid()
        return normalised.relu() + normalised.clamp(-1, 1)


@pytest.mark.parametrize(("sum_of", "fused"), [("normalised", 0), ("views", 0), ("clamps", 0), ("activated", 1)])
def test_a_normalised_tensor_that_others_need_stays(sum_of: str, fused: int) -> None:
    check(Shared(sum_of), torch.randn(4, 3, 10, 10), torch.randn(4, 4, 8, 8), fused)


class SqueezeExcite(nn.Module):
    """A block that scales an activated tensor by what it makes of the tensor's means."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.activation = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), activation
        self.scale = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.norm(self.first(x)))
        return x * self.scale(x.mean((2, 3), keepdim=True)).sigmoid()


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Hardswish(), nn.SiLU()])
def test_an_activated_tensor_may_have_several_readers(activation: nn.Module) -> None:
    graph = check(SqueezeExcite(activation), torch.randn(4, 3, 10, 10), torch.randn(4, 4, 8, 8), 1)
    assert len(ops_named(graph, FUSED_BACKWARD)) == 1


@pytest.mark.parametrize("change", [nn.Module.eval, lambda model: setattr(model[1], "track_running_stats", False)])
def test_other_statistics_are_left_alone(change: Callable[[nn.Module], Any]) -> None:
    model = block(nn.ReLU)
    change(model)
    graph = capture(model, torch.randn(4, 3, 10, 10), torch.randn(4, 4, 6, 6))
    assert not ops_named(graph, FUSED)


def test_types_that_the_operators_do_not_take_are_left_alone() -> None:
    model = block(nn.ReLU).bfloat16()
    graph = capture(model, torch.randn(4, 3, 10, 10).bfloat16(), torch.randn(4, 4, 6, 6).bfloat16())
    assert not ops_named(graph, FUSED)


class UsedTwice(nn.Module):
    """A BatchNorm whose second call reads what the first has made of its averages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.norm(x).relu() + self.norm(2 * x + 1).relu()


def test_both_calls_of_a_batch_norm_are_fused() -> None:
    check(UsedTwice(), torch.randn(4, 3, 10, 10), torch.randn(4, 4, 8, 8), 2)


def test_instance_norm_with_averages_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.ReLU())
    graph = capture(model, torch.randn(4, 3, 10, 10), torch.randn(4, 4, 8, 8))
    assert BATCH_NORM in {op.target for op in graph.program} and not ops_named(graph, FUSED)


def test_vectors_are_fused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    check(model, torch.randn(32, 4), torch.randn(32, 4), 1)


def test_numbers_are_consistent() -> None:
    graph = capture(block(nn.ReLU6), torch.randn(4, 3, 10, 10), torch.randn(4, 4, 6, 6))
    for op in graph.program:
        assert all(graph.values[v].producer == op.index for v in op.results)
        assert all(graph.values[v].producer is None or graph.values[v].producer < op.index for v in op.reads)
    assert graph.boundary == sum(op.phase == "forward" for op in graph.program)
