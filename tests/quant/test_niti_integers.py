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
from torch_odt.ops.int8_arguments import number_of
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


def windows_of(geometry: Geometry) -> tuple[Any, ...]:
    return (list(geometry.stride), list(geometry.padding), list(geometry.dilation), geometry.groups)


GEOMETRIES = {
    "pointwise": (Geometry([1, 1], [0, 0], [1, 1], 1), (3, 20, 7, 5), 33, 1),
    "spatial": (Geometry([1, 1], [1, 1], [1, 1], 1), (4, 6, 9, 8), 70, 3),
    "strided": (Geometry([2, 2], [1, 1], [1, 1], 1), (2, 5, 9, 8), 12, 3),
    "depthwise": (Geometry([1, 1], [1, 1], [1, 1], 24), (3, 24, 6, 7), 24, 3),
    "groups": (Geometry([1, 2], [2, 1], [2, 1], 2), (2, 6, 9, 8), 8, 3),
    "linear": (Geometry([1, 1], [0, 0], [1, 1], 1), (5, 40, 1, 1), 10, 1),
    "no samples": (Geometry([1, 1], [1, 1], [1, 1], 1), (0, 6, 9, 8), 12, 3),
    # More pixels than int32 holds the sums of.
    "many pixels": (Geometry([1, 1], [0, 0], [1, 1], 1), (3, 3, 160, 150), 4, 1),
}


# Whether there is a ReLU, its ceiling, what a part of the batch may take, and what is left of a weight's gradient.
MANNERS = ((False, None, 0, 3), (True, None, 900, 1), (True, 0.5, 0, 7), (True, 1e3, 0, -2))


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("state", [FRESH, HELD, TIGHT, DUE], ids=["fresh", "held", "tight", "due"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rounding", ["nearest", "pseudo_stochastic"])
def test_both_passes_have_the_bits_of_plain_torch(name: str, state: Rescaling, training: bool, rounding: Any) -> None:
    geometry, size, outputs, kernel = GEOMETRIES[name]
    tensors, shape = operands(geometry, size, outputs, kernel, 1)
    windows, operators = windows_of(geometry), torch.ops.torch_odt
    rows = torch.stack([replace(state, exponent=state.exponent + 2).row(), replace(state, exponent=1).row()])
    for relu, ceiling, part_bytes, bits in (
        (False, None, 0, 3),
        (True, None, 900, 1),
        (True, 0.5, 0, 7),
        (True, 1e3, 0, -2),
    ):
        manner = (number_of(rounding), part_bytes, training)
        arguments = (*tensors, state.row(), rows, torch.tensor([bits]), relu, ceiling, *manner, *windows)
        found = operators.niti_layer(*arguments)
        same(found, niti_integers._layer(*arguments))
        assert found[0].stride() == niti_integers._layer_fake(*arguments)[0].stride()
        gradient = as_carrier(mantissas(*shape, seed=9, most=40))
        of_relu = found[:2] if relu else (None, None)
        kept = (gradient, one(-4), *of_relu, *tensors[:4], rows, torch.tensor([bits]))
        for wanted in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
            rest = (*wanted, ceiling, *manner, *windows)
            same(operators.niti_layer_backward(*kept, *rest), niti_integers._backward(*kept, *rest))


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
    arguments = (*tensors, FRESH.row(), state, torch.tensor([2]), True, None, 2, 0, True, *windows_of(geometry))
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

    def run(**other: Any) -> None:
        names = ("input", "exponent", "weight", "weight_exponent", "bias", "bias_exponent", "state")
        named = dict(zip(names, (*tensors, FRESH.row()), strict=True)) | other
        windows = windows_of(geometry)
        torch.ops.torch_odt.niti_layer(*named.values(), state, torch.tensor([2]), False, None, 2, 0, True, *windows)

    with pytest.raises(RuntimeError, match="mantissas are a CPU tensor of 4 dimensions"):
        run(input=torch.zeros(size))
    with pytest.raises(RuntimeError, match="exponent must be a contiguous float32"):
        run(exponent=torch.zeros(2))
    with pytest.raises(RuntimeError, match="state must be a contiguous float64"):
        run(state=torch.zeros(10))
    with pytest.raises(RuntimeError, match="bias must be contiguous mantissas"):
        run(bias=torch.zeros(outputs))
    with pytest.raises(RuntimeError, match="both must have the same shape"):
        zeros = torch.zeros(3, dtype=CARRIER)
        torch.ops.torch_odt.niti_add(zeros, one(0), zeros[:2], one(0), 0)
