"""Batch normalisation with an activation function: against float64, against ATen's operators, and against itself."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.batch_norm_cases import (
    CLAMPS,
    DTYPES,
    EPS,
    HARDSWISH,
    LAYOUTS,
    MOMENTUM,
    NONE,
    RELU,
    RELU6,
    SHAPES,
    SILU,
    Act,
    Case,
    Layout,
    assert_as_accurate,
    make_case,
)
from torch_odt.ops import batch_norm_act, batch_norm_act_backward, batch_norm_act_normalize, batch_norm_normalize
from torch_odt.ops.fused_batch_norm import _act_in_torch, _backward_in_torch, _normalize_act_in_torch

aten = torch.ops.aten
odt = torch.ops.torch_odt


def forward(case: Case, act: Act) -> tuple[Tensor, ...]:
    return batch_norm_act(case.x, case.weight, case.bias, case.running_mean, case.running_var, MOMENTUM, EPS, *act)


def backward(case: Case, statistics: tuple[Tensor, Tensor], act: Act) -> tuple[Tensor, ...]:
    return batch_norm_act_backward(case.grad, case.x, *statistics, case.weight, case.bias, *act)


def aten_forward(case: Case, act: Act) -> tuple[Tensor, ...]:
    output, *rest = aten._native_batch_norm_legit_functional(
        case.x, case.weight, case.bias, case.running_mean, case.running_var, True, MOMENTUM, EPS
    )
    return activated(output, act), *rest


def activated(output: Tensor, act: Act) -> Tensor:
    name, low, high = act
    return output.clamp(low, high) if name == "clamp" else getattr(F, name)(output)


def aten_backward(case: Case, statistics: tuple[Tensor, Tensor], act: Act) -> tuple[Tensor, ...]:
    """From ATen's own forward pass, as autograd would."""
    args = (case.weight, case.bias, case.running_mean, case.running_var, True, MOMENTUM, EPS)
    output = aten._native_batch_norm_legit_functional(case.x, *args)[0]
    if act == RELU:
        grad = aten.threshold_backward(case.grad, output.relu(), 0)
    elif act[0] != "clamp":
        grad = getattr(aten, f"{act[0]}_backward")(case.grad, output)
    else:
        grad = case.grad if act == NONE else aten.hardtanh_backward(case.grad, output, *act[1:])
    return aten.native_batch_norm_backward(
        grad, case.x, case.weight, None, None, *statistics, True, EPS, [True, True, True]
    )


