"""Layers in NITI's arithmetic against int64, in parts against one piece, and with held scales."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from niti_cases import mantissas, reference, scaled
from torch import Tensor, nn

from torch_odt.quant import niti_functions
from torch_odt.quant.batch_splitting import cache_bytes, parts_of
from torch_odt.quant.niti_functions import (
    niti_add,
    niti_avg_pool2d,
    niti_dequantize,
    niti_fork,
    niti_max_pool2d,
    niti_quantize,
    niti_relu,
)
from torch_odt.quant.niti_layers import NitiConv2d, NitiLayer, NitiLinear
from torch_odt.quant.niti_numbers import CARRIER, Scaled, as_carrier, as_int8, rescaled
from torch_odt.quant.niti_passes import How
from torch_odt.quant.packed_weights import PackedWeights
from torch_odt.quant.rescaling import WIDTH, Rescaling

POINTWISE = (1, 1, 0, 0, 1, 1, 1)

GEOMETRIES: list[tuple[tuple[int, int, int], dict[str, int]]] = [
    ((6, 5, 1), {}),
    ((6, 5, 3), {"padding": 1, "stride": 2}),
    ((6, 6, 3), {"padding": 1, "groups": 6}),
    ((6, 4, 3), {"padding": 2, "dilation": 2, "groups": 2}),
]


def conv(inputs: int, outputs: int, kernel: int, windows: dict[str, int], **options: Any) -> NitiConv2d:
    torch.manual_seed(0)
    return NitiConv2d(nn.Conv2d(inputs, outputs, kernel, **windows), **options)  # type: ignore[arg-type]


def run(layer: NitiLayer, image: Scaled, gradient: Scaled) -> dict[str, Tensor]:
    """A step of a layer: what it gives and what comes back, in integers."""
    layer.zero_grad()
    output = layer(image)
    torch.autograd.backward(
        [output.mantissas, output.exponent], [gradient.mantissas.detach(), gradient.exponent.detach()]
    )
    found = {
        "output": as_int8(output.mantissas.detach()),
        "output exponent": output.exponent.detach(),
        "input gradient": as_int8(image.mantissas.grad),  # type: ignore[arg-type]
        "input exponent": image.exponent.grad,
        "weight gradient": as_int8(layer.weight.grad),  # type: ignore[arg-type]
        "state": layer.rescaling,
        "backward state": layer.gradient_rescaling.grad,
    }
    if layer.bias is not None:
        found["bias gradient"] = as_int8(layer.bias.grad)  # type: ignore[arg-type]
    return {name: tensor.clone() for name, tensor in found.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [(20,), (3, 20), (2, 3, 20), (2, 3, 4, 20), (2, 0, 20)])
def test_a_linear_layer_takes_rows_of_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = NitiLinear(nn.Linear(20, 6)), torch.randn(shape)
    rows, alike = copy.deepcopy(layer), x.reshape(-1, 20).requires_grad_()
    x.requires_grad_()
    found = [niti_dequantize(each(inputs)) for each, inputs in ((layer, x), (rows, alike))]
    assert found[0].shape == (*shape[:-1], 6)
    assert torch.equal(found[0].reshape(-1, 6), found[1])
    gradient = torch.randn(found[1].shape)
    found[0].backward(gradient.view_as(found[0]))
    found[1].backward(gradient)
    assert x.grad is not None and alike.grad is not None and torch.equal(x.grad.reshape(-1, 20), alike.grad)
    assert layer.weight.grad is not None and rows.weight.grad is not None
    assert torch.equal(as_int8(layer.weight.grad), as_int8(rows.weight.grad))


@settings(max_examples=15)
@given(st.sampled_from(GEOMETRIES), st.integers(1, 3), st.integers(-20, 4), st.integers(1, 7), st.booleans())
def test_a_step_has_the_integers_of_the_reference(
    geometry: tuple[tuple[int, int, int], dict[str, int]], batch: int, exponent: int, bits: int, small: bool
) -> None:
    (inputs, outputs, kernel), windows = geometry
    layer = conv(inputs, outputs, kernel, windows, gradient_bits=bits)
    image = scaled(mantissas(batch, inputs, 7, 6, seed=1, most=1 if small else 127), exponent)
    like = layer(image).mantissas
    layer.rescaling.copy_(Rescaling().row())
    gradient = scaled(mantissas(*like.shape, seed=2, most=3 if small else 127), -9)
    found = run(layer, image, gradient)
    assert layer.bias is not None and layer.bias_exponent is not None
    weight = Scaled(layer.weight, layer.weight_exponent)
    bias = as_int8(layer.bias.detach())
    exact = reference(image, weight, bias, int(layer.bias_exponent), gradient, bits, windows)
    assert torch.equal(found["output"], exact.output) and int(found["output exponent"]) == exact.output_exponent
    assert torch.equal(found["input gradient"], exact.input_gradient)
    assert int(found["input exponent"]) == exact.input_exponent
    assert torch.equal(found["weight gradient"], exact.weight_gradient)
    assert torch.equal(found["bias gradient"], exact.bias_gradient)


def test_a_linear_layer_is_a_convolution_of_one_pixel() -> None:
    torch.manual_seed(0)
    layer = NitiLinear(nn.Linear(20, 6), gradient_bits=3)
    image, gradient = scaled(mantissas(5, 20, seed=1), -6), scaled(mantissas(5, 6, seed=2), -8)
    found = run(layer, image, gradient)
    sums = as_int8(image.mantissas.detach()).double() @ as_int8(layer.weight.detach()).double().T
    values = sums * 2.0 ** (-6 + float(layer.weight_exponent)) + layer.float_bias().double()  # type: ignore[union-attr]
    step = 2.0 ** float(found["output exponent"])
    assert float((found["output"] * step - values).abs().max()) <= step
    assert found["weight gradient"].shape == (6, 20) and int(found["weight gradient"].abs().max()) <= 8


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_parts_have_the_bits_of_one_piece(geometry: tuple[tuple[int, int, int], dict[str, int]]) -> None:
    """With a scale that is looked at, one that is held, and one that is outgrown."""
    (inputs, outputs, kernel), windows = geometry
    whole = conv(inputs, outputs, kernel, windows)
    parts = copy.deepcopy(whole)
    parts.part_bytes = 400
    for batch, most in enumerate((20, 20, 127, 127)):
        values = mantissas(7, inputs, 9, 8, seed=batch, most=most)
        found = []
        for layer in (whole, parts):
            image = scaled(values, -6)
            size = layer(image).mantissas.shape
            found.append(run(layer, image, scaled(mantissas(*size, seed=9 + batch, most=most), -9)))
            layer.gradient_rescaling.data.copy_(found[-1]["backward state"])
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert whole.rescalings()["output"].batches == 8
    assert whole.rescalings()["weight gradient"].checks < 4


def test_a_held_scale_clips_and_is_looked_at_in_the_next_batch() -> None:
    layer = conv(4, 4, 3, {"padding": 1})
    quiet, loud = mantissas(2, 4, 6, 6, seed=1, most=8), mantissas(2, 4, 6, 6, seed=2)
    for _ in range(3):
        layer(scaled(quiet, -6))
    held = layer.rescalings()["output"]
    assert (held.checks, held.period) == (2, 2)
    while layer.rescalings()["output"].is_due:
        layer(scaled(quiet, -6))
    clipped = layer(scaled(loud, -6))
    after = layer.rescalings()["output"]
    assert after.clipped_batches == 1 and after.is_due
    assert int(as_int8(clipped.mantissas).abs().max()) == 127 and float(clipped.exponent.detach()) == held.exponent
    looked = layer(scaled(loud, -6))
    assert float(looked.exponent.detach()) > held.exponent and layer.rescalings()["output"].changes == 1


def test_evaluation_leaves_the_scales_alone() -> None:
    layer = conv(4, 4, 3, {}).eval()
    image = scaled(mantissas(2, 4, 6, 6, seed=1), -6)
    first = layer(image)
    assert layer.rescalings()["output"].batches == 0
    layer.train()
    assert torch.equal(as_int8(layer(image).mantissas), as_int8(first.mantissas))


def test_float32_goes_in_and_comes_out() -> None:
    """Between float32 neighbours the products alone are integers: nothing is rounded on the way out or back."""
    layer = conv(4, 6, 3, {"padding": 1})
    layer.to_float = True
    x = torch.randint(-100, 101, (2, 4, 5, 5)).float().requires_grad_()
    output = layer(x)
    weight, bias = layer.float_weight(), layer.float_bias()
    assert bias is not None
    # The bias is rounded to the sums' unit.
    apart = (output - torch.conv2d(x, weight, bias, padding=1)).detach().abs().max()
    assert float(apart) <= 2.0 ** float(layer.weight_exponent)
    gradient = torch.randint(-100, 101, output.shape).float()
    (found,) = torch.autograd.grad(output, x, gradient)
    expected = torch.nn.grad.conv2d_input(x.shape, weight, gradient, padding=1)
    assert torch.equal(found, expected)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(RuntimeError, match="the input of a convolution holds numbers that are not finite"):
            layer(torch.full((1, 4, 5, 5), bad))
        with pytest.raises(RuntimeError, match="the gradient of a convolution's output"):
            layer(x).backward(torch.full_like(gradient, bad))


def test_wrong_options_of_a_layer_are_refused() -> None:
    with pytest.raises(ValueError, match="rounding='stochastic'"):
        conv(3, 4, 1, {}, rounding="stochastic")
    with pytest.raises(ValueError, match="gradient_bits=8: it is from -8 to 7"):
        conv(3, 4, 1, {}, gradient_bits=8)


def test_a_weight_without_a_scale_is_refused() -> None:
    layer = nn.Linear(3, 2)
    nn.init.zeros_(layer.weight)
    with pytest.raises(ValueError, match="all zeros"):
        NitiLinear(layer)
    nn.init.constant_(layer.weight, float("nan"))
    with pytest.raises(ValueError, match="weight holds numbers that are not finite"):
        NitiLinear(layer)


def test_functions_of_mantissas_against_float32() -> None:
    values = mantissas(2, 3, 8, 8, seed=4)
    real = (values.float() * 0.25).requires_grad_()
    cases = [
        (niti_relu, torch.relu),
        (lambda t: niti_relu(t, 6.0), nn.functional.relu6),
        (lambda t: niti_max_pool2d(t, 2), lambda t: torch.max_pool2d(t, 2)),
        (lambda t: niti_max_pool2d(t, 3, 2, 1), lambda t: torch.max_pool2d(t, 3, 2, 1)),
        (lambda t: niti_avg_pool2d(t, 4), lambda t: nn.functional.avg_pool2d(t, 4)),
        (lambda t: niti_avg_pool2d(t, 8), lambda t: nn.functional.avg_pool2d(t, 8)),
        (lambda t: niti_add(*niti_fork(t)), lambda t: t + t),
    ]
    for ours, plain in cases:
        tensor = scaled(values, -2)
        found, expected = ours(tensor), plain(real)
        gradient = scaled(mantissas(*found.mantissas.shape, seed=5), -7)
        torch.autograd.backward([found.mantissas, found.exponent], [gradient.mantissas.detach(), gradient.exponent])
        (wanted,) = torch.autograd.grad(expected, real, niti_dequantize(gradient).detach())
        step = 2.0 ** float(found.exponent.detach())
        assert float((niti_dequantize(found) - expected).detach().abs().max()) <= 0.5 * step
        assert tensor.mantissas.grad is not None and tensor.exponent.grad is not None
        back = as_int8(tensor.mantissas.grad).float() * 2.0 ** float(tensor.exponent.grad)
        assert float((back - wanted).abs().max()) <= 2.0 ** float(tensor.exponent.grad)


@pytest.mark.parametrize(("part_elements", "seed"), [(1, 0), (1 << 18, 1), (3 * 9 * 9 * 2, 2)])
def test_gradients_of_windows_that_overlap_have_the_bits_of_their_exact_sums(
    monkeypatch: pytest.MonkeyPatch, part_elements: int, seed: int
) -> None:
    monkeypatch.setattr(niti_functions, "_PART_ELEMENTS", part_elements // torch.get_num_threads())
    values = mantissas(5, 3, 9, 9, seed=seed).contiguous(memory_format=torch.channels_last)
    tensor = scaled(values, -2)
    found = niti_max_pool2d(tensor, 3, 1, 1)
    gradient = scaled(mantissas(*found.mantissas.shape, seed=5), -7)
    torch.autograd.backward([found.mantissas, found.exponent], [gradient.mantissas.detach(), gradient.exponent])
    real = values.float().requires_grad_()
    steps = as_int8(gradient.mantissas).float()
    (sums,) = torch.autograd.grad(torch.max_pool2d(real, 3, 1, 1), real, steps)
    expected, shift = rescaled(sums.to(torch.int32), "pseudo_stochastic")
    assert shift > 0
    assert torch.equal(as_int8(tensor.mantissas.grad), expected)
    assert float(tensor.exponent.grad) == -7 + shift


def test_quantising_and_back_is_exact_in_both_passes() -> None:
    x = torch.randint(-127, 128, (4, 5)).float().requires_grad_()
    y = niti_dequantize(niti_quantize(x, "nearest"))
    assert torch.equal(x, y)
    gradient = torch.randint(-127, 128, (4, 5)).float() / 512
    y.backward(gradient)
    assert torch.equal(x.grad, gradient)  # type: ignore[arg-type]


def test_moving_and_retyping_a_layer_leaves_its_integers() -> None:
    layer = conv(3, 4, 3, {})
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.half().double().to("cpu")
    for name, tensor in layer.state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.equal(
            tensor.view(torch.int8), before[name].view(torch.int8)
        )
    assert layer.weight.dtype == CARRIER


def test_packed_weights_are_used_again_until_they_change() -> None:
    packs = PackedWeights()
    layer = conv(16, 16, 3, {"padding": 1}, packs=packs)
    plain = conv(16, 16, 3, {"padding": 1})
    image = mantissas(2, 16, 6, 6, seed=1)
    for _ in range(3):
        assert torch.equal(as_int8(layer(scaled(image, -6)).mantissas), as_int8(plain(scaled(image, -6)).mantissas))
    assert (packs.packed_count, packs.reused_count) == (1, 2)
    with torch.no_grad():
        for each in (layer, plain):
            as_int8(each.weight).neg_()
    assert torch.equal(as_int8(layer(scaled(image, -6)).mantissas), as_int8(plain(scaled(image, -6)).mantissas))
    assert packs.packed_count == 2
    kept = packs.kept_bytes
    packs.release()
    assert packs.kept_bytes == 0 <= kept


def test_packed_weights_are_used_in_parts_of_a_batch_and_both_passes() -> None:
    packs = PackedWeights()
    image, gradient = mantissas(8, 16, 6, 6, seed=1), mantissas(8, 16, 6, 6, seed=2)
    ways: list[dict[str, Any]] = [{"packs": packs, "part_bytes": 3000}, {"part_bytes": 3000}, {}]
    kept, *others = (
        run(conv(16, 16, 3, {"padding": 1}, **way), scaled(image, -6), scaled(gradient, -4)) for way in ways
    )
    assert packs.packed_count == 2
    for other in others:
        assert all(torch.equal(kept[name], other[name]) for name in kept)


def test_one_weight_may_have_several_windows() -> None:
    packs, weight = PackedWeights(), as_int8(as_carrier(mantissas(16, 16, 3, 3, seed=1)))
    for windows in (POINTWISE, (2, 2, 1, 1, 1, 1, 1)) * 2:
        packed = packs.packed(weight, windows, for_grad_input=True)
        assert torch.equal(packed, torch.ops.torch_odt.int8_pack_weight(weight, windows, True))
    assert (packs.packed_count, packs.reused_count) == (2, 2)


def test_operators_that_keep_packed_weights_can_be_traced() -> None:
    packs = PackedWeights()
    layer = conv(16, 16, 3, {"padding": 1}, packs=packs)
    input = scaled(mantissas(2, 16, 6, 6, seed=1), -6)
    how = How(packs=packs.number)
    tensors = (layer.weight.detach(), layer.weight_exponent, None, None, layer.rescaling, torch.zeros(2, WIDTH))
    arguments = (*input, *tensors, layer.gradient_bits, how.numbers(), None, [1, 1, 1, 1, 1, 1, 1])
    torch.library.opcheck(torch.ops.torch_odt.niti_packed_layer.default, arguments, test_utils="test_faketensor")


def test_the_most_recent_pack_is_released_under_pressure() -> None:
    weights = [as_int8(as_carrier(mantissas(16, 16, 3, 3, seed=seed))) for seed in range(4)]
    size = PackedWeights().packed(weights[0], POINTWISE, for_grad_input=False).nbytes
    if not size:
        pytest.skip("without compiled parts nothing is packed")
    packs = PackedWeights(limit_bytes=3 * size)
    for _ in range(3):
        for weight in weights:
            packs.packed(weight, POINTWISE, for_grad_input=False)
    # Of four in turn, three fit: the least recently used one would never be there when it is asked for.
    assert packs.kept_bytes == 3 * size
    assert packs.reused_count >= 4 and packs.released_count == packs.packed_count - 3
    nothing = PackedWeights(limit_bytes=0)
    nothing.packed(weights[0], POINTWISE, for_grad_input=False)
    assert nothing.kept_bytes == 0


def test_parts_of_a_batch() -> None:
    assert parts_of(8, 100, 0, 0) == [slice(0, 8)]
    assert parts_of(8, 100, 100, 900) == [slice(0, 8)]
    assert [part.stop - part.start for part in parts_of(8, 100, 100, 450)] == [3, 3, 2]
    assert len(parts_of(8, 100, 1000, 450)) == 8, "a sample is never cut"


def test_the_size_of_a_cache(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate([(1, "Instruction", "32K"), (1, "Data", "48K"), (2, "Unified", "2M")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("level", str(level)), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    assert cache_bytes(tmp_path) == 2 << 20
    assert cache_bytes(tmp_path / "nothing") > 0
