"""int8 convolutions and linear layers: exactly what int64 sums say, in every layout, with any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from int8_cases import Case, assert_exact, assert_same, cases, channels_last, make_case, numbers, of, ours
from torch import Tensor

import torch_odt.ops as ops
from torch_odt import _extensions
from torch_odt.ops import int8_plain as plain

odt = torch.ops.torch_odt


@given(cases())
def test_sums_are_exact(case: Case) -> None:
    assert_exact(case)


@pytest.mark.parametrize("kind", ["random", "lowest", "highest"])
@pytest.mark.parametrize(
    ("channels", "size", "windows"),
    [
        ((64, 96), (20, 20), {"kernel": (1, 1)}),
        ((24, 144), (33, 31), {"kernel": (1, 1)}),
        ((23, 200), (9, 10), {"kernel": (1, 1)}),  # AMX leaves sums of so many terms to another set, but not of 24
        ((24, 200), (9, 10), {"kernel": (1, 1)}),
        ((3, 32), (64, 64), {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}),
        ((64, 64), (14, 14), {"kernel": (3, 3), "padding": (1, 1)}),
        ((144, 144), (28, 28), {"kernel": (3, 3), "padding": (1, 1), "groups": 144}),
        ((144, 144), (28, 28), {"kernel": (3, 3), "padding": (1, 1), "stride": (2, 2), "groups": 144}),
        ((700, 520), (1, 1), {"kernel": (1, 1)}),
    ],
)
def test_layers_of_networks_are_exact(
    threads: int, channels: tuple[int, int], size: tuple[int, int], windows: dict[str, Any], kind: str
) -> None:
    assert_exact(make_case(4, channels, size, kind=kind, zero_point=-3, **windows))


def test_int_mm_agrees() -> None:
    left, right = numbers((40, 72), "random", 1), numbers((24, 72), "random", 2)
    assert torch.equal(ops.int8_linear(left, right), torch._int_mm(left, right.t()))
    assert torch.equal(ops.int8_linear_grad_input(left[:, :24].contiguous(), right), torch._int_mm(left[:, :24], right))


@given(
    cases(),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
    st.sampled_from([(-128, 127, 0), (0, 127, 0), (-5, 90, -7)]),
)
def test_what_becomes_of_sums(case: Case, rounding: int, per_channel: bool, limits: tuple[int, int, int]) -> None:
    outputs = case.weight.shape[0]
    count = outputs if per_channel and rounding != 2 else 1
    scale = torch.linspace(0.001, 0.02, count) if rounding != 2 else torch.tensor([2.0**-7])
    bias = torch.arange(outputs, dtype=torch.int32) * 100 - 300
    zero, windows, one = case.zero_point, case.numbers, scale[:1]
    image = (case.input, case.weight, None)
    low, high, output_zero = limits
    size = list(case.input.shape[2:])
    assert_same("int8_conv2d_scaled", *image, bias, scale, zero, windows)
    seed = 2**40 + 5
    assert_same("int8_conv2d_quantized", *image, bias, scale, zero, output_zero, low, high, rounding, seed, windows)
    gradient = (case.grad_output, case.weight, None)
    assert_same("int8_conv2d_grad_input_scaled", *gradient, one, size, windows)
    assert_same("int8_conv2d_grad_input_quantized", *gradient, one, rounding, seed, size, windows)
    kernel = list(case.weight.shape[2:])
    assert_same("int8_conv2d_grad_weight_scaled", case.grad_output, case.input, scale, zero, kernel, windows)
    both = (case.grad_output, case.input, case.weight, None, one, scale)
    assert_same("int8_conv2d_backward", *both, zero, rounding, seed, windows)
    for dtype in (torch.int8, torch.float32):
        updated, expected = (channels_last(case.weight.to(dtype)).clone() for _ in range(2))
        arguments = (case.grad_output, case.input, scale, zero, rounding, seed, windows)
        of_bias = odt.int8_conv2d_update_weight_(updated, *arguments)
        assert torch.equal(of_bias, of("int8_conv2d_update_weight_", expected, *arguments))
        assert torch.equal(updated, expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("depth", [36, 100])
def test_threads_share_no_byte_of_a_mask(depth: int) -> None:
    case = make_case(1, (256, 2 * depth), (6, 8), (3, 3), padding=(1, 1), groups=2)
    for _ in range(30):
        image = (case.input, case.weight, None, None, torch.tensor([0.004]), 0, 0, -100, 90, 0, 0)
        found, expected = (call("int8_conv2d_quantized", *image, case.numbers) for call in (ours, of))
        assert torch.equal(found[1], expected[1])


def test_threads_change_no_bit(request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    case = make_case(4, (32, 48), (30, 30), (3, 3), padding=(1, 1))
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        output = ops.int8_conv2d_quantized(
            case.input, case.weight, torch.tensor([0.001]), rounding="stochastic", seed=3, **case.windows
        )
        gradient = ops.int8_conv2d_grad_input_quantized(
            case.grad_output, case.weight, torch.tensor([0.001]), (30, 30), seed=4, **case.windows
        )
        found.append((*output, *gradient))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        make_case(4, (64, 48), (14, 14), (3, 3), padding=(1, 1)),
        make_case(3, (160, 96), (7, 7), (1, 1)),
        make_case(5, (96, 96), (15, 15), (3, 3), groups=96, padding=(1, 1)),
        make_case(2, (64, 512), (7, 7), (3, 3), stride=(2, 2), padding=(1, 1)),
        make_case(2, (12, 20), (60, 60), (3, 3), padding=(1, 1)),
    ],
    ids=["blocks", "few pixels", "depthwise", "many weights, strided", "many pixels"],
)
def test_threads_change_no_bit_of_both_gradients(case: Case, packed: bool, request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    panels = odt.int8_pack_weight(case.weight, case.numbers, True) if packed else None
    scale = torch.tensor([0.001])
    found = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        found.append(
            odt.int8_conv2d_backward(
                case.grad_output, case.input, case.weight, panels, scale, scale, 3, 1, 7, case.numbers
            )
        )
    of_input, _ = ops.int8_conv2d_grad_input_quantized(
        case.grad_output, case.weight, scale, case.input.shape[2:], seed=7, **case.windows
    )
    assert torch.equal(found[0][0], of_input)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_stochastic_rounding_is_right_on_average() -> None:
    ones = torch.ones(1, 1, 400, 400, dtype=torch.int8)
    kernel = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    for fraction in (0.1, 0.5, 0.85):
        scale = torch.tensor([fraction])
        means = [
            float(
                ops.int8_conv2d_quantized(ones, kernel, scale, rounding="stochastic", seed=seed).output.float().mean()
            )
            for seed in range(3)
        ]
        assert len(set(means)) == 3
        assert all(abs(mean - fraction) < 0.006 for mean in means)


@pytest.mark.parametrize(("draws", "unit"), [(plain.half_draws, 1.0), (plain.byte_draws, 2.0**-8)])
def test_draws_are_spread_and_independent(draws: Callable[[int, int, int], Tensor], unit: float) -> None:
    for width in (1 << 16, 96, 24, 1):
        drawn = draws(1 << 16, width, 7).float() * unit
        counts = torch.histc(drawn, 16, 0, 1)
        assert float((counts - 4096).abs().max()) < 300
        for lag in (1, 2, 8, 16, 24, 32, 48, 64, 96):
            pairs = torch.stack([drawn[:-lag], drawn[lag:]])
            assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.02


def test_mask_and_largest() -> None:
    row = torch.tensor([[1, 10, 100]], dtype=torch.int8)
    found = ops.int8_linear_quantized(
        torch.tensor([[2]], dtype=torch.int8), row.t(), torch.tensor([1.0]), low=0, high=50
    )
    assert found.output.tolist() == [[2, 20, 50]]
    assert ops.unpack_bits(found.mask, 0, 3).tolist() == [True, True, False]
    assert found.largest.item() == 200


def test_packed_weights_follow_the_weight() -> None:
    case = make_case(2, (12, 20), (9, 9), (3, 3), stride=(2, 2), padding=(1, 1))
    cached = ops.PackedInt8Weight(case.weight, **case.windows)
    before = cached.for_forward()
    assert cached.for_forward() is before

    def run() -> tuple[Tensor, Tensor]:
        return (
            ops.int8_conv2d(case.input, case.weight, packed=cached.for_forward(), **case.windows),
            ops.int8_conv2d_grad_input(
                case.grad_output, case.weight, case.input.shape[2:], packed=cached.for_grad_input(), **case.windows
            ),
        )

    assert all(torch.equal(a, b) for a, b in zip(run(), (case.sums, case.input_sums), strict=True))
    case.weight.neg_()
    assert cached.for_forward() is not before
    assert all(torch.equal(a, b) for a, b in zip(run(), (case.sums, case.input_sums), strict=True))
    ops.int8_conv2d_update_weight_(case.weight, case.grad_output, case.input, torch.tensor([0.01]), **case.windows)
    assert torch.equal(run()[0], case.sums)
    cached.forget()
    assert torch.equal(run()[0], case.sums)


def test_linear_layers() -> None:
    x, weight, out = numbers((2, 5, 13), "random", 1), numbers((7, 13), "random", 2), numbers((2, 5, 7), "random", 3)
    wide = [t.long() for t in (x, weight, out)]
    assert torch.equal(ops.int8_linear(x, weight, input_zero_point=4), (wide[0] - 4) @ wide[1].t())
    assert torch.equal(ops.int8_linear_grad_input(out, weight), wide[2] @ wide[1])
    of_weight, of_bias = ops.int8_linear_grad_weight(out, x)
    rows, columns = wide[2].flatten(0, 1), wide[0].flatten(0, 1)
    assert torch.equal(of_weight, rows.t() @ columns) and torch.equal(of_bias, rows.sum(0))
    half = torch.tensor([0.5])
    assert torch.equal(ops.int8_linear_scaled(x, weight, half), (wide[0] @ wide[1].t()).float() / 2)
    assert torch.equal(ops.int8_linear_grad_input_scaled(out, weight, half), (wide[2] @ wide[1]).float() / 2)
    assert torch.equal(ops.int8_linear_grad_weight_scaled(out, x, half).weight, (rows.t() @ columns).float() / 2)
    fine = torch.tensor([2.0**-10])
    quantized = ops.int8_linear_grad_input_quantized(out, weight, fine, rounding="nearest").gradient
    assert torch.equal(quantized, ((wide[2] @ wide[1]).float() / 1024).round().clamp(-128, 127).to(torch.int8))
    updated = weight.float()
    ops.int8_linear_update_weight_(updated, out, x, half)
    assert torch.equal(updated, weight.float() - (rows.t() @ columns).float() / 2)


def test_nothing_in_nothing_out() -> None:
    empty = torch.empty(0, 4, 5, 5, dtype=torch.int8)
    weight = numbers((6, 4, 3, 3), "random", 1)
    assert ops.int8_conv2d(empty, weight).shape == (0, 6, 3, 3)
    assert ops.int8_conv2d_grad_input(torch.empty(0, 6, 3, 3, dtype=torch.int8), weight, (5, 5)).shape == empty.shape
    found = ops.int8_conv2d_grad_weight(torch.empty(0, 6, 3, 3, dtype=torch.int8), empty, 3)
    assert found.weight.shape == weight.shape and not found.weight.any() and not found.bias.any()
    pixels, nothing = numbers((2, 3, 4, 4), "random", 1), torch.empty(2, 0, 4, 4, dtype=torch.int8)
    found = ops.int8_conv2d_grad_weight(pixels, nothing, 1)
    assert found.weight.shape == (3, 0, 1, 1) and torch.equal(found.bias, pixels.sum((0, 2, 3)))
    assert ops.int8_conv2d_grad_weight(nothing, pixels, 1).weight.shape == (0, 3, 1, 1)
    assert not ops.int8_linear(torch.empty(3, 0, dtype=torch.int8), torch.empty(5, 0, dtype=torch.int8)).any()


def test_sums_of_few_terms_into_many_channels() -> None:
    x, weight = numbers((2, 4), "random", 1), numbers((70000, 4), "random", 2)
    assert torch.equal(ops.int8_linear(x, weight), x.long() @ weight.long().t())
    gradient = numbers((2, 70000), "random", 3)
    assert torch.equal(ops.int8_linear_grad_input(gradient, weight), gradient.long() @ weight.long())


def out(x: Tensor) -> Tensor:
    """A gradient for six output channels of a 3 x 3 kernel."""
    return x[:, [0, 1, 2, 3, 0, 1], :3, :3]


BAD: list[tuple[str, Callable[[Tensor, Tensor, Tensor], object]]] = [
    ("input must be an int8", lambda x, w, s: ops.int8_conv2d(x.float(), w)),
    ("weight must be an int8", lambda x, w, s: ops.int8_conv2d(x, w[0])),
    ("6 x 4 channels, which do not fit 4 input channels in 2 groups", lambda x, w, s: ops.int8_conv2d(x, w, groups=2)),
    ("kernel is larger than the padded input", lambda x, w, s: ops.int8_conv2d(x, w, dilation=3)),
    ("positive", lambda x, w, s: ops.int8_conv2d(x, w, stride=0)),
    ("input_zero_point must be a value of int8, not 200", lambda x, w, s: ops.int8_conv2d(x, w, input_zero_point=200)),
    ("scale must be", lambda x, w, s: ops.int8_conv2d_scaled(x, w, s.expand(5))),
    ("finite", lambda x, w, s: ops.int8_conv2d_scaled(x, w, s / 0)),
    ("low, high and output_zero_point", lambda x, w, s: ops.int8_conv2d_quantized(x, w, s, low=5, high=4)),
    ("power of two", lambda x, w, s: ops.int8_conv2d_quantized(x, w, 3 * s, rounding="pseudo_stochastic")),
    ("grad_output must have the output's shape", lambda x, w, s: ops.int8_conv2d_grad_input(x, w, (5, 5))),
    ("grad_output must have the output's shape", lambda x, w, s: ops.int8_conv2d_grad_weight(x, x, 3)),
    ("memory_format=torch.channels_last", lambda x, w, s: ops.int8_conv2d_update_weight_(w.contiguous(), out(x), x, s)),
    ("weight must have 2 dimensions", lambda x, w, s: ops.int8_linear(x, w)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), BAD, ids=[message for message, _ in BAD])
def test_bad_input_is_named(message: str, call: Callable[[Tensor, Tensor, Tensor], object]) -> None:
    x, weight = numbers((2, 4, 5, 5), "random", 1), channels_last(numbers((6, 4, 3, 3), "random", 2))
    with pytest.raises(RuntimeError, match=message):
        call(x, weight, torch.tensor([0.5]))


@pytest.mark.parametrize(
    ("windows", "error", "message"),
    [
        ({"stride": (1, 2, 3)}, ValueError, r"\(1, 2, 3\): a stride, padding, dilation or size is one whole number"),
        ({"padding": "same"}, ValueError, "'same': a stride, padding"),
        ({"dilation": 1.5}, ValueError, "1.5: a stride, padding"),
        ({"padding": 2**59, "stride": 2**58, "groups": 16}, RuntimeError, "must be 1073741824 at most"),
    ],
)
def test_windows_that_are_none_are_named(windows: dict[str, Any], error: type[Exception], message: str) -> None:
    x, kernel = numbers((2, 16, 6, 6), "random", 1), numbers((16, 1, 3, 3), "random", 2)
    with pytest.raises(error, match=message):
        ops.int8_conv2d(x, kernel, **windows)


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_bias_leaves_room_for_the_sums(sign: int) -> None:
    image = torch.full((1, 3, 1, 1), -128 if sign > 0 else 127, dtype=torch.int8)
    weight, scale = torch.full((1, 3, 1, 1), -128, dtype=torch.int8), torch.tensor([1.0])
    most = 2**31 - 1 - 3 * 255 * 128
    bias = torch.tensor([sign * most], dtype=torch.int32)
    expected = sign * most + int((image.long() * weight.long()).sum())
    assert ops.int8_conv2d_scaled(image, weight, scale, bias).item() == float(torch.tensor(expected).float())
    with pytest.raises(RuntimeError, match=f"bias must be from -{most} to {most}"):
        ops.int8_conv2d_scaled(image, weight, scale, bias + sign)


def test_windows_are_looked_at_while_tracing() -> None:
    x = torch.zeros(1, 4, 5, 5, dtype=torch.int8, device="meta")
    with pytest.raises(RuntimeError, match="stride"):
        ops.int8_conv2d(x, x, stride=0)


@pytest.mark.parametrize("windows", [[], [1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 1, 1, 1, 1]])
def test_windows_are_seven_numbers(windows: list[int]) -> None:
    image, kernel = numbers((2, 16, 6, 6), "random", 1), numbers((16, 16, 3, 3), "random", 2)
    one = torch.tensor([1.0])
    calls = {
        "int8_pack_weight": (kernel, windows, True),
        "int8_conv2d": (image, kernel, None, 0, windows),
        "int8_conv2d_backward": (numbers((2, 16, 4, 4), "random", 3), image, kernel, None, one, one, 0, 1, 5, windows),
    }
    for name, arguments in calls.items():
        with pytest.raises(RuntimeError, match=f"{name}: windows are seven numbers"):
            getattr(odt, name)(*arguments)
    on_meta = (numbers((2, 16, 4, 4), "random", 3).to("meta"), kernel.to("meta"), None, [6, 6], windows)
    with pytest.raises(RuntimeError, match="windows are seven numbers"):
        odt.int8_conv2d_grad_input(*on_meta)


def test_parameters_are_updated_in_place() -> None:
    weight = torch.nn.Parameter(channels_last(torch.zeros(2, 3, 1, 1)))
    x, gradient = (torch.ones(1, channels, 2, 2, dtype=torch.int8) for channels in (3, 2))
    assert ops.int8_conv2d_update_weight_(weight, gradient, x, torch.tensor([0.5])).tolist() == [4, 4]
    assert weight.is_leaf and weight.detach().flatten().tolist() == [-2.0] * 6


def test_tensors_of_several_devices_are_refused() -> None:
    x, kernel = numbers((2, 4, 6, 6), "random", 1), numbers((8, 4, 3, 3), "random", 2)
    with pytest.raises(RuntimeError, match="int8_conv2d_scaled: its tensors are on several devices, cpu and meta"):
        ops.int8_conv2d_scaled(x, kernel, torch.ones(1, device="meta"))


def test_linear_layers_name_what_is_not_int8() -> None:
    with pytest.raises(RuntimeError, match=r"int8_linear: input must be int8, not torch\.float32"):
        ops.int8_linear(torch.ones(3, 4), torch.ones(2, 4, dtype=torch.int8))
    with pytest.raises(RuntimeError, match="int8_linear: grad_output must be int8"):
        ops.int8_linear_grad_weight(torch.ones(3, 2), torch.ones(3, 4, dtype=torch.int8))


def test_roundings_have_names() -> None:
    x = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="choose one of nearest, stochastic, pseudo_stochastic"):
        ops.int8_conv2d_quantized(x, x, torch.tensor([1.0]), rounding="up")  # type: ignore[arg-type]


@pytest.mark.skipif(not _extensions.has_kernels, reason="packs nothing")
def test_packed_for_another_weight_is_refused() -> None:
    x, weight = numbers((2, 4, 5, 5), "random", 1), numbers((6, 4, 3, 3), "random", 2)
    with pytest.raises(RuntimeError, match="packed is not what"):
        ops.int8_conv2d(x, weight, packed=ops.int8_pack_weight(weight[:, :1, :1, :1]))


def test_operators_are_registered_as_torch_wants_them() -> None:
    case = make_case(2, (6, 8), (7, 7), (3, 3), stride=(2, 2), padding=(1, 1), groups=2)
    scale, bias, windows = torch.tensor([0.01]), torch.arange(8, dtype=torch.int32), case.numbers
    size, kernel = [7, 7], [3, 3]
    image, gradient = (case.input, case.weight, None), (case.grad_output, case.weight, None)
    weight = channels_last(case.weight.clone())
    samples: dict[str, tuple[Any, ...]] = {
        "int8_pack_weight": (case.weight, windows, True),
        "int8_conv2d": (*image, 3, windows),
        "int8_conv2d_scaled": (*image, bias, scale, 3, windows),
        "int8_conv2d_quantized": (*image, bias, scale, 3, 1, -128, 127, 1, 5, windows),
        "int8_conv2d_grad_input": (*gradient, size, windows),
        "int8_conv2d_grad_input_scaled": (*gradient, scale, size, windows),
        "int8_conv2d_grad_input_quantized": (*gradient, scale, 1, 5, size, windows),
        "int8_conv2d_grad_weight": (case.grad_output, case.input, 3, kernel, windows),
        "int8_conv2d_grad_weight_scaled": (case.grad_output, case.input, scale, 3, kernel, windows),
        "int8_conv2d_backward": (case.grad_output, *image, scale, scale, 3, 1, 5, windows),
        "int8_conv2d_update_weight_": (weight, case.grad_output, case.input, scale, 3, 1, 5, windows),
    }
    for name, arguments in samples.items():
        torch.library.opcheck(getattr(odt, name).default, arguments)


def test_a_quantised_layer_trains() -> None:
    """Gradient descent in int8 from end to end: a convolution learns another one's weights."""
    torch.manual_seed(0)
    target = torch.randint(-60, 61, (8, 4, 3, 3), dtype=torch.int8)
    learned = channels_last(torch.zeros_like(target))
    errors = []
    for step in range(150):
        x = torch.randint(-20, 21, (8, 4, 10, 10), dtype=torch.int8)
        difference = ops.int8_conv2d(x, learned, padding=1) - ops.int8_conv2d(x, target, padding=1)
        errors.append(float(difference.float().square().mean()))
        scale = difference.abs().max().clamp(min=1) / 127
        gradient = (difference / scale).round().to(torch.int8)
        rate = (scale * 2.0**-18).reshape(1)
        ops.int8_conv2d_update_weight_(learned, gradient, x, rate, seed=step, padding=1)
    assert errors[-1] < errors[0] / 300
