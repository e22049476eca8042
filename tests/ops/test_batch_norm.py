"""The compiled normalisation against torch's own, in every dtype and layout."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_odt.ops import batch_norm, batch_norm_normalize

SHAPES = [
    (8, 24, 14, 14),
    (4, 7, 5, 3),
    (16, 32),
    (3, 5, 17),
    (2, 3, 4, 5, 6),
    (8, 16, 1, 1),
    (1, 64, 9, 9),
    (2, 1, 3, 3),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def channels_innermost(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def every_other_sample(x: Tensor) -> Tensor:
    return torch.cat([x, x])[::2]


LAYOUTS = [torch.Tensor.contiguous, channels_innermost, every_other_sample]


def parameters(channels: int, dtype: torch.dtype) -> list[Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [torch.rand(channels, dtype=wide) + 0.5 for _ in range(4)]


def reference(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = [1, -1] + [1] * (x.dim() - 2)
    y = (x.double() - mean.double().view(shape)) * invstd.double().view(shape)
    y = y if weight is None else y * weight.double().view(shape)
    return y if bias is None else y + bias.double().view(shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_format(shape: tuple[int, ...], dtype: torch.dtype, layout) -> None:
    torch.manual_seed(0)
    x = layout((torch.randn(shape) * 3 + 1).to(dtype))
    mean, invstd, weight, bias = parameters(shape[1], dtype)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype]
    for w, b in ((weight, bias), (None, bias), (weight, None), (None, None)):
        y = batch_norm_normalize(x, mean, invstd, w, b)
        assert (y.dtype, y.shape) == (dtype, x.shape)
        torch.testing.assert_close(y.double(), reference(x, mean, invstd, w, b), rtol=tolerance, atol=tolerance)
        assert y.stride() == batch_norm._fake(x, mean, invstd, w, b).stride()


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch has no fused kernels here")
@pytest.mark.skipif(not batch_norm._extensions.has_kernels, reason="the kernels are not built")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_recomputing_gives_the_bits_of_the_forward_pass(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 24, 14, 14).to(dtype).to(memory_format=memory_format)
    _, _, weight, bias = parameters(24, dtype)
    y, mean, invstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    assert torch.equal(batch_norm_normalize(x, mean, invstd, weight, bias), y)


@settings(deadline=None, max_examples=50)
@given(shape=st.lists(st.integers(0, 7), min_size=2, max_size=5), dtype=st.sampled_from(DTYPES), last=st.booleans())
def test_any_shape(shape: list[int], dtype: torch.dtype, last: bool) -> None:
    x = torch.randn(shape).to(dtype)
    x = channels_innermost(x) if last else x
    values = parameters(shape[1], dtype)
    y = batch_norm_normalize(x, *values)
    torch.testing.assert_close(y, batch_norm._normalize_in_torch(x, *values), rtol=1e-2, atol=1e-2)


def test_nan_and_infinity_stay_what_they_are() -> None:
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 3e38]]).bfloat16()
    y = batch_norm_normalize(x, torch.zeros(4), torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 2.0]))
    assert bool(y[0, 0].isnan())
    assert y[0, 1:].tolist() == [float("inf"), -float("inf"), float("inf")]


def test_threads_do_not_change_the_bits() -> None:
    x = torch.randn(8, 64, 40, 40)
    values = parameters(64, torch.float32)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(batch_norm_normalize(x, *values))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own doing
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype: torch.dtype, layout) -> None:
    x = layout(torch.randn(4, 3, 5, 5).to(dtype))
    mean, invstd, weight, bias = parameters(3, dtype)
    for w, b in ((weight, bias), (None, None)):
        torch.library.opcheck(torch.ops.torch_odt.batch_norm_normalize.default, (x, mean, invstd, w, b))
    tracked = (x.requires_grad_(), mean.requires_grad_(), invstd, weight.requires_grad_(), bias)
    torch.library.opcheck(torch.ops.torch_odt.batch_norm_normalize.default, tracked)


def test_gradients() -> None:
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64, requires_grad=True)
    values = [value.requires_grad_() for value in parameters(4, torch.float64)]
    assert torch.autograd.gradcheck(batch_norm_normalize, (x, *values))
    assert torch.autograd.gradcheck(batch_norm_normalize, (x, *values[:2], None, None))
    assert torch.autograd.gradgradcheck(batch_norm_normalize, (x, *values))


@pytest.mark.parametrize(
    ("x", "size", "dtype"),
    [
        (torch.randn(3), 3, torch.float32),
        (torch.randn(2, 3), 4, torch.float32),
        (torch.randn(2, 3), 3, torch.float64),
        (torch.randn(2, 3).half(), 3, torch.float32),
        (torch.ones(2, 3, dtype=torch.int64), 3, torch.float32),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, size: int, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="batch_norm_normalize"):
        batch_norm_normalize(x, torch.zeros(size, dtype=dtype), torch.ones(size, dtype=dtype))


def test_the_baseline_instruction_set_agrees() -> None:
    script = """
import torch
from torch_odt.ops import batch_norm, batch_norm_normalize
torch.manual_seed(0)
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    for fmt in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(4, 9, 7, 7).to(dtype).to(memory_format=fmt)
        values = [torch.rand(9, dtype=torch.float64 if dtype == torch.float64 else torch.float32) for _ in range(4)]
        expected = batch_norm._normalize_in_torch(x, *values)
        torch.testing.assert_close(batch_norm_normalize(x, *values), expected)
"""
    environment = {**os.environ, "TORCH_ODT_ISA": "baseline"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
