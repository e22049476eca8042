"""Batch normalisation with a residual that is added, and a clamp behind the sum, forward and backward."""

from __future__ import annotations

import math

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
    LAYOUTS,
    MOMENTUM,
    NONE,
    RELU,
    RELU6,
    SHAPES,
    Act,
    Case,
    Layout,
    assert_as_accurate,
    make_case,
)
from torch_odt.ops import batch_norm_act, batch_norm_act_normalize, batch_norm_add_act_backward
from torch_odt.ops.fused_batch_norm import _act_in_torch, _add_backward_in_torch, _normalize_act_in_torch

aten = torch.ops.aten
odt = torch.ops.torch_odt


def residual_of(case: Case, layout: Layout = torch.Tensor.contiguous) -> Tensor:
    return layout((torch.randn(case.x.shape, dtype=torch.float64) * 2).to(case.x.dtype))


def forward(case: Case, residual: Tensor, act: Act) -> tuple[Tensor, ...]:
    statistics = (case.running_mean, case.running_var, MOMENTUM, EPS)
    return batch_norm_act(case.x, case.weight, case.bias, *statistics, *act, residual)


def backward(case: Case, ours: tuple[Tensor, ...], act: Act) -> tuple[Tensor, ...]:
    return batch_norm_add_act_backward(case.grad, ours[0], case.x, ours[1], ours[2], case.weight, *act[1:])


def aten_forward(case: Case, residual: Tensor, act: Act) -> tuple[Tensor, ...]:
    output, *rest = aten._native_batch_norm_legit_functional(
        case.x, case.weight, case.bias, case.running_mean, case.running_var, True, MOMENTUM, EPS
    )
    return (output + residual).clamp(*act[1:]), *rest


def aten_backward(case: Case, output: Tensor, statistics: tuple[Tensor, Tensor], act: Act) -> tuple[Tensor, ...]:
    """With the mask of the given output."""
    if act == RELU:
        grad = aten.threshold_backward(case.grad, output, 0)
    else:
        grad = case.grad if act == NONE else aten.hardtanh_backward(case.grad, output, *act[1:])
    mask = [True, case.weight is not None, case.bias is not None]
    return *aten.native_batch_norm_backward(grad, case.x, case.weight, None, None, *statistics, True, EPS, mask), grad


@pytest.mark.parametrize("act", CLAMPS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_accurate_as_aten(shape: tuple[int, ...], layout: Layout, affine: bool, act: Act) -> None:
    case = make_case(shape, layout=layout, affine=affine)
    residual = residual_of(case, layout)
    ours, theirs = forward(case, residual, act), aten_forward(case, residual, act)
    exact = aten_forward(case.doubled, residual.double(), act)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert_as_accurate(a, b, c)

    actual = backward(case, ours, act)
    usual = aten_backward(case, ours[0], theirs[1:3], act)
    best = aten_backward(case.doubled, ours[0].double(), exact[1:3], act)
    assert torch.equal(actual[3], usual[3])
    for a, b, c in zip(actual[:3], usual[:3], best[:3], strict=True):
        if b is not None:
            assert_as_accurate(a, b, c)


@pytest.mark.parametrize("act", [RELU, RELU6])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_rounded_once(shape: tuple[int, ...], layout: Layout, act: Act) -> None:
    case = make_case(shape, torch.bfloat16, layout)
    residual = residual_of(case, layout)
    ours, exact = forward(case, residual, act), aten_forward(case.doubled, residual.double(), act)
    torch.testing.assert_close(ours[0], exact[0].bfloat16(), rtol=2**-7, atol=1e-5)

    actual = backward(case, ours, act)
    best = aten_backward(case.doubled, ours[0].double(), exact[1:3], act)
    assert [gradient.dtype for gradient in actual] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    torch.testing.assert_close(actual[0], best[0].bfloat16(), rtol=2**-7, atol=1e-4)
    for a, b in zip(actual[1:3], best[1:3], strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-3)
    assert torch.equal(actual[3], best[3].bfloat16())


@pytest.mark.parametrize("function", ["hardswish", "silu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_smooth_functions_follow_a_residual(layout: Layout, function: str) -> None:
    case = make_case((8, 24, 15, 14), layout=layout)
    residual = residual_of(case, layout)
    act = (function, -math.inf, math.inf)
    ours = forward(case, residual, act)
    theirs, exact = (
        getattr(F, function)(aten_forward(*arguments, NONE)[0])
        for arguments in ((case, residual), (case.doubled, residual.double()))
    )
    assert_as_accurate(ours[0], theirs, exact)
    again = batch_norm_act_normalize(case.x, *ours[1:3], case.weight, case.bias, *act, residual)
    assert torch.equal(again, ours[0])


@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    residual_layout=st.sampled_from(LAYOUTS),
    grad_layout=st.sampled_from(LAYOUTS),
    act=st.sampled_from(CLAMPS),
    affine=st.booleans(),
)
def test_any_shape(
    shape: list[int],
    dtype: torch.dtype,
    layout: Layout,
    residual_layout: Layout,
    grad_layout: Layout,
    act: Act,
    affine: bool,
) -> None:
    """The compiled operators and those in plain torch agree, results that nobody wants and strides included."""
    case = make_case(tuple(shape), dtype, layout, affine)
    case.grad = grad_layout(case.grad)
    residual = residual_of(case, residual_layout)
    args = (case.weight, case.bias, case.running_mean, case.running_var, MOMENTUM, EPS, *act, residual)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 2e-2}[dtype]

    def check(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        for a, b in zip(actual, expected, strict=True):
            assert (a.shape, a.squeeze().stride(), a.dtype) == (b.shape, b.squeeze().stride(), b.dtype)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)

    actual = batch_norm_act(case.x, *args)
    check(actual, _act_in_torch(case.x, *args))
    again = (case.x, *actual[1:3], case.weight, case.bias, *act, residual)
    assert torch.equal(batch_norm_act_normalize(*again), actual[0])
    check((actual[0],), (_normalize_act_in_torch(*again),))
    # A variance of nothing blows up every rounding.
    if case.x.numel() > 4 * case.x.shape[1]:
        output = residual_layout(actual[0])
        for mask in ([True, True, True], [True, False, False], [False, True, True], [False, False, True]):
            arguments = (case.grad, output, case.x, *actual[1:3], case.weight, *act[1:], mask)
            check(batch_norm_add_act_backward(*arguments), _add_backward_in_torch(*arguments))


@pytest.mark.parametrize("act", CLAMPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputing_gives_the_bits_of_the_forward_pass(layout: Layout, dtype: torch.dtype, act: Act) -> None:
    case = make_case((8, 24, 15, 14), dtype, layout)
    residual = residual_of(case, layout)
    output, mean, invstd, *_ = forward(case, residual, act)
    again = batch_norm_act_normalize(case.x, mean, invstd, case.weight, case.bias, *act, residual)
    assert torch.equal(again, output) and again.stride() == output.stride()


@pytest.mark.parametrize("act", [RELU, RELU6])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5])
def test_what_is_not_finite_spreads_as_in_aten(
    place: int, value: float, dtype: torch.dtype, layout: Layout, act: Act
) -> None:
    for to_input in (True, False):
        case = make_case((4, 3, 8, 8), dtype, layout)
        residual = residual_of(case, layout)
        (case.x if to_input else residual)[place // 2, 1, 0, place] = value
        ours, theirs = forward(case, residual, act), aten_forward(case, residual, act)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=4e-2, equal_nan=True)
        # Behind a hardtanh ATen passes the gradient of a NaN where its loops use no vectors, and ends it elsewhere.
        if act == RELU:
            expected = aten_backward(case, ours[0], theirs[1:3], act)
            for a, b in zip(backward(case, ours, act), expected, strict=True):
                torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=6e-2, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize(("act", "passed"), [(NONE, 7), (RELU, 5), (RELU6, 3), (("clamp", -math.inf, 6.0), 5)], ids=str)
