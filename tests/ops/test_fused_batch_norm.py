"""Batch normalisation with a clamp behind it: against float64, against ATen's operators, and against itself."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_odt.ops import batch_norm_act, batch_norm_act_backward, batch_norm_act_normalize, batch_norm_normalize
from torch_odt.ops.fused_batch_norm import _act_in_torch, _backward_in_torch, _normalize_act_in_torch

aten = torch.ops.aten
odt = torch.ops.torch_odt

SHAPES = [
    (8, 24, 14, 14),
    (4, 7, 5, 3),
    (16, 32),
    (3, 1030, 5, 4),
    (64, 1),
    (3, 5, 17),
    (2, 3, 4, 5, 6),
    (32, 16, 1, 1),
    (1, 64, 9, 9),
    (2, 1, 40, 40),
    (16, 33, 7, 7),
    (70, 96, 28, 28),
]
NONE, RELU, RELU6, NARROW = (-math.inf, math.inf), (0.0, math.inf), (0.0, 6.0), (-0.3, 0.7)
BOUNDS = [NONE, RELU, RELU6, NARROW]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
MOMENTUM, EPS = 0.1, 1e-5


def channels_innermost(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def every_other_sample(x: Tensor) -> Tensor:
    return torch.cat([x, x])[::2]


Layout = Callable[[Tensor], Tensor]
LAYOUTS: list[Layout] = [torch.Tensor.contiguous, channels_innermost, every_other_sample]


@dataclass
class Case:
    """Arguments of a forward and a backward pass."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    grad: Tensor

    @property
    def doubled(self) -> Case:
        def wide(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.double()

        return Case(*(wide(tensor) for tensor in vars(self).values()))


def make_case(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, layout: Layout = torch.Tensor.contiguous, affine=True
) -> Case:
    torch.manual_seed(0)
    channels, wide = shape[1], torch.float64 if dtype == torch.float64 else torch.float32
    x = layout((torch.randn(shape, dtype=wide) * 3 + 1).to(dtype))
    weight, bias = (
        (torch.rand(channels, dtype=wide) + 0.5, torch.randn(channels, dtype=wide)) if affine else (None,) * 2
    )
    running = torch.randn(channels, dtype=wide), torch.rand(channels, dtype=wide)
    return Case(x, weight, bias, *running, layout(torch.randn(shape, dtype=wide).to(dtype)))


def forward(case: Case, bounds: tuple[float, float]) -> tuple[Tensor, ...]:
    return batch_norm_act(case.x, case.weight, case.bias, case.running_mean, case.running_var, MOMENTUM, EPS, *bounds)


def backward(case: Case, statistics: tuple[Tensor, Tensor], bounds: tuple[float, float]) -> tuple[Tensor, ...]:
    return batch_norm_act_backward(case.grad, case.x, *statistics, case.weight, case.bias, *bounds)


def aten_forward(case: Case, bounds: tuple[float, float]) -> tuple[Tensor, ...]:
    output, *rest = aten._native_batch_norm_legit_functional(
        case.x, case.weight, case.bias, case.running_mean, case.running_var, True, MOMENTUM, EPS
    )
    return output.clamp(*bounds), *rest


def aten_backward(case: Case, statistics: tuple[Tensor, Tensor], bounds: tuple[float, float]) -> tuple[Tensor, ...]:
    """From ATen's own forward pass, as autograd would."""
    args = (case.weight, case.bias, case.running_mean, case.running_var, True, MOMENTUM, EPS)
    output = aten._native_batch_norm_legit_functional(case.x, *args)[0]
    if bounds == RELU:
        grad = aten.threshold_backward(case.grad, output.relu(), 0)
    else:
        grad = case.grad if bounds == NONE else aten.hardtanh_backward(case.grad, output, *bounds)
    return aten.native_batch_norm_backward(
        grad, case.x, case.weight, None, None, *statistics, True, EPS, [True, True, True]
    )


def assert_as_accurate(ours: Tensor, theirs: Tensor, exact: Tensor, rounding: float = 1e-6) -> None:
    distance, usual = (float((tensor.double() - exact).norm()) for tensor in (ours, theirs))
    assert distance <= 2 * usual + rounding * float(exact.norm())


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_accurate_as_aten(shape: tuple[int, ...], layout: Layout, affine: bool, bounds: tuple[float, float]) -> None:
    case = make_case(shape, layout=layout, affine=affine)
    ours, theirs, exact = forward(case, bounds), aten_forward(case, bounds), aten_forward(case.doubled, bounds)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert_as_accurate(a, b, c)

    # An output that rounding puts on the other side of a bound has another gradient: the mask is our output's.
    ends = torch.zeros_like(case.x, dtype=torch.bool)
    ends |= False if bounds[0] == -math.inf else ours[0] <= bounds[0]
    ends |= False if bounds[1] == math.inf else ours[0] >= torch.tensor(bounds[1])
    masked = Case(*vars(case).values())
    masked.grad = case.grad.masked_fill(ends, 0)
    actual = backward(case, ours[1:3], bounds)
    usual = aten_backward(masked, theirs[1:3], NONE)
    for a, b, c in zip(actual, usual, aten_backward(masked.doubled, exact[1:3], NONE), strict=True):
        if b is not None:
            assert_as_accurate(a, b, c)


@pytest.mark.parametrize("bounds", [RELU, RELU6])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_rounded_once(shape: tuple[int, ...], layout: Layout, bounds: tuple[float, float]) -> None:
    case = make_case(shape, torch.bfloat16, layout)
    wide = case.doubled
    output, *statistics = forward(case, bounds)
    expected, *expected_statistics = aten_forward(wide, bounds)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected.bfloat16(), rtol=2**-7, atol=1e-5)
    for actual, wanted in zip(statistics, expected_statistics, strict=True):
        torch.testing.assert_close(actual, wanted.float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(batch_norm_act_normalize(case.x, *statistics[:2], case.weight, case.bias, *bounds), output)

    # The clamp's mask is that of the rounded output, as where the activation function reads the rounded tensor.
    rounded = batch_norm_normalize(case.x, *statistics[:2], case.weight, case.bias)
    wide.grad = aten.hardtanh_backward(case.grad, rounded, *bounds).double()
    gradients = backward(case, (statistics[0], statistics[1]), bounds)
    expected_gradients = aten_backward(wide, (expected_statistics[0], expected_statistics[1]), NONE)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close(gradients[0], expected_gradients[0].bfloat16(), rtol=2**-7, atol=1e-4)
    for actual, wanted in zip(gradients[1:], expected_gradients[1:], strict=True):
        torch.testing.assert_close(actual, wanted.float(), rtol=1e-4, atol=1e-3)


@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    grad_layout=st.sampled_from(LAYOUTS),
    bounds=st.sampled_from(BOUNDS),
    affine=st.booleans(),
)
def test_any_shape(
    shape: list[int],
    dtype: torch.dtype,
    layout: Layout,
    grad_layout: Layout,
    bounds: tuple[float, float],
    affine: bool,
) -> None:
    """The compiled operators and those in plain torch agree, results that nobody wants and strides included."""
    case = make_case(tuple(shape), dtype, layout, affine)
    case.grad = grad_layout(case.grad)
    args = (case.weight, case.bias, case.running_mean, case.running_var, MOMENTUM, EPS, *bounds)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 2e-2}[dtype]

    def check(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        for a, b in zip(actual, expected, strict=True):
            assert (a.shape, a.squeeze().stride(), a.dtype) == (b.shape, b.squeeze().stride(), b.dtype)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)

    with torch.no_grad():
        actual, expected = batch_norm_act(case.x, *args), _act_in_torch(case.x, *args)
        check(actual, expected)
        again = (case.x, *actual[1:3], case.weight, case.bias, *bounds)
        output = batch_norm_act_normalize(*again)
        assert torch.equal(output, actual[0])
        check((output,), (_normalize_act_in_torch(*again),))
        # A variance of nothing blows up every rounding.
        if case.x.numel() > 4 * case.x.shape[1]:
            for mask in ([True, True, True], [True, False, False], [False, True, True], [False, False, True]):
                check(batch_norm_act_backward(case.grad, *again, mask), _backward_in_torch(case.grad, *again, mask))


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputing_gives_the_bits_of_the_forward_pass(
    layout: Layout, dtype: torch.dtype, bounds: tuple[float, float]
) -> None:
    case = make_case((8, 24, 15, 14), dtype, layout)
    output, mean, invstd, *_ = forward(case, bounds)
    again = batch_norm_act_normalize(case.x, mean, invstd, case.weight, case.bias, *bounds)
    assert torch.equal(again, output) and again.stride() == output.stride()


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("offset", [1e3, 1e5])
def test_a_mean_far_from_zero_costs_no_accuracy(layout: Layout, offset: float) -> None:
    case = make_case((16, 8, 32, 32), layout=layout)
    case.x = layout(case.x + offset)
    ours, theirs, exact = forward(case, RELU6), aten_forward(case, RELU6), aten_forward(case.doubled, RELU6)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert_as_accurate(a, b, c)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("values", [(1e4,), (-1e3, 3e3, 1e4)])
