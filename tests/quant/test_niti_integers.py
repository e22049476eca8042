"""The compiled operators of NITI's arithmetic against the same in plain torch, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from niti_cases import mantissas
from torch import Tensor

from torch_odt import _extensions
from torch_odt.ops import int8_take_off_
from torch_odt.ops.int8_arguments import number_of, windows_of
from torch_odt.ops.int8_plain import Geometry
from torch_odt.quant import niti_functions, niti_integers
from torch_odt.quant.niti_numbers import CARRIER, as_carrier, as_int8
from torch_odt.quant.rescaling import Rescaling

pytestmark = pytest.mark.skipif(
    not _extensions.has_kernels, reason="without compiled parts there is nothing to compare"
)

FRESH = Rescaling()
HELD = Rescaling(is_known=True, exponent=-3, period=4, wait=3, batches=5, checks=2)
TIGHT = replace(HELD, exponent=-9)  # so that much is clipped
DUE = replace(HELD, wait=0)


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        if ours.dtype == CARRIER:
            ours, theirs = as_int8(ours), as_int8(theirs)
        assert torch.equal(ours, theirs)


def one(number: float) -> Tensor:
    return torch.tensor([float(number)])


def operands(
    geometry: Geometry, size: tuple[int, int, int, int], outputs: int, kernel: int, seed: int
) -> tuple[list[Any], list[int]]:
    """What a layer takes but for its state, and the output's shape."""
    batch, channels, rows, columns = size
    image = mantissas(*size, seed=seed)
    weight = mantissas(outputs, channels // geometry.groups, kernel, kernel, seed=seed + 1)
    bias = mantissas(outputs, seed=seed + 2)
    output = geometry.output_size("test", (rows, columns), (kernel, kernel))
    tensors = [as_carrier(image), one(-6), as_carrier(weight), one(-7), as_carrier(bias), one(-9)]
    return tensors, [batch, outputs, *output]


def numbers_of(geometry: Geometry) -> tuple[int, ...]:
    return windows_of(geometry.stride, geometry.padding, geometry.dilation, geometry.groups)


GEOMETRIES = {
    "pointwise": (Geometry([1, 1], [0, 0], [1, 1], 1), (3, 20, 7, 5), 33, 1),
    "spatial": (Geometry([1, 1], [1, 1], [1, 1], 1), (4, 6, 9, 8), 70, 3),
    "strided": (Geometry([2, 2], [1, 1], [1, 1], 1), (2, 5, 9, 8), 12, 3),
    "depthwise": (Geometry([1, 1], [1, 1], [1, 1], 24), (3, 24, 6, 7), 24, 3),
    "groups": (Geometry([1, 2], [2, 1], [2, 1], 2), (2, 6, 9, 8), 8, 3),
    "linear": (Geometry([1, 1], [0, 0], [1, 1], 1), (5, 40, 1, 1), 10, 1),
    "no samples": (Geometry([1, 1], [1, 1], [1, 1], 1), (0, 6, 9, 8), 40, 3),
    # More pixels than int32 holds the sums of.
    "many pixels": (Geometry([1, 1], [0, 0], [1, 1], 1), (3, 3, 160, 150), 4, 1),
    "one large sample": (Geometry([1, 1], [0, 0], [1, 1], 1), (1, 2, 300, 260), 3, 1),
}


# The gradients of input, weight and bias.
WANTED = ((True, True, True), (True, False, False), (False, True, False), (False, False, True))
# Whether there is a ReLU, its ceiling, what a part of the batch may take, and what is left of a weight's gradient.
MANNERS = ((False, None, 0, 3), (True, None, 900, 1), (True, 0.5, 0, 7), (True, 1e3, 0, -2))


def check_taken_off(expected: tuple[Tensor, ...], kept: tuple[Any, ...], rest: tuple[Any, ...]) -> None:
    """Where the weight's gradient is taken off the weight, the others are the same."""
    weight = as_int8(kept[6]).clone(memory_format=torch.channels_last)
    int8_take_off_(weight, as_int8(expected[2]))
    for operator in (torch.ops.torch_odt.niti_layer_take_off_, niti_integers._take_off):
        own = kept[6].clone(memory_format=torch.channels_last)
        *found, changed = operator(*kept[:6], own, *kept[7:], *rest)
        same(tuple(found), (*expected[:2], *expected[3:]))
        assert bool(changed) == bool(as_int8(expected[2]).any())
        assert torch.equal(as_int8(own), weight)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("state", [FRESH, HELD, TIGHT, DUE], ids=["fresh", "held", "tight", "due"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rounding", ["nearest", "pseudo_stochastic"])
def test_both_passes_have_the_bits_of_plain_torch(name: str, state: Rescaling, training: bool, rounding: Any) -> None:
    geometry, size, outputs, kernel = GEOMETRIES[name]
    tensors, shape = operands(geometry, size, outputs, kernel, 1)
    windows, operators = numbers_of(geometry), torch.ops.torch_odt
    rows = torch.stack([replace(state, exponent=state.exponent + 2).row(), replace(state, exponent=1).row()])
    panels = [operators.int8_pack_weight(as_int8(tensors[2]), windows, backward) for backward in (False, True)]
    for relu, ceiling, part_bytes, bits in MANNERS:
        manner = (number_of(rounding), part_bytes, training)
        arguments = (*tensors, state.row(), rows, torch.tensor([bits]), False, relu, ceiling, *manner, None, windows)
        found = operators.niti_layer(*arguments)
        same(found, niti_integers._layer(*arguments))
        same(found, operators.niti_layer(*arguments[:-2], panels[0], windows))
        assert found[0].stride() == niti_integers._layer_fake(*arguments)[0].stride()
        gradient = as_carrier(mantissas(*shape, seed=9, most=40))
        of_relu = found[:2] if relu else (None, None)
        kept = (gradient, one(-4), *of_relu, *tensors[:4], rows, torch.tensor([bits]))
        for wanted in WANTED:
            rest = (False, *wanted, ceiling, *manner)
            passed_back = operators.niti_layer_backward(*kept, *rest, None, windows)
            same(passed_back, niti_integers._backward(*kept, *rest, None, windows))
            same(passed_back, operators.niti_layer_backward(*kept, *rest, panels[1], windows))
            if wanted[1]:
                check_taken_off(passed_back, kept, (False, wanted[0], wanted[2], ceiling, *manner, panels[1], windows))


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("state", [FRESH, HELD], ids=["fresh", "held"])
@pytest.mark.parametrize("rounding", ["nearest", "pseudo_stochastic"])
@pytest.mark.parametrize("size", [1.0, 2.0**-30, 0.0])
def test_float32_in_and_out_has_the_bits_of_plain_torch(
    name: str, state: Rescaling, rounding: Any, size: float
) -> None:
    geometry, shape_in, outputs, kernel = GEOMETRIES[name]
    tensors, shape = operands(geometry, shape_in, outputs, kernel, 1)
    generator = torch.Generator().manual_seed(2)
    image = size * torch.randn(shape_in, generator=generator)
    gradient = size * torch.randn(shape, generator=generator)
    windows, operators = numbers_of(geometry), torch.ops.torch_odt
    rows = torch.stack([state.row(), state.row()])
    for to_float, relu, part_bytes in ((True, False, 0), (False, True, 900), (True, False, 900)):
        manner = (None, number_of(rounding), part_bytes, True)
        states = (state.row(), rows, torch.tensor([2]))
        arguments = (image, None, *tensors[2:], *states, to_float, relu, *manner, None, windows)
        made = niti_integers._layer(*arguments)
        same(operators.niti_layer(*arguments), made)
        of_output = (gradient, None) if to_float else (as_carrier(mantissas(*shape, seed=9)), one(-4))
        of_relu = made[:2] if relu else (None, None)
        kept = (*of_output, *of_relu, *made[2:4], *tensors[2:4], *states[1:])
        for wanted in WANTED:
            rest = (True, *wanted, *manner, None, windows)
            same(operators.niti_layer_backward(*kept, *rest), niti_integers._backward(*kept, *rest))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(number: float) -> None:
    geometry, size, outputs, kernel = GEOMETRIES["spatial"]
    tensors, shape = operands(geometry, size, outputs, kernel, 1)
    rows, bits = torch.stack([FRESH.row(), FRESH.row()]), torch.tensor([2])
    rest = (None, 2, 0, True, None, numbers_of(geometry))
    image, gradient = torch.zeros(size), torch.zeros(shape)
    image[1, 2, 3, 4] = gradient[0, 1, 2, 3] = number
    for run in (torch.ops.torch_odt.niti_layer, niti_integers._layer):
        with pytest.raises(RuntimeError, match="the input of a convolution holds numbers that are not finite"):
            run(image, None, *tensors[2:], FRESH.row(), rows, bits, False, False, *rest)
    for run in (torch.ops.torch_odt.niti_layer_backward, niti_integers._backward):
        with pytest.raises(RuntimeError, match="the gradient of a convolution's output holds numbers that are not"):
            run(gradient, None, None, None, *tensors[:4], rows, bits, False, True, True, True, *rest)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(-40, 40), st.integers(-40, 40), st.sampled_from(["nearest", "pseudo_stochastic"]),
    st.sampled_from([(0,), (5,), (3, 70), (2, 5, 3, 4), (1, 3, 200, 70), (4, 6, 1, 1)]), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_a_sum_has_the_bits_of_plain_torch(
    first: int, second: int, rounding: Any, shape: tuple[int, ...], mixed: bool, seed: int
) -> None:
    one_tensor, other = mantissas(*shape, seed=seed), mantissas(*shape, seed=seed + 1)
    other = other.contiguous() if mixed else other
    arguments = (as_carrier(one_tensor), one(first), as_carrier(other), one(second), number_of(rounding))
    found = torch.ops.torch_odt.niti_add(*arguments)
    same(found, niti_functions._add(*arguments))
    assert found[0].stride() == niti_functions._add_fake(*arguments)[0].stride()


def test_no_thread_changes_a_bit() -> None:
    geometry, size, outputs, kernel = GEOMETRIES["spatial"]
    tensors, _ = operands(geometry, (8, *size[1:]), outputs, kernel, 4)
    state = torch.stack([FRESH.row(), FRESH.row()])
    how = (False, True, None, 2, 0, True, None)
    arguments = (*tensors, FRESH.row(), state, torch.tensor([2]), *how, numbers_of(geometry))
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(torch.ops.torch_odt.niti_layer(*arguments))
    finally:
        torch.set_num_threads(before)
    same(found[0], found[1])
    same(found[0], found[2])


def test_wrong_tensors_are_named() -> None:
    geometry, size, outputs, kernel = GEOMETRIES["pointwise"]
    tensors, _ = operands(geometry, size, outputs, kernel, 1)
    state = torch.stack([FRESH.row(), FRESH.row()])

    def run(packed: Tensor | None = None, **other: Any) -> None:
        names = ("input", "exponent", "weight", "weight_exponent", "bias", "bias_exponent", "state")
        named = dict(zip(names, (*tensors, FRESH.row()), strict=True)) | other
        windows = numbers_of(geometry)
        rest = (torch.tensor([2]), False, False, None, 2, 0, True, packed)
        torch.ops.torch_odt.niti_layer(*named.values(), state, *rest, windows)

    with pytest.raises(RuntimeError, match="mantissas are a CPU tensor of 4 dimensions"):
        run(input=torch.zeros(size))
    with pytest.raises(RuntimeError, match="must be mantissas with an exponent, or a float32 CPU tensor"):
        run(exponent=None)
    with pytest.raises(RuntimeError, match="exponent must be a contiguous float32"):
        run(exponent=torch.zeros(2))
    with pytest.raises(RuntimeError, match="state must be a contiguous float64"):
        run(state=torch.zeros(10))
    with pytest.raises(RuntimeError, match="packed is not what int8_pack_weight made of such a weight for this pass"):
        run(packed=torch.ops.torch_odt.int8_pack_weight(as_int8(tensors[2]), numbers_of(geometry), True))
    with pytest.raises(RuntimeError, match="bias must be contiguous mantissas"):
        run(bias=torch.zeros(outputs))
    with pytest.raises(RuntimeError, match="both must have the same shape"):
        zeros = torch.zeros(3, dtype=CARRIER)
        torch.ops.torch_odt.niti_add(zeros, one(0), zeros[:2], one(0), 0)
    with pytest.raises(RuntimeError, match="rounding must be 0"):
        torch.ops.torch_odt.niti_add(zeros, one(0), zeros, one(0), 1)


def test_wrong_tensors_of_the_backward_pass_are_named() -> None:
    geometry, size, outputs, kernel = GEOMETRIES["pointwise"]
    (image, image_exponent, weight, weight_exponent, *_), shape = operands(geometry, size, outputs, kernel, 1)
    gradient, state = as_carrier(mantissas(*shape, seed=3)), torch.stack([FRESH.row(), FRESH.row()])

    def run(output: Tensor | None = None, weight: Tensor = weight, bits: int = 2, rounding: int = 2) -> None:
        kept = (output, None if output is None else one(0), image, image_exponent, weight, weight_exponent)
        manner = (False, False, True, False, None, rounding, 0, True, None)
        arguments = (gradient, one(0), *kept, state, torch.tensor([bits]), *manner, numbers_of(geometry))
        torch.ops.torch_odt.niti_layer_backward(*arguments)

    run()
    with pytest.raises(RuntimeError, match="weight must have the shape 33 x 20"):
        run(weight=weight[:4])
    with pytest.raises(RuntimeError, match="output must have the gradient's shape"):
        run(output=gradient[:1])
    with pytest.raises(RuntimeError, match="gradient_bits must be from -8 to 7"):
        run(bits=63)
    with pytest.raises(RuntimeError, match="rounding must be 0"):
        run(rounding=1)
