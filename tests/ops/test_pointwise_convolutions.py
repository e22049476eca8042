"""Pointwise convolutions and their gradients, against float64's: every layout and number of channels, any threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_odt._extensions import has_kernels
from torch_odt.ops import (
    pointwise,
    pointwise_conv2d,
    pointwise_conv2d_grad_input,
    pointwise_conv2d_grad_weight,
    stored_pointwise_conv2d,
    stored_pointwise_conv2d_grad_input,
)

odt = torch.ops.torch_odt
Operators = tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]
COMPILED: Operators = (pointwise_conv2d, pointwise_conv2d_grad_input, pointwise_conv2d_grad_weight)
PLAIN: Operators = (pointwise._in_torch, pointwise._grad_input_in_torch, pointwise._grad_weight_in_torch)


@dataclass(frozen=True)
class Case:
    """A convolution: images, weight, bias and the gradient of the output."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    gradient: Tensor


def make_case(shape: tuple[int, int, int, int], outputs: int, with_bias: bool = True) -> Case:
    generator = torch.Generator().manual_seed(sum(shape))
    samples, inputs, *size = shape
    sizes = shape, (outputs, inputs, 1, 1), (outputs,), (samples, outputs, *size)
    x, weight, bias, gradient = (torch.randn(each, generator=generator) for each in sizes)
    return Case(x, weight, bias if with_bias else None, gradient)


