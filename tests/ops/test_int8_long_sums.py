"""int8: sums of more terms than int32 holds are split, and exact; what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from int8_cases import Case, assert_exact, assert_same, make_case
from torch import Tensor

import torch_odt.ops as ops
from torch_odt.ops import int8_plain as plain

odt = torch.ops.torch_odt


def sums_without_zero_point(case: Case) -> Tensor:
    size = case.weight.shape[2:]
    return plain.grad_weight_sums("test", case.grad_output, case.input, 0, size, case.geometry)[0]


@pytest.mark.parametrize("kind", ["random", "lowest"])
@pytest.mark.parametrize(
    ("channels", "size", "windows"),
    [
        ((70000, 3), (1, 1), {"kernel": (1, 1)}),
        ((3, 70000), (1, 1), {"kernel": (1, 1)}),
        ((7500, 2), (4, 4), {"kernel": (3, 3), "padding": (1, 1)}),
        ((2, 2), (3, 2), {"kernel": (301, 261), "padding": (150, 130), "groups": 2}),
    ],
)
def test_long_sums_are_split(
    threads: int, channels: tuple[int, int], size: tuple[int, int], windows: dict[str, Any], kind: str
) -> None:
    """Exact where int32 holds them, and as float32 where it does not."""
    case = make_case(2, channels, size, kind=kind, **windows)
    assert_exact(case)
    case = make_case(2, channels, size, kind=kind, zero_point=127, **windows)
    scale = torch.tensor([2.0**-20])
    image, gradient = (case.input, case.weight, None), (case.grad_output, case.weight, None)
    shape = list(case.input.shape[2:])
    assert_same("int8_conv2d_scaled", *image, None, scale, 127, case.numbers)
    assert_same("int8_conv2d_quantized", *image, None, scale, 127, 0, -100, 90, 1, 7, case.numbers)
    assert_same("int8_conv2d_grad_input_scaled", *gradient, scale, shape, case.numbers)
    assert_same("int8_conv2d_grad_input_quantized", *gradient, scale, 1, 7, shape, case.numbers)


def test_sums_that_do_not_fit_are_refused() -> None:
    from torch_odt.ops import int8_convolution

    case = make_case(1, (70000, 2), (1, 1), (1, 1), kind="lowest", zero_point=127)
    for call in (odt.int8_conv2d, int8_convolution._conv2d_plain):
        with pytest.raises(RuntimeError, match="int8_conv2d: a sum does not fit into int32"):
            call(case.input, case.weight, None, 127, case.numbers)


def test_more_pixels_than_int32_sums() -> None:
    """All terms alike and as large as they get."""
    case = make_case(3, (2, 2), (160, 160), (1, 1), kind="lowest", zero_point=127)
    scale = torch.tensor([2.0**-30])
    found = ops.int8_conv2d_grad_weight_scaled(
        case.grad_output, case.input, scale, (1, 1), input_zero_point=case.zero_point, **case.windows
    )
    sums, bias = case.weight_sums
    assert int(sums.max()) > 2**31
    assert torch.equal(found.weight, plain.scaled("test", sums, scale, 0)) and torch.equal(found.bias, bias)
    wide = make_case(3, (4, 4), (160, 160), (3, 3), kind="lowest", zero_point=127, groups=4, padding=(1, 1))
    found = ops.int8_conv2d_grad_weight_scaled(
        wide.grad_output, wide.input, scale, (3, 3), input_zero_point=wide.zero_point, **wide.windows
    )
    assert torch.equal(found.weight, plain.scaled("test", wide.weight_sums[0], scale, 0))
    long = make_case(1, (2, 2), (1, 70000), (1, 1), kind="lowest", zero_point=127, groups=2)
    found = ops.int8_conv2d_grad_weight_scaled(
        long.grad_output, long.input, scale, (1, 1), input_zero_point=long.zero_point, **long.windows
    )
    assert torch.equal(found.weight, plain.scaled("test", long.weight_sums[0], scale, 0))
    with pytest.raises(RuntimeError, match="int8_conv2d_grad_weight: a sum does not fit into int32"):
        ops.int8_conv2d_grad_weight(
            case.grad_output, case.input, (1, 1), input_zero_point=case.zero_point, **case.windows
        )
    found = ops.int8_conv2d_grad_weight(case.grad_output, case.input, (1, 1), **case.windows)
    assert torch.equal(found.weight, sums_without_zero_point(case))
