"""A max-pool as a part of an int8 layer, beside the same pool behind it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_layer import CASES, Case, make_case
from torch import Tensor, nn

import torch_odt as odt
from torch_odt.quant import layer, rewrite
from torch_odt.quant.activation import new_slot
from torch_odt.quant.layer import Windows
from torch_odt.quant.pooling import Pool, max_pool

HALVED = Pool((2, 2), (2, 2))
FORWARD = [torch.ops.torch_odt.int8_layer, layer._layer]
BACKWARD = [torch.ops.torch_odt.int8_layer_backward, layer._backward]


@given(
    channels=st.tuples(st.integers(1, 9), st.integers(1, 17)),
    size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    apart=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    is_padded=st.booleans(),
    ceil_mode=st.booleans(),
    low=st.sampled_from([None, 0.0]),
)
def test_a_pool_in_the_layer_is_the_pool_behind_it(
    channels: tuple[int, int],
    size: tuple[int, int],
    apart: tuple[int, int],
    is_padded: bool,
    ceil_mode: bool,
    low: float | None,
) -> None:
    stride = (size[0] + apart[0], size[1] + apart[1])
    pool = Pool(size, stride, (size[0] // 2, size[1] // 2) if is_padded else (0, 0), ceil_mode=ceil_mode)
    case = make_case(channels, low=low)
    case.tensors.weight_scale.fill_(0.5)
    expected = max_pool(case.run(), pool)
    pooled = replace(case, windows=case.windows._replace(pool=pool))
    found = pooled.run()
    assert torch.equal(found.values, expected.values) and found.values.stride() == expected.values.stride()
    # Few steps, all of which int8 holds: nothing is rounded, and whether before or behind the pool makes no difference.
    gradient = torch.randint(-1, 2, found.values.shape, generator=torch.Generator().manual_seed(1)).float()
    wanted = (case.slot, case.tensors.weight_slot, case.tensors.bias)
    ours, theirs = (torch.autograd.grad(each.slot, wanted, gradient) for each in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def forward(run: Callable[..., Any], case: Case, numbers: tuple[int, ...]) -> Any:
    return run(*case.input, *case.tensors, case.output_grid, case.low, case.high, False, numbers)


@pytest.mark.parametrize("run", FORWARD)
@pytest.mark.parametrize(
    ("of_pool", "complaint"),
    [
        ((3, 3, 2, 2, 0, 0, 0), "must not overlap"),
        ((2, 2, 2, 2, 2, 2, 0), "at most half|half of the"),
        ((17, 17, 17, 17, 0, 0, 0), "too small|more than 256"),
        ((300, 1, 300, 1, 0, 0, 0), "more than 256"),
        ((9, 8, 9, 8, 0, 0), "seven numbers of a convolution, and of a pool seven more"),
        ((2, 2, 2, 2, 0, 0, 0, 0), "seven numbers of a convolution, and of a pool seven more"),
        ((0, 2, 2, 2, 0, 0, 0), "must be positive"),
        ((2, 2, -2, 2, 0, 0, 0), "must be positive"),
        ((2, 2, 2, 1 << 40, 0, 0, 0), "1073741824 at most"),
    ],
)
def test_what_is_no_pool_of_a_layer_is_refused(run: Any, of_pool: tuple[int, ...], complaint: str) -> None:
    case = make_case()
    with pytest.raises(RuntimeError, match=complaint):
        forward(run, case, (*case.windows.numbers, *of_pool))


@pytest.mark.parametrize("run", FORWARD)
def test_only_images_are_pooled(run: Any) -> None:
    with pytest.raises(RuntimeError, match="only images are pooled"):
        forward(run, CASES["linear"], Windows(pool=Pool((1, 1), (1, 1))).numbers)


@pytest.mark.parametrize("run", [torch.ops.torch_odt.int8_layer_to_float, layer._layer_to_float])
def test_scores_are_not_pooled(run: Any) -> None:
    case = CASES["pooled"]
    with pytest.raises(RuntimeError, match="seven numbers"):
        run(*case.input, *case.tensors, False, case.windows.numbers)


def backward(
    run: Callable[..., Any],
    case: Case,
    mask: Tensor | None,
    shape: list[int],
    wanted: Any = None,
    of: Case | None = None,
) -> Any:
    """With a gradient of ones of the output, or of another case's."""
    t = case.tensors
    gradient = torch.ones((of or case).run().values.shape)
    kept = (gradient, mask, case.values, case.input_grid, t.weight, t.weight_scale)
    return run(*kept, shape, *(wanted or (True, True, True)), False, case.windows.numbers)


