"""Sums, products, clamps, tables, dropout and pools of int8 activations, against float64 on the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_odt.quant import joining, pointwise, pooling
from torch_odt.quant.activation import Int8Activation, new_slot
from torch_odt.quant.modules import Int8Function
from torch_odt.quant.pooling import Pool
from torch_odt.quant.ranges import grid_of

GRID = grid_of(-1.0, 3.0)
# Of max-pools whose windows overlap gradients are added up in bfloat16: three roundings of numbers up to 4.
SUMMED = 3 * 2.0**-7


def activation(*shape: int, grid: Tensor = GRID, seed: int = 0) -> Int8Activation:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, shape, generator=draw).to(torch.int8)
    if len(shape) == 4:
        values = values.contiguous(memory_format=torch.channels_last)
    return Int8Activation(values, new_slot(shape).requires_grad_(), grid)


def real(x: Int8Activation) -> Tensor:
    return ((x.values.double() - x.grid[1]) * x.grid[0].double()).requires_grad_()


def check(
    inputs: list[Int8Activation],
    ours: Callable[..., Int8Activation],
    truth: Callable[..., Tensor],
    *,
    steps: float = 0.51,
    clamped: bool = False,
    gradient_atol: float = 1e-5,
) -> None:
    """Values within half a step of the truth; where nothing is clamped, gradients equal to its own but for bfloat16."""
    reals = [real(x) for x in inputs]
    output, expected = ours(*inputs), truth(*reals)
    whole = expected.detach() / output.grid[0].double() + output.grid[1]
    assert float((output.values - whole.clamp(-128, 127)).abs().max()) <= steps
    inside = (whole.round() >= -128) & (whole.round() <= 127)
    assert bool(inside.all()) != clamped
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    wanted = torch.autograd.grad(expected, reals, gradient.double() * inside)
    found = torch.autograd.grad(output.slot, [x.slot for x in inputs], gradient)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2**-8, atol=gradient_atol)


def test_there_and_back() -> None:
    x = torch.linspace(-2, 4, 61).view(1, 1, 61, 1).requires_grad_()
    activation = pointwise.quantize(x, GRID)
    back = pointwise.dequantize(activation)
    within = x.clamp(-1, 3).detach()
    assert float((back.detach() - within).abs().max()) <= 0.5 * float(GRID[0]) + 1e-6
    back.backward(torch.ones_like(back))
    assert x.grad is not None
    half = float(GRID[0]) / 2
    assert torch.equal(x.grad.bool(), (x > -1 - half) & (x < 3 + half))
    # What lies on the grid stays where it is.
    assert torch.equal(pointwise.quantize(back.detach(), GRID).values, activation.values)


def test_sums() -> None:
    left, right = activation(2, 4, 5, 5), activation(2, 4, 5, 5, grid=grid_of(-0.5, 0.1), seed=1)
    check([left, right], lambda a, b: pointwise.add(a, b, grid_of(-2.0, 4.0)), torch.add)
    check([left, right], lambda a, b: pointwise.add(a, b, grid_of(-0.5, 2.0)), torch.add, clamped=True)
    output = pointwise.add(left, right, GRID, low=0.0)
    assert int(output.values.min()) == int(GRID[1])


@pytest.mark.parametrize("shape", [(2, 4, 5, 5), (2, 4, 1, 1)])
def test_products(shape: tuple[int, ...]) -> None:
    left, right = activation(2, 4, 5, 5), activation(*shape, grid=grid_of(0.0, 1.0), seed=1)
    check([left, right], lambda a, b: pointwise.multiply(a, b, GRID), torch.mul)


def test_concatenations() -> None:
    left, right = activation(2, 4, 5, 5), activation(2, 3, 5, 5, grid=grid_of(-0.5, 4.0), seed=1)
    check(
        [left, right], lambda *both: joining.concatenate(both, grid_of(-1.1, 4.1), 1), lambda *both: torch.cat(both, 1)
    )
    flat, other = activation(2, 6), activation(2, 5, seed=1)
    check([flat, other], lambda *both: joining.concatenate(both, GRID, -1), lambda *both: torch.cat(both, 1))


def test_clamps() -> None:
    x = activation(2, 4, 5, 5)
    output = pointwise.clamp(x, 0.0, 1.0)
    torch.testing.assert_close(real(output).float(), real(x).float().clamp(0, 1), atol=float(GRID[0]), rtol=0)
    output.slot.backward(torch.ones(2, 4, 5, 5))
    inside = (real(x) > -0.5 * GRID[0]) & (real(x) < 1 + 0.5 * GRID[0])
    assert x.slot.grad is not None and torch.equal(x.slot.grad.bool(), inside)


@pytest.mark.parametrize("function", [nn.SiLU(), nn.Hardswish(), nn.Sigmoid(), nn.GELU(), nn.LeakyReLU(0.1)])
def test_functions_by_a_table(function: nn.Module) -> None:
    x = activation(2, 4, 5, 5, grid=grid_of(-4.0, 3.9))
    output = function(real(x)).detach()
    grid = grid_of(float(output.min()), float(output.max()))
    layer = Int8Function(function, x.grid, grid)
    # A zero point is a whole number, so that the ends of a range may lie half a step outside.
    layer.slopes.copy_(Int8Function(function, x.grid, grid_of(-9.0, 9.0)).slopes)
    assert layer(x).values.unique().numel() > 30
    check([x], layer, function)


def test_dropout_is_exact_and_draws_as_torch_does() -> None:
    x = activation(64, 32)
    torch.manual_seed(3)
    output = pointwise.drop(x, 0.25, training=True)
    torch.manual_seed(3)
    torch.testing.assert_close(real(output).float(), F.dropout(real(x).float(), 0.25))
    output.slot.backward(torch.ones(64, 32))
    assert x.slot.grad is not None
    assert x.slot.grad.unique().tolist() == pytest.approx([0, 4 / 3], rel=2**-8)
    assert pointwise.drop(x, 0.25, training=False) is x


@pytest.mark.parametrize("pool", [Pool((3, 3), (2, 2), (1, 1)), Pool((2, 2), (2, 2), ceil_mode=True)])
def test_max_pools_are_exact(pool: Pool) -> None:
    x = activation(2, 4, 7, 7)
    p = pool

    def truth(image: Tensor) -> Tensor:
        # torch takes the first of equal elements, and these are equal for both.
        return F.max_pool2d(image, p.kernel_size, p.stride, p.padding, p.dilation, p.ceil_mode)

    check([x], lambda a: pooling.max_pool(a, pool), truth, steps=1e-5, gradient_atol=SUMMED)


@pytest.mark.parametrize("counts_padding", [True, False])
def test_average_pools(counts_padding: bool) -> None:
    x, pool = activation(2, 4, 7, 7), Pool((3, 3), (2, 2), (1, 1))
    check(
        [x],
        lambda a: pooling.average_pool(a, pool, count_include_pad=counts_padding),
        lambda image: F.avg_pool2d(image, 3, 2, 1, False, counts_padding),
    )


def test_many_windows_are_added_up_in_more_than_bfloat16() -> None:
    x = activation(1, 1, 40, 40)
    slot = x.slot.detach().requires_grad_()
    pooled = pooling.average_pool(x._replace(slot=slot), Pool((16, 16), (1, 1)))
    [gradient] = torch.autograd.grad(pooled.slot, slot, torch.ones(1, 1, 25, 25, dtype=torch.bfloat16))
    assert float(gradient[0, 0, 20, 20]) == 1


@pytest.mark.parametrize("size", [(1, 1), (3, None)])
def test_adaptive_pools(size: tuple[int, int | None]) -> None:
    check(
        [activation(2, 4, 7, 7)],
        lambda a: pooling.adaptive_average_pool(a, size),
        lambda image: F.adaptive_avg_pool2d(image, size),
    )


def test_the_gradient_behind_a_global_pool_takes_the_memory_of_one_pixel() -> None:
    x = activation(2, 4, 7, 7)
    slot = x.slot.detach().requires_grad_()
    pooled = pooling.adaptive_average_pool(x._replace(slot=slot), (1, 1))
    given = torch.randn(2, 4, 1, 1).bfloat16()
    [gradient] = torch.autograd.grad(pooled.slot, slot, given)
    assert torch.equal(gradient, (given / 49).expand(2, 4, 7, 7)) and gradient.stride()[2:] == (0, 0)


def operator_calls() -> dict[str, tuple[object, ...]]:
    """Arguments of each operator, by its name."""
    x, other = activation(2, 4, 6, 6), activation(2, 4, 6, 6, seed=1)
    table, slopes = torch.arange(-128, 128).to(torch.int8), torch.rand(256)
    return {
        "int8_quantize": (torch.randn(2, 4, 6, 6, requires_grad=True), GRID),
        "int8_dequantize": tuple(x),
        "int8_add": (*x, *other, GRID, 0.0, None),
        "int8_multiply": (*x, *other, GRID),
        "int8_concatenate": ([x.values, other.values], [x.slot, other.slot], [GRID, GRID], GRID, 1),
        "int8_clamp": (*x, 0.0, 1.0),
        "int8_look_up": (x.values, x.slot, table, slopes),
        "int8_drop": (*x, torch.ones(2, 4, 6, 6)),
        "int8_max_pool": (x.values, x.slot, [2, 2], [2, 2], [0, 0], [1, 1], False),
        "int8_average_pool": (*x, [2, 2], [2, 2], [0, 0], False, True),
        "int8_adaptive_average_pool": (*x, [2, 2]),
    }


class Nothing(torch.autograd.Function):
    """Passes no gradient back, which is not one of zeros."""

    @staticmethod
    def forward(ctx: object, slot: Tensor) -> Tensor:
        return slot.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> None:
        return None


@pytest.mark.parametrize("name", sorted(operator_calls()))
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the check itself
def test_operators_are_registered_as_torch_wants_them(name: str) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = getattr(torch.ops.torch_odt, name).default
    torch.library.opcheck(operator, operator_calls()[name], test_utils=checks)


@pytest.mark.parametrize("name", sorted(set(operator_calls()) - {"int8_quantize", "int8_concatenate"}))
def test_no_gradient_is_passed_on_as_none(name: str) -> None:
    arguments = operator_calls()[name]
    results = getattr(torch.ops.torch_odt, name)(*arguments)
    of_slot = results if isinstance(results, Tensor) else results[1]
    total = Nothing.apply(of_slot).sum()
    total.backward()
    assert isinstance(arguments[1], Tensor) and arguments[1].grad is None


@pytest.mark.parametrize(
    "name", ["int8_multiply", "int8_look_up", "int8_max_pool", "int8_average_pool", "int8_adaptive_average_pool"]
)
def test_second_derivatives_are_refused(name: str) -> None:
    arguments = operator_calls()[name]
    results = getattr(torch.ops.torch_odt, name)(*arguments)
    given = torch.ones_like(results[1]).requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name}_backward has no gradient"):
        torch.autograd.grad(results[1], arguments[1], given, create_graph=True)


@pytest.mark.parametrize(
    "name", ["int8_dequantize", "int8_multiply", "int8_average_pool", "int8_adaptive_average_pool"]
)
def test_arguments_stay_as_they_are(name: str) -> None:
    """Also where values are no int8, for which no operator is made."""
    values, *others = operator_calls()[name]
    assert isinstance(values, Tensor)
    floats = values.float()
    with torch.no_grad():
        getattr(torch.ops.torch_odt, name)(floats, *others)
    assert torch.equal(floats, values.float())


def test_bad_input_is_named() -> None:
    x = activation(2, 4, 5, 5)
    with pytest.raises(RuntimeError, match="holds NaN"):
        pointwise.quantize(torch.full((2,), float("nan")), GRID)
    with pytest.raises(RuntimeError, match="must be float32"):
        pointwise.quantize(torch.zeros(2, dtype=torch.float64), GRID)
    with pytest.raises(RuntimeError, match=r"shapes .* differ"):
        pointwise.add(x, activation(2, 4, 1, 1), GRID)
    with pytest.raises(RuntimeError, match="does not broadcast"):
        pointwise.multiply(activation(2, 4, 1, 1), x, GRID)
    ops, gradient = torch.ops.torch_odt, torch.ones(8, 4, 2, 2)
    with pytest.raises(RuntimeError, match="none of a pool of"):
        ops.int8_average_pool_backward(gradient, [2, 4, 4, 4], [2, 2], [2, 2], [0, 0], False, True)
    with pytest.raises(RuntimeError, match="none of a pool of"):
        ops.int8_adaptive_average_pool_backward(gradient, [2, 8, 4, 4])


def test_grids() -> None:
    step, zero = grid_of(0.5, 2.0).tolist()
    assert (step, zero) == (pytest.approx(2 / 255), -128)
    assert grid_of(-3.0, -1.0).tolist()[1] == 127
    for low, high in ((0.0, 0.0), (float("nan"), 1.0), (0.0, float("inf"))):
        with pytest.raises(ValueError, match="has no steps"):
            grid_of(low, high)


@pytest.mark.parametrize("shape", [(0, 4), (3,), (130,), (1, 1, 1, 1), (2, 3, 5, 7), (4, 24, 33, 33)], ids=str)
def test_sums_and_grids_have_the_bits_of_plain_torch(shape: tuple[int, ...]) -> None:
    ops = torch.ops.torch_odt
    grids = (GRID, grid_of(-3.0, 1.0), grid_of(-2.0, 2.5))
    one, other = (activation(*shape, grid=grid, seed=seed) for seed, grid in enumerate(grids[:2]))
    for low, high in ((None, None), (0.0, None), (0.0, 1.0)):
        arguments = (*one, *other, grids[2], low, high)
        for ours, theirs in zip(ops.int8_add(*arguments)[::2], pointwise._add(*arguments)[::2], strict=True):
            assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3
    values[values > 5] = float("inf")
    for ours, theirs in zip(ops.int8_quantize(values, GRID)[::2], pointwise._quantize(values, GRID)[::2], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 64, 9, 8), (1, 65, 6, 6), (2, 1, 13, 13), (0, 3, 4, 4)], ids=str)
def test_images_are_quantized_from_any_layout(shape: tuple[int, ...]) -> None:
    quantize = torch.ops.torch_odt.int8_quantize
    wide = torch.randn((*shape[:3], 2 * shape[3]), generator=torch.Generator().manual_seed(3))
    for values in (
        wide[..., ::2],
        wide[..., : shape[3]],
        wide[..., : shape[3]].transpose(2, 3),
        wide[..., :1].expand(shape),
    ):
        found = quantize(values, GRID)
        expected = quantize(values.clone(memory_format=torch.channels_last), GRID)
        for ours, theirs in zip(found[::2], expected[::2], strict=True):
            assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    if wide.numel():
        wide[0, 0, -1, shape[3] - 1] = float("nan")
        with pytest.raises(RuntimeError, match="holds NaN"):
            quantize(wide[..., : shape[3]], GRID)
