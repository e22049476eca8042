"""Max-pooling with offsets of a byte, against ATen's operators: every bit, in every layout, NaNs included."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from torch_odt.ops import max_pool, max_pool2d_with_offsets, max_pool2d_with_offsets_backward

aten = torch.ops.aten
odt = torch.ops.torch_odt

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
Window = tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int], bool]
Pair = tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]

PAIRS: list[Pair] = [
    (max_pool2d_with_offsets, max_pool2d_with_offsets_backward),
    (max_pool._pool_in_torch, max_pool._backward_in_torch),
]


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def every_other_sample(x: Tensor) -> Tensor:
    return torch.cat([x, x])[::2]


def every_other_channel(x: Tensor) -> Tensor:
    return channels_last(torch.cat([x, x], 1))[:, ::2]


def transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


LAYOUTS = [torch.Tensor.contiguous, channels_last, every_other_sample, every_other_channel, transposed]


@dataclass(frozen=True)
class Case:
    """An input, a gradient of its output, and windows."""

    x: Tensor
    window: Window
    grad: Tensor


def make_case(x: Tensor, window: Window) -> Case:
    output = aten.max_pool2d_with_indices(x, *window)[0]
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(output.shape, generator=generator).to(x.dtype)
    return Case(x, window, grad.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else grad)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, special: bool = False) -> Tensor:
    """Few different values, so that many are equal; with all that is no number among them where asked for."""
    torch.manual_seed(sum(shape))
    x = torch.randint(-3, 4, shape).to(dtype)
    if special:
        for value in (math.nan, math.inf, -math.inf, -0.0):
            x[torch.rand(shape) < 0.15] = value
    return x


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape and ours.stride() == theirs.stride() and ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.signbit() & ~ours.isnan(), theirs.signbit() & ~theirs.isnan())


def check(pair: Pair, case: Case) -> None:
    pool, backward = pair
    expected, indices = aten.max_pool2d_with_indices(case.x, *case.window)
    output, offsets = pool(case.x, *case.window)
    assert_same_bits(output, expected)
    assert offsets.dtype == torch.uint8 and offsets.stride() == output.stride()
    gradient = aten.max_pool2d_with_indices_backward(case.grad, case.x, *case.window, indices)
    like = torch.empty_strided(case.x.shape, case.x.stride(), dtype=case.x.dtype, device="cpu")
    assert_same_bits(backward(case.grad, like, *case.window, offsets), gradient)


WINDOWS: list[Window] = [
    ((3, 3), (2, 2), (1, 1), (1, 1), False),
    ((3, 3), (2, 2), (0, 0), (1, 1), True),
    ((2, 2), (2, 2), (0, 0), (1, 1), False),
    ((5, 3), (1, 2), (2, 1), (1, 1), False),
    ((2, 3), (3, 1), (1, 0), (2, 2), True),
    ((16, 16), (1, 1), (8, 8), (1, 1), False),
    ((1, 1), (3, 3), (0, 0), (1, 1), False),
    ((2, 3), (2, 4), (1, 1), (1, 1), True),
]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_bit_is_atens(pair: Pair, window: Window, layout: Callable[..., Tensor], dtype: torch.dtype) -> None:
    for special in (False, True):
        check(pair, make_case(layout(numbers((2, 7, 17, 19), dtype, special)), window))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_int8_is_pooled_as_its_numbers(pair: Pair, window: Window, layout: Callable[..., Tensor]) -> None:
    pool, backward = pair
    x = layout(torch.randint(-128, 128, (2, 7, 17, 19), generator=torch.Generator().manual_seed(0)).to(torch.int8))
    output, offsets = pool(x, *window)
    expected, wanted = pool(x.float(), *window)
    assert output.dtype == torch.int8 and output.stride() == expected.stride() and torch.equal(offsets, wanted)
    assert torch.equal(output.float(), expected)
    grad = torch.randint(-128, 128, output.shape, generator=torch.Generator().manual_seed(1)).to(torch.int8)
    kernel, stride, _, dilation, _ = window
    if any((k - 1) * d + 1 > s for k, d, s in zip(kernel, dilation, stride, strict=True)):
        with pytest.raises(RuntimeError, match="windows that overlap, int8 does not hold the sums of gradients"):
            backward(grad, x, *window, offsets)
        return
    found = backward(grad, x, *window, offsets)
    assert found.dtype == torch.int8 and torch.equal(found.float(), backward(grad.float(), x.float(), *window, offsets))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_one_image_without_a_batch(pair: Pair, window: Window) -> None:
    check(pair, make_case(numbers((5, 17, 18), torch.float32, True), window))


@given(data=st.data())
def test_any_window_over_any_image(data: st.DataObject) -> None:
    def number(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    kernel, stride, dilation = ((number(1, 5), number(1, 5)) for _ in range(3))
    padding = tuple(number(0, k // 2) for k in kernel)
    size = tuple(number(max(1, 1 + d * (k - 1) - 2 * p), 24) for k, d, p in zip(kernel, dilation, padding, strict=True))
    assume(all(n >= d for n, d in zip(size, dilation, strict=True)))
    window = (kernel, stride, padding, dilation, data.draw(st.booleans()))
    x = numbers((number(1, 3), number(1, 9), *size), data.draw(st.sampled_from(DTYPES)), data.draw(st.booleans()))
    check(PAIRS[0], make_case(data.draw(st.sampled_from(LAYOUTS))(x), window))


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, channels_last])
def test_threads_cut_between_rows(layout: Callable[..., Tensor]) -> None:
    for shape, window in [((1, 300, 41, 43), WINDOWS[0]), ((3, 130, 29, 31), WINDOWS[3])]:
        check(PAIRS[0], make_case(layout(numbers(shape, torch.float32)), window))


def test_the_baseline_has_the_same_bits() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:logging", "-n", "0", "-q", __file__, "-k", "any or threads"]
    environment = os.environ | {"TORCH_ODT_ISA": "baseline"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_for_tracing(layout: Callable[..., Tensor], dtype: torch.dtype) -> None:
    case = make_case(layout(numbers((2, 3, 7, 9), dtype)), WINDOWS[0])
    _, offsets = max_pool2d_with_offsets(case.x, *case.window)
    torch.library.opcheck(odt.max_pool2d_with_offsets, (case.x, *case.window))
    torch.library.opcheck(odt.max_pool2d_with_offsets_backward, (case.grad, case.x, *case.window, offsets))


@pytest.mark.parametrize("pair", PAIRS)
def test_offsets_that_point_elsewhere_stay_inside(pair: Pair) -> None:
    x = channels_last(torch.zeros(2, 3, 9, 9))
    window = WINDOWS[0]
    offsets = torch.randint(0, 256, (2, 3, 5, 5), dtype=torch.uint8)
    gradient = pair[1](torch.ones(2, 3, 5, 5), x, *window, offsets)
    assert gradient.isfinite().all() and gradient.sum() <= 150


WRONG: list[tuple[Any, Window, str]] = [
    (torch.zeros(1, 1, 4, 4).half(), WINDOWS[2], "float32, float64 or bfloat16"),
    (torch.zeros(4, 4), WINDOWS[2], "dimensions"),
    (torch.zeros(0, 1, 4, 4), WINDOWS[2], "must have elements"),
    (torch.zeros(1, 1, 40, 40), ((17, 16), (1, 1), (0, 0), (1, 1), False), "more than 256"),
    (torch.zeros(1, 1, 4, 4), ((1 << 32, 1 << 32), (1 << 32, 1 << 32), (0, 0), (1, 1), True), "more than 256"),
    (torch.zeros(1, 1, 4, 4), ((2, 2), (1 << 62, 2), (0, 0), (1, 1), True), "1073741824 at most"),
    (torch.zeros(1, 1, 4, 4), ((2, 2), (2, 2), (0, 0), (1, 1 << 62), True), "1073741824 at most"),
    (torch.zeros(1, 1, 4, 4), ((2,), (2, 2), (0, 0), (1, 1), False), "two numbers"),
    (torch.zeros(1, 1, 1, 1), ((2, 2), (1, 1), (1, 1), (2, 2), False), "outside of the input"),
]


@pytest.mark.parametrize(("x", "window", "complaint"), WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("pool", [max_pool2d_with_offsets, max_pool._pool_in_torch])
def test_what_cannot_be_pooled(pool: Callable[..., Any], x: Tensor, window: Window, complaint: str) -> None:
    if "two numbers" in complaint and pool is max_pool2d_with_offsets:
        window = ((2, 2, 2), *window[1:])
    with pytest.raises(RuntimeError, match=complaint):
        pool(x, *window)


def test_gradients_and_offsets_of_another_shape() -> None:
    x, window = torch.zeros(1, 1, 4, 4), WINDOWS[2]
    _, offsets = max_pool2d_with_offsets(x, *window)
    with pytest.raises(RuntimeError, match="grad_output must have"):
        max_pool2d_with_offsets_backward(torch.zeros(1, 1, 3, 3), x, *window, offsets)
    with pytest.raises(RuntimeError, match="offsets must be uint8"):
        max_pool2d_with_offsets_backward(torch.zeros(1, 1, 2, 2), x, *window, offsets.long())


@pytest.mark.parametrize("pool", [max_pool2d_with_offsets, max_pool._pool_in_torch])
@pytest.mark.parametrize(("size", "kernel"), [((1, 3), 2), ((2, 2), 3), ((4, 1), 3)])
def test_a_window_larger_than_the_image_is_cut(pool: Callable[..., Any], size: tuple[int, int], kernel: int) -> None:
    x = torch.randn(2, 3, *size)
    window = ((kernel, kernel), (kernel, kernel), (0, 0), (1, 1), True)
    output, offsets = pool(x, *window)
    assert torch.equal(output, aten.max_pool2d_with_indices(x, *window)[0]) and offsets.shape == output.shape