def test_gradients_end_at_the_bounds(layout: Layout, act: Act, passed: int) -> None:
    """An output that is a bound has gradient 0, one between them its whole gradient, a NaN too."""
    output = torch.tensor([-1.0, 0.0, 1.0, 5.0, 6.0, 7.0, math.nan])
    output = layout(output.repeat(40).reshape(1, 1, 280, 1).expand(1, 3, 280, 1))
    grad = torch.full_like(output, 2.0)
    identity = (torch.zeros(3), torch.ones(3))
    *_, grad_bias, grad_residual = batch_norm_add_act_backward(
        grad, output, torch.zeros_like(output), *identity, None, *act[1:]
    )
    assert grad_bias.tolist() == [80.0 * passed] * 3
    assert grad_residual.sum().item() == 3 * 80.0 * passed


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_threads_do_not_change_the_bits(layout: Layout) -> None:
    case = make_case((8, 64, 40, 40), layout=layout)
    residual = residual_of(case, layout)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            ours = forward(case, residual, RELU6)
            results.append((*ours, *backward(case, ours, RELU6)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype: torch.dtype, layout: Layout) -> None:
    for affine, act in ((True, RELU6), (False, RELU)):
        case = make_case((4, 3, 5, 5), dtype, layout, affine)
        residual = residual_of(case, layout)
        args = (case.weight, case.bias, case.running_mean, case.running_var, MOMENTUM, EPS, *act, residual)
        torch.library.opcheck(odt.batch_norm_act.default, (case.x, *args))
        output, mean, invstd, *_ = forward(case, residual, act)
        again = (case.x, mean, invstd, case.weight, case.bias, *act, residual)
        torch.library.opcheck(odt.batch_norm_act_normalize.default, again)
        for mask in ([True, True, True], [False, True, False]):
            arguments = (case.grad, output, case.x, mean, invstd, case.weight, *act[1:], mask)
            torch.library.opcheck(odt.batch_norm_add_act_backward.default, arguments)


def test_together_they_are_the_derivative() -> None:
    """Autograd through plain torch in float64 gives the same gradients."""
    case, act = make_case((6, 5, 4, 3), torch.float64), ("clamp", 0.0, 1.0)
    residual = residual_of(case)
    leaves = [tensor.clone().requires_grad_() for tensor in (case.x, case.weight, case.bias, residual)]
    (F.batch_norm(leaves[0], None, None, *leaves[1:3], training=True) + leaves[3]).clamp(*act[1:]).backward(case.grad)
    for leaf, gradient in zip(leaves, backward(case, forward(case, residual, act), act), strict=True):
        torch.testing.assert_close(gradient, leaf.grad)


@pytest.mark.parametrize("other", [torch.randn(2, 4), torch.randn(2, 3, 1), torch.randn(2, 3).bfloat16()])
def test_what_does_not_fit_is_refused(other: Tensor) -> None:
    case = make_case((2, 3))
    with pytest.raises(RuntimeError, match="batch_norm_act: residual"):
        forward(case, other, RELU)
    statistics = (torch.zeros(3), torch.ones(3))
    with pytest.raises(RuntimeError, match="batch_norm_add_act_backward: output"):
        backward(case, (other, *statistics), RELU)
    case.grad = other
    with pytest.raises(RuntimeError, match="batch_norm_add_act_backward: grad_output"):
        backward(case, (case.x, *statistics), RELU)