@pytest.mark.parametrize("act", CLAMPS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_accurate_as_aten(shape: tuple[int, ...], layout: Layout, affine: bool, act: Act) -> None:
    case = make_case(shape, layout=layout, affine=affine)
    ours, theirs, exact = forward(case, act), aten_forward(case, act), aten_forward(case.doubled, act)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert_as_accurate(a, b, c)

    # An output that rounding puts on the other side of a bound has another gradient: the mask is our output's.
    ends = torch.zeros_like(case.x, dtype=torch.bool)
    ends |= False if act[1] == -math.inf else ours[0] <= act[1]
    ends |= False if act[2] == math.inf else ours[0] >= torch.tensor(act[2])
    masked = Case(*vars(case).values())
    masked.grad = case.grad.masked_fill(ends, 0)
    actual = backward(case, ours[1:3], act)
    usual = aten_backward(masked, theirs[1:3], NONE)
    for a, b, c in zip(actual, usual, aten_backward(masked.doubled, exact[1:3], NONE), strict=True):
        if b is not None:
            assert_as_accurate(a, b, c)


@pytest.mark.parametrize("act", [HARDSWISH, SILU])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_smooth_functions_are_as_accurate_as_atens(
    shape: tuple[int, ...], layout: Layout, affine: bool, act: Act
) -> None:
    case = make_case(shape, layout=layout, affine=affine)
    ours, theirs, exact = forward(case, act), aten_forward(case, act), aten_forward(case.doubled, act)
    usual, best = aten_backward(case, theirs[1:3], act), aten_backward(case.doubled, exact[1:3], act)
    both = zip((*ours, *backward(case, ours[1:3], act)), (*theirs, *usual), (*exact, *best), strict=True)
    for a, b, c in both:
        if b is not None:
            assert_as_accurate(a, b, c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("act", [HARDSWISH, SILU])
def test_the_functions_themselves(act: Act, dtype: torch.dtype) -> None:
    """Everywhere, one channel to a number: what ends at infinity, what becomes 0, what is next to a kink."""
    kinks = torch.tensor([-3.0, 3.0, 0.0])
    around = torch.cat([kinks, kinks.nextafter(torch.tensor(math.inf)), kinks.nextafter(torch.tensor(-math.inf))])
    ends = torch.tensor(
        [math.inf, -math.inf, math.nan, 1e30, -1e30, -87.5, -88.0, -88.5, -104.0, -708.5, -710.0, -1e-30]
    )
    x = torch.cat([torch.linspace(-100, 100, 200_001), around, ends]).to(dtype)[None]
    identity = (torch.zeros(x.numel(), dtype=dtype), torch.ones(x.numel(), dtype=dtype))
    exact = activated(x.double(), act)
    rounding = torch.finfo(dtype).eps
    output = batch_norm_act_normalize(x, *identity, None, None, *act)
    torch.testing.assert_close(output.double(), exact, rtol=4 * rounding, atol=1e-35, equal_nan=True)
    grad = torch.full_like(x, 1.5)
    expected = getattr(aten, f"{act[0]}_backward")(grad.double(), x.double())
    found = batch_norm_act_backward(grad, x, *identity, None, None, *act)[2]
    torch.testing.assert_close(found.double()[None], expected, rtol=1e-6, atol=64 * rounding, equal_nan=True)


@pytest.mark.parametrize("act", [RELU, RELU6, HARDSWISH, SILU])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_rounded_once(shape: tuple[int, ...], layout: Layout, act: Act) -> None:
    case = make_case(shape, torch.bfloat16, layout)
    wide = case.doubled
    output, *statistics = forward(case, act)
    expected, *expected_statistics = aten_forward(wide, act)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected.bfloat16(), rtol=2**-7, atol=1e-5)
    for actual, wanted in zip(statistics, expected_statistics, strict=True):
        torch.testing.assert_close(actual, wanted.float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(batch_norm_act_normalize(case.x, *statistics[:2], case.weight, case.bias, *act), output)

    if act[0] == "clamp":
        # Its mask is that of the rounded output, as where the activation function reads the rounded tensor.
        rounded = batch_norm_normalize(case.x, *statistics[:2], case.weight, case.bias)
        wide.grad = aten.hardtanh_backward(case.grad, rounded, *act[1:]).double()
    gradients = backward(case, (statistics[0], statistics[1]), act)
    smooth = NONE if act[0] == "clamp" else act
    expected_gradients = aten_backward(wide, (expected_statistics[0], expected_statistics[1]), smooth)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close(gradients[0], expected_gradients[0].bfloat16(), rtol=2**-7, atol=1e-4)
    for actual, wanted in zip(gradients[1:], expected_gradients[1:], strict=True):
        torch.testing.assert_close(actual, wanted.float(), rtol=1e-4, atol=1e-3)


@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    grad_layout=st.sampled_from(LAYOUTS),
    act=st.sampled_from([*CLAMPS, HARDSWISH, SILU]),
    affine=st.booleans(),
)
def test_any_shape(
    shape: list[int],
    dtype: torch.dtype,
    layout: Layout,
    grad_layout: Layout,
    act: Act,
    affine: bool,
) -> None:
    """The compiled operators and those in plain torch agree, results that nobody wants and strides included."""
    case = make_case(tuple(shape), dtype, layout, affine)
    case.grad = grad_layout(case.grad)
    args = (case.weight, case.bias, case.running_mean, case.running_var, MOMENTUM, EPS, *act)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 2e-2}[dtype]

    def check(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        for a, b in zip(actual, expected, strict=True):
            assert (a.shape, a.squeeze().stride(), a.dtype) == (b.shape, b.squeeze().stride(), b.dtype)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)

    with torch.no_grad():
        actual, expected = batch_norm_act(case.x, *args), _act_in_torch(case.x, *args, None)
        check(actual, expected)
        again = (case.x, *actual[1:3], case.weight, case.bias, *act)
        output = batch_norm_act_normalize(*again)
        assert torch.equal(output, actual[0])
        check((output,), (_normalize_act_in_torch(*again, None),))
        # A variance of nothing blows up every rounding.
        if case.x.numel() > 4 * case.x.shape[1]:
            for mask in ([True, True, True], [True, False, False], [False, True, True], [False, False, True]):
                check(batch_norm_act_backward(case.grad, *again, mask), _backward_in_torch(case.grad, *again, mask))


@pytest.mark.parametrize("act", [*CLAMPS, HARDSWISH, SILU])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputing_gives_the_bits_of_the_forward_pass(layout: Layout, dtype: torch.dtype, act: Act) -> None:
    case = make_case((8, 24, 15, 14), dtype, layout)
    output, mean, invstd, *_ = forward(case, act)
    again = batch_norm_act_normalize(case.x, mean, invstd, case.weight, case.bias, *act)
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


