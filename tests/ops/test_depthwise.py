"""Depthwise convolutions and their gradients, against float64's: every layout, stride and border, any threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_odt._extensions import has_kernels
from torch_odt.ops import depthwise, depthwise_conv2d, depthwise_conv2d_grad_input, depthwise_conv2d_grad_weight

odt = torch.ops.torch_odt
Operators = tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]
COMPILED: Operators = (depthwise_conv2d, depthwise_conv2d_grad_input, depthwise_conv2d_grad_weight)
PLAIN: Operators = (depthwise._in_torch, depthwise._grad_input_in_torch, depthwise._grad_weight_in_torch)


@dataclass(frozen=True)
class Case:
    """A convolution: images, weight, bias and the gradient of the output."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, int]
    padding: tuple[int, int]
    gradient: Tensor


def make_case(
    shape: tuple[int, int, int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    with_bias: bool = True,
) -> Case:
    generator = torch.Generator().manual_seed(sum(shape))
    x, weight, bias = (torch.randn(size, generator=generator) for size in (shape, (shape[1], 1, *kernel), (shape[1],)))
    added = bias if with_bias else None
    output = torch.conv2d(x, weight, added, stride, padding, groups=shape[1])
    gradient = torch.randn(output.shape, generator=generator)
    return Case(x, weight, added, stride, padding, gradient)


def expected(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients in float64."""
    x, weight = (tensor.double().requires_grad_() for tensor in (case.x, case.weight))
    bias = None if case.bias is None else case.bias.double()
    output = torch.conv2d(x, weight, bias, case.stride, case.padding, groups=case.x.shape[1])
    return output.detach(), *torch.autograd.grad(output, (x, weight), case.gradient.double())


def computed(case: Case, operators: Operators) -> tuple[Tensor, Tensor, Tensor]:
    forward, grad_input, grad_weight = operators
    geometry = (case.stride, case.padding)
    return (
        forward(case.x, case.weight, case.bias, *geometry),
        grad_input(case.gradient, case.weight, case.x.shape[2:], *geometry),
        grad_weight(case.gradient, case.x, case.weight.shape[2:], *geometry),
    )


def assert_right(case: Case, operators: Operators = COMPILED) -> None:
    for ours, theirs in zip(computed(case, operators), expected(case), strict=True):
        # Sums of n products are off by the size of their terms.
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-6 * max(1.0, float(theirs.abs().max())))


@pytest.mark.parametrize("operators", [COMPILED, PLAIN], ids=["compiled", "plain"])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5, 7, 9])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_output_and_gradients_of_each_window(operators: Operators, kernel: int, stride: int) -> None:
    for padding in {0, kernel // 2, kernel - 1}:
        case = make_case((2, 19, 12, 11), (kernel, kernel), (stride, stride), (padding, padding))
        assert_right(case, operators)


@given(
    channels=st.integers(1, 70),
    size=st.tuples(st.integers(1, 13), st.integers(1, 13)),
    kernel=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    samples=st.integers(1, 3),
    with_bias=st.booleans(),
    data=st.data(),
)
def test_any_shape(
    channels: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    samples: int,
    with_bias: bool,
    data: st.DataObject,
) -> None:
    least = [max(0, -((each - window) // 2)) for each, window in zip(size, kernel, strict=True)]
    padding = tuple(
        data.draw(st.integers(min(low, window - 1), window - 1)) for low, window in zip(least, kernel, strict=True)
    )
    fits = all(s + 2 * p >= k for s, p, k in zip(size, padding, kernel, strict=True))
    if fits:
        assert_right(make_case((samples, channels, *size), kernel, stride, padding, with_bias))  # type: ignore[arg-type]


@pytest.mark.skipif(not has_kernels, reason="plain torch sums up as oneDNN does")
def test_threads_and_layouts_change_no_bit(threads: int) -> None:
    case = make_case((3, 67, 40, 40), (3, 3), (1, 1), (1, 1))
    first = computed(case, COMPILED)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = computed(case, COMPILED)
    torch.set_num_threads(before)
    laid_out = Case(
        case.x.contiguous(memory_format=torch.channels_last),
        case.weight.contiguous(memory_format=torch.channels_last),
        torch.stack([case.bias, case.bias], 1)[:, 0],  # type: ignore[list-item]
        case.stride,
        case.padding,
        torch.cat([case.gradient, case.gradient], 1)[:, :67],
    )
    for one, other, another in zip(first, alone, computed(laid_out, COMPILED), strict=True):
        assert torch.equal(one, other) and torch.equal(one, another)


def test_samples_do_not_depend_on_their_batch() -> None:
    case = make_case((4, 24, 9, 9), (3, 3), (2, 2), (1, 1))
    output, grad_input, _ = computed(case, COMPILED)
    for i in range(4):
        one = Case(case.x[i : i + 1], case.weight, case.bias, case.stride, case.padding, case.gradient[i : i + 1])
        own, own_gradient, _ = computed(one, COMPILED)
        assert torch.equal(own[0], output[i]) and torch.equal(own_gradient[0], grad_input[i])


def test_results_are_laid_out_as_traces_say() -> None:
    case = make_case((2, 5, 7, 6), (3, 3), (2, 1), (1, 1))
    geometry = (list(case.stride), list(case.padding))
    for operator, arguments in (
        (odt.depthwise_conv2d, (case.x, case.weight, case.bias, *geometry)),
        (odt.depthwise_conv2d_grad_input, (case.gradient, case.weight, [7, 6], *geometry)),
        (odt.depthwise_conv2d_grad_weight, (case.gradient, case.x, [3, 3], *geometry)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("operators", [COMPILED, PLAIN], ids=["compiled", "plain"])
def test_numbers_that_no_image_has_are_refused_or_mean_nothing(operators: Operators) -> None:
    forward, grad_input, grad_weight = operators
    most = 2**63 - 1
    x, weight, pixel = torch.ones(1, 64, 3, 3), torch.ones(64, 1, 3, 3), torch.ones(1, 64, 1, 1)
    if operators is COMPILED and has_kernels:
        # Of a single window the stride means nothing.
        assert torch.equal(forward(x, weight, None, (most, most), (2, 2)), torch.ones(1, 64, 1, 1))
        expected = torch.zeros(1, 64, 1, 9)
        expected[..., 0] = 1
        row = torch.ones(64, 1, 1, 1)
        assert torch.equal(grad_input(pixel, row, (1, 9), (1, most), (0, 0)), expected)
        corner = torch.zeros(64, 1, 3, 3)
        corner[..., 2, 2] = 1
        assert torch.equal(grad_weight(pixel, x, (3, 3), (most, most), (2, 2)), corner)
    for number in (most, most // 2, 2**62, 2**32, 2**31):
        for call in (
            lambda n=number: forward(x, weight, None, (1, 1), (n, n)),
            lambda n=number: grad_input(pixel, weight, (n, n), (n, n), (0, 0)),
            lambda n=number: grad_input(pixel, weight, (n, 3), (1, 1), (0, 0)),
            lambda n=number: grad_weight(pixel, x, (n, n), (1, 1), (n - 1, n - 1)),
            lambda n=number: grad_weight(pixel, x, (n, 3), (n, n), (n - 1, 2)),
        ):
            with pytest.raises(RuntimeError):
                call()


@pytest.mark.parametrize("operators", [COMPILED, PLAIN], ids=["compiled", "plain"])
def test_bad_input_is_refused(operators: Operators) -> None:
    forward, grad_input, grad_weight = operators
    x, weight, gradient = torch.ones(1, 4, 5, 5), torch.ones(4, 1, 3, 3), torch.ones(1, 4, 5, 5)
    same = ((1, 1), (1, 1))
    for arguments in (
        (x.double(), weight, None, *same),
        (x, weight.double(), None, *same),
        (x[0], weight, None, *same),
        (x, torch.ones(2, 1, 3, 3), None, *same),
        (x, torch.ones(4, 2, 3, 3), None, *same),
        (x, weight, torch.ones(3), *same),
        (x, weight, torch.ones(4).double(), *same),
        (x, weight, None, (1, 1), (3, 3)),
        (x, torch.ones(4, 1, 9, 9), None, *same),
        (x, weight, None, (0, 1), (1, 1)),
    ):
        with pytest.raises(RuntimeError):
            forward(*arguments)
    with pytest.raises(RuntimeError):
        grad_input(gradient, weight, (6, 5), *same)
    with pytest.raises(RuntimeError):
        grad_input(gradient, torch.ones(3, 1, 3, 3), (5, 5), *same)
    with pytest.raises(RuntimeError):
        grad_weight(gradient, torch.ones(1, 3, 5, 5), (3, 3), *same)
    with pytest.raises(RuntimeError):
        grad_weight(gradient[..., 1:], x, (3, 3), *same)
