"""An int8 layer against float64: what it gives is within a step of the rounded truth, and its gradients are near."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from quantized_models import relative_error
from torch import Tensor

from torch_odt.quant import layer
from torch_odt.quant.activation import Int8Activation, new_slot, new_weight_slot, weight_of
from torch_odt.quant.layer import LayerTensors, Windows, int8_layer, int8_layer_to_float
from torch_odt.quant.pooling import Pool
from torch_odt.quant.ranges import grid_of


@dataclass
class Case:
    """A layer, its input, and the same as real numbers in float64."""

    windows: Windows
    values: Tensor
    slot: Tensor
    tensors: LayerTensors
    output_grid: Tensor
    low: float | None = None
    high: float | None = None

    input_grid = grid_of(-1.0, 3.0)

    @property
    def input(self) -> Int8Activation:
        return Int8Activation(self.values, self.slot, self.input_grid)

    def run(self, scales_gradients: bool = True) -> Int8Activation:
        return int8_layer(
            self.input, self.tensors, self.windows, self.output_grid, low=self.low, high=self.high,
            scales_gradients=scales_gradients,
        )  # fmt: skip

    def real(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Input, weight, bias and output in float64, the first three as leaves."""
        t, w = self.tensors, self.windows
        x = ((self.values.double() - self.input_grid[1]) * self.input_grid[0].double()).requires_grad_()
        scale = t.weight_scale.double().view(-1, *[1] * (t.weight.dim() - 1))
        weight = (t.weight.double() * scale).requires_grad_()
        assert t.bias is not None
        bias = t.bias.detach().double().requires_grad_()
        if t.weight.dim() == 2:
            return x, weight, bias, torch.nn.functional.linear(x, weight, bias)
        output = torch.conv2d(x, weight, bias, w.stride, w.padding, w.dilation, w.groups)
        return x, weight, bias, output if w.pool is None else self._pooled(output, w.pool)

    def whole(self, output: Tensor) -> tuple[Tensor, int, int]:
        """A real output rounded to the grid, and the bounds there."""
        step, zero = self.output_grid.double()
        low = -128 if self.low is None else max(-128, round(self.low / float(step)) + int(zero))
        high = 127 if self.high is None else min(127, round(self.high / float(step)) + int(zero))
        return (output.detach() / step).round() + zero, low, high

    def _pooled(self, output: Tensor, pool: Pool) -> Tensor:
        """Of each window the element that is the largest in int8: of equal ones the first."""
        whole, low, high = self.whole(output)
        window = (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)
        _, places = F.max_pool2d(whole.clamp(low, high), *window, return_indices=True)
        return output.flatten(2).gather(2, places.flatten(2)).view(places.shape)

    def descended(self, kept: tuple[Any, ...], rest: tuple[Any, ...], run: Any) -> list[Tensor]:
        """What the operator gives and changes whose weight's gradient is taken off the weight."""
        weight, rounding, saturated = self.tensors.weight.clone(), torch.tensor([3, 4]), torch.tensor(5)
        input_shape, for_input, _, for_bias, *options = rest
        _, gradient, _ = layer._backward(*kept, input_shape, False, True, False, *options)
        # Ten steps for the largest, and some decay.
        rate = 10 / float((gradient.flatten(1).abs().amax(1) / self.tensors.weight_scale).max())
        found = run(
            *kept[:4], weight, *kept[5:], rounding, saturated, input_shape, for_input, for_bias, options[0], rate,
            0.01 / rate, options[1],
        )  # fmt: skip
        assert rounding.tolist() == [3, 5] and not torch.equal(weight, self.tensors.weight)
        assert 5 <= int(saturated) < 5 + weight.numel() / 10
        return [*found, weight, saturated]


PADDED = Windows(padding=(1, 1))


