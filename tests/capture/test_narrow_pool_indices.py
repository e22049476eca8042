"""Max-pooling's indices of a byte: where they come, where they must not, and that not a bit changes."""

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
from torch_odt.capture.narrow_pool_indices import NARROW, NARROW_BACKWARD, POOL, POOL_BACKWARD
from torch_odt.capture.profile import profile


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def network(*pool: Any, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.MaxPool2d(*pool, **options), nn.Flatten())


OPTIONS = [{}, {"stride": 2, "padding": 1}, {"stride": 1, "dilation": 2}, {"stride": 2, "ceil_mode": True}]


def batch_for(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.randn_like(model(x))


def counts(graph: TrainingGraph) -> tuple[int, int]:
    assert len(ops_named(graph, NARROW)) == len(ops_named(graph, NARROW_BACKWARD))
    assert len(ops_named(graph, POOL)) == len(ops_named(graph, POOL_BACKWARD))
    return len(ops_named(graph, NARROW)), len(ops_named(graph, POOL))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1}, {"stride": 1, "dilation": 2}, {"stride": 2, "ceil_mode": True}],
    ids=str,
)
def test_indices_take_a_byte(options: dict[str, Any], memory_format: torch.memory_format) -> None:
    model = network(3, **options).to(memory_format=memory_format)
    x, y = batch_for(model, torch.randn(2, 3, 12, 13).to(memory_format=memory_format))
    graph = check_against_plain(model, x, y)
    assert counts(graph) == (1, 0)
    (pool,) = ops_named(graph, NARROW)
    output, offsets = (graph.values[value] for value in pool.results)
    assert offsets.dtype == "uint8" and offsets.nbytes * 4 == output.nbytes


def test_the_backward_pass_needs_the_shape_alone() -> None:
    model = network(2)
    graph = capture(model, *batch_for(model, torch.randn(2, 3, 12, 12)))
    (pool,), (backward,) = ops_named(graph, NARROW), ops_named(graph, NARROW_BACKWARD)
    assert backward.shape_reads == pool.reads and not set(pool.reads) & set(backward.reads)


def test_one_image_without_a_batch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.MaxPool2d(2))
    assert counts(check_against_plain(model, *batch_for(model, torch.randn(3, 12, 12)))) == (1, 0)


def with_indices(model: nn.Module, x: Tensor) -> Tensor:
    values, indices = F.max_pool2d(model(x), 2, return_indices=True)
    return F.max_unpool2d(values, indices, 2)


class Applied(nn.Module):
    """A function of what a convolution returns."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function = nn.Conv2d(3, 5, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first, x)


LEFT_ALONE: list[tuple[Callable[[nn.Module, Tensor], Tensor], int]] = [
    (with_indices, 22),
    (lambda layer, x: F.max_pool2d(layer(x), 17, 2), 22),
    (lambda layer, x: F.max_pool2d(layer(x)[..., :1, :], (2, 2), 1, 1, 2), 12),
]


@pytest.mark.parametrize(("function", "size"), LEFT_ALONE)
def test_what_is_left_alone(function: Callable[[nn.Module, Tensor], Tensor], size: int) -> None:
    model, x = Applied(function), torch.randn(2, 3, size, size)
    graph = capture(model, x, torch.randn_like(model(x)))
    assert counts(graph) == (0, 1)


def test_half_precision_is_left_alone() -> None:
    model, x = network(2).half(), torch.randn(2, 3, 12, 12).half()
    assert counts(capture(model, *batch_for(model, x))) == (0, 1)


def test_it_can_be_switched_off() -> None:
    model = network(2)
    batch = batch_for(model, torch.randn(2, 3, 12, 12))
    assert counts(check_against_plain(model, *batch, disabled=["narrow_pool_indices"])) == (0, 1)


def classify(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
    return F.cross_entropy(model(args[0]), args[1]), None


def test_micro_batches_add_up() -> None:
    model = network(3, 2, padding=1)
    captured = separate(model, classify, torch.randn(4, 3, 12, 12), torch.randint(10, (4,)), size=4, micro_size=1)
    assert counts(captured.full) == (1, 0)
    check_equal(captured)


def test_both_operators_can_be_measured() -> None:
    model = network(3, 2, padding=1)
    graph = capture(model, *batch_for(model, torch.randn(2, 3, 12, 12)))
    costs = profile(graph, repeats=1, min_seconds=0.0)
    for target in (NARROW, NARROW_BACKWARD):
        (op,) = ops_named(graph, target)
        assert costs.ops[op.index].source == "measured"