def test_outliers_at_the_start_cost_no_accuracy(layout: Layout, values: tuple[float, ...]) -> None:
    case = make_case((16, 8, 32, 32), layout=layout)
    case.x[0, :, 0, : len(values)] = torch.tensor(values)
    ours, theirs, exact = forward(case, NONE), aten_forward(case, NONE), aten_forward(case.doubled, NONE)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert_as_accurate(a, b, c)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_a_constant_channel_has_no_variance(layout: Layout) -> None:
    x = layout(torch.full((8, 3, 20, 20), 1234567.9))
    for eps, expected in ((1e-5, 1e-5**-0.5), (0.0, 0.0)):
        _, mean, invstd, _, variance = batch_norm_act(
            x, None, None, torch.zeros(3), torch.ones(3), momentum=1.0, eps=eps, low=0.0
        )
        assert torch.equal(mean, x[0, :, 0, 0]) and torch.equal(variance, torch.zeros(3))
        torch.testing.assert_close(invstd, torch.full((3,), expected))


@pytest.mark.parametrize("bounds", [RELU, RELU6])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5])
def test_what_is_not_finite_spreads_as_in_aten(
    place: int, value: float, dtype: torch.dtype, layout: Layout, bounds: tuple[float, float]
) -> None:
    case = make_case((4, 3, 8, 8), dtype, layout)
    case.x[place // 2, 1, 0, place] = value
    ours, theirs = forward(case, bounds), aten_forward(case, bounds)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2, equal_nan=True)
    assert bool(ours[0][:, 1].isnan().all()) and bool(ours[0][:, 0].isfinite().all())
    gradient = backward(case, ours[1:3], bounds)[0]
    expected = aten_backward(case, theirs[1:3], bounds)[0]
    torch.testing.assert_close(gradient.float(), expected.float(), rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize(("bounds", "passed"), [(NONE, 6), (RELU, 4), (RELU6, 2), ((-math.inf, 6.0), 4)])
def test_gradients_end_at_the_bounds(layout: Layout, bounds: tuple[float, float], passed: int) -> None:
    """An output that is a bound has gradient 0, one between them its whole gradient, a NaN too."""
    outputs = torch.tensor([-1.0, 0.0, 1.0, 5.0, 6.0, 7.0])
    x = layout(outputs.repeat(40).reshape(1, 1, 240, 1).expand(1, 3, 240, 1))
    identity = (torch.zeros(3), torch.ones(3))
    _, _, grad_bias = batch_norm_act_backward(torch.ones_like(x), x, *identity, None, None, *bounds)
    assert grad_bias.tolist() == [40.0 * passed] * 3
    nan = torch.full((3,), math.nan)
    _, _, grad_bias = batch_norm_act_backward(torch.ones_like(x), x, *identity, None, nan, *bounds)
    assert grad_bias.tolist() == [240.0] * 3


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_threads_do_not_change_the_bits(layout: Layout) -> None:
    case = make_case((8, 64, 40, 40), layout=layout)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            ours = forward(case, RELU6)
            results.append((*ours, *backward(case, ours[1:3], RELU6)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype: torch.dtype, layout: Layout) -> None:
    for affine, bounds in ((True, RELU6), (False, RELU)):
        case = make_case((4, 3, 5, 5), dtype, layout, affine)
        args = (case.weight, case.bias, case.running_mean, case.running_var, MOMENTUM, EPS, *bounds)
        torch.library.opcheck(odt.batch_norm_act.default, (case.x, *args))
        again = (case.x, *forward(case, bounds)[1:3], case.weight, case.bias, *bounds)
        torch.library.opcheck(odt.batch_norm_act_normalize.default, again)
        for mask in ([True, True, True], [False, True, False]):
            torch.library.opcheck(odt.batch_norm_act_backward.default, (case.grad, *again, mask))


def test_together_they_are_the_derivative() -> None:
    """Autograd through plain torch in float64 gives the same gradients."""
    case = make_case((6, 5, 4, 3), torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in (case.x, case.weight, case.bias)]
    F.batch_norm(leaves[0], None, None, *leaves[1:], training=True).clamp(0, 1).backward(case.grad)
    ours = forward(case, (0.0, 1.0))
    for leaf, gradient in zip(leaves, backward(case, ours[1:3], (0.0, 1.0)), strict=True):
        torch.testing.assert_close(gradient, leaf.grad)


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.randn(3)},
        {"x": torch.randn(0, 3)},
        {"x": torch.randn(2, 3).half()},
        {"weight": torch.ones(4)},
        {"bias": torch.ones(3, dtype=torch.float64)},
        {"grad": torch.randn(2, 4)},
        {"grad": torch.randn(2, 3).bfloat16()},
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor]) -> None:
    case = make_case((2, 3))
    vars(case).update(change)
    with pytest.raises(RuntimeError, match="batch_norm_"):
        backward(case, (torch.zeros(3), torch.ones(3)), RELU)
    if "grad" not in change:
        with pytest.raises(RuntimeError, match="batch_norm_"):
            forward(case, RELU)


def test_the_baseline_instruction_set_agrees() -> None:
    environment = {**os.environ, "TORCH_ODT_ISA": "baseline"}
    script = """
import torch
from torch_odt.ops import batch_norm_act as ours
from torch_odt.ops import batch_norm_act_backward as ours_backward
from torch_odt.ops.fused_batch_norm import _act_in_torch as plain
from torch_odt.ops.fused_batch_norm import _backward_in_torch as plain_backward
torch.manual_seed(0)
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    for fmt in (torch.contiguous_format, torch.channels_last):
        x, g = (torch.randn(4, 9, 11, 11).to(dtype).to(memory_format=fmt) for _ in range(2))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        weight, bias, mean, variance = (torch.rand(9, dtype=wide) for _ in range(4))
        actual = ours(x, weight, bias, mean, variance, 0.1, 1e-5, 0.0, 1.0)
        expected = plain(x, weight, bias, mean, variance, 0.1, 1e-5, 0.0, 1.0)
        torch.testing.assert_close(actual, expected)
        args = (g, x, *actual[1:3], weight, bias, 0.0, 1.0, [True, True, True])
        torch.testing.assert_close(ours_backward(*args)[0], plain_backward(*args)[0], rtol=1e-2, atol=1e-5)
"""
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