def expected(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients in float64."""
    x, weight = (tensor.double().requires_grad_() for tensor in (case.x, case.weight))
    output = torch.conv2d(x, weight, None if case.bias is None else case.bias.double())
    return output.detach(), *torch.autograd.grad(output, (x, weight), case.gradient.double())


def computed(case: Case, operators: Operators) -> tuple[Tensor, Tensor, Tensor]:
    forward, grad_input, grad_weight = operators
    return (
        forward(case.x, case.weight, case.bias),
        grad_input(case.gradient, case.weight),
        grad_weight(case.gradient, case.x),
    )


def assert_right(case: Case, operators: Operators = COMPILED) -> None:
    for ours, theirs in zip(computed(case, operators), expected(case), strict=True):
        # Sums of n products are off by the size of their terms.
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-6 * max(1.0, float(theirs.abs().max())))


@pytest.mark.parametrize("operators", [COMPILED, PLAIN], ids=["compiled", "plain"])
@pytest.mark.parametrize("outputs", [1, 8, 24, 100])
@pytest.mark.parametrize("inputs", [1, 7, 40, 300])
def test_output_and_gradients(operators: Operators, inputs: int, outputs: int) -> None:
    for with_bias in (True, False):
        assert_right(make_case((2, inputs, 12, 11), outputs, with_bias), operators)


@pytest.mark.parametrize("pixels", [2048, 2049, 5000])
@pytest.mark.parametrize("operators", [COMPILED, PLAIN], ids=["compiled", "plain"])
def test_gradients_of_weights_of_many_pixels(operators: Operators, pixels: int) -> None:
    """They are sums of several."""
    assert_right(make_case((1, 20, pixels, 1), 11), operators)
    assert_right(make_case((4, 9, pixels // 4, 1), 40), operators)


@pytest.mark.skipif(not has_kernels, reason="plain torch sums up as oneDNN does")
def test_sums_of_one_sign_keep_their_digits() -> None:
    """As behind ReLU: one running sum of all terms would be off by 9e-7 and 6e-7 here."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.rand(1, 4096, 4, 4, generator=generator), torch.rand(16, 4096, 1, 1, generator=generator)
    pixels, gradient = torch.rand(1, 64, 45, 45, generator=generator), torch.full((1, 32, 45, 45), 1 / 135)
    for ours, exact in (
        (pointwise_conv2d(x, weight), torch.conv2d(x.double(), weight.double())),
        (
            pointwise_conv2d_grad_weight(gradient, pixels)[..., 0, 0],
            torch.einsum("nohw,nihw->oi", gradient.double(), pixels.double()),
        ),
    ):
        assert (ours - exact).norm() / exact.norm() < 2e-7


@given(
    inputs=st.integers(1, 140),
    outputs=st.integers(1, 70),
    size=st.tuples(st.integers(1, 13), st.integers(1, 13)),
    samples=st.integers(0, 3),
    with_bias=st.booleans(),
)
def test_any_shape(inputs: int, outputs: int, size: tuple[int, int], samples: int, with_bias: bool) -> None:
    case = make_case((samples, inputs, *size), outputs, with_bias)
    if samples:
        assert_right(case)
    else:
        output, grad_input, grad_weight = computed(case, COMPILED)
        assert output.shape == (0, outputs, *size) and grad_input.shape == case.x.shape
        assert torch.equal(grad_weight, torch.zeros_like(case.weight))


@pytest.mark.skipif(not has_kernels, reason="plain torch sums up as oneDNN does")
@pytest.mark.parametrize(("outputs", "size"), [(16, 20), (1000, 20), (40, 61)])
def test_threads_and_layouts_change_no_bit(threads: int, outputs: int, size: int) -> None:
    case = make_case((3, 67, size, size), outputs)
    first = computed(case, COMPILED)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = computed(case, COMPILED)
    torch.set_num_threads(before)
    laid_out = Case(
        case.x.contiguous(memory_format=torch.channels_last),
        case.weight.transpose(0, 1).contiguous().transpose(0, 1),
        torch.stack([case.bias, case.bias], 1)[:, 0],  # type: ignore[list-item]
        torch.cat([case.gradient, case.gradient], 1)[:, :outputs],
    )
    for one, other, another in zip(first, alone, computed(laid_out, COMPILED), strict=True):
        assert torch.equal(one, other) and torch.equal(one, another)


def test_samples_do_not_depend_on_their_batch() -> None:
    case = make_case((4, 24, 9, 9), 40)
    output, grad_input, _ = computed(case, COMPILED)
    for i in range(4):
        one = Case(case.x[i : i + 1], case.weight, case.bias, case.gradient[i : i + 1])
        own, own_gradient, _ = computed(one, COMPILED)
        if has_kernels:
            assert torch.equal(own[0], output[i]) and torch.equal(own_gradient[0], grad_input[i])
        else:
            torch.testing.assert_close(own[0], output[i])


def make_codes(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outputs)
    codes = torch.randint(-128, 128, (outputs, inputs, 1, 1), generator=generator).to(torch.int8)
    return codes, torch.rand(outputs, 1, 1, 1, generator=generator) / 100


@pytest.mark.parametrize("outputs", [1, 8, 24, 100])
@pytest.mark.parametrize("inputs", [1, 7, 40, 300])
def test_codes_have_the_bits_of_the_weight_that_they_stand_for(inputs: int, outputs: int) -> None:
    case, (codes, scale) = make_case((2, inputs, 6, 5), outputs), make_codes(outputs, inputs)
    assert torch.equal(
        stored_pointwise_conv2d(case.x, codes, scale, case.bias), pointwise_conv2d(case.x, codes * scale, case.bias)
    )
    assert torch.equal(
        stored_pointwise_conv2d_grad_input(case.gradient, codes, scale),
        pointwise_conv2d_grad_input(case.gradient, codes * scale),
    )


@pytest.mark.skipif(not has_kernels, reason="plain torch refuses other things")
def test_images_without_channels_may_not_be_endless() -> None:
    for shape in ((2**50, 0, 1, 1), (2**20, 0, 2**20, 2**20), (1, 0, 2**40, 1)):
        with pytest.raises(RuntimeError, match="images can"):
            pointwise_conv2d(torch.empty(shape), torch.empty(4, 0, 1, 1))
        with pytest.raises(RuntimeError, match="images can"):
            pointwise_conv2d_grad_weight(torch.empty(shape), torch.empty(shape))
    assert torch.equal(pointwise_conv2d(torch.empty(2, 0, 3, 1), torch.empty(4, 0, 1, 1)), torch.zeros(2, 4, 3, 1))


def test_bad_codes_are_refused() -> None:
    x, gradient, (codes, scale) = torch.ones(1, 4, 5, 5), torch.ones(1, 6, 5, 5), make_codes(6, 4)
    for wrong in ((codes.int(), scale), (codes, scale.double()), (codes, scale[:5]), (codes[:, :3], scale), (x, scale)):
        with pytest.raises(RuntimeError):
            stored_pointwise_conv2d(x, *wrong)
    for wrong in ((codes.int(), scale), (codes, scale.double()), (codes, scale[:5]), (codes[:5], scale[:5])):
        with pytest.raises(RuntimeError):
            stored_pointwise_conv2d_grad_input(gradient, *wrong)


def test_results_are_laid_out_as_traces_say() -> None:
    for size in ((7, 6), (1, 1)):
        case, stored = make_case((2, 5, *size), 3), make_codes(3, 5)
        for operator, arguments in (
            (odt.pointwise_conv2d, (case.x, case.weight, case.bias)),
            (odt.pointwise_conv2d_grad_input, (case.gradient, case.weight)),
            (odt.pointwise_conv2d_grad_weight, (case.gradient, case.x)),
            (odt.stored_pointwise_conv2d, (case.x, *stored, case.bias)),
            (odt.stored_pointwise_conv2d_grad_input, (case.gradient, *stored)),
        ):
            torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("operators", [COMPILED, PLAIN], ids=["compiled", "plain"])
def test_bad_input_is_refused(operators: Operators) -> None:
    forward, grad_input, grad_weight = operators
    x, weight, gradient = torch.ones(1, 4, 5, 5), torch.ones(6, 4, 1, 1), torch.ones(1, 6, 5, 5)
    for arguments in (
        (x.double(), weight, None),
        (x, weight.double(), None),
        (x[0], weight, None),
        (x, weight[..., 0], None),
        (x, torch.ones(6, 3, 1, 1), None),
        (x, torch.ones(6, 4, 1, 2), None),
        (x, weight, torch.ones(4)),
        (x, weight, torch.ones(6).double()),
    ):
        with pytest.raises(RuntimeError):
            forward(*arguments)
    for one, other in ((gradient, torch.ones(4, 4, 1, 1)), (gradient.double(), weight), (gradient, weight[..., 0])):
        with pytest.raises(RuntimeError):
            grad_input(one, other)
    for one, other in ((gradient[..., 1:], x), (gradient, x.double()), (torch.ones(2, 6, 5, 5), x), (gradient[0], x)):
        with pytest.raises(RuntimeError):
            grad_weight(one, other)
