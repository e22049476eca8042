"""Masks drawn as bits, against torch's `bernoulli_`: the same bits, and the same generator afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_odt import _extensions
from torch_odt.ops import bernoulli_bits, pack_bits, random_bits, unpack_bits

Draw = Callable[[Tensor, int, float], Tensor]

needs_torchs_twister = pytest.mark.skipif(
    not random_bits.draws_like_torch(), reason="torch draws with another generator here, or nothing is compiled"
)
DRAWS = [
    pytest.param(lambda *arguments: torch.ops.torch_odt.draw_bits(*arguments), marks=needs_torchs_twister, id="op"),
    pytest.param(random_bits._draw_in_torch, id="torch"),
]


def generator_after(words: int, seed: int = 0) -> torch.Generator:
    """A generator that has given out so many words."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(words):
        torch.empty(1).uniform_(generator=generator)
    return generator


def drawn_by_torch(generator: torch.Generator, count: int, probability: float) -> Tensor:
    return pack_bits(torch.empty(count, dtype=torch.bool).bernoulli_(probability, generator=generator))


@pytest.mark.parametrize("draw", DRAWS)
@given(
    count=st.integers(0, 3000),
    probability=st.floats(0, 1) | st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    words=st.integers(0, 3) | st.integers(622, 626),
)
def test_bits_and_state_are_torchs(draw: Draw, count: int, probability: float, words: int) -> None:
    generator = generator_after(words)
    state = generator.get_state()
    assert torch.equal(draw(state, count, probability), drawn_by_torch(generator, count, probability))
    assert torch.equal(state, generator.get_state())


@pytest.mark.parametrize("like_torch", [True, False])
def test_masks_follow_each_other_in_the_default_generator(like_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not like_torch:
        monkeypatch.setattr(random_bits, "draws_like_torch", lambda: False)
    counts = (1, 8, 1000, 100_001)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = [torch.empty(count, dtype=torch.bool).bernoulli_(0.9) for count in counts]
        after = torch.rand(3)
        torch.manual_seed(3)
        found = [unpack_bits(bernoulli_bits(count, 0.9), 0, count) for count in counts]
        assert all(map(torch.equal, found, expected))
        assert torch.equal(torch.rand(3), after)


def test_a_machine_that_draws_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = torch.zeros(125, dtype=torch.uint8)
    monkeypatch.setattr(torch.ops.torch_odt, "draw_bits", lambda *_: wrong)
    assert not random_bits.draws_like_torch.__wrapped__()


def test_shapes_for_tracing() -> None:
    torch.library.opcheck(torch.ops.torch_odt.draw_bits, (generator_after(1).get_state(), 19, 0.5))


@pytest.mark.parametrize(
    ("state", "count", "probability", "complaint"),
    [
        (torch.zeros(7, dtype=torch.uint8), 1, 0.5, "must be that of a torch.Generator"),
        (torch.zeros(5056, dtype=torch.uint8), 1, 0.5, "must be that of a torch.Generator"),
        (torch.zeros(5056), 1, 0.5, "must be that of a torch.Generator"),
        (torch.Generator().get_state(), -1, 0.5, "count must not be negative"),
        (torch.Generator().get_state(), 1, 1.5, "probability must lie between 0 and 1"),
        (torch.Generator().get_state(), 1, float("nan"), "probability must lie between 0 and 1"),
    ],
    ids=["short", "zeros", "dtype", "count", "above", "nan"],
)
@pytest.mark.skipif(not _extensions.has_kernels, reason="nothing is compiled")
def test_what_cannot_be_drawn(state: Tensor, count: int, probability: float, complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        torch.ops.torch_odt.draw_bits(state, count, probability)
