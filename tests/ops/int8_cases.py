"""Convolutions of int8 tensors, what int64 sums make of them, and compiled operators beside plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import torch_odt.ops as ops
from torch_odt.ops import int8_plain as plain
from torch_odt.ops.int8_arguments import windows_of

odt = torch.ops.torch_odt


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def unaligned(x: Tensor) -> Tensor:
    """In torch.channels_last, one byte beyond where memory begins."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype)[1:]
    n, c, h, w = x.shape
    return flat.view(n, h, w, c).copy_(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def every_other_channel(x: Tensor) -> Tensor:
    return channels_last(torch.repeat_interleave(x, 2, dim=1))[:, ::2]


LAYOUTS: list[Callable[[Tensor], Tensor]] = [channels_last, Tensor.contiguous, unaligned, every_other_channel]


@dataclass(frozen=True)
class Case:
    """A convolution with the tensors of both its passes."""

    input: Tensor
    weight: Tensor
    grad_output: Tensor
    zero_point: int
    windows: dict[str, Any]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The windows as the operators take them."""
        return windows_of(**self.windows)

    @property
    def geometry(self) -> plain.Geometry:
        return plain.Geometry.of("test", self.numbers)

    @property
    def sums(self) -> Tensor:
        return plain.forward_sums("test", self.input, self.weight, None, self.zero_point, self.geometry)

    @property
    def input_sums(self) -> Tensor:
        size = self.input.shape[2:]
        return plain.grad_input_sums("test", self.grad_output, self.weight, size, self.geometry)

    @property
    def weight_sums(self) -> tuple[Tensor, Tensor]:
        size = self.weight.shape[2:]
        return plain.grad_weight_sums("test", self.grad_output, self.input, self.zero_point, size, self.geometry)


def numbers(shape: tuple[int, ...], kind: str, seed: int) -> Tensor:
    if kind != "random":
        return torch.full(shape, {"lowest": -128, "highest": 127}[kind], dtype=torch.int8)
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def make_case(
    batch: int,
    channels: tuple[int, int],
    size: tuple[int, int],
    kernel: tuple[int, int],
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    zero_point: int = 0,
    kind: str = "random",
    layout: Callable[[Tensor], Tensor] = channels_last,
) -> Case:
    geometry = plain.Geometry(stride, padding, dilation, groups)
    out = geometry.output_size("test", size, kernel)
    return Case(
        layout(numbers((batch, channels[0], *size), kind, 1)),
        layout(numbers((channels[1], channels[0] // groups, *kernel), kind, 2)),
        layout(numbers((batch, channels[1], *out), kind, 3)),
        zero_point,
        {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups},
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def two(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 16]))
    inputs, outputs = groups * draw(st.integers(1, 20)), groups * draw(st.integers(1, 20))
    if draw(st.booleans()) and groups > 1:
        inputs = outputs = groups  # depthwise
    kernel, dilation, padding = two(1, 4), two(1, 3), two(0, 3)
    smallest = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    return make_case(
        draw(st.integers(0, 3)),
        (inputs, outputs),
        (smallest[0] + draw(st.integers(0, 9)), smallest[1] + draw(st.integers(0, 9))),
        kernel,
        stride=two(1, 3),
        padding=padding,
        dilation=dilation,
        groups=groups,
        zero_point=draw(st.sampled_from([0, 0, -128, 127, 3])),
        kind=draw(st.sampled_from(["random", "random", "lowest", "highest"])),
        layout=draw(st.sampled_from(LAYOUTS)),
    )


def assert_exact(case: Case) -> None:
    output = ops.int8_conv2d(case.input, case.weight, input_zero_point=case.zero_point, **case.windows)
    assert output.dtype == torch.int32 and output.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(output, case.sums)
    of_input = ops.int8_conv2d_grad_input(case.grad_output, case.weight, case.input.shape[2:], **case.windows)
    assert torch.equal(of_input, case.input_sums)
    of_weight, of_bias = ops.int8_conv2d_grad_weight(
        case.grad_output, case.input, case.weight.shape[2:], input_zero_point=case.zero_point, **case.windows
    )
    assert torch.equal(of_weight, case.weight_sums[0]) and torch.equal(of_bias, case.weight_sums[1])


def of(name: str, *arguments: Any) -> Any:
    """What the operator makes in plain torch."""
    from torch_odt.ops import int8_backward, int8_convolution, int8_gradients

    body = {
        "int8_conv2d_scaled": int8_convolution._scaled_plain,
        "int8_conv2d_quantized": int8_convolution._quantized_plain,
        "int8_conv2d_grad_input_scaled": int8_gradients._grad_input_scaled_plain,
        "int8_conv2d_grad_input_quantized": int8_gradients.grad_input_quantized_plain,
        "int8_conv2d_grad_weight_scaled": int8_gradients.grad_weight_scaled_plain,
        "int8_conv2d_backward": int8_backward.backward_plain,
        "int8_conv2d_update_weight_": int8_gradients._update_weight_plain,
    }[name]
    return body(*arguments)


def ours(name: str, *arguments: Any) -> Any:
    """What the compiled operator makes."""
    return getattr(odt, name)(*arguments)


def assert_same(name: str, *arguments: Any) -> None:
    """Compiled and plain, bit by bit."""
    found, expected = ours(name, *arguments), of(name, *arguments)
    for one, other in zip(
        found if isinstance(found, tuple) else (found,),
        expected if isinstance(expected, tuple) else (expected,),
        strict=True,
    ):
        assert one.dtype == other.dtype
        assert one.dim() < 4 or one.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(one, other)
