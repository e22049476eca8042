"""Gradients that autograd writes into zeros: where they are looked at themselves, and that not a bit changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.capture.micro_batches import check_equal, separate
from tests.capture.test_rewrite import check_against_plain, ops_named
from torch_odt.capture.batch_axis import NotSeparable
from torch_odt.capture.view_gradients import SCATTER


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Applied(nn.Module):
    """A convolution of images in channels_last, a function of what it returns, and a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], features: int) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Conv2d(3, 4, 3), function, nn.Linear(features, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.function(self.first(x)).flatten(1))
        return scores


def pooled(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, 1)


def gate(x: Tensor) -> Tensor:
    """As in squeeze and excitation: the pooled image is a convolution's input."""
    weight = torch.ones(4, 4, 1, 1).contiguous(memory_format=torch.channels_last)
    return pooled(x * torch.sigmoid(F.conv2d(pooled(x), weight)))


def images(samples: int, size: int = 7) -> Tensor:
    return torch.randn(samples, 3, size, size).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("function", [pooled, gate])
@pytest.mark.parametrize("samples", [1, 3])
def test_nothing_is_scattered(function: Callable[[Tensor], Tensor], samples: int) -> None:
    graph = check_against_plain(Applied(function, 4), images(samples), torch.randn(samples, 2))
    assert not ops_named(graph, SCATTER)
    assert any(note.endswith("(view_gradients)") for note in graph.notes)


def classify(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
    return F.cross_entropy(model(args[0]), args[1]), None


@pytest.mark.parametrize("function", [pooled, gate])
@pytest.mark.parametrize("micro_size", [1, 2])
def test_micro_batches_of_one_sample_add_up(function: Callable[[Tensor], Tensor], micro_size: int) -> None:
    targets = torch.randint(2, (4,))
    check_equal(separate(Applied(function, 4), classify, images(4), targets, size=4, micro_size=micro_size))


def strided(sizes: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Callable[[Tensor], Tensor]:
    return lambda x: x.as_strided((x.shape[0], *sizes), strides, offset)


# A convolution returns 3 x 4 x 2 x 2, 1 x 4 x 1 x 1 behind each other where images are channels_last.
LEFT_ALONE = [
    pytest.param(strided((4,), (16, 1)), 4, id="some elements"),
    pytest.param(strided((15,), (16, 1), 1), 15, id="another start"),
    pytest.param(strided((16,), (16, 1)), 16, id="another order"),
]


@pytest.mark.parametrize(("function", "features"), LEFT_ALONE)
def test_what_is_left_alone(function: Callable[[Tensor], Tensor], features: int) -> None:
    graph = check_against_plain(Applied(function, features), images(3, 4), torch.randn(3, 2))
    assert ops_named(graph, SCATTER)


def test_a_gradient_in_another_order_is_refused_in_micro_batches() -> None:
    """What is left alone is still known to mix samples, or not to."""
    model = Applied(strided((16,), (16, 1), 0), 16)
    with pytest.raises(NotSeparable, match="as_strided"):
        separate(model, classify, images(4, 4), torch.randint(2, (4,)), size=4, micro_size=2)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_any_order_of_axes(sizes: list[int], draw: Any) -> None:
    """A view of all elements, by axes in any order, of a tensor that lies so as well."""
    order = list(range(len(sizes)))
    draw.shuffle(order)
    inverse = [order.index(axis) for axis in range(len(sizes))]

    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn([sizes[axis] for axis in order]))

        def forward(self, x: Tensor) -> Tensor:
            laid_out = (self.weight * x.reshape([sizes[axis] for axis in order])).permute(inverse)
            return laid_out.as_strided(laid_out.shape, laid_out.stride()).sin() * 2

    model, x = Viewed(), torch.randn([sizes[axis] for axis in order])
    check_against_plain(model, x, torch.randn(sizes))
