"""Fused batch normalisation's gradients in the place of the one they come from: the bits of those that are not."""

from __future__ import annotations

import pytest
import torch
from batch_norm_cases import (
    DTYPES,
    HARDSWISH,
    LAYOUTS,
    NONE,
    RELU,
    RELU6,
    SHAPES,
    SILU,
    Act,
    Case,
    Layout,
    make_case,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_odt import ops

odt = torch.ops.torch_odt


def statistics(case: Case) -> tuple[Tensor, Tensor]:
    _, mean, invstd, *_ = ops.batch_norm_act(case.x, case.weight, case.bias, case.running_mean, case.running_var)
    return mean, invstd


def check(case: Case, act: Act, mask: list[bool]) -> None:
    arguments = (case.x, *statistics(case), case.weight, case.bias, *act)
    grad_input, *expected = ops.batch_norm_act_backward(case.grad, *arguments, mask)
    gradient = case.grad.clone(memory_format=torch.preserve_format)
    strides = gradient.stride()
    found = ops.batch_norm_act_backward_(gradient, *arguments, mask)
    for own, other in zip((gradient, *found), (grad_input, *expected), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)
    assert gradient.stride() == strides


def check_sum(case: Case, act: Act, mask: list[bool]) -> None:
    """The output is whatever tells what passes the clamp."""
    arguments = (case.x.flip(0), case.x, *statistics(case), case.weight, *act[1:])
    *expected, grad_residual = ops.batch_norm_add_act_backward(case.grad, *arguments, mask)
    gradient = case.grad.clone(memory_format=torch.preserve_format)
    found = ops.batch_norm_add_act_backward_(gradient, *arguments, mask)
    for own, other in zip((gradient, *found), (grad_residual, *expected), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_the_operators_that_allocate(
    shape: tuple[int, ...], dtype: torch.dtype, layout: Layout
) -> None:
    case = make_case(shape, dtype, layout)
    for act in (NONE, RELU6, HARDSWISH, SILU):
        check(case, act, [True, True, True])
    check_sum(case, RELU, [True, True, True])


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9)),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    gradient_layout=st.sampled_from(LAYOUTS),
    act=st.sampled_from([NONE, RELU, RELU6]),
    mask=st.tuples(st.booleans(), st.booleans()),
)
def test_any_shape_and_layout(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: Layout,
    gradient_layout: Layout,
    act: Act,
    mask: tuple[bool, bool],
) -> None:
    """Also where the gradient is laid out in another way than the input."""
    case = make_case(shape, dtype, layout)
    case.grad = gradient_layout(case.grad)
    check(case, act, [True, *mask])
    check_sum(case, act, [True, *mask])


def test_nan_and_infinity() -> None:
    case = make_case((4, 3, 5, 5), torch.float32, torch.Tensor.contiguous)
    case.x[0, 0, 0, 0], case.x[1, 1, 1, 1] = float("nan"), float("inf")
    case.grad[2, 2, 2, 2], case.grad[0, 2, 0, 0] = float("inf"), float("nan")
    for act in (RELU6, SILU):
        check(case, act, [True, True, True])
    check_sum(case, RELU, [True, True, True])


def test_the_inputs_gradient_must_be_wanted() -> None:
    case = make_case((2, 3, 4, 4), torch.float32, torch.Tensor.contiguous)
    with pytest.raises(RuntimeError, match="the input's gradient must be wanted"):
        check(case, NONE, [False, True, True])


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype: torch.dtype) -> None:
    case = make_case((2, 3, 4, 5), dtype, torch.Tensor.contiguous)
    shared = (case.x, *statistics(case), case.weight)
    torch.library.opcheck(odt.batch_norm_act_backward_.default, (case.grad, *shared, case.bias, *RELU, [True] * 3))
    torch.library.opcheck(
        odt.batch_norm_add_act_backward_.default, (case.grad, case.x, *shared, 0.0, 6.0, [True, False, True])
    )