@pytest.mark.parametrize("run", BACKWARD)
def test_gradients_of_another_pool_are_refused(run: Any) -> None:
    case = CASES["pooled"]
    shape, mask = list(case.values.shape), forward(layer._layer, case, case.windows.numbers)[2]
    with pytest.raises(RuntimeError, match="a byte and a bit for each element"):
        backward(run, case, torch.zeros(7, dtype=torch.uint8), shape)
    with pytest.raises(RuntimeError, match="needs its mask"):
        backward(run, case, None, shape, (False, False, True))
    with pytest.raises(RuntimeError, match="of as many"):
        backward(run, case, mask, [5, *shape[1:]])
    overlapping = replace(case, windows=Windows(padding=(1, 1), pool=Pool((3, 3), (2, 2))))
    for wanted in ((True, True, True), (False, False, True)):
        for size in (4, 30, -1, 1 << 33, (1 << 63) - 1, -(1 << 63)):
            for forged in ([*shape[:2], size, shape[3]], [*shape[:3], size]):
                with pytest.raises(RuntimeError):
                    backward(run, case, mask, forged, wanted)
        with pytest.raises(RuntimeError, match="must not overlap"):
            backward(run, overlapping, mask, shape, wanted, of=case)
    with pytest.raises(RuntimeError, match="pooled output's shape"):
        backward(run, case, mask, [*shape[:2], 30, shape[3]])


@pytest.mark.parametrize("run", BACKWARD)
def test_places_that_no_window_has_lead_nowhere(run: Any) -> None:
    case = CASES["pooled"]
    mask = torch.full_like(forward(layer._layer, case, case.windows.numbers)[2], 255)
    of_input, of_weight, _ = backward(run, case, mask, list(case.values.shape))
    assert of_input.isfinite().all() and of_weight.isfinite().all()


@pytest.mark.parametrize(
    ("images", "channels", "pool"),
    [(0, 7, HALVED), (1, 7, HALVED), (3, 1, HALVED), (1, 7, Pool((9, 8), (9, 8)))],
)
def test_few_images_channels_and_pixels(images: int, channels: int, pool: Pool) -> None:
    case = make_case((3, 7), windows=Windows(padding=(1, 1), pool=pool), low=0.0)
    case.values = case.values[:images].contiguous(memory_format=torch.channels_last)
    case.slot = new_slot(case.values.shape)
    t = case.tensors
    assert t.bias is not None
    case.tensors = t._replace(
        weight=t.weight[:channels],
        weight_slot=t.weight_slot.detach()[:channels],
        weight_scale=t.weight_scale[:channels],
        bias=t.bias.detach()[:channels],
    )
    numbers = case.windows.numbers
    with torch.no_grad():
        ours, plain = (forward(run, case, numbers) for run in FORWARD)
        assert torch.equal(ours[0], plain[0]) and torch.equal(ours[2], plain[2])
        assert ours[0].stride() == plain[0].stride()
        found = [backward(run, case, ours[2], list(case.values.shape)) for run in BACKWARD]
        assert all(map(torch.equal, *found))


def test_a_layer_without_channels() -> None:
    case = make_case((3, 7), windows=Windows(padding=(1, 1), pool=HALVED))
    weight, slot, scale, bias = (None if each is None else each.detach() for each in case.tensors)
    arguments = (*case.input, weight[:0], slot[:0], scale[:0], bias[:0], case.output_grid, None, None, False)  # type: ignore[index]
    found = torch.ops.torch_odt.int8_layer(*arguments, case.windows.numbers)
    assert [each.shape for each in found] == [(3, 0, 4, 4), (3, 0, 4, 4), (0,)]


