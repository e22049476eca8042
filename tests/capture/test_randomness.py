"""Masks are drawn for the whole batch: the same bits and the same generator state as in the plain step."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from tests.capture.micro_batches import Captured, check_equal, separate
from torch_odt.capture.batch_axis import NotSeparable
from torch_odt.capture.operators import resolve
from torch_odt.capture.randomness import hoist_random


class Layout(nn.Module):
    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.weight, self.order = nn.Parameter(torch.randn(3, 1, 1)), order

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout((x * self.weight).permute(self.order), 0.3, True)


def mean_square(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    output = model(*args)
    return output.square().mean(), output


def separated(model: nn.Module, x: Tensor, micro_size: int = 2) -> Captured:
    return separate(model, mean_square, x, size=x.shape[0], micro_size=micro_size)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_dropout_in_every_layout(order: tuple[int, ...], channels_last: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5, 6)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    captured = separated(Layout(order), x)
    (draw,) = hoist_random(captured.micro, captured.full, captured.separation).draws
    dropped = captured.full.values[draw.op.args[0].value]
    source = torch.empty_strided(dropped.shape, dropped.stride).normal_()
    torch.manual_seed(5)
    _, mask = torch.ops.aten.native_dropout(source, 0.3, True)
    generator = torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(draw.slice(draw.draw(), 0, 4), mask)
    assert torch.equal(torch.get_rng_state(), generator)
    check_equal(captured)


@pytest.mark.parametrize("train", [True, None])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_with_a_given_mask_has_the_bits_of_dropout(train: bool | None, p: float) -> None:
    x = torch.randn(4, 3, 5, 6)
    output, mask = torch.ops.aten.native_dropout(x, p, train)
    assert torch.equal(resolve("odt.dropout_apply")(x, mask, p), output)


class Noise(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 5), kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        match self.kind:
            case "rand":
                return y * torch.rand(y.shape[0], 1)
            case "randn_like":
                return y + torch.randn_like(y)
            case "shared":
                return y + torch.randn(5)
            case "merged":
                return torch.dropout(y.t().reshape(-1, 1), 0.5, True).reshape(5, -1)
            case "bernoulli":
                return y * torch.bernoulli(torch.full((y.shape[0], 5), 0.5))
            case _:
                return y * torch.bernoulli(torch.sigmoid(y.detach()))


@pytest.mark.parametrize("kind", ["rand", "randn_like", "shared", "merged", "bernoulli"])
def test_other_random_operators(kind: str) -> None:
    torch.manual_seed(0)
    captured = separated(Noise(kind), torch.randn(4, 6))
    assert len(captured.separation.random_ops) == 1
    check_equal(captured)


def test_a_draw_that_depends_on_data_is_refused() -> None:
    captured = separated(Noise("data"), torch.randn(4, 6))
    with pytest.raises(NotSeparable, match="depends on data"):
        hoist_random(captured.micro, captured.full, captured.separation)


def test_the_hoisted_graph_keeps_the_invariants_of_graphs() -> None:
    captured = separated(
        nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 4), nn.Dropout(0.1)), torch.randn(4, 6)
    )
    before = copy.deepcopy(captured.micro)
    hoisted = hoist_random(captured.micro, captured.full, captured.separation)
    graph = hoisted.graph
    assert [value.index for value in graph.values] == list(range(len(graph.values)))
    assert [op.index for op in graph.ops] == list(range(len(graph.ops)))
    assert graph.boundary == sum(op.phase == "forward" for op in graph.program)
    assert not any(op.is_random for op in graph.program)
    known = set(graph.inputs) | set(graph.constants)
    for op in graph.program:
        assert set(op.reads) <= known
        known |= set(op.results)
        assert all(graph.values[value].producer == op.index for value in op.results)
    assert all(value.producer is not None for value in graph.values if value.kind == "computed")
    assert [graph.values[draw.value].target for draw in hoisted.draws] == ["random:0", "random:1"]
    assert [draw.value for draw in hoisted.draws] == graph.inputs[-2:]
    assert captured.micro == before


def test_draws_are_data() -> None:
    captured = separated(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5)), torch.randn(4, 6))
    (draw,) = hoist_random(captured.micro, captured.full, captured.separation).draws
    again = pickle.loads(pickle.dumps(draw))
    torch.manual_seed(1)
    first = draw.draw()
    torch.manual_seed(1)
    assert torch.equal(again.draw(), first)