@pytest.mark.parametrize("act", [RELU, RELU6, HARDSWISH, SILU])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5])
def test_what_is_not_finite_spreads_as_in_aten(
    place: int, value: float, dtype: torch.dtype, layout: Layout, act: Act
) -> None:
    case = make_case((4, 3, 8, 8), dtype, layout)
    case.x[place // 2, 1, 0, place] = value
    ours, theirs = forward(case, act), aten_forward(case, act)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2, equal_nan=True)
    assert bool(ours[0][:, 1].isnan().all()) and bool(ours[0][:, 0].isfinite().all())
    gradient = backward(case, ours[1:3], act)[0]
    expected = aten_backward(case, theirs[1:3], act)[0]
    torch.testing.assert_close(gradient.float(), expected.float(), rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize(("act", "passed"), [(NONE, 6), (RELU, 4), (RELU6, 2), (("clamp", -math.inf, 6.0), 4)])
def test_gradients_end_at_the_bounds(layout: Layout, act: Act, passed: int) -> None:
    """An output that is a bound has gradient 0, one between them its whole gradient, a NaN too."""
    outputs = torch.tensor([-1.0, 0.0, 1.0, 5.0, 6.0, 7.0])
    x = layout(outputs.repeat(40).reshape(1, 1, 240, 1).expand(1, 3, 240, 1))
    identity = (torch.zeros(3), torch.ones(3))
    _, _, grad_bias = batch_norm_act_backward(torch.ones_like(x), x, *identity, None, None, *act)
    assert grad_bias.tolist() == [40.0 * passed] * 3
    nan = torch.full((3,), math.nan)
    _, _, grad_bias = batch_norm_act_backward(torch.ones_like(x), x, *identity, None, nan, *act)
    assert grad_bias.tolist() == [240.0] * 3


@pytest.mark.parametrize("act", [RELU6, SILU])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_threads_do_not_change_the_bits(layout: Layout, act: Act) -> None:
    case = make_case((8, 64, 40, 40), layout=layout)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            ours = forward(case, act)
            results.append((*ours, *backward(case, ours[1:3], act)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype: torch.dtype, layout: Layout) -> None:
    for affine, act in ((True, RELU6), (False, RELU), (True, SILU), (False, HARDSWISH)):
        case = make_case((4, 3, 5, 5), dtype, layout, affine)
        args = (case.weight, case.bias, case.running_mean, case.running_var, MOMENTUM, EPS, *act)
        torch.library.opcheck(odt.batch_norm_act.default, (case.x, *args, None))
        again = (case.x, *forward(case, act)[1:3], case.weight, case.bias, *act)
        torch.library.opcheck(odt.batch_norm_act_normalize.default, (*again, None))
        for mask in ([True, True, True], [False, True, False]):
            torch.library.opcheck(odt.batch_norm_act_backward.default, (case.grad, *again, mask))


@pytest.mark.parametrize("act", [("clamp", 0.0, 1.0), HARDSWISH, SILU])
def test_together_they_are_the_derivative(act: Act) -> None:
    """Autograd through plain torch in float64 gives the same gradients."""
    case = make_case((6, 5, 4, 3), torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in (case.x, case.weight, case.bias)]
    activated(F.batch_norm(leaves[0], None, None, *leaves[1:], training=True), act).backward(case.grad)
    ours = forward(case, act)
    for leaf, gradient in zip(leaves, backward(case, ours[1:3], act), strict=True):
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


def test_an_unknown_activation_function_is_refused() -> None:
    case, unknown = make_case((2, 3)), ("gelu", 0.0, 1.0)
    with pytest.raises(RuntimeError, match="batch_norm_act: there is no activation function gelu"):
        forward(case, unknown)
    with pytest.raises(RuntimeError, match="batch_norm_act_backward: there is no activation function gelu"):
        backward(case, (torch.zeros(3), torch.ones(3)), unknown)


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
        for act in ("clamp", "hardswish", "silu"):
            actual = ours(x, weight, bias, mean, variance, 0.1, 1e-5, act, 0.0, 1.0)
            expected = plain(x, weight, bias, mean, variance, 0.1, 1e-5, act, 0.0, 1.0, None)
            torch.testing.assert_close(actual, expected)
            args = (g, x, *actual[1:3], weight, bias, act, 0.0, 1.0, [True, True, True])
            torch.testing.assert_close(ours_backward(*args)[0], plain_backward(*args)[0], rtol=1e-2, atol=1e-5)
"""
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