class Graph(nn.Module):
    """A network of two convolutions with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = first or nn.Conv2d(3, 8, 3, padding=1)
        self.between = between
        self.second = nn.Conv2d(8, 6, 3)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.between(self.first(x))).mean((2, 3)))


def read_twice(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2) + F.avg_pool2d(x, 2)


def clamp_read_twice(x: Tensor) -> Tensor:
    x = F.relu(x)
    return F.max_pool2d(x, 2) + F.avg_pool2d(x, 2)


def in_place_read_twice(x: Tensor) -> Tensor:
    y = x.relu_()
    return F.max_pool2d(y, 2) + F.avg_pool2d(x, 2)


def pooled_twice(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2) + F.max_pool2d(x, 2)


# What stands between, and how many of the pools are a part of the layer.
GRAPHS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "pool": (nn.MaxPool2d(2), 1),
    "relu": (nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), 1),
    "relu in place": (nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d((2, 3), padding=(1, 1))), 1),
    "norm": (nn.Sequential(nn.BatchNorm2d(8), nn.ReLU6(), nn.MaxPool2d(3, ceil_mode=True)), 1),
    "apart": (nn.MaxPool2d(2, 3), 1),
    "two in a row": (nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(2)), 1),
    "overlapping": (nn.MaxPool2d(3, 2), 0),
    "dilated": (nn.MaxPool2d(2, 3, dilation=2), 0),
    "read twice": (read_twice, 0),
    "clamp read twice": (clamp_read_twice, 0),
    "in place, read twice": (in_place_read_twice, 0),
    "pooled twice": (pooled_twice, 0),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("masters", ["none", "fp32"])
def test_a_network_is_as_with_pools_of_their_own(name: str, masters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    between, parts = GRAPHS[name]
    model = Graph(copy.deepcopy(between)).eval()
    other = copy.deepcopy(model)
    batch = torch.randn(4, 3, 14, 13)
    odt.quant.convert_(model, [batch], masters=masters)
    with monkeypatch.context() as patch:
        patch.setattr(rewrite, "can_be_of_a_layer", lambda pool: False)
        odt.quant.convert_(other, [batch], masters=masters)
    assert [("max-pooled" in str(each.first)) for each in (model, other)] == [parts == 1, False]
    scores = [each(batch) for each in (model, other)]
    assert torch.equal(*scores)
    for each in scores:
        each.square().sum().backward()
    for (label, one), another in zip(model.named_parameters(), other.parameters(), strict=True):
        assert one.grad is not None and another.grad is not None, label
        # Both round by chance, one of them more elements.
        assert float((one.grad - another.grad).norm()) < 0.05 * float(another.grad.norm()), label
    back = [odt.quant.dequantize_(each)(batch) for each in (model, other)]
    assert torch.equal(*back)


def test_a_window_larger_than_the_image_is_cut() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(8, 4))
    batch = torch.randn(4, 3, 3, 3)
    expected = model(batch).detach()
    odt.quant.convert_(model.eval(), [batch])
    torch.testing.assert_close(model(batch), expected, rtol=0, atol=0.05)


def test_a_plan_from_before_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of the same model whose pools are operators of their own keeps them."""
    torch.manual_seed(0)
    model, file = Graph(GRAPHS["relu"][0]).eval(), tmp_path / "plan.json"
    other = copy.deepcopy(model)
    batch, labels = torch.randn(4, 3, 14, 13), torch.arange(4)

    def trained(model: nn.Module, **options: Any) -> tuple[odt.TrainStep, list[float]]:
        odt.quant.convert_(model, [batch])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        odt.quant.train_int8_(model, optimizer)
        step = odt.TrainStep(model, F.cross_entropy, optimizer, **options)
        return step, [float(step(batch, labels)) for _ in range(2)]

    with monkeypatch.context() as patch:
        patch.setattr(rewrite, "can_be_of_a_layer", lambda pool: False)
        step, expected = trained(other, budget="1GiB")
    step.plan.save(file)
    assert "int8_max_pool" in file.read_text()
    assert trained(model, plan=file)[1] == expected
