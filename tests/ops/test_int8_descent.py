"""Gradient descent of int8 weights: the bits of plain torch, and of a float32 copy that is rounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_odt.ops import int8_descend_, int8_descent, int8_store_rounded_
from torch_odt.quant.activation import by_channel

SHAPES = [(5, 7), (1, 1), (64, 320), (3, 16, 1, 1), (40, 33, 3, 3), (96, 1, 3, 3), (0, 4), (512, 64, 3, 3)]
# What is exact whatever is fused.
RATE, DECAY = 2.0**-4, 2.0**-6

odt = torch.ops.torch_odt


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def a_weight(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    gradient = torch.randn(shape, generator=generator) * 60
    if len(shape) == 4:
        weight, gradient = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (weight, gradient))
    return weight, gradient


def steps_of(weight: Tensor) -> Tensor:
    """Powers of two, so that real weights are exact."""
    return 2.0 ** -(torch.arange(len(weight)) % 5).float()


def counters() -> tuple[Tensor, Tensor]:
    return torch.tensor([7, 1]), torch.tensor(0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("rate", "weight_decay"), [(RATE, DECAY), (0.3, 0.0), (0.01, 0.1)])
def test_it_has_the_bits_of_plain_torch(shape: tuple[int, ...], rate: float, weight_decay: float, threads: int) -> None:
    ours, gradient = a_weight(shape)
    theirs, states, scale = ours.clone(), (counters(), counters()), 0.3 + torch.arange(len(ours)) % 7
    for _ in range(2):
        version = ours._version
        int8_descend_(ours, gradient, scale, *states[0], rate=rate, weight_decay=weight_decay)
        int8_descent._descend_plain(theirs, gradient, scale, *states[1], rate, weight_decay)
        assert torch.equal(ours, theirs) and ours._version > version
        assert all(torch.equal(*pair) for pair in zip(*states, strict=True))
    assert states[0][0].tolist() == [7, 3]
    assert int(states[0][1]) > 0 or weight_decay or ours.numel() < 1000


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_sgd_of_a_float32_copy_that_is_rounded(shape: tuple[int, ...], threads: int) -> None:
    ours, gradient = a_weight(shape)
    theirs, states = ours.clone(), (counters(), counters())
    scale = steps_of(ours)
    int8_descend_(ours, gradient, scale, *states[0], rate=RATE, weight_decay=DECAY)

    real = torch.nn.Parameter(theirs.float() * by_channel(scale, theirs))
    real.grad = gradient
    torch.optim.SGD([real], lr=RATE, weight_decay=DECAY).step()
    int8_store_rounded_(theirs, real.detach() / by_channel(scale, theirs), *states[1])
    assert torch.equal(ours, theirs)
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


def test_small_steps_are_right_on_average() -> None:
    weight = torch.zeros(400, 500, dtype=torch.int8)
    for _ in range(4):
        int8_descend_(weight, torch.full((400, 500), 0.5), torch.full((400,), 0.5), *counters(), rate=0.01)
    assert weight.float().mean().item() == pytest.approx(-0.04, abs=0.003)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_told(bad: float) -> None:
    weight, gradient = a_weight((65, 33, 3, 3))
    gradient[64, 32, 2, 2] = bad
    rounding, saturated = counters()
    before = weight.clone()
    for descend in (odt.int8_descend_, int8_descent._descend_plain):
        with pytest.raises(RuntimeError, match="update of int8 weights is not finite"):
            descend(weight, gradient, steps_of(weight), rounding, saturated, 0.1, 0.0)
        assert rounding.tolist() == [7, 1] and not saturated and torch.equal(weight, before)


def test_large_gradients_and_small_steps_of_different_channels_are_no_overflow() -> None:
    weight, gradient = torch.ones(2, 2, dtype=torch.int8), torch.tensor([[1e10, 0.0], [0.0, 1e-30]])
    for descend in (odt.int8_descend_, int8_descent._descend_plain):
        ours = weight.clone()
        descend(ours, gradient, torch.tensor([1.0, 1e-32]), *counters(), 1e-3, 0.0)
        assert ours[0].tolist() == [-127, 1] and ours[1, 0] == 1
        with pytest.raises(RuntimeError, match="update of int8 weights is not finite"):
            descend(ours, gradient, torch.tensor([1e-32, 1.0]), *counters(), 1e-3, 0.0)


def test_bad_arguments_are_named() -> None:
    weight, gradient = a_weight((6, 4, 3, 3))
    state, scale = counters(), steps_of(weight)
    for descend in (odt.int8_descend_, int8_descent._descend_plain):
        with pytest.raises(RuntimeError, match="weight and gradient must be of the same shape"):
            descend(weight, gradient[1:], scale, *state, 0.1, 0.0)
        with pytest.raises(RuntimeError, match="channels_last"):
            descend(weight.contiguous(), gradient, scale, *state, 0.1, 0.0)
        with pytest.raises(RuntimeError, match="must be int8 and gradient float32"):
            descend(weight, gradient.double(), scale, *state, 0.1, 0.0)
        with pytest.raises(RuntimeError, match="saturated must be"):
            descend(weight, gradient, scale, state[0], torch.tensor(0.0), 0.1, 0.0)
        with pytest.raises(RuntimeError, match="scale must be a contiguous float32 CPU tensor of 6 numbers"):
            descend(weight, gradient, scale[1:], *state, 0.1, 0.0)


def test_it_is_registered_as_torch_wants_it() -> None:
    weight, gradient = a_weight((5, 7))
    torch.library.opcheck(odt.int8_descend_.default, (weight, gradient, steps_of(weight), *counters(), 0.1, 0.0))