def make_case(
    channels: tuple[int, int] = (8, 12),
    kernel: int | None = 3,
    windows: Windows = PADDED,
    low: float | None = None,
    high: float | None = None,
    seed: int = 0,
) -> Case:
    """A convolution, or with kernel None a linear layer, of random numbers."""
    draw = torch.Generator().manual_seed(seed)
    shape = (3, channels[0]) if kernel is None else (3, channels[0], 9, 8)
    size = () if kernel is None else (kernel, kernel)
    values = torch.randint(-128, 128, shape, generator=draw).to(torch.int8)
    weight = torch.randint(-127, 128, (channels[1], channels[0] // windows.groups, *size), generator=draw).to(
        torch.int8
    )
    if kernel is not None:
        values, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (values, weight))
    scale = torch.rand(channels[1], generator=draw) * 0.01 + 1e-4
    tensors = LayerTensors(
        weight=weight,
        weight_slot=new_weight_slot(weight).requires_grad_(),
        weight_scale=scale,
        bias=(scale * Case.input_grid[0] * torch.randint(-3000, 3000, (channels[1],), generator=draw)).requires_grad_(),
    )
    case = Case(windows, values, new_slot(values.shape).requires_grad_(), tensors, torch.ones(2), low, high)
    output = case.real()[3].detach()
    case.output_grid = grid_of(float(output.quantile(0.02)), float(output.quantile(0.98)))
    return case


CASES = {
    "pointwise": make_case((16, 24), 1, Windows()),
    "strided": make_case((8, 12), 3, Windows((2, 2), (1, 1))),
    "depthwise": make_case((12, 12), 3, Windows(padding=(1, 1), groups=12)),
    "grouped": make_case((6, 9), 3, Windows(padding=(2, 2), dilation=(2, 2), groups=3)),
    "linear": make_case((20, 11), None, Windows()),
    "relu": make_case(low=0.0),
    "relu6": make_case(low=0.0, high=1.0),
    "pooled": make_case(windows=Windows(padding=(1, 1), pool=Pool((2, 2), (2, 2))), low=0.0),
    "pooled apart": make_case((4, 5), windows=Windows((2, 1), pool=Pool((1, 2), (2, 3), (0, 1)))),
    "pooled up": make_case((4, 3), windows=Windows(padding=(1, 1), pool=Pool((2, 3), (2, 3), ceil_mode=True))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_output_is_the_rounded_truth(name: str) -> None:
    case = CASES[name]
    output = case.run()
    step, zero = case.output_grid.double()
    truth = case.real()[3].detach()
    expected = (truth.clamp(case.low, case.high) if case.low is not None else truth) / step + zero
    away = (output.values.double() - expected.clamp(-128, 127)).abs()
    # Half a step, and what float32 loses of a number of up to 2^24 steps; a bound is rounded once more.
    assert float(away.max()) < (0.51 if case.high is None else 1.01)
    assert output.slot.shape == output.values.shape == truth.shape
    assert output.slot.untyped_storage().nbytes() == 2


@given(
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    groups=st.integers(1, 4),
    kernel=st.sampled_from([1, 2, 3]),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 1)),
    seed=st.integers(0, 99),
)
def test_any_windows(
    channels: tuple[int, int],
    groups: int,
    kernel: int,
    stride: tuple[int, int],
    padding: tuple[int, int],
    seed: int,
) -> None:
    windows = Windows(stride, padding, (1, 1), groups)
    case = make_case((channels[0] * groups, channels[1] * groups), kernel, windows, seed=seed)
    output = case.run()
    step, zero = case.output_grid.double()
    expected = (case.real()[3].detach() / step + zero).clamp(-128, 127)
    assert float((output.values.double() - expected).abs().max()) < 0.51


def passed(case: Case, output: Int8Activation) -> Tensor:
    """Where the gradient passes: where nothing was clamped before rounding."""
    whole, low, high = case.whole(case.real()[3])
    return (whole >= low) & (whole <= high)


