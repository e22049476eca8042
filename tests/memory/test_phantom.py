"""Phantoms cost nothing, and these operators look at the shape of an argument alone.

Every operator runs in a process of its own, because one that does read a phantom ends the process.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torch_odt import memory

PRELUDE = """
import os
import sys
import traceback
import torch
from torch_odt.memory import phantom_tensor
torch.manual_seed(0)
from torch_odt.capture.operators import Laid, shape_only_positions
layout, dtype, threads, onednn = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "oneDNN"
torch.set_num_threads(threads)
torch._C._set_mkldnn_enabled(onednn)
aten = torch.ops.aten

def in_layout(tensor):
    return tensor.to(memory_format=torch.channels_last) if layout == "channels_last" else tensor

def random(*shape):
    return in_layout(torch.randn(shape).to(dtype))

def laid(tensor):
    return Laid(tuple(tensor.shape), tensor.stride())

def check(operator, argument):
    real = operator(argument)
    ghostly = operator(phantom_tensor(argument.shape, argument.stride(), argument.dtype))
    pairs = zip(real, ghostly) if isinstance(real, tuple) else [(real, ghostly)]
    for a, b in pairs:
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, b) and a.stride() == b.stride())
"""

OPERATORS = {
    "convolution_backward": """
for c_in, c_out, k, s, p, d, g, size, transposed in (
    (8, 16, 3, 1, 1, 1, 1, 14, False), (8, 8, 3, 2, 1, 1, 8, 14, False), (16, 32, 1, 1, 0, 1, 1, 7, False),
    (16, 32, 1, 2, 0, 1, 1, 8, False), (8, 12, 5, 1, 2, 2, 2, 14, False), (3, 16, 3, 2, 1, 1, 1, 32, False),
    (8, 16, 3, 1, 1, 1, 1, 14, True), (96, 96, 3, 1, 1, 1, 96, 28, False),
    (8, 8, 1, 1, 0, 1, 8, 7, False), (8, 8, 1, 2, 0, 1, 8, 7, False),
):
    x = random(4, c_in, size, size)
    w = random(*((c_in, c_out // g, k, k) if transposed else (c_out, c_in // g, k, k)))
    settings = [s, s], [p, p], [d, d], transposed, [0, 0], g
    y = random(*aten.convolution(x, w, None, *settings).shape)
    arguments = (w, None, *settings, [True, False, False])
    if shape_only_positions("aten.convolution_backward.default", (y, x, *arguments), sys.argv[2], laid(x), laid(w)):
        check(lambda x: aten.convolution_backward(y, x, *arguments), x)
    else:
        assert g > 1 and (k == s == threads == 1 or not (onednn and dtype == torch.float32))
""",
    "convolution_backward_weight": """
x, w = random(4, 8, 14, 14), random(16, 8, 3, 3)
settings = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
y = random(4, 16, 14, 14)
check(lambda w: aten.convolution_backward(y, x, w, [16], *settings, [False, True, True]), w)
""",
    "convolution_backward_mixed_layouts": """
formats = torch.contiguous_format, torch.channels_last
for c, k, of_images, of_window in [(c, k, *two) for c in (1, 8) for k in (1, 3) for two in (formats, formats[::-1])]:
    x, w = random(4, c, 9, 9).to(memory_format=of_images), random(16, c, k, k).to(memory_format=of_window)
    settings = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    y = aten.convolution(x, w, None, *settings)
    arguments = (w, None, *settings, [True, False, False])
    if shape_only_positions("aten.convolution_backward.default", (y, x, *arguments), sys.argv[2], laid(x), laid(w)):
        check(lambda x: aten.convolution_backward(y, x, *arguments), x)
    else:
        assert c == 8 and of_images == torch.contiguous_format
""",
    "max_pool2d_with_indices_backward": """
for k, s, p in ((2, 2, 0), (3, 2, 1)):
    x = random(4, 8, 15, 15)
    y, indices = aten.max_pool2d_with_indices(x, [k, k], [s, s], [p, p])
    y = random(*y.shape)
    settings = [k, k], [s, s], [p, p], [1, 1], False
    check(lambda x: aten.max_pool2d_with_indices_backward(y, x, *settings, indices), x)
""",
    "avg_pool2d_backward": """
for k, s, p in ((2, 2, 0), (3, 2, 1)):
    x = random(4, 8, 15, 15)
    y = random(*aten.avg_pool2d(x, [k, k], [s, s], [p, p]).shape)
    check(lambda x: aten.avg_pool2d_backward(y, x, [k, k], [s, s], [p, p], False, True, None), x)
""",
    "_adaptive_avg_pool2d_backward": """
for size in (1, 3):
    x, y = random(4, 8, 15, 15), random(4, 8, size, size)
    check(lambda x: aten._adaptive_avg_pool2d_backward(y, x), x)
""",
    "adaptive_max_pool2d_backward": """
x = random(4, 8, 15, 15)
y, indices = aten.adaptive_max_pool2d(x, (3, 3))
check(lambda x: aten.adaptive_max_pool2d_backward(y, x, indices), x)
""",
    "nll_loss_backward": """
x, target = torch.randn(16, 10).to(dtype), torch.randint(0, 10, (16,))
_, weight = aten.nll_loss_forward(x, target, None, 1, -100)
check(lambda x: aten.nll_loss_backward(torch.ones((), dtype=dtype), x, target, None, 1, -100, weight), x)
""",
    "factories": """
x = random(4, 8, 15, 15)
check(torch.zeros_like, x)
check(lambda x: torch.full_like(x, 2.0), x)
check(lambda x: aten.new_zeros(x, [3, 3]), x)
""",
}


# Nothing has run in parallel before the forks, so that each child starts threads of its own.
EACH_IN_A_CHILD = """
for name, code in operators.items():
    child = os.fork()
    if child == 0:
        try:
            exec(code)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    ending = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ending == 0, f"{name} ended with {ending}"
print("all of", *operators)
"""


@pytest.mark.parametrize(
    ("layout", "dtype", "threads", "library"),
    [
        ("contiguous", "float32", 1, "oneDNN"),
        ("channels_last", "float32", 2, "oneDNN"),
        ("channels_last", "bfloat16", 2, "oneDNN"),
        ("contiguous", "float32", 1, "ATen"),
    ],
)
def test_operators_that_read_the_shape_alone(
    layout: str, dtype: str, threads: int, library: str, run_python: Callable
) -> None:
    script = f"{PRELUDE}\noperators = {OPERATORS!r}\n{EACH_IN_A_CHILD}"
    result = run_python(script, layout, dtype, str(threads), library)
    assert result.returncode == 0, result.stderr or result.returncode
    assert result.stdout.split() == ["all", "of", *OPERATORS]


def test_a_phantom_has_any_shape_stride_and_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64):
        tensor = memory.phantom_tensor((2, 3, 4, 5), (60, 1, 15, 3), dtype)
        assert (tensor.shape, tensor.stride(), tensor.dtype) == ((2, 3, 4, 5), (60, 1, 15, 3), dtype)
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert memory.phantom_tensor((), (), torch.float32).dim() == 0
    assert memory.phantom_tensor((0, 4), (4, 1), torch.float32).numel() == 0
    assert memory.phantom_tensor((5, 4), (0, 1), torch.float32).stride() == (0, 1)


def test_phantoms_cost_no_memory() -> None:
    level = memory.process_bytes()
    tensors = [memory.phantom_tensor((2**20 * n,), (1,), torch.float32) for n in (1, 400, 4000)]
    assert memory.process_bytes() - level < 2**20
    assert tensors[2].numel() == 4000 * 2**20


def test_impossible_phantoms_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        memory.phantom_tensor((2, 3), (1,), torch.float32)
    with pytest.raises(ValueError, match="negative"):
        memory.phantom_tensor((2,), (-1,), torch.float32)


def test_without_the_extension_a_phantom_reads_as_zeros(run_python: Callable) -> None:
    script = """
import torch
from torch_odt.memory import phantom_tensor
tensor = phantom_tensor((2, 3), (1, 2), torch.float32)
assert tensor.stride() == (1, 2) and bool((tensor == 0).all())
"""
    result = run_python(script, TORCH_ODT_DISABLE_EXTENSIONS="1")
    assert result.returncode == 0, result.stderr
