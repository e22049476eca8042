"""Dropout with masks of bits: the same numbers, the same results, and the same state of the generator afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.test_rewrite import capture, execute, ops_named, recompute
from tests.execute.small_steps import Net, make_batches, train_both
from torch_odt.capture.graph import TrainingGraph
from torch_odt.capture.operators import resolve
from torch_odt.capture.pack_dropout_masks import DROPOUT, DROPOUT_BACKWARD, PACKED, SCALE
from torch_odt.capture.profile import profile
from torch_odt.capture.rewrite import for_whole_batch
from torch_odt.capture.strides import is_contiguous

FORMATS = [torch.contiguous_format, torch.channels_last]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def capture_whole(model: nn.Module, *args: Tensor, disabled: Any = (), **options: Any) -> TrainingGraph:
    return for_whole_batch(capture(model, *args, disabled=disabled, **options), disabled)


def check(model: nn.Module, *args: Tensor, packed: int) -> TrainingGraph:
    """Bit for bit what the graph gives without the rewrite, and so many masks are packed."""
    plain = capture(model, *args)
    before = copy.deepcopy(plain)
    graph = for_whole_batch(plain)
    assert plain == before
    assert len(ops_named(graph, PACKED)) == len(ops_named(graph, SCALE)) == packed
    assert len(ops_named(plain, DROPOUT)) - packed == len(ops_named(graph, DROPOUT))
    state = torch.get_rng_state()
    expected = execute(plain, copy.deepcopy(model), args)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    found = execute(graph, copy.deepcopy(model), args)
    assert torch.equal(torch.get_rng_state(), after)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    return graph


class Dropped(nn.Module):
    """Dropout of what a convolution returns, seen through a function."""

    def __init__(self, p: float, function: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first, self.p, self.function = nn.Conv2d(3, 5, 3), p, function

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.function(self.first(x)), self.p, True).square()


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_masks_take_a_bit(dtype: torch.dtype, p: float, memory_format: torch.memory_format) -> None:
    model = Dropped(p).to(dtype=dtype, memory_format=memory_format)
    x = torch.randn(3, 3, 7, 9).to(dtype=dtype, memory_format=memory_format)
    graph = check(model, x, torch.randn(3, 5, 5, 7).to(dtype), packed=1)
    (op,) = ops_named(graph, PACKED)
    assert op.is_random and graph.values[op.results[1]].nbytes == (3 * 5 * 35 + 7) // 8
    assert not ops_named(graph, DROPOUT_BACKWARD)


def test_another_order_in_memory_is_left_alone() -> None:
    check(Dropped(0.5, lambda x: x.permute(3, 1, 0, 2)), torch.randn(3, 3, 7, 9), torch.randn(7, 5, 3, 5), packed=0)


def test_one_that_turns_up_after_tracing_draws_in_its_own_order() -> None:
    graph = capture_whole(Dropped(0.5), torch.randn(3, 3, 7, 9), torch.randn(3, 5, 5, 7))
    (op,) = ops_named(graph, PACKED)
    x = torch.randn(3, 5, 5, 7).to(memory_format=torch.channels_last)
    state = torch.get_rng_state()
    expected, _ = torch.ops.aten.native_dropout(x, 0.5, True)
    torch.set_rng_state(state)
    output, bits = resolve(PACKED)(x, *op.args[1:])
    assert torch.equal(output, expected)
    assert torch.equal(torch.ops.torch_odt.scale_masked(x, bits, 2.0, False), expected)


def test_without_the_drawing_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_odt.ops.random_bits.draws_like_torch", lambda: False)
    check(Dropped(0.3), torch.randn(3, 3, 7, 9), torch.randn(3, 5, 5, 7), packed=1)


def test_outputs_come_back_from_the_bits() -> None:
    graph = capture_whole(Dropped(0.3), torch.randn(3, 3, 7, 9), torch.randn(3, 5, 5, 7))
    pairs = list(recompute(graph, SCALE))
    assert len(pairs) == 1
    for first, second in pairs:
        assert torch.equal(first, second) and first.stride() == second.stride()


def test_it_can_be_switched_off() -> None:
    graph = capture_whole(
        Dropped(0.3), torch.randn(3, 3, 7, 9), torch.randn(3, 5, 5, 7), disabled=["pack_dropout_masks"]
    )
    assert ops_named(graph, DROPOUT) and not ops_named(graph, PACKED)


def test_attention_draws_its_masks_as_bits() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    graph = check(model, torch.randn(3, 5, 8), torch.randn(3, 5, 8), packed=3)
    # What attention returns lies sequence by sequence.
    (left,) = ops_named(graph, DROPOUT)
    kept = graph.values[left.reads[0]]
    assert not is_contiguous(kept.shape, kept.stride)


def test_whole_steps_are_plain_pytorchs() -> None:
    step = train_both(Net(dropout=0.4), make_batches(3))
    assert any("pack_dropout_masks" in note for note in step.plan.notes)


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_micro_batches_draw_for_the_whole_batch(micro_batch: int) -> None:
    train_both(Net(dropout=0.4), make_batches(3), micro_batch=micro_batch, exact=False)


def test_the_operator_can_be_measured() -> None:
    graph = capture_whole(Dropped(0.3), torch.randn(3, 3, 7, 9), torch.randn(3, 5, 5, 7))
    state = torch.get_rng_state()
    costs = profile(graph, repeats=1, min_seconds=0.0)
    assert torch.equal(torch.get_rng_state(), state)
    for target in (PACKED, SCALE):
        (op,) = ops_named(graph, target)
        assert costs.ops[op.index].source == "measured"
