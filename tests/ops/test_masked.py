"""Clamps and dropout with masks of bits, against ATen's operators."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_odt.ops import clamp_with_mask, clamp_with_mask_backward, masked, pack_bits, scale_masked, unpack_bits

aten = torch.ops.aten
odt = torch.ops.torch_odt

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
CLAMPS = [clamp_with_mask, masked._clamp_in_torch]
BACKWARDS = [clamp_with_mask_backward, masked._clamp_backward_in_torch]
PLAIN_IN_PLACE = (masked._clamp_in_place_in_torch, masked._clamp_backward_in_place_in_torch)
Scale = Callable[..., Tensor]
SCALES: list[Scale] = [scale_masked, masked._scale_in_torch]
BOUNDS = [(0.0, 6.0), (-1.0, 1.0), (0.0, math.inf), (-0.5, 2.0)]
# Vectors, parts and threads end among these.
SHAPES = [(1,), (7,), (1025,), (1, 3, 1, 1), (2, 3, 5, 7), (3, 33, 17, 5), (1, 64, 40, 41)]


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def every_other_sample(x: Tensor) -> Tensor:
    return torch.cat([x, x])[::2]


LAYOUTS = [torch.Tensor.contiguous, channels_last, every_other_sample]


def numbers(shape: tuple[int, ...], dtype: torch.dtype, special: tuple[float, ...] = ()) -> Tensor:
    torch.manual_seed(len(shape))
    x = (torch.randn(shape) * 4).to(dtype)
    for value in (*special, 0.0, -0.0, 6.0, 1.0, -1.0):
        x[torch.rand(shape) < 0.05] = value
    return x


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.signbit() & ~ours.isnan(), theirs.signbit() & ~theirs.isnan())


def wants_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("number", range(len(CLAMPS)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_relu_has_atens_bits(
    shape: tuple[int, ...], layout: Callable[..., Tensor], dtype: torch.dtype, number: int
) -> None:
    special = (math.nan, math.inf, -math.inf)
    x, grad = layout(numbers(shape, dtype, special)), numbers(shape, dtype, special).flip(0)
    output, mask = CLAMPS[number](x, 0.0, None, wants_channels_last(x))
    assert_same_bits(output, x.relu())
    for gradient in (grad, channels_last(grad)):
        found = BACKWARDS[number](gradient, mask, wants_channels_last(x))
        assert_same_bits(found, aten.threshold_backward(gradient, output, 0))
        assert found.stride() == torch.empty_like(gradient).stride()


@pytest.mark.parametrize("number", range(len(CLAMPS)))
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hardtanh_has_atens_bits(dtype: torch.dtype, bounds: tuple[float, float], number: int) -> None:
    x, grad = numbers((3, 33, 17, 5), dtype, (math.inf, -math.inf)), numbers((3, 33, 17, 5), dtype, (math.nan,)).flip(0)
    output, mask = CLAMPS[number](x, *bounds, False)
    assert_same_bits(output, aten.hardtanh(x, *bounds))
    assert_same_bits(BACKWARDS[number](grad, mask, False), aten.hardtanh_backward(grad, x, *bounds))


@pytest.mark.parametrize("in_place", [(odt.clamp_with_mask_, odt.clamp_with_mask_backward_), PLAIN_IN_PLACE])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("last", [False, True])
def test_in_place_has_the_same_bits(
    last: bool, layout: Callable[..., Tensor], dtype: torch.dtype, in_place: tuple[Callable[..., Any], ...]
) -> None:
    x = layout(numbers((3, 33, 17, 5), dtype, (math.nan, math.inf, -math.inf)))
    output, mask = clamp_with_mask(x, 0.0, 6.0, last)
    gradient = clamp_with_mask_backward(x, mask, last)
    clamped, passed = x.clone(), x.clone()
    assert torch.equal(in_place[0](clamped, 0.0, 6.0, last), mask)
    assert in_place[1](passed, mask, last) is None
    assert_same_bits(clamped, output)
    assert_same_bits(passed, gradient)


@pytest.mark.parametrize("number", range(len(CLAMPS)))
def test_nans_stay_and_their_gradients_pass(number: int) -> None:
    output, mask = CLAMPS[number](torch.full((19,), math.nan), 0.0, 6.0, False)
    assert output.isnan().all()
    assert torch.equal(BACKWARDS[number](torch.arange(19.0), mask, False), torch.arange(19.0))


@pytest.mark.parametrize("scale_with", SCALES)
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dropout_has_atens_bits(
    shape: tuple[int, ...],
    layout: Callable[..., Tensor],
    dtype: torch.dtype,
    p: float,
    scale_with: Callable[..., Tensor],
) -> None:
    x = layout(numbers(shape, dtype, (math.nan, math.inf, -math.inf)))
    last = wants_channels_last(x)
    expected, booleans = aten.native_dropout(x, p, True)
    bits = masked.pack_in_order(booleans, last)
    scale = 1 / (1 - p)
    assert_same_bits(scale_with(x, bits, torch.tensor(scale, dtype=dtype).item(), last), expected)
    grad = numbers(shape, dtype, (math.nan, math.inf))
    assert_same_bits(scale_with(grad, bits, scale, last), aten.native_dropout_backward(grad, booleans, scale))


def part_of_a_concatenation(x: Tensor) -> Tensor:
    """Its first axis but one is cut out of a longer one."""
    return torch.cat([x, x, x], 1).contiguous(memory_format=format_of(x))[:, x.shape[1] : 2 * x.shape[1]]


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


def format_of(x: Tensor) -> torch.memory_format:
    return masked.memory_format_of(wants_channels_last(x))


@pytest.mark.parametrize("number", range(len(CLAMPS)))
@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize("form", [part_of_a_concatenation, expanded, lambda x: x.flip(0).transpose(-1, -2)])
@pytest.mark.parametrize("shape", [(2, 3, 5, 5), (1, 33, 17, 17), (3, 64, 40, 40), (4, 9)], ids=str)
def test_gradients_in_any_layout(
    shape: tuple[int, ...], form: Callable[..., Tensor], layout: Callable[..., Tensor], number: int
) -> None:
    x = layout(numbers(shape, torch.float32))
    grad = form(layout(numbers(shape, torch.float32)))
    if grad.shape != x.shape:
        return
    output, mask = CLAMPS[number](x, 0.0, None, wants_channels_last(x))
    found = BACKWARDS[number](grad, mask, wants_channels_last(x))
    assert_same_bits(found, aten.threshold_backward(grad, output, 0))


@given(data=st.data())
def test_any_shape_in_any_layout(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)))
    x = data.draw(st.sampled_from(LAYOUTS))(numbers(shape, data.draw(st.sampled_from(DTYPES)), (math.nan, math.inf)))
    x = x.transpose(*data.draw(st.tuples(*[st.integers(0, len(shape) - 1)] * 2)))
    last = x.dim() == 4 and data.draw(st.booleans())
    output, mask = clamp_with_mask(x, 0.0, None, last)
    assert_same_bits(output, x.relu())
    assert output.stride() == torch.empty_like(x).stride()
    order = (0, 2, 3, 1) if last else tuple(range(x.dim()))
    passed = unpack_bits(mask, 0, x.numel())
    assert torch.equal(passed, ~(x <= 0).permute(order).flatten())
    gradient = clamp_with_mask_backward(x, mask, last)
    assert_same_bits(gradient, aten.threshold_backward(x, output, 0))
    assert_same_bits(scale_masked(x, mask, 1.5, last), masked._scale_in_torch(x, mask, 1.5, last))


def test_threads_cut_at_bytes() -> None:
    x = torch.randn(5 * 32768 + 13)
    output, mask = clamp_with_mask(x, 0.0)
    assert torch.equal(output, x.relu())
    assert torch.equal(mask, pack_bits(x > 0))
    assert torch.equal(clamp_with_mask_backward(x, mask), output)
    assert torch.equal(scale_masked(x, mask, 2.0), (x * (x > 0)) * 2)


def test_nothing_in_nothing_out() -> None:
    output, mask = clamp_with_mask(torch.empty(0, 3), 0.0)
    assert output.shape == (0, 3) and mask.shape == (0,)
    assert clamp_with_mask_backward(output, mask).shape == scale_masked(output, mask, 2.0).shape == (0, 3)


@pytest.mark.slow
def test_the_baseline_has_the_same_bits() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:logging",
        "-n",
        "0",
        "-q",
        __file__,
        "-k",
        "hardtanh or any or threads",
    ]
    environment = os.environ | {"TORCH_ODT_ISA": "baseline"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_for_tracing(layout: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x = layout(numbers((2, 3, 5, 7), dtype))
    last = wants_channels_last(x)
    _, mask = clamp_with_mask(x, 0.0, None, last)
    torch.library.opcheck(odt.clamp_with_mask, (x, 0.0, 6.0, last))
    torch.library.opcheck(odt.clamp_with_mask, (x, 0.0, None, not last))
    torch.library.opcheck(odt.clamp_with_mask_backward, (x, mask, last))
    torch.library.opcheck(odt.clamp_with_mask_, (x.clone(), 0.0, 6.0, last))
    torch.library.opcheck(odt.clamp_with_mask_backward_, (x.clone(), mask, last))
    torch.library.opcheck(odt.scale_masked, (x, mask, 2.0, not last))


@pytest.mark.parametrize("number", range(len(CLAMPS)))
def test_what_is_refused(number: int) -> None:
    mask = torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="float32, float64 or bfloat16"):
        CLAMPS[number](torch.zeros(3).half(), 0.0, None, False)
    with pytest.raises(RuntimeError, match="4 dimensions"):
        CLAMPS[number](torch.zeros(3), 0.0, None, True)
    for function in (BACKWARDS[number], lambda x, bits, last: SCALES[number](x, bits, 2.0, last)):
        with pytest.raises(RuntimeError, match="4 dimensions"):
            function(torch.zeros(3), mask, True)
        with pytest.raises(RuntimeError, match="a bit for each element"):
            function(torch.zeros(9), mask, False)
        with pytest.raises(RuntimeError, match="uint8"):
            function(torch.zeros(3), mask.float(), False)
