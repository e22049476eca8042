"""Activations that are kept as bits: where that happens, where it must not, and that not a bit of the step changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.micro_batches import check_equal, separate
from tests.capture.test_rewrite import capture, check_against_plain, ops_named
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.pack_activation_masks import CLAMP, CLAMP_BACKWARD
from torch_odt.capture.profile import profile

FORMATS = [torch.contiguous_format, torch.channels_last]
CLAMPS: list[Callable[[], nn.Module]] = [
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    nn.ReLU6,
    nn.Hardtanh,
    lambda: nn.Hardtanh(-0.3, 0.7),
]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def pooled(clamp: nn.Module) -> nn.Sequential:
    """A clamp whose output nobody needs for the backward pass: the pooling asks for its shape alone."""
    return nn.Sequential(nn.Conv2d(3, 5, 3), clamp, nn.MaxPool2d(2), nn.Conv2d(5, 2, 3))


def images(memory_format: torch.memory_format = torch.contiguous_format) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 12, 12).to(memory_format=memory_format), torch.randn(2, 2, 3, 3)


def packed(graph: TrainingGraph) -> int:
    assert len(ops_named(graph, CLAMP)) == len(ops_named(graph, CLAMP_BACKWARD))
    return len(ops_named(graph, CLAMP))


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("clamp", CLAMPS)
def test_a_clamp_in_front_of_a_pooling(clamp: Callable[[], nn.Module], memory_format: torch.memory_format) -> None:
    model = pooled(clamp()).to(memory_format=memory_format)
    graph = check_against_plain(model, *images(memory_format))
    assert packed(graph) == 1
    (op,), (backward,) = ops_named(graph, CLAMP), ops_named(graph, CLAMP_BACKWARD)
    output, mask = op.results
    assert graph.values[mask].nbytes == (5 * 200 + 7) // 8 and mask in backward.reads
    late = {value for other in graph.program if other.phase == "backward" for value in other.reads}
    assert output not in late and op.reads[0] not in late


class Joined(nn.Module):
    """Branches that a convolution behind keeps as one tensor: a gradient is a part of that tensor's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 5, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(9, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.first(x).relu(), self.second(x).relu()], 1))


@pytest.mark.parametrize("memory_format", FORMATS)
def test_branches_that_are_joined(memory_format: torch.memory_format) -> None:
    model = Joined().to(memory_format=memory_format)
    x = torch.randn(2, 3, 12, 12).to(memory_format=memory_format)
    assert packed(check_against_plain(model, x, torch.randn(2, 2, 8, 8))) == 2


def test_a_clamp_behind_a_linear_layer() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    assert packed(check_against_plain(model, torch.randn(4, 6), torch.randn(4, 3))) == 1


@pytest.mark.parametrize("bound", [0.7, 0.5])
def test_bfloat16_with_bounds_that_it_holds(bound: float) -> None:
    model = pooled(nn.Hardtanh(-0.5, bound)).bfloat16()
    graph = check_against_plain(model, *(tensor.bfloat16() for tensor in images()))
    assert packed(graph) == (bound == 0.5)


@pytest.mark.parametrize("clamp", [nn.ReLU(), nn.ReLU6()])
def test_what_a_convolution_keeps_anyway(clamp: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), clamp, nn.Conv2d(5, 2, 3), nn.Flatten())
    graph = check_against_plain(model, images()[0], torch.randn(2, 128))
    # ReLU's output is kept for the convolution; what hardtanh reads is its input, which nobody else keeps.
    assert packed(graph) == isinstance(clamp, nn.ReLU6)


class Applied(nn.Module):
    """A function of what a convolution returns."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function = nn.Conv2d(3, 5, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


def through_a_view(x: Tensor) -> Tensor:
    y = x.relu()
    return y.flatten(1).square() + F.max_pool2d(y, 1).flatten(1)


@pytest.mark.parametrize(
    "function",
    [through_a_view, lambda x: F.relu6(x.sigmoid()).flatten(1), lambda x: F.threshold(x, 0.5, 0.5).flatten(1)],
)
def test_what_is_left_alone(function: Callable[[Tensor], Tensor]) -> None:
    graph = check_against_plain(Applied(function), images()[0], torch.randn(2, 500))
    assert packed(graph) == 0


def test_an_output_of_the_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU())
    graph = capture(model, images()[0], torch.randn(2, 5, 10, 10), drop=())
    # The loss keeps it; here it also leaves.
    assert packed(graph) == 0


def test_it_can_be_switched_off() -> None:
    graph = check_against_plain(pooled(nn.ReLU()), *images(), disabled=["pack_activation_masks"])
    assert packed(graph) == 0


def test_where_the_data_of_the_pooling_is_read_nothing_is_gained() -> None:
    assert packed(check_against_plain(pooled(nn.ReLU()), *images(), disabled=["mark_shape_reads"])) == 0


def classify(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
    return F.cross_entropy(model(args[0]).flatten(1), args[1]), None


@pytest.mark.parametrize("clamp", [nn.ReLU(), nn.ReLU6()])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_micro_batches_add_up(clamp: nn.Module, memory_format: torch.memory_format) -> None:
    model = pooled(clamp).to(memory_format=memory_format)
    x = torch.randn(4, 3, 12, 12).to(memory_format=memory_format)
    captured = separate(model, classify, x, torch.randint(10, (4,)), size=4, micro_size=1)
    assert packed(captured.full) == 1
    check_equal(captured)


def test_both_operators_can_be_measured() -> None:
    graph = capture(pooled(nn.ReLU()), *images())
    costs = profile(graph, repeats=1, min_seconds=0.0)
    for target in (CLAMP, CLAMP_BACKWARD):
        (op,) = ops_named(graph, target)
        assert costs.ops[op.index].source == "measured"
