"""Gradients and updates rounded to int8: the compiled operators against plain torch, and against the truth."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_odt.ops import int8_quantize_gradient, int8_rows, int8_store_rounded_, pack_bits

odt = torch.ops.torch_odt
# Vectors, halves of hashes, runs of sums and parts of threads end among these.
SHAPES = [(0, 5, 3, 3), (1, 1, 1, 1), (2, 3, 5, 7), (3, 24, 21, 20), (2, 37, 20, 20), (8, 64, 12, 12), (8, 517, 1, 1)]
DTYPES = (torch.float32, torch.bfloat16)
WEIGHTS = [(0, 4), (5, 7), (130, 33), (3, 1, 3, 3), (65, 33, 3, 3)]


def a_gradient(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=draw) * torch.logspace(-6, 3, shape[1]).view(-1, 1, 1)
    return values.contiguous(memory_format=torch.channels_last)


def a_mask(gradient: Tensor, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Booleans, and the same as bits."""
    pixels = torch.rand(gradient.permute(0, 2, 3, 1).shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    return pixels.permute(0, 3, 1, 2), pack_bits(pixels.flatten())


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        assert ours.dim() != 4 or ours.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("for_input", [False, True])
@pytest.mark.parametrize("for_weight", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_has_the_bits_of_plain_torch(
    shape: tuple[int, ...], for_input: bool, for_weight: bool, dtype: torch.dtype, threads: int
) -> None:
    gradient = a_gradient(shape).to(dtype)
    scale = torch.rand(shape[1]) + 0.01 if for_input else None
    for mask in (None, a_mask(gradient)[1]):
        found = odt.int8_quantize_gradient(gradient, mask, scale, for_weight)
        assert_same(found, int8_rows._quantize_plain(gradient, mask, scale, for_weight))


@given(
    shape=st.tuples(*[st.integers(1, size) for size in (3, 40, 6, 6)]),
    seed=st.integers(0, 99),
    strided=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_and_layout(shape: tuple[int, int, int, int], seed: int, strided: bool, dtype: torch.dtype) -> None:
    gradient = a_gradient(shape, seed).to(dtype)
    if strided:
        gradient = torch.cat([gradient, gradient], 3)[..., ::2]
    mask = a_mask(gradient, seed)[1]
    scale = torch.randn(shape[1], generator=torch.Generator().manual_seed(seed))
    found = odt.int8_quantize_gradient(gradient, mask, scale, True)
    assert_same(found, int8_rows._quantize_plain(gradient, mask, scale, True))


@pytest.mark.parametrize(
    "shape", [(1, 37, 4, 4), (3, 64, 7, 5), (2, 1, 3, 3), (40, 17, 7, 7), (2, 8, 9, 1), (2, 8, 1, 9)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_is_the_same_for_all_pixels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    one = torch.randn(shape[0], shape[1], 1, 1).to(dtype)
    gradient, scale = one.expand(shape), torch.rand(shape[1])
    dense = gradient.contiguous(memory_format=torch.channels_last)
    for mask in (None, a_mask(dense)[1]):
        expected = odt.int8_quantize_gradient(dense, mask, scale, True)
        assert_same(odt.int8_quantize_gradient(gradient, mask, scale, True), expected)
        # Of other layouts, too, in which samples or channels do not adjoin.
        for other in (one[:1].expand(shape), one[:, :1].expand(shape), torch.cat([one, one], 1)[:, ::2].expand(shape)):
            found = odt.int8_quantize_gradient(other, mask, scale, True)
            assert_same(
                found, odt.int8_quantize_gradient(other.clone(memory_format=torch.channels_last), mask, scale, True)
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_reads_from_any_address(dtype: torch.dtype) -> None:
    memory = torch.randn(1 + 2 * 19 * 5 * 5).to(dtype)
    gradient = memory[1:].view(2, 5, 5, 19).permute(0, 3, 1, 2)
    found = odt.int8_quantize_gradient(gradient, None, torch.ones(19), True)
    assert_same(found, int8_rows._quantize_plain(gradient, None, torch.ones(19), True))


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_instruction_sets_agree(isa: str) -> None:
    code = (
        "import torch, sys; sys.path.insert(0, 'tests/ops'); from test_int8_rows import *\n"
        "for shape, dtype in [(shape, dtype) for shape in SHAPES for dtype in DTYPES]:\n"
        "    gradient = a_gradient(shape).to(dtype); mask = a_mask(gradient)[1]; scale = torch.rand(shape[1])\n"
        "    found = odt.int8_quantize_gradient(gradient, mask, scale, True)\n"
        "    assert_same(found, int8_rows._quantize_plain(gradient, mask, scale, True))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TORCH_ODT_ISA": isa})


def test_rounding_is_right_on_average_and_within_a_step() -> None:
    gradient = a_gradient((4, 6, 9, 9))
    inside, mask = a_mask(gradient)
    truth = (gradient * inside).double()
    scale = torch.rand(6) + 0.1
    means = [torch.zeros_like(truth) for _ in range(2)]
    for number in range(60):
        # Another last bit draws other numbers.
        found = int8_quantize_gradient(gradient * (1 + 1e-6 * number), mask, weight_scale=scale)
        of_weight = found.for_weight * found.weight_steps.view(-1, 1, 1).double()
        of_input = found.for_input * found.input_step.double()
        for mean, values, wanted, step in (
            (means[0], of_weight, truth, found.weight_steps.view(-1, 1, 1)),
            (means[1], of_input, truth * scale.view(-1, 1, 1), found.input_step),
        ):
            assert bool(((values - wanted).abs() <= 1.01 * step + wanted.abs() * 1e-3).all())
            mean += values / 60
        torch.testing.assert_close(found.sums.double(), truth.sum((0, 2, 3)), rtol=1e-3, atol=1e-9)
    steps = truth.abs().amax((0, 2, 3)) / 127
    assert float(((means[0] - truth).abs() / steps.view(-1, 1, 1)).mean()) < 0.06
    assert float((means[1] - truth * scale.view(-1, 1, 1)).abs().mean()) < 0.06 * float(found.input_step)


def test_the_same_gradient_is_rounded_the_same_way_again() -> None:
    gradient = a_gradient((2, 8, 5, 5))
    assert_same(int8_quantize_gradient(gradient), int8_quantize_gradient(gradient.clone()))


def test_zeros_and_the_smallest_numbers_are_zeros() -> None:
    for value in (0.0, 1e-42, 1e-38):
        found = int8_quantize_gradient(torch.full((1, 3, 2, 2), value), weight_scale=torch.full((3,), 1e30))
        assert not found.for_weight.any() and bool((found.weight_steps == 1).all())
        assert bool(found.input_step.isfinite())


def test_what_the_mask_hides_does_not_count() -> None:
    gradient = torch.full((1, 4, 2, 2), float("nan")).contiguous(memory_format=torch.channels_last)
    found = int8_quantize_gradient(gradient, torch.zeros(2, dtype=torch.uint8), weight_scale=torch.ones(4))
    assert not found.for_input.any() and not found.sums.any()


def test_bad_gradients_are_named() -> None:
    gradient = a_gradient((2, 4, 3, 3))
    for bad in (float("nan"), float("inf"), float("-inf")):
        broken = gradient.clone()
        broken[1, 2, 0, 1] = bad
        for quantize in (odt.int8_quantize_gradient, int8_rows._quantize_plain):
            for dtype in DTYPES:
                with pytest.raises(RuntimeError, match="gradient is not finite"):
                    quantize(broken.to(dtype), None, None, True)
    for quantize in (odt.int8_quantize_gradient, int8_rows._quantize_plain):
        with pytest.raises(RuntimeError, match="times the weight's steps"):
            quantize(torch.full((1, 4, 1, 1), 1e38), None, torch.full((4,), 1e3), True)
        with pytest.raises(RuntimeError, match="times the weight's steps"):
            quantize(gradient, None, torch.tensor([1.0, float("nan"), 1.0, 1.0]), True)
        with pytest.raises(RuntimeError, match="4 dimensions"):
            quantize(gradient[0], None, None, True)
        with pytest.raises(RuntimeError, match="float32 or bfloat16"):
            quantize(gradient.double(), None, None, True)
        with pytest.raises(RuntimeError, match="a bit for each element"):
            quantize(gradient, torch.zeros(3, dtype=torch.uint8), None, True)
        with pytest.raises(RuntimeError, match="one number for each channel"):
            quantize(gradient, None, torch.ones(3), True)


def a_weight(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    steps = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 60
    weight = torch.zeros(shape, dtype=torch.int8)
    if len(shape) == 4:
        steps, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (steps, weight))
    return weight, steps


@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
def test_an_update_has_the_bits_of_plain_torch(shape: tuple[int, ...], threads: int) -> None:
    ours, steps = a_weight(shape)
    theirs = ours.clone()
    states = [(torch.tensor([7, 1]), torch.tensor(0)) for _ in range(2)]
    for _ in range(2):
        before, version = ours.clone(), ours._version
        int8_store_rounded_(ours, steps, *states[0])
        int8_rows.store_plain(theirs, steps, *states[1])
        assert torch.equal(ours, theirs) and ours._version > version
        assert all(torch.equal(*pair) for pair in zip(*states, strict=True))
        assert not ours.numel() or not torch.equal(ours, before)
    assert states[0][0].tolist() == [7, 3]
    beyond = int((steps.abs() > 128).sum())
    assert 2 * beyond <= int(states[0][1]) <= 2 * int((steps.abs() > 127).sum())


def test_an_update_that_is_not_finite_changes_nothing() -> None:
    weight, steps = a_weight((65, 33, 3, 3))
    steps[64, 32, 2, 2] = float("nan")
    rounding, saturated = torch.tensor([7, 1]), torch.tensor(0)
    for store in (odt.int8_store_rounded_, int8_rows.store_plain):
        with pytest.raises(RuntimeError, match="update of int8 weights is not finite"):
            store(weight, steps, rounding, saturated)
        assert not weight.any() and rounding.tolist() == [7, 1] and not saturated


def test_bad_updates_are_named() -> None:
    weight, steps = a_weight((6, 4, 3, 3))
    state = (torch.tensor([7, 1]), torch.tensor(0))
    for store in (odt.int8_store_rounded_, int8_rows.store_plain):
        with pytest.raises(RuntimeError, match="the same shape"):
            store(weight, steps[1:], *state)
        with pytest.raises(RuntimeError, match="channels_last"):
            store(weight.contiguous(), steps, *state)
        with pytest.raises(RuntimeError, match="must be int8 and steps float32"):
            store(weight, steps.double(), *state)
        with pytest.raises(RuntimeError, match="rounding must be"):
            store(weight, steps, torch.tensor([7]), state[1])


def test_they_are_registered_as_torch_wants_it() -> None:
    gradient = a_gradient((2, 8, 5, 5))
    arguments = (gradient, a_mask(gradient)[1], torch.rand(8), True)
    torch.library.opcheck(odt.int8_quantize_gradient.default, arguments)
    weight, steps = a_weight((5, 7))
    torch.library.opcheck(odt.int8_store_rounded_.default, (weight, steps, torch.tensor([1, 2]), torch.tensor(0)))