def a_gradient(output: Int8Activation) -> Tensor:
    """One of numbers that slots take as they are."""
    return torch.randn(output.values.shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def gradients(case: Case, gradient: Tensor, scales: bool = True) -> list[Tensor]:
    t = case.tensors
    assert t.bias is not None
    found = torch.autograd.grad(case.run(scales).slot, [case.slot, t.weight_slot, t.bias], gradient)
    assert found[1].is_contiguous() and found[1].shape == t.weight_slot.shape
    return [found[0], weight_of(found[1]), found[2]]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_float64_but_for_rounding(name: str) -> None:
    case = CASES[name]
    output = case.run()
    gradient = a_gradient(output)
    x, weight, bias, truth = case.real()
    wanted = torch.autograd.grad(truth, [x, weight, bias], gradient.double() * passed(case, output))
    found = gradients(case, gradient)
    assert relative_error(found[0], wanted[0]) < 0.04
    assert relative_error(found[1], wanted[1]) < 0.04
    assert relative_error(found[2], wanted[2]) < 1e-5


def test_channels_with_small_steps_have_as_good_gradients() -> None:
    case = make_case((8, 12), 3)
    case.tensors.weight_scale.copy_(torch.logspace(-6, -2, 12))
    case.output_grid = grid_of(-2.0, 2.0)
    gradient = a_gradient(case.run())
    _, weight, _, truth = case.real()
    (wanted,) = torch.autograd.grad(truth, weight, gradient.double() * passed(case, case.run()))
    found = gradients(case, gradient)[1]
    assert all(relative_error(ours, theirs) < 0.05 for ours, theirs in zip(found, wanted, strict=True))


def test_depthwise_channels_with_small_gradients_pass_on_as_good_ones() -> None:
    case = make_case((12, 12), 3, Windows(padding=(1, 1), groups=12))
    gradient = (a_gradient(case.run()) * torch.logspace(-5, 0, 12).view(-1, 1, 1)).bfloat16()
    x, _, _, truth = case.real()
    (wanted,) = torch.autograd.grad(truth, x, gradient.double() * passed(case, case.run()))
    found = gradients(case, gradient)[0]
    assert all(relative_error(found[:, i], wanted[:, i]) < 0.03 for i in range(12))


def test_gradients_are_right_on_average() -> None:
    case = make_case((6, 5), 3)
    gradient = a_gradient(case.run())
    x, weight, _, truth = case.real()
    of_input, of_weight = torch.autograd.grad(truth, [x, weight], gradient.double() * passed(case, case.run()))
    assert torch.equal(gradients(case, gradient)[1], gradients(case, gradient)[1])
    # Other largest values draw other numbers.
    factors = [1 + number / 64 for number in range(40)]
    found = [[each / factor for each in gradients(case, gradient * factor)] for factor in factors]
    assert not torch.equal(found[0][1], found[1][1])
    for position, wanted in enumerate((of_input, of_weight)):
        mean = torch.stack([each[position] for each in found]).mean(0)
        assert relative_error(mean, wanted) < 0.4 * relative_error(found[0][position], wanted)


def test_without_qas_gradients_are_multiplied_by_the_squares_of_the_steps() -> None:
    case = make_case((6, 5), 3)
    gradient = a_gradient(case.run())
    plain, scaled = gradients(case, gradient, scales=False), gradients(case, gradient)
    s_w = case.tensors.weight_scale
    assert torch.equal(scaled[0], plain[0])
    torch.testing.assert_close(scaled[1], plain[1] / s_w.view(-1, 1, 1, 1) ** 2)
    torch.testing.assert_close(scaled[2], plain[2] / (s_w * case.input_grid[0]) ** 2)


def test_to_float_is_the_same_layer() -> None:
    case = CASES["linear"]
    x, weight, _, truth = case.real()
    output = int8_layer_to_float(case.input, case.tensors, case.windows)
    assert output.dtype == torch.float32 and relative_error(output, truth) < 1e-6
    gradient = torch.randn_like(output)
    found = torch.autograd.grad(output, [case.slot, case.tensors.weight_slot], gradient)
    wanted = torch.autograd.grad(truth, [x, weight], gradient.double())
    assert relative_error(found[0], wanted[0]) < 0.04
    assert relative_error(found[1], wanted[1]) < 0.04


def test_a_frozen_weight_keeps_no_input() -> None:
    def kept(case: Case) -> int:
        tensors: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            case.run()
        return sum(tensor.nbytes for tensor in tensors)

    trained, frozen = make_case(), make_case()
    frozen.tensors.weight_slot.requires_grad_(False)
    assert kept(trained) - kept(frozen) == trained.values.nbytes
    outputs = trained.run().values.numel()
    # Beside the mask of a bit an element: the weight, its steps and the grid.
    assert kept(frozen) == outputs // 8 + frozen.tensors.weight.nbytes + 12 * 4 + 2 * 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the check itself
@pytest.mark.parametrize("name", ["relu6", "linear", "pooled up"])
def test_it_is_registered_as_torch_wants_it(name: str) -> None:
    case = CASES[name]
    t = case.tensors
    tensors = (case.values, case.slot, case.input_grid, t.weight, t.weight_slot, t.weight_scale, t.bias)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    windows = case.windows.numbers
    operators = torch.ops.torch_odt
    arguments = (*tensors, case.output_grid, case.low, case.high, True, windows)
    torch.library.opcheck(operators.int8_layer.default, arguments, test_utils=checks)
    if case.windows.pool is None:
        torch.library.opcheck(operators.int8_layer_to_float.default, (*tensors, False, windows), test_utils=checks)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    case = make_case()
    with pytest.raises(RuntimeError, match="gradient is not finite"):
        case.run().slot.backward(torch.full(case.run().values.shape, float("inf")))


@pytest.mark.parametrize("groups", [1, 4])
def test_a_gradient_that_overflows_with_the_steps_is_named(groups: int) -> None:
    case = make_case((4, 4), 3, Windows(padding=(1, 1), groups=groups))
    t = case.tensors
    gradient, mask = torch.full(case.run().values.shape, 1e38, dtype=torch.bfloat16), None
    kept = (gradient, mask, case.values, case.input_grid, t.weight, torch.full((4,), 1e3))
    rest = (list(case.values.shape), True, False, False, False, case.windows.numbers)
    for run in (torch.ops.torch_odt.int8_layer_backward, layer._backward):
        with pytest.raises(RuntimeError, match="gradient times the weight's steps is not finite"):
            run(*kept, *rest)


def test_no_samples() -> None:
    case = make_case()
    case.values, case.slot = case.values[:0], new_slot((0, 8, 9, 8)).requires_grad_()
    output = case.run()
    output.slot.backward(torch.zeros(output.values.shape))
    assert output.values.shape == (0, 12, 9, 8)
    assert case.tensors.weight_slot.grad is not None and not case.tensors.weight_slot.grad.any()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_compiled_layer_has_the_bits_of_plain_torch(name: str, scales: bool, dtype: torch.dtype) -> None:
    case = CASES[name]
    t, ops = case.tensors, torch.ops.torch_odt
    tensors = (case.values, case.slot, case.input_grid, t.weight, t.weight_slot, t.weight_scale, t.bias)
    windows = case.windows.numbers
    with torch.no_grad():
        arguments = (*tensors, case.output_grid, case.low, case.high, scales, windows)
        found, expected = ops.int8_layer(*arguments), layer._layer(*arguments)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
        assert found[0].stride() == expected[0].stride() and found[1].shape == expected[1].shape
        real = (*tensors, scales, windows[:7])
        assert torch.equal(ops.int8_layer_to_float(*real), layer._layer_to_float(*real))
        gradient = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        kept = (gradient, found[2], case.values, case.input_grid, t.weight, t.weight_scale)
        for wanted in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
            rest = (list(case.values.shape), *wanted, scales, windows)
            for ours, theirs in zip(ops.int8_layer_backward(*kept, *rest), layer._backward(*kept, *rest), strict=True):
                assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
            if wanted[1]:
                descended = [case.descended(kept, rest, run) for run in (ops.int8_layer_descend_, layer._descend)]
                assert all(torch.equal(*pair) for pair in zip(*descended, strict=True))


def test_an_activation_is_printed_in_a_line() -> None:
    activation = Int8Activation(torch.zeros(2, 3, dtype=torch.int8), new_slot((2, 3)), torch.tensor([0.25, -7.0]))
    assert repr(activation) == "Int8Activation(shape=(2, 3), grid=tensor([ 0.2500, -7.0000]))"


@pytest.mark.parametrize("run", [torch.ops.torch_odt.int8_layer, layer._layer])
@pytest.mark.parametrize(("bias", "scale"), [(float("nan"), 1e-3), (0.0, 0.0)])
def test_a_bias_that_is_no_number_is_named(run: Any, bias: float, scale: float) -> None:
    case = make_case()
    t = case.tensors
    with torch.no_grad():
        assert t.bias is not None
        t.bias[3], t.weight_scale[3] = bias, scale
        arguments = (*case.input, *t, case.output_grid, None, None, True, case.windows.numbers)
        with pytest.raises(RuntimeError, match="a bias over its steps is not a number"):
            run(*arguments)
